"""TrainerTask with `peft_config`: one base in each process, whose adapters train as those that `model_init` makes."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import shoal
from shoal.core.errors import ShoalError, TaskError
from shoal.integrations.transformers import TrainerTask

WORDS, LENGTH = 40, 6

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SPACE = {
    "r": shoal.choice([2, 3]),
    "lora_alpha": shoal.choice([4, 16]),
    "learning_rate": shoal.loguniform(1e-3, 1e-1),
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": shoal.choice([1, 2]),
}
LORA: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}


class Texts(Dataset[Any]):
    def __init__(self, rows: int) -> None:
        self.rows = torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Loaded:
    """Loads the base from a file, which draws no numbers, and counts it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.calls = [0]

    def __call__(self) -> Any:
        self.calls[0] += 1
        model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **SIZES)).double()
        model.load_state_dict(torch.load(self.file))
        return model


class Adapted(Loaded):
    """Also makes the adapter, for a config."""

    def __call__(self, config: Any = None) -> Any:
        config = config or {}
        with torch.random.fork_rng(devices=[]):
            model = super().__call__()
        return get_peft_model(model, LoraConfig(**LORA, r=config.get("r", 8), lora_alpha=config.get("lora_alpha", 8)))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    file = tmp_path / "base.pt"
    torch.save(LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **SIZES)).state_dict(), file)
    return file


def arguments(**settings: Any) -> TrainingArguments:
    return TrainingArguments(report_to="none", use_cpu=True, save_strategy="no", num_train_epochs=2, **settings)


def searched(task: TrainerTask, directory: Path) -> Any:
    return shoal.tune(
        task, SPACE, metric="valid_loss", mode="min", algorithm=shoal.Random(5, epochs=2), directory=directory,
        backend="inline", devices="cpu:1",
    )  # fmt: skip


def test_adapters_train_as_those_of_model_init(tmp_path: Path, weights: Path) -> None:
    init = Loaded(weights)
    task = TrainerTask(init, arguments(), Texts(12), Texts(8), peft_config=LoraConfig(**LORA))
    assert init.calls == [1]
    study = searched(task, tmp_path / "base")
    assert init.calls == [2]
    owned = searched(TrainerTask(Adapted(weights), arguments(), Texts(12), Texts(8)), tmp_path / "own")
    for one, other in zip(study.trials, owned.trials, strict=True):
        assert one.metrics["valid_loss"] == pytest.approx(other.metrics["valid_loss"], rel=1e-5)
        assert study.rerun(one.number).largest < 1e-5
    assert len({row.job for trial in study.trials for row in study.proof(trial.number)}) == 1, "they are one array"
    model: Any = study.best_model()
    assert model.peft_config["default"].r == study.best_trial.config["r"]
    with torch.no_grad():
        ids = Texts(8).rows
        expected = model(input_ids=ids).logits
        for way, given in (("adapter", {"base": Loaded(weights)()}), ("merged", {})):
            folder = study.export(study.best_trial.number, tmp_path / way, **{way: True})
            loaded = runpy.run_path(str(folder / "load.py"))["load"](**given)
            assert hasattr(loaded, "peft_config") is (way == "adapter")
            torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-9, atol=1e-12)


def test_names_of_the_space_are_those_of_arguments_or_adapter(weights: Path) -> None:
    task = TrainerTask(Loaded(weights), arguments(), Texts(12), Texts(8), peft_config=LoraConfig(**LORA))
    assert task.arguments({"learning_rate": 0.5, "r": 3, "use_dora": True}).learning_rate == 0.5
    base = task.base({})
    assert base is not None
    model: Any = task.model({"r": 3, "target_modules": ["k_proj"]}, base)
    assert model.peft_config["default"].target_modules == {"k_proj"}
    assert {each.shape[0] for name, each in model.named_parameters() if "lora_A" in name} == {3}
    with pytest.raises(TaskError, match=r"'rank' is not a field of TrainingArguments or of `peft_config`"):
        task.arguments({"rank": 3})
    with pytest.raises(TaskError, match=r"peft refuses the `peft_config` of the trial \(r=0\)"):
        task.model({"r": 0}, task.base({}))
    with pytest.raises(TaskError, match=r"peft refuses .*target_modules=\['nothing'\].*not found"):
        task.model({"target_modules": ["nothing"]}, task.base({}))


@pytest.mark.parametrize("given", [{"r": 8}, LoraConfig, nn.Linear(1, 1)])
def test_what_is_no_configuration_of_peft_is_refused(given: Any, weights: Path) -> None:
    with pytest.raises(ShoalError, match=r"`peft_config` must be a configuration of peft"):
        TrainerTask(Loaded(weights), arguments(), Texts(12), Texts(8), peft_config=given)
