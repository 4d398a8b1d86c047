"""`TrainerTask` beside what people subclass `Trainer` and `TrainingArguments` for, trial by trial as by `Trainer`."""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    Seq2SeqTrainingArguments,
    SiglipConfig,
    SiglipModel,
    Trainer,
    TrainingArguments,
)

import shoal
from shoal.core.array import Member
from shoal.core.errors import TaskError
from shoal.core.trial import Trial
from shoal.integrations.trainer_arguments import _IN_PLACE
from shoal.integrations.transformers import TrainerTask
from shoal.train.trial_runtime import build

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

WORDS = 400
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DRAWS = torch.Generator().manual_seed(0)
ROWS = torch.randint(0, WORDS, (48, 8), generator=DRAWS)
SENTENCES = [{"input_ids": row.tolist(), "labels": int(row[0] > WORDS // 2)} for row in ROWS]
PAIRS = [
    {
        "pixel_values": torch.randn(3, 8, 8, generator=DRAWS),
        "input_ids": torch.cat([torch.randint(3, 40, (6,), generator=DRAWS), torch.tensor([2])]),
    }
    for _ in range(24)
]


def bert() -> nn.Module:
    config = BertConfig(vocab_size=WORDS, hidden_size=16, intermediate_size=24, **SIZES, **NO_DROPOUT)
    return BertForSequenceClassification(config)


def wide() -> nn.Module:
    """With a layer of more than 4,096 weights beside the embeddings, whose states bitsandbytes keeps in 8 bits."""
    config = BertConfig(vocab_size=WORDS, hidden_size=32, intermediate_size=160, **SIZES, **NO_DROPOUT)
    return BertForSequenceClassification(config)


TEXT = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16, **SIZES}
TEXT |= {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, "projection_size": 16}
VISION = {"hidden_size": 16, "intermediate_size": 24, "image_size": 8, "patch_size": 4, **SIZES}


def clip() -> nn.Module:
    return CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8))


def siglip() -> nn.Module:
    return SiglipModel(SiglipConfig(text_config=TEXT, vision_config=VISION))


def contrasted(samples: list[Any]) -> dict[str, Any]:
    return {**{name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}, "return_loss": True}


def arguments(directory: Path, kind: type[TrainingArguments] = TrainingArguments, **settings: Any) -> Any:
    usual = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
    usual |= {"eval_strategy": "epoch", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    usual |= {"logging_strategy": "no", "report_to": "none", "lr_scheduler_type": "constant"}
    return kind(output_dir=str(directory / "out"), **{**usual, **settings})


def check_search(
    task: TrainerTask, space: dict[str, Any], trainer: Callable[..., Trainer], directory: Path, rel: float = 1e-5
) -> None:
    """Each trial of a search has the loss that `trainer(args, sampler)` finds by itself."""
    study = shoal.tune(
        task, space, metric="valid_loss", mode="min", algorithm=shoal.Random(2, epochs=2), devices="cpu:1",
        backend="inline", directory=directory / "study", show_progress=False,
    )  # fmt: skip
    assert len(study.trials) == 2
    for trial in study.trials:
        args = copy.copy(task.args)
        for name, value in trial.config.items():
            setattr(args, name, value)
        torch.manual_seed(trial.seed)
        alone = trainer(args, Ordered(trial, len(task.train_dataset)))
        alone.train()
        assert trial.metrics["valid_loss"] == pytest.approx(alone.evaluate()["eval_loss"], rel=rel)


class Ordered(torch.utils.data.Sampler[int]):
    """Each pass in the order of a trial."""

    def __init__(self, trial: Any, size: int) -> None:
        self.trial, self.size, self.passes = trial, size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(shoal.sample_order(self.trial, self.passes - 1, self.size).tolist())


def ordered(kind: type[Trainer], make: Callable[[], nn.Module], task: TrainerTask) -> Callable[..., Trainer]:
    def trainer(args: TrainingArguments, sampler: Ordered) -> Trainer:
        class InOrder(kind):  # type: ignore[misc, valid-type]
            def _get_train_sampler(self, train_dataset: Any = None) -> Any:
                return sampler

        return InOrder(
            model=make(), args=args, train_dataset=task.train_dataset, eval_dataset=task.eval_dataset,
            data_collator=task.data_collator,
        )  # fmt: skip

    return trainer


RATES = {"learning_rate": shoal.loguniform(3e-3, 1e-2)}


@dataclass
class OwnArguments(TrainingArguments):
    """With fields that only a trainer of its own acts on."""

    gamma: float = field(default=0.0, metadata={"help": "exponent of the focal loss"})
    stages: list[str] = field(default_factory=lambda: ["one"])


class FocalTrainer(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        out = model(**inputs)
        loss = focal(out.logits, inputs["labels"], self.args.gamma)
        return (loss, out) if return_outputs else loss


def focal(logits: Tensor, labels: Tensor, gamma: Any) -> Tensor:
    chosen = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return -((1 - chosen.exp()) ** gamma * chosen).mean()


class FocalTask(TrainerTask):
    honoured = ("gamma",)

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.register_buffer("gamma", torch.tensor(self.arguments(config).gamma), persistent=False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return focal(model(**batch).logits, batch["labels"], model.gamma)


class LayeredTask(TrainerTask):
    """Trains the head ten times as fast."""

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        rate = self.arguments(config).learning_rate
        return torch.optim.SGD(layers(model, rate))


class LayeredTrainer(Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(layers(self.model, self.args.learning_rate))
        return self.optimizer


def layers(model: nn.Module, rate: float) -> list[dict[str, Any]]:
    rates = {"bert": rate, "classifier": 10 * rate}
    return [{"params": list(getattr(model, name).parameters()), "lr": lr} for name, lr in rates.items()]


def test_a_loss_of_a_subclass_reads_a_field_that_a_config_overrides(tmp_path: Path) -> None:
    task = FocalTask(bert, arguments(tmp_path, OwnArguments, gamma=1.0), SENTENCES, SENTENCES[:16])
    check_search(task, {**RATES, "gamma": shoal.choice([0.5, 2.0])}, ordered(FocalTrainer, bert, task), tmp_path)


def test_an_optimizer_of_a_subclass_trains_as_that_of_a_trainer(tmp_path: Path) -> None:
    task = LayeredTask(bert, arguments(tmp_path), SENTENCES, SENTENCES[:16])
    check_search(task, RATES, ordered(LayeredTrainer, bert, task), tmp_path)


class Weighted:
    """What a script's trainers have in common."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:
        raise AssertionError("no study calls it")


class OfAMixin(TrainerTask, Weighted):
    pass


class Derived(OfAMixin):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(**batch).loss

    def create_optimizer(self) -> Any:
        raise AssertionError("no study calls it")

    create_scheduler = training_step = log = create_optimizer


class Sampled(TrainerTask):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        raise AssertionError("no study calls it")


class Counted(TrainerTask):
    def floating_point_ops(self, inputs: Any) -> int:
        raise AssertionError("no study calls it")


METHODS: dict[type[TrainerTask], str] = {
    OfAMixin: "OfAMixin defines methods of `Trainer` that a study does not call: `compute_loss` (write `loss`). ",
    Derived: "`compute_loss` (write `loss`), `create_optimizer` (write `optimizer`), `create_scheduler` (write "
    "`scheduler`), `log` (write `metrics`), `training_step` (write `loss`, or `step` for all of a training step). ",
    Sampled: "`_get_train_sampler` (write `data`, with a DataLoader that has the sampler). ",
    Counted: "`floating_point_ops`. Override methods of TrainerTask instead; or give `shoal.tune` a function that runs",
}


@pytest.mark.parametrize("kind", METHODS)
def test_methods_of_trainer_that_no_study_calls_are_refused(kind: type[TrainerTask], tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=re.escape(METHODS[kind])):
        kind(bert, arguments(tmp_path), SENTENCES, SENTENCES)


def test_what_stands_in_place_of_a_method_of_trainer_is_a_method_of_the_task() -> None:
    for name, words in _IN_PLACE.items():
        assert hasattr(Trainer, name)
        assert all(hasattr(TrainerTask, own) for own in re.findall("`(.+?)`", words)), words


class HeadTask(TrainerTask):
    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.classifier.parameters(), self.arguments(config).learning_rate)


class IdleBodyTask(TrainerTask):
    """Trains the head, and has the gradients of the body zeroed."""

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        body = {"params": list(model.bert.parameters()), "lr": 0.0}
        head = {"params": list(model.classifier.parameters()), "lr": self.arguments(config).learning_rate}
        return torch.optim.SGD([body, head])


class HeadTrainer(Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.classifier.parameters(), self.args.learning_rate)
        return self.optimizer


def test_gradients_that_no_optimizer_zeroes_are_not_clipped(tmp_path: Path) -> None:
    member = Member(Trial(0, {}, seed=1, data_seed=2), 0, 1)
    made = {}
    for norm in (0.0, 0.1):
        task = made[norm] = HeadTask(bert, arguments(tmp_path, max_grad_norm=norm), SENTENCES, SENTENCES)
        frozen = HeadTask(lambda: frozen_body(bert()), task.args, SENTENCES, SENTENCES)
        assert build(frozen, member, torch.device("cpu")).settings.max_norm == (norm or None)
    build(made[0.0], member, torch.device("cpu"))
    name = "'bert.embeddings.word_embeddings.weight'"
    with pytest.raises(
        TaskError, match=rf"`optimizer` leaves out {name}, .* max_grad_norm .* with lr=0.* or set max_g"
    ):
        build(made[0.1], member, torch.device("cpu"))


def frozen_body(model: nn.Module) -> nn.Module:
    model.bert.requires_grad_(False)
    return model


def test_parameters_with_a_learning_rate_of_zero_count_in_the_norm_as_by_trainer(tmp_path: Path) -> None:
    task = IdleBodyTask(bert, arguments(tmp_path, max_grad_norm=0.05), SENTENCES, SENTENCES[:16])
    high = {"learning_rate": shoal.loguniform(0.3, 3.0)}
    check_search(task, high, ordered(HeadTrainer, bert, task), tmp_path)


def test_an_optimizer_whose_package_is_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.trainer_optimizer.is_bitsandbytes_available", lambda: False)
    args = arguments(tmp_path, optim="adamw_bnb_8bit")
    message = "optim='adamw_bnb_8bit' of TrainingArguments: You need to install `bitsandbytes`"
    with pytest.raises(TaskError, match=message):
        TrainerTask(bert, args, SENTENCES, SENTENCES)
    LayeredTask(bert, args, SENTENCES, SENTENCES)  # it has an optimizer of its own
    task = TrainerTask(bert, arguments(tmp_path), SENTENCES, SENTENCES)
    with pytest.raises(TaskError, match=message):
        task.optimizer(task.model({}), {"optim": "adamw_bnb_8bit"})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"gamma": 2.0}, r"gamma=2\.0 \(of OwnArguments, which TrainerTask does not know\)"),
    "a list": ({"stages": ["one", "two"]}, r"stages=\['one', 'two'\] \(of OwnArguments"),
    "beside a known one": ({"gamma": 2.0, "neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5\.0 .*gamma=2\.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_of_other_arguments_is_refused_unless_it_has_its_default(name: str, tmp_path: Path) -> None:
    settings, message = REFUSED[name]
    remedy = (
        "subclass TrainerTask, act on them in `loss`, `optimizer` or another method, and name them in its `honoured`"
    )
    with pytest.raises(TaskError, match=f"{message}.*{re.escape(remedy)}"):
        TrainerTask(bert, arguments(tmp_path, OwnArguments, **settings), SENTENCES, SENTENCES)
    assert TrainerTask(bert, arguments(tmp_path, OwnArguments), SENTENCES, SENTENCES).batch_size({}) == 8


def test_a_field_that_must_be_given_is_refused(tmp_path: Path) -> None:
    @dataclass(kw_only=True)
    class Stated(TrainingArguments):
        beta: float

    with pytest.raises(TaskError, match=r"beta=0\.1 \(of Stated, which"):
        TrainerTask(bert, arguments(tmp_path, Stated, beta=0.1), SENTENCES, SENTENCES)


def test_a_config_overrides_no_field_that_a_subclass_does_not_honour(tmp_path: Path) -> None:
    task = TrainerTask(bert, arguments(tmp_path, OwnArguments), SENTENCES, SENTENCES)
    with pytest.raises(TaskError, match="the config's 'gamma' is an argument of the whole study"):
        task.arguments({"gamma": 2.0})


def test_lengths_of_generation_have_no_effect_without_generation(tmp_path: Path) -> None:
    args = arguments(tmp_path, Seq2SeqTrainingArguments, generation_max_length=9, generation_num_beams=2)
    assert TrainerTask(bert, args, SENTENCES, SENTENCES).batch_size({}) == 8


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("names", [None, []])
@pytest.mark.parametrize("make", [clip, siglip])
def test_a_loss_that_comes_by_return_loss_of_the_collator(make: Any, names: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path, remove_unused_columns=False, label_names=names)
    task = TrainerTask(make, args, PAIRS, PAIRS[:16], contrasted)
    check_search(task, RATES, ordered(Trainer, make, task), tmp_path)


def test_a_batch_without_labels_and_without_return_loss_says_both(tmp_path: Path) -> None:
    task = TrainerTask(clip, arguments(tmp_path), PAIRS, PAIRS[:16], lambda samples: {})
    batch = {name: value for name, value in contrasted(PAIRS[:4]).items() if name != "return_loss"}
    with pytest.raises(TaskError, match=r"samples need labels, .* or its batches return_loss=True, if"):
        task.loss(clip(), batch)


def test_a_model_instead_of_a_function_that_makes_one_is_refused(tmp_path: Path) -> None:
    args, remedy = arguments(tmp_path), "each trial needs a new one; pass `model_init`, a function that returns it"
    with pytest.raises(TaskError, match=f"takes no `model`: {remedy}"):
        TrainerTask(model=bert(), args=args, train_dataset=SENTENCES, eval_dataset=SENTENCES)
    with pytest.raises(TaskError, match=f"got a BertForSequenceClassification: {remedy}"):
        TrainerTask(bert(), args, SENTENCES, SENTENCES)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=f"got nothing: {remedy}"):
        TrainerTask(args=args, train_dataset=SENTENCES, eval_dataset=SENTENCES)


def test_a_search_without_an_evaluation_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="needs an `eval_dataset`: trials are compared by an evaluation set"):
        TrainerTask(bert, arguments(tmp_path), SENTENCES)
    with pytest.raises(TaskError, match="`args` must be TrainingArguments, got NoneType"):
        TrainerTask(bert, train_dataset=SENTENCES, eval_dataset=SENTENCES)


class Bitsandbytes(torch.optim.SGD):
    """Stands for an optimizer of bitsandbytes, each of which has the one manager of the process."""

    everyone = SimpleNamespace(index2config={})

    def __init__(self, groups: Any, lr: float, optim_bits: int) -> None:
        super().__init__(groups, lr)
        self.mng = self.everyone


@pytest.mark.parametrize(("bits", "kept"), [(8, {"word", "position", "token_type"}), (32, set())])
def test_an_optimizer_of_8_bits_has_overrides_of_its_own_for_embeddings(
    bits: int, kept: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bitsandbytes, "__module__", "bitsandbytes.optim")
    given = (Bitsandbytes, {"lr": 0.1, "optim_bits": bits})
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", lambda *_: given)
    task = TrainerTask(bert, arguments(tmp_path), SENTENCES, SENTENCES)
    model = task.model({})
    optimizer: Any = task.optimizer(model, {})
    names = {id(each): name for name, each in model.named_parameters()}
    places = {
        names[id(optimizer.param_groups[row]["params"][column])]: bits["optim_bits"]
        for (row, column), bits in optimizer.mng.index2config.items()
    }
    assert places == {f"bert.embeddings.{name}_embeddings.weight": 32 for name in kept}
    assert Bitsandbytes.everyone.index2config == {}


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The one manager of all optimizers of bitsandbytes, without overrides that earlier tests registered."""
    found = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager
    monkeypatch.setattr(found, "_instance", None)
    return found.get_instance()


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    "name", ["adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit", "ademamix_8bit", "rmsprop_bnb_8bit", "lion_32bit"]
)
def test_bitsandbytes_keeps_the_states_of_embeddings_as_by_trainer(name: str, manager: Any, tmp_path: Path) -> None:
    task = TrainerTask(wide, arguments(tmp_path, optim=name), SENTENCES, SENTENCES[:16])
    low = {"learning_rate": shoal.loguniform(1e-3, 3e-3)}
    check_search(task, low, ordered(Trainer, wide, task), tmp_path, rel=1e-4)  # 8 bits round what differs by little


def test_bitsandbytes_keeps_the_embeddings_of_each_model_apart(manager: Any, tmp_path: Path) -> None:
    task = TrainerTask(wide, arguments(tmp_path, optim="adamw_bnb_8bit"), SENTENCES, SENTENCES[:16])
    model = task.model({})
    optimizer: Any = task.optimizer(model, {})
    model(**task.collate(SENTENCES[:4])).loss.backward()
    optimizer.step()
    large = {name: each for name, each in model.named_parameters() if each.numel() >= 4096}
    kept = {name: optimizer.state[each]["state1"].dtype for name, each in large.items()}
    words, positions = (f"bert.embeddings.{name}_embeddings.weight" for name in ("word", "position"))
    assert {name for name, dtype in kept.items() if dtype == torch.float32} == {words, positions}
    assert torch.uint8 in kept.values()
    assert (manager.index2config, manager.module_weight_config_triple) == ({}, []), (
        "it would hold each model of a search"
    )
