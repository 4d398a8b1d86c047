"""Adapters that `peft` puts on a frozen model: members that differ in what adapter searches vary are one array."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app
from shoal.core.errors import FusionError
from shoal.core.trial import TrialState
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import fuse_optimizers

WORDS, LENGTH = 48, 6
TOKENS = torch.randint(0, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 2, 1])
STEPS = 2

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes, **heads)).double()


def bert() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=3, **sizes, **none)).double()


BASES: dict[str, tuple[Callable[[], nn.Module], str, list[str]]] = {
    "llama": (llama, "CAUSAL_LM", ["q_proj", "v_proj"]),
    "bert": (bert, "SEQ_CLS", ["query", "value"]),
}


def adapted(base: str, seed: int, **settings: Any) -> Any:
    make, kind, targets = BASES[base]
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": kind, **settings})
    model = make()
    torch.manual_seed(seed)
    return get_peft_model(model, config).double()


def loss(model: Any, tokens: Tensor) -> Tensor:
    """In float64 throughout; what `transformers` computes by itself is in float32."""
    logits = model(input_ids=tokens).logits
    if logits.dim() == 2:
        return F.cross_entropy(logits, LABELS)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def adam(model: nn.Module, number: int) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2 * (number + 1), eps=1e-3, weight_decay=0.1)


def trained(models: list[nn.Module], numbers: list[int]) -> tuple[Tensor, ModelArray]:
    """Losses of an array of some models, [steps, B], and the array."""
    array = fuse(models, numbers, strict=False)
    optimizer = fuse_optimizers([adam(model, b) for model, b in zip(models, numbers, strict=True)], array)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        each = array.map(loss, TOKENS)
        each.sum().backward()
        optimizer.step()
        losses.append(each.detach())
    return torch.stack(losses), array


def check(base: str, settings: list[dict[str, Any]]) -> ModelArray:
    """Train an array and each of its members alone; they come to the same losses and weights."""
    models = [adapted(base, b, **each) for b, each in enumerate(settings)]
    losses, array = trained(models, list(range(len(models))))
    for b, each in enumerate(settings):
        twin = adapted(base, b, **each)
        alone, _ = trained([twin], [b])
        torch.testing.assert_close(losses[:, b : b + 1], alone, rtol=1e-9, atol=0)
        torch.testing.assert_close(models[b].state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-12)
    return array


CASES: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "alphas": ([{"lora_alpha": 4}, {"lora_alpha": 8}, {"lora_alpha": 32}], False),
    "dropout rates": ([{"lora_dropout": 0.1}, {"lora_dropout": 0.3}], False),
    "rank-stabilized or not": ([{}, {"use_rslora": True}], False),
    "initial weights": ([{}, {"init_lora_weights": "gaussian"}], False),
    "weight-decomposed": ([{"use_dora": True, "lora_alpha": alpha} for alpha in (4, 8)], False),
    "ranks": ([{"r": 2}, {"r": 4}, {"r": 7}], True),
    "ranks, alphas and dropout": ([{"r": 2, "lora_dropout": 0.2}, {"r": 4, "lora_alpha": 16}, {}], True),
    "weight-decomposed or not": ([{}, {"use_dora": True}], True),
}


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", CASES)
def test_members_of_an_array_are_as_alone(base: str, name: str) -> None:
    settings, partial = CASES[name]
    assert check(base, settings).partial == partial


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("base", BASES)
def test_targets_and_ranks_of_layers_may_differ(base: str) -> None:
    first, second = BASES[base][2]
    assert check(base, [{}, {"target_modules": [first]}, {"rank_pattern": {second: 2}}]).partial


def test_six_members_of_ranks_from_2_to_32_on_one_base() -> None:
    settings = [
        {"r": r, "lora_alpha": alpha, "lora_dropout": 0.1 * (alpha == 8)} for r in (2, 32) for alpha in (4, 8, 32)
    ]
    array = check("llama", settings)
    shared = {path for path, _, _ in array.shared_parameters()}
    frozen = {path for path, each in array.members[0].named_parameters() if not each.requires_grad}
    assert shared == frozen


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ["dropout rates", "ranks, alphas and dropout"])
def test_checkpointed_layers_change_no_number(base: str, name: str) -> None:
    """`transformers` keeps a handle of its hook on the inputs, which must not count as a difference."""
    settings, partial = CASES[name]
    found = []
    for checkpointed in (False, True):
        models = [adapted(base, b, **each) for b, each in enumerate(settings)]
        for model in models if checkpointed else ():
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        losses, array = trained(models, list(range(len(models))))
        found.append((losses, [model.state_dict() for model in models]))
        assert array.partial == partial
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_ia3_is_one_array() -> None:
    kind = {"task_type": "CAUSAL_LM", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    models = [get_peft_model(llama(), IA3Config(**kind)).double() for _ in range(2)]
    twins = [get_peft_model(llama(), IA3Config(**kind)).double() for _ in range(2)]
    losses, array = trained(models, [0, 1])
    assert not array.partial
    alone = torch.cat([trained([twin], [b])[0] for b, twin in enumerate(twins)], dim=1)
    torch.testing.assert_close(losses, alone, rtol=1e-9, atol=0)


def by_rank(model: Any, tokens: Tensor) -> Tensor:
    """Reads what differs between the members."""
    return loss(model, tokens) / model.peft_config["default"].lora_alpha


def test_a_function_that_reads_what_differs_is_refused() -> None:
    models = [adapted("llama", 0, lora_alpha=alpha) for alpha in (4, 16)]
    with pytest.raises(FusionError, match=r"by_rank \(test_peft\.py:\d+\): it reads .*lora_alpha, in which"):
        fuse(models).map(by_rank, TOKENS)


class Adapters(shoal.Task):
    """Next words of random text."""

    def data(self, config: Any) -> Any:
        words = torch.randint(0, WORDS, (24, LENGTH), generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(words[:16]), torch.utils.data.TensorDataset(words[16:])

    def model(self, config: Any) -> nn.Module:
        kind = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
        return get_peft_model(llama(), LoraConfig(r=config["r"], lora_alpha=config["alpha"], **kind)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return adam(model, 0)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return loss(model, batch[0])


def test_a_search_over_ranks_and_alphas_gives_a_peft_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    study = shoal.tune(
        Adapters(), {"r": shoal.choice([2, 4]), "alpha": shoal.choice([4, 16]), "batch_size": 8},
        metric="valid_loss", mode="min", algorithm=shoal.Grid(epochs=2), devices="cpu:1", backend="inline",
        directory=tmp_path / "study", show_progress=False,
    )  # fmt: skip
    assert len(study.trials) == 4
    best = study.best_model()
    assert isinstance(best, PeftModel)
    done = CliRunner().invoke(
        app,
        [
            "export",
            str(study.directory),
            str(study.best_trial.number),
            "--adapter",
            "--output",
            str(tmp_path / "adapter"),
        ],
    )
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    expected = loss(best.eval(), TOKENS)
    again = exported(tmp_path / "adapter", base=llama()).double()
    torch.testing.assert_close(loss(again, TOKENS), expected, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match=r"a LlamaForCausalLM, has no name to load it by"):
        exported(tmp_path / "adapter")
    assert 'library_name: "peft"' in (tmp_path / "adapter" / "README.md").read_text()
    merged = exported(study.export(study.best_trial.number, tmp_path / "merged", merged=True))
    assert isinstance(merged, LlamaForCausalLM)
    torch.testing.assert_close(loss(merged, TOKENS), expected, rtol=1e-9, atol=0)


def exported(folder: Path, **arguments: Any) -> Any:
    return runpy.run_path(str(folder / "load.py"))["load"](**arguments)


class Preferred(Adapters):
    """A loss relative to the base model, which is computed with the adapter switched off (preference training)."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        with torch.no_grad(), model.disable_adapter():
            base = loss(model, batch[0])
        return (loss(model, batch[0]) - base).exp()


@pytest.mark.parametrize(
    "ranks", [*(pytest.param(ranks, marks=pytest.mark.thorough) for ranks in ([2], [2, 2])), [2, 4]], ids=str
)
def test_an_adapter_that_is_switched_off_within_a_step_trains_exactly(ranks: list[int], tmp_path: Path) -> None:
    tasks = {"r": shoal.choice(ranks), "alpha": 4, "batch_size": 8}
    study = shoal.tune(
        Preferred(), tasks, metric="valid_loss", mode="min", algorithm=shoal.Random(len(ranks), epochs=1),
        devices="cpu:1", backend="inline", directory=tmp_path / "study", show_progress=False,
    )  # fmt: skip
    for row in study.trials:
        assert row.state is TrialState.COMPLETE
        assert study.rerun(row.number).largest < 1e-9
