"""Adapters of `peft` on a base that `transformers` loads in 4 or 8 bits: one base for all, each adapter as alone."""

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import shoal
from shoal.core.array import Member
from shoal.core.errors import StudyFailedError
from shoal.core.trial import Trial, TrialState
from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.quantised import state_tensors
from shoal.fuse.rows import is_packed
from shoal.fuse.structure import structure_digest
from shoal.task import Config
from shoal.train.bases import bases_of
from shoal.train.checkpoint import CheckpointWriter, load_weights
from shoal.train.signature_builder import WithoutValues
from shoal.train.trial_runtime import TrialRuntime, build

bnb: Any = pytest.importorskip("bitsandbytes")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

CPU = torch.device("cpu")
ROWS = torch.randint(0, 64, (12, 8), generator=torch.Generator().manual_seed(0))
BITS: dict[int, dict[str, Any]] = {
    4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    8: {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes)).save_pretrained(directory)
    return directory


def loaded(directory: Path, bits: int) -> Any:
    settings = BitsAndBytesConfig(**BITS[bits])  # type: ignore[no-untyped-call]
    return AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=settings, device_map={"": "cpu"}, dtype=torch.float32
    )


def adapted(base: Any, rank: int = 4, alpha: float = 8, dropout: float = 0.1) -> Any:
    targets = ["q_proj", "v_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets)
    return get_peft_model(base, config)


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


class Adapters(shoal.Task):
    def __init__(self, directory: str, bits: int, optimizer: str = "AdamW", builds_base: bool = False) -> None:
        self.directory, self.bits, self.name, self.builds_base = directory, bits, optimizer, builds_base

    def data(self, config: Config) -> Any:
        return TensorDataset(ROWS[:8]), TensorDataset(ROWS[8:])

    def base(self, config: Config) -> nn.Module | None:
        return loaded(Path(self.directory), self.bits) if self.builds_base else None

    def model(self, config: Config, base: Any = None) -> nn.Module:
        return adapted(base or loaded(Path(self.directory), self.bits), config["r"])  # type: ignore[no-any-return]

    def optimizer(self, model: nn.Module, config: Config) -> torch.optim.Optimizer:
        kind: Any = torch.optim.AdamW if self.name == "AdamW" else getattr(bnb.optim, self.name)
        return kind([each for each in model.parameters() if each.requires_grad], lr=config["lr"])  # type: ignore[no-any-return]

    def batch_size(self, config: Config) -> int:
        return 4

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch[0])


def trained(models: list[nn.Module], numbers: list[int]) -> Tensor:
    """The losses of an array of some models, [B, steps], the last of a validation."""
    array = fuse(models, numbers, strict=False)
    made = [torch.optim.AdamW([each for each in m.parameters() if each.requires_grad], 1e-2) for m in models]
    optimizer = fuse_optimizers(made, array)
    losses = []
    for train in (True, True, False):
        array.train(train)
        optimizer.zero_grad()
        each = array.map(loss, ROWS[:4])
        each.sum().backward()
        if train:
            optimizer.step()
        losses.append(each.detach())
    return torch.stack(losses, dim=1)


def storages(models: list[nn.Module]) -> set[int]:
    """Addresses of the memory of codes and scales."""
    packed = [each for model in models for each in model.parameters() if is_packed(each)]
    scales = [each for model in models for each in state_tensors(model)]
    return {each.untyped_storage().data_ptr() for each in (*packed, *scales)}


def test_twelve_adapters_on_one_4_bit_base_are_as_alone(saved: Path) -> None:
    base = loaded(saved, 4)

    def member(b: int) -> nn.Module:
        own = copy.deepcopy(base)
        torch.manual_seed(b)
        model: nn.Module = adapted(own, rank=(2, 4, 8)[b % 3], alpha=4.0 * (1 + b % 4), dropout=0.05 * (1 + b % 5))
        return model

    models = [member(b) for b in range(12)]
    losses = trained(models, list(range(12)))
    layers, each = 7, 6  # codes, scales and their table, and as many for the scales' own quantisation
    assert len(storages(models)) == len(storages(models[:1])) == layers * each
    for b in range(12):
        twin = member(b)
        torch.testing.assert_close(losses[b], trained([twin], [b])[0], rtol=1e-6, atol=0)
        for mine, theirs in zip(models[b].parameters(), twin.parameters(), strict=True):
            if mine.requires_grad:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("builds_base", [True, False])
@pytest.mark.parametrize(("bits", "optimizer"), [(4, "AdamW8bit"), (8, "AdamW")])
def test_a_search_over_adapters_of_a_quantised_base(
    bits: int, optimizer: str, builds_base: bool, saved: Path, tmp_path: Path
) -> None:
    task = Adapters(str(saved), bits, optimizer, builds_base)
    space = {"r": shoal.choice([2, 4]), "lr": shoal.loguniform(1e-3, 1e-2)}
    study = shoal.tune(
        task,
        space,
        metric="valid_loss",
        mode="min",
        algorithm=shoal.Random(3, epochs=2),
        backend="inline",
        devices="cpu:1",
        directory=tmp_path / "study",
        seed=0,
    )
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 3
    for text in study.dataframe()["proof"]:  # which of them, if any, is measured to be faster alone is a matter of luck
        assert re.match(r"(fused|plain, as that is faster): .*equal at \d+ check", text)
    model: Any = study.best_model()
    weights = [each for each in model.parameters() if is_packed(each)]
    assert {type(each) for each in weights} == {bnb.nn.Params4bit if bits == 4 else bnb.nn.Int8Params}
    with torch.no_grad():
        found = loss(model, ROWS[8:]).item()
    assert found == pytest.approx(study.best_trial.ranked["valid_loss"], rel=1e-5 if bits == 4 else 1e-3)


def step(task: Adapters, runtime: TrialRuntime) -> float:
    runtime.optimizer.zero_grad()
    value = task.loss(runtime.model, (ROWS[:4],))
    value.backward()
    runtime.optimizer.step()
    return value.item()


@pytest.mark.parametrize("builds_base", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_a_trial_goes_on_from_its_checkpoint(bits: int, builds_base: bool, saved: Path, tmp_path: Path) -> None:
    task = Adapters(str(saved), bits, "AdamW8bit", builds_base)
    member = Member(Trial(0, {"r": 64, "lr": 1e-2}, seed=0, data_seed=0), 0, 1)  # 64 x 64 numbers have 8-bit states
    first = build(task, member, CPU)
    first.model.eval()  # without dropout
    for _ in range(2):
        step(task, first)
    first.model.train()
    first.step = 2
    writer = CheckpointWriter(tmp_path)
    assert first.save(writer) == ""
    writer.flush()
    writer.close()
    saved_weights = load_weights(tmp_path, 0)
    of_base = {name for name in saved_weights.model if "lora_" not in name}
    assert bool(of_base) != builds_base
    assert len(saved_weights.carried) < 500, "codes and scales are in the state dict, if anywhere"
    again = build(task, member, CPU)
    first.model.eval(), again.model.eval()
    again.restore(tmp_path, steps_of=lambda epoch: 2)
    assert {type(each) for each in again.model.parameters()} == {type(each) for each in first.model.parameters()}
    kinds = {each["state1"].dtype for each in again.optimizer.state.values()}
    assert kinds == {torch.uint8}
    assert [step(task, first) for _ in range(2)] == [step(task, again) for _ in range(2)]


@pytest.mark.parametrize("bits", BITS)
def test_a_model_on_a_base_without_values_has_the_same_structure(bits: int, saved: Path) -> None:
    """So the signature of a trial needs no base in memory."""
    task = Adapters(str(saved), bits, builds_base=True)
    bases, config = bases_of(task, CPU), {"r": 4, "lr": 0.1}
    bases.key(config)
    with torch.device("meta"), WithoutValues():
        empty = bases.model(config, meta=True)
    assert {each.device.type for each in empty.parameters()} == {"meta"}
    assert structure_digest(empty) == structure_digest(bases.model(config))


def test_a_base_without_its_library_says_what_to_install(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.quantizers.quantizer_bnb_4bit.is_bitsandbytes_available", lambda: False)
    with pytest.raises(StudyFailedError, match="requires bitsandbytes: `pip install -U bitsandbytes"):
        shoal.tune(
            Adapters(str(saved), 4),
            {"r": shoal.choice([2]), "lr": 0.1},
            metric="valid_loss",
            mode="min",
            algorithm=shoal.Random(1, epochs=1),
            backend="inline",
            devices="cpu:1",
            directory=tmp_path / "study",
        )
