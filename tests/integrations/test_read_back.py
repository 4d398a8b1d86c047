"""Exports of models whose `save_pretrained` does not write all that was trained."""

import json
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.core.errors import ShoalError

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from transformers import BertConfig, BertForSequenceClassification  # noqa: E402

from shoal.integrations.read_back import lost_by_adapter, lost_by_class  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads a deprecated name of transformers

TOKENS = torch.randint(0, 16, (8, 4), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


class Tempered(BertForSequenceClassification):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.temperature = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = found.logits / self.temperature
        return found


def bert() -> Any:
    return Tempered(BertConfig(vocab_size=16, **SIZES)).eval()


def adapted(**arguments: Any) -> Any:
    return peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query"], **arguments))


def tripled(factor: int, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return factor * output


class Plain(shoal.Task):
    def model(self, config: Any) -> Any:
        return bert()

    def data(self, config: Any) -> Any:
        return TensorDataset(TOKENS), TensorDataset(TOKENS)

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), 0.1)

    def loss(self, model: Any, batch: Any) -> Tensor:
        found: Tensor = model(input_ids=batch[0]).logits.square().mean()
        return found


class Headed(Plain):
    def model(self, config: Any) -> Any:
        model = bert()
        model.classifier = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        return model


class Hooked(Plain):
    def model(self, config: Any) -> Any:
        model = bert()
        model.classifier.register_forward_hook(partial(tripled, 3))
        return model


class Cooled(Plain):
    def end_epoch(self, model: Any, config: Any) -> None:
        model.temperature = 7.0


class AdaptedAndCooled(Cooled):
    def model(self, config: Any) -> Any:
        return adapted()

    def end_epoch(self, model: Any, config: Any) -> None:
        model.get_base_model().temperature = 7.0


def trained(task: shoal.Task, directory: Path) -> shoal.Study:
    return shoal.tune(
        task, {"x": 1.0}, metric="valid_loss", mode="min", algorithm=shoal.Random(1, epochs=1), backend="inline",
        devices="cpu:1", directory=directory, show_progress=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("task", "ways", "loader"),
    [
        (Plain(), {}, "pretrained"),
        (Headed(), {}, "task"),
        (Hooked(), {}, "task"),
        (Cooled(), {}, "task"),
        (AdaptedAndCooled(), {}, "task"),
        (AdaptedAndCooled(), {"merged": True}, "task"),
    ],
    ids=["plain", "head", "hook", "attribute", "attribute beside an adapter", "attribute of a merged model"],
)
def test_the_loaded_model_computes_what_the_trained_one_does(
    task: shoal.Task, ways: dict[str, bool], loader: str, tmp_path: Path
) -> None:
    study = trained(task, tmp_path / "study")
    folder = study.export(0, tmp_path / "out", **ways)
    assert json.loads((folder / "trial.json").read_text())["loader"] == loader
    assert (folder / "config.json").exists() is (loader == "pretrained")
    expected: Any = study.model(0)
    loaded = runpy.run_path(str(folder / "load.py"))["load"]()
    exact = {"rtol": 1e-5, "atol": 1e-6} if ways else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(loaded(input_ids=TOKENS).logits, expected(input_ids=TOKENS).logits, **exact)


def test_an_adapter_alone_is_refused_if_more_was_trained(tmp_path: Path) -> None:
    study = trained(AdaptedAndCooled(), tmp_path / "study")
    with pytest.raises(ShoalError, match="it lacks attributes that training changed; export the whole"):
        study.export(0, tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()


def unfrozen() -> Any:
    model = adapted()
    model.get_base_model().classifier.bias.requires_grad_(True)
    return model


def with_hook() -> Any:
    model = adapted()
    model.get_base_model().classifier.register_forward_hook(partial(tripled, 3))
    return model


@pytest.mark.parametrize(
    ("build", "lost"),
    [
        (adapted, ""),
        (partial(adapted, use_dora=True), ""),
        (partial(adapted, modules_to_save=["classifier"]), ""),
        (lambda: peft.get_peft_model(bert(), peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS")), ""),
        (unfrozen, "the trained parameter `base_model.model.classifier.bias`"),
        (with_hook, "the hook tripled"),
    ],
    ids=["LoRA", "DoRA", "modules to save", "prefix", "unfrozen parameter", "hook"],
)
def test_what_an_adapter_lacks(build: Callable[[], Any], lost: str) -> None:
    assert lost_by_adapter(build(), b"") == lost


def test_a_class_that_cannot_read_its_folder(tmp_path: Path) -> None:
    class Broken(nn.Linear):
        @classmethod
        def from_pretrained(cls, folder: str) -> None:
            raise TypeError("missing: size")

    assert lost_by_class(Broken(1, 1), b"", tmp_path) == (
        "the model: Broken.from_pretrained fails with TypeError: missing: size"
    )
