"""`TrainerTask` trains each member of an array as `transformers.Trainer` trains it on the same order of samples."""

import copy
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import shoal
from shoal.algorithms.base import Algorithm
from shoal.arguments import study_warnings
from shoal.core.array import Array, Member
from shoal.core.errors import TaskError
from shoal.core.event import Reported
from shoal.core.job import Job, WorkerContext
from shoal.core.space import Space
from shoal.core.trial import Trial
from shoal.integrations import trainer_arguments
from shoal.integrations.transformers import TrainerTask
from shoal.train import run
from shoal.train.checkpoint import load_newest
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache, WorkerState

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

CPU = torch.device("cpu")
SAMPLES, FEW, DATA_SEED, WORDS = 22, 13, 5, 32
"""All samples; those of a comparison with Trainer, whose last batch and last step are not whole."""
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def bert() -> nn.Module:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=3, **SIZES, **none)).double()


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **SIZES)).double()


def vit() -> nn.Module:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **SIZES, **none)).double()


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(0)
    config = T5Config(vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config).double()


def words(number: int) -> list[int]:
    """A sample of its own length."""
    generator = np.random.default_rng(number)
    return generator.integers(1, WORDS, 3 + number % 5).tolist()


def padded(rows: list[list[int]], value: int) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def sentences(samples: list[Any]) -> dict[str, Tensor]:
    """Pads to the longest sample; labels of words are padded with -100."""
    rows = [sample["input_ids"] for sample in samples]
    found = {"input_ids": padded(rows, 0), "attention_mask": padded([[1] * len(row) for row in rows], 0)}
    labels = [sample["labels"] for sample in samples]
    return {**found, "labels": torch.tensor(labels) if isinstance(labels[0], int) else padded(labels, -100)}


def translations(samples: list[Any]) -> dict[str, Tensor]:
    """With the inputs of the decoder, which a model without labels does not make itself."""
    found = sentences(samples)
    shifted = nn.functional.pad(found["labels"].clamp(min=0)[:, :-1], (1, 0))
    return {**found, "decoder_input_ids": shifted}


CLASSIFIED = [{"input_ids": words(n), "labels": n % 3, "text": "a column that is not used"} for n in range(SAMPLES)]
CONTINUED = [{"input_ids": words(n), "labels": words(n)} for n in range(SAMPLES)]
TRANSLATED = [{"input_ids": words(n), "labels": words(n + 1)} for n in range(SAMPLES)]
PICTURES = [
    {"pixel_values": torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(n)).double(), "labels": n % 3}
    for n in range(SAMPLES)
]

MODELS: dict[str, tuple[Callable[[], nn.Module], list[Any], Any, float]] = {
    "bert": (bert, CLASSIFIED, sentences, 1e-9),
    "llama": (llama, CONTINUED, sentences, 1e-5),
    "vit": (vit, PICTURES, None, 1e-5),
    "t5": (t5, TRANSLATED, translations, 1e-5),
}
"""Model, samples, collator, and the tolerance: all but BERT compute in float32 what decides the loss."""

SETTINGS: dict[str, dict[str, Any]] = {
    "linear warm-up": {"warmup_steps": 2},
    "cosine warm-up, accumulation": {
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.25,
        "gradient_accumulation_steps": 4,
    },
    "clipped to little, no schedule": {"max_grad_norm": 0.05, "lr_scheduler_type": "constant", "weight_decay": 0.1},
    "not clipped, another optimizer": {"max_grad_norm": 0.0, "optim": "sgd", "optim_args": "momentum=0.9"},
    "smoothed labels, accumulation": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 3},
    "last batches dropped": {"dataloader_drop_last": True, "warmup_steps": 0.25},
}
FAST = {
    ("bert", "cosine warm-up, accumulation"),
    ("bert", "clipped to little, no schedule"),
    ("bert", "not clipped, another optimizer"),
    ("bert", "last batches dropped"),
    ("llama", "smoothed labels, accumulation"),
    ("vit", "linear warm-up"),
    ("t5", "cosine warm-up, accumulation"),
}
"""Each model and each setting, and most settings in float64."""

CONFIGS = [
    {"learning_rate": 1e-3, "weight_decay": 0.0},
    {"learning_rate": 3e-3, "weight_decay": 0.1},
    {"learning_rate": 1e-2, "weight_decay": 0.01},
]
EPOCHS = 2


def arguments(directory: Path, **settings: Any) -> TrainingArguments:
    usual = {"num_train_epochs": EPOCHS, "per_device_train_batch_size": 3, "per_device_eval_batch_size": 5}
    usual |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(directory / "out"), **{**usual, **settings})


class Ordered(torch.utils.data.Sampler[int]):
    """Each pass in Shoal's order."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return FEW

    def __iter__(self) -> Iterator[int]:
        order = shoal.sample_order(trial(0, {}), self.passes, FEW)
        self.passes += 1
        return iter(order.tolist())


class OrderedTrainer(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return Ordered()


class Evaluations(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **rest: Any) -> None:
        self.found.append({name: metrics[name] for name in ("eval_loss", "eval_score") if name in metrics})


def score(prediction: Any) -> dict[str, Any]:
    """No mean over batches, and of all that is predicted."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"score": np.abs(logits).max() + (prediction.label_ids == 1).mean()}


def by_trainer(
    make: Callable[[], nn.Module], args: TrainingArguments, samples: list[Any], collator: Any
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Evaluations after each step, and final weights."""
    evaluations = Evaluations()
    trainer = OrderedTrainer(
        model_init=make, args=args, train_dataset=samples[:FEW], eval_dataset=samples[:7], data_collator=collator,
        compute_metrics=score, callbacks=[evaluations],
    )  # fmt: skip
    trainer.train()
    return evaluations.found, trainer.model.state_dict()


def trial(number: int, config: dict[str, Any]) -> Trial:
    return Trial(number, config, seed=100 + number, data_seed=DATA_SEED)


def by_shoal(
    task: TrainerTask, trials: list[Trial], epochs: int, directory: Path
) -> dict[int, tuple[list[Any], dict[str, Tensor]]]:
    """What each trial of an array reports after each epoch, and its final weights."""
    sets = DataSets(task, CPU)
    signatures = SignatureBuilder(task, sets)
    keys = {signatures.key(each) for each in trials}
    assert len({key.family or key.structure for key in keys}) == 1, "they are one array"
    job = Job("job", (Array(keys.pop(), tuple(Member(each, 0, epochs) for each in trials)),))
    directory.mkdir(parents=True, exist_ok=True)
    state = WorkerState(task, sets, TrialCache(), CPU, directory)
    trainer = run.Trainer(job, state, signatures, JobControl(prompt=True), WorkerContext(directory, b""))
    reports = [report for event in trainer.run() if isinstance(event, Reported) for report in event.reports]
    found = {}
    for each in trials:
        saved = load_newest(directory, each.number)
        assert saved is not None
        mine = sorted((report for report in reports if report.trial == each.number), key=lambda report: report.epoch)
        found[each.number] = ([report.metrics for report in mine], dict(saved.model))
    return found


def steps_in_all(args: TrainingArguments) -> int:
    batches = FEW // 3 if args.dataloader_drop_last else math.ceil(FEW / 3)
    return EPOCHS * math.ceil(batches / args.gradient_accumulation_steps)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(
    ("name", "settings"),
    [pytest.param(*case, marks=[] if case in FAST else pytest.mark.thorough) for case in product(MODELS, SETTINGS)],
)
def test_members_of_an_array_are_as_by_trainer(
    name: str, settings: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, samples, collator, tolerance = MODELS[name]
    if "label_smoothing_factor" in SETTINGS[settings]:
        tolerance = 1e-5  # it sums in float32
    args = arguments(tmp_path, **SETTINGS[settings])
    task = TrainerTask(make, args, samples[:FEW], samples[:7], data_collator=collator, compute_metrics=score)
    trials = [trial(b, config) for b, config in enumerate(CONFIGS[:2])]
    epochs = steps_in_all(args)
    with caplog.at_level(logging.WARNING, "shoal"):
        found = by_shoal(task, trials, epochs, tmp_path)
    assert not [record for record in caplog.records if "plain PyTorch" in record.getMessage()]
    for one in trials:
        own = arguments(tmp_path, **{**SETTINGS[settings], **one.config})
        evaluations, weights = by_trainer(make, own, samples, collator)
        reports, mine = found[one.number]
        assert len(reports) == len(evaluations) == epochs
        for report, evaluation in zip(reports, evaluations, strict=True):
            assert report["valid_loss"] == pytest.approx(evaluation["eval_loss"], rel=tolerance)
            assert report["score"] == pytest.approx(evaluation["eval_score"], rel=tolerance)
        torch.testing.assert_close(mine, dict(weights), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("smoothing", "tolerance"), [pytest.param(0.0, 1e-9, marks=pytest.mark.thorough), (0.1, 1e-5)])
def test_a_member_equals_its_lone_run(smoothing: float, tolerance: float, tmp_path: Path) -> None:
    args = arguments(tmp_path, eval_strategy="epoch", gradient_accumulation_steps=2)
    configs = [{**config, "label_smoothing_factor": smoothing * (b + 1)} for b, config in enumerate(CONFIGS)]
    trials = [trial(b, config) for b, config in enumerate(configs)]
    task = TrainerTask(bert, args, CLASSIFIED[:FEW], CLASSIFIED[:7], sentences, score)
    together = by_shoal(task, trials, EPOCHS, tmp_path / "together")
    for one in trials:
        alone = by_shoal(task, [one], EPOCHS, tmp_path / f"alone{one.number}")[one.number]
        assert together[one.number][0] == [pytest.approx(report, rel=tolerance) for report in alone[0]]
        torch.testing.assert_close(together[one.number][1], alone[1], rtol=tolerance, atol=tolerance / 100)


def test_mixed_precision_is_as_by_trainer(tmp_path: Path) -> None:
    def single() -> nn.Module:
        return bert().float()

    settings = {"bf16": True, "eval_strategy": "epoch"}
    trials = [trial(b, config) for b, config in enumerate(CONFIGS[:2])]
    task = TrainerTask(single, arguments(tmp_path, **settings), CLASSIFIED[:FEW], CLASSIFIED[:7], sentences, score)
    found = by_shoal(task, trials, EPOCHS, tmp_path)
    for one in trials:
        evaluations, _ = by_trainer(single, arguments(tmp_path, **settings, **one.config), CLASSIFIED, sentences)
        reports, weights = found[one.number]
        assert {each.dtype for each in weights.values()} == {torch.float32}
        for report, evaluation in zip(reports, evaluations, strict=True):
            assert report["valid_loss"] == pytest.approx(evaluation["eval_loss"], rel=2e-2)
            assert report["score"] == pytest.approx(evaluation["eval_score"], rel=5e-2)


@pytest.mark.thorough  # fast, test_peft.py trains them without the task
def test_adapters_of_several_ranks_are_one_array(tmp_path: Path) -> None:
    def adapted(config: Any) -> nn.Module:
        kind = LoraConfig(r=config["rank"] if config else 2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return get_peft_model(llama(), kind).double()

    task = TrainerTask(adapted, arguments(tmp_path, eval_strategy="epoch"), CONTINUED[:FEW], CONTINUED[:7], sentences)
    trials = [trial(b, {"rank": 2 * (b + 1), **config}) for b, config in enumerate(CONFIGS)]
    found = by_shoal(task, trials, EPOCHS, tmp_path / "together")
    for one in trials:
        alone = by_shoal(task, [one], EPOCHS, tmp_path / f"alone{one.number}")[one.number]
        assert found[one.number][0] == [pytest.approx(report, rel=1e-5) for report in alone[0]]


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=3, **SIZES)).double()


def low_rank(config: Any) -> nn.Module:
    config = config or {"rank": 2, "dropout": 0.1}
    kind = LoraConfig(
        r=config["rank"], lora_dropout=config["dropout"], target_modules=["q_proj"], task_type="CAUSAL_LM"
    )
    return get_peft_model(llama(), kind).double()


CHECKPOINTED: dict[str, tuple[Callable[..., nn.Module], list[Any], list[dict[str, Any]]]] = {
    "dropout": (with_dropout, CLASSIFIED, CONFIGS[:2]),
    "adapters": (low_rank, CONTINUED, [{"rank": 2, "dropout": 0.0}, {"rank": 3, "dropout": 0.5}]),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_activation_checkpointing_changes_no_number(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, samples, configs = CHECKPOINTED[name]
    trials = [trial(b, config) for b, config in enumerate(configs)]
    found = []
    for checkpointed in (False, True):
        args = arguments(tmp_path, eval_strategy="epoch", activation_checkpointing=checkpointed)
        task = TrainerTask(make, args, samples[:FEW], samples[:7], sentences)
        model: Any = task.model(configs[0])
        assert model.is_activation_checkpointing == checkpointed
        found.append(by_shoal(task, trials, 1, tmp_path / str(checkpointed)))
    assert not [record for record in caplog.records if "plain PyTorch" in record.getMessage()]
    for number, (reports, weights) in found[0].items():
        assert found[1][number][0] == [pytest.approx(report, rel=1e-9) for report in reports]
        torch.testing.assert_close(found[1][number][1], weights, rtol=1e-9, atol=1e-12)


def test_only_some_layers_are_checkpointed_if_the_arguments_say_so(tmp_path: Path) -> None:
    def deep() -> nn.Module:
        return BertForSequenceClassification(BertConfig(vocab_size=WORDS, **{**SIZES, "num_hidden_layers": 4}))

    args = arguments(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2})
    model: Any = TrainerTask(deep, args, CLASSIFIED, CLASSIFIED[:12], sentences).model({})
    assert [layer.gradient_checkpointing for layer in model.bert.encoder.layer] == [True, False, True, False]
    assert model.bert.encoder.layer[0]._gradient_checkpointing_func.keywords == {"use_reentrant": False}


def test_a_model_that_cannot_be_checkpointed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
            return input_ids

    args = arguments(tmp_path, activation_checkpointing=True)
    with pytest.raises(TaskError, match="Plain has no method `activation_checkpointing_enable`"):
        TrainerTask(lambda: Plain(), args, CLASSIFIED, CLASSIFIED[:12])
    monkeypatch.setattr(BertForSequenceClassification, "supports_gradient_checkpointing", False)
    with pytest.raises(TaskError, match=r"activation_checkpointing=True .*Classification does not supp"):
        TrainerTask(bert, args, CLASSIFIED, CLASSIFIED[:12])


def test_kernels_of_liger_are_applied_to_the_model_where_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path, use_liger_kernel=True, liger_kernel_config={"rope": False})
    with pytest.raises(TaskError, match=r"use_liger_kernel=True \(the package liger-kernel is not installed\)"):
        TrainerTask(bert, args, CLASSIFIED, CLASSIFIED[:12], sentences)
    monkeypatch.setattr(trainer_arguments, "is_liger_kernel_available", lambda: True)
    with pytest.raises(TaskError, match="there is no CUDA device"):
        TrainerTask(bert, args, CLASSIFIED, CLASSIFIED[:12], sentences)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    applied: list[Any] = []
    monkeypatch.setattr(trainer_arguments, "apply_liger_kernel", lambda *given: applied.append(given))
    model = TrainerTask(bert, args, CLASSIFIED, CLASSIFIED[:12], sentences).model({})
    assert applied[-1] == (model, {"rope": False})


def test_a_search_takes_names_of_the_arguments_and_of_the_model(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))

    def by_config(config: Any) -> nn.Module:
        model = bert()
        if config is not None:
            nn.init.constant_(model.classifier.bias, config["bias"])
        return model

    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_score"}
    args = arguments(tmp_path, eval_strategy="epoch", save_strategy="epoch", **best)
    task = TrainerTask(by_config, args, CLASSIFIED, CLASSIFIED[:12], sentences, score)
    study = shoal.tune(
        task, {"learning_rate": shoal.choice([1e-3, 1e-2]), "bias": 0.5}, metric="score", mode="max",
        algorithm=shoal.Grid(epochs=2), devices="cpu:1", backend="inline", directory=tmp_path / "study",
        show_progress=False,
    )  # fmt: skip
    assert {row.config["learning_rate"] for row in study.trials} == {1e-3, 1e-2}
    assert isinstance(study.best_model(), BertForSequenceClassification)
    best = study.best_trial
    assert best.objective == max(report["score"] for report in (best.ranked, best.metrics))
    assert not [record for record in caplog.records if record.name == "shoal.study"]


def warned(
    args: TrainingArguments, algorithm: Algorithm, metric: str = "score", mode: str = "max", **space: Any
) -> Any:
    algorithm.bind(Space(space), metric=metric, mode=mode, seed=0)
    return study_warnings(TrainerTask(bert, args, CLASSIFIED, CLASSIFIED[:12], sentences, score), algorithm)


LENGTHS: dict[str, tuple[dict[str, Any], Algorithm, dict[str, Any], str]] = {
    "the usual number of epochs": (
        {"num_train_epochs": 3, "eval_strategy": "epoch"},
        shoal.Hyperband(max_epochs=27),
        {},
        "num_train_epochs=3 of TrainingArguments plans the schedule 'linear' for 24 optimizer steps, and the longest "
        "trials of the study have 27 epochs of 8 steps, so the longest trials continue after its end, where the "
        "learning "
        "rate is 0 or rises again; set num_train_epochs=27, or change the epochs of the algorithm",
    ),
    "short trials": (
        {"num_train_epochs": 3, "eval_strategy": "epoch"},
        shoal.Random(2, epochs=2),
        {"per_device_train_batch_size": 11},
        "for 6 optimizer steps, .* 2 epochs of 2 steps, so no trial reaches its end; set num_train_epochs=2,",
    ),
    "in steps": (
        {"max_steps": 24, "eval_steps": 5},
        shoal.Random(2, epochs=6),
        {},
        "max_steps=24 of .* set max_steps=30,",
    ),
    "epochs of steps": (
        {"num_train_epochs": 3, "eval_steps": 5},
        shoal.Random(2, epochs=3),
        {},
        "num_train_epochs=3 of .* set max_steps=15,",
    ),
    "epochs of a share": (
        {"eval_steps": 0.5},
        shoal.Random(2, epochs=4),
        {},
        r"so the longest .* set eval_steps=0\.25,",
    ),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_schedule_of_another_length_than_the_trials_is_said(name: str, tmp_path: Path) -> None:
    settings, algorithm, space, message = LENGTHS[name]
    (warning,) = warned(arguments(tmp_path, **settings), copy.deepcopy(algorithm), **space)
    assert re.search(message, warning)


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"num_train_epochs": 3, "eval_strategy": "epoch"}, 3),
        ({"num_train_epochs": 3, "eval_steps": 5}, 4),
        ({"num_train_epochs": 3, "eval_steps": 5}, 5),
        ({"num_train_epochs": 3, "eval_strategy": "epoch", "lr_scheduler_type": "constant"}, 27),
    ],
    ids=["equal", "within the last epoch", "the last epoch is not whole", "no end"],
)
def test_a_schedule_as_long_as_the_trials_is_not_spoken_of(
    settings: dict[str, Any], epochs: int, tmp_path: Path
) -> None:
    assert warned(arguments(tmp_path, **settings), shoal.Random(2, epochs=epochs)) == []


def test_arguments_without_effect_are_said(tmp_path: Path) -> None:
    args = arguments(tmp_path, report_to=["wandb"], push_to_hub=True)
    reporting, hub = warned(args, shoal.Random(2, epochs=16))
    assert re.match(r"report_to=\['wandb'\] of TrainingArguments has no effect .* callbacks=", reporting)
    assert re.match(r"push_to_hub=True .* push `study.best_model\(\)` after the search", hub)


@pytest.mark.parametrize(("metric", "own"), [("eval_loss", "valid_loss"), ("eval_score", "score")])
def test_a_metric_with_the_prefix_of_trainer_is_refused(metric: str, own: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=rf"reports {metric} of `Trainer` as '{own}'; pass '{own}'"):
        warned(arguments(tmp_path, eval_strategy="epoch"), shoal.Random(2, epochs=2), metric)


def test_metrics_are_reported_without_the_prefix_of_trainer(tmp_path: Path) -> None:
    task = TrainerTask(
        bert, arguments(tmp_path), CLASSIFIED, CLASSIFIED[:12], sentences, lambda _: {"eval_score": 0.5, "f1": 0.25}
    )
    assert task.evaluate([{"logits": torch.zeros(2, 3), "labels": torch.zeros(2)}], {}) == {"score": 0.5, "f1": 0.25}


ONE_BATCH = [{"logits": torch.zeros(2, 3), "labels": torch.zeros(2)}]

PER_CLASS: dict[str, Any] = {
    "f1": np.float32(0.5),
    "zero_dim": np.array(0.25),
    "one_element": torch.tensor([4.0]),
    "undefined": float("nan"),
    "eval_per_class": [0.5, 0.25],
    "array": np.array([0.5, 0.25]),
    "report": "precision recall",
    "missing": None,
}


def measured(metrics: dict[str, Any], directory: Path) -> TrainerTask:
    args = arguments(directory, eval_strategy="epoch", num_train_epochs=1)
    return TrainerTask(bert, args, CLASSIFIED[:6], CLASSIFIED[:5], sentences, lambda _: metrics)


def test_metrics_that_are_no_numbers_are_left_out_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shoal.integrations.trainer_arguments._left_out", set())
    task = measured(PER_CLASS, tmp_path)
    for _ in range(2):
        found = task.evaluate(ONE_BATCH, {})
        assert found == pytest.approx(
            {"f1": 0.5, "zero_dim": 0.25, "one_element": 4.0, "undefined": math.nan}, nan_ok=True
        )
    assert [record.getMessage() for record in caplog.records] == [
        f"`compute_metrics` returns '{name}' as {kind}, which is no number: it is not reported"
        for name, kind in [("eval_per_class", "list"), ("array", "ndarray"), ("report", "str"), ("missing", "NoneType")]
    ]


def test_a_metric_of_the_study_that_is_no_number_is_refused(tmp_path: Path) -> None:
    task = measured(PER_CLASS, tmp_path)
    settings: dict[str, Any] = {"algorithm": shoal.Random(1, epochs=1), "mode": "max", "devices": "cpu:1"}
    settings |= {"backend": "inline", "show_progress": False}
    space = {"learning_rate": shoal.loguniform(1e-3, 1e-2)}
    with pytest.raises(TaskError, match="`compute_metrics` returns 'eval_per_class' as list, and the study compares"):
        shoal.tune(task, space, metric="per_class", directory=tmp_path / "one", **settings)
    study = shoal.tune(task, space, metric="f1", directory=tmp_path / "two", **settings)
    assert study.best_trial.metrics["f1"] == 0.5
    with pytest.raises(TaskError, match=r"an instance of a subclass of shoal\.Task, got <class"):
        shoal.tune(TrainerTask, space, metric="f1", directory=tmp_path / "three", **settings)


@pytest.mark.parametrize("name", ["loss", "eval_loss", "valid_loss"])
def test_a_metric_with_the_name_of_the_loss_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=f"`compute_metrics` returns '{name}', .* as 'valid_loss'; give the metric ano"):
        measured({name: 7.0}, tmp_path).evaluate(ONE_BATCH, {})


@pytest.mark.parametrize("returned", [None, [0.5], {1: 0.5}])
def test_metrics_without_names_are_refused(returned: Any, tmp_path: Path) -> None:
    task = TrainerTask(bert, arguments(tmp_path), CLASSIFIED, CLASSIFIED[:12], sentences, lambda _: returned)
    with pytest.raises(TaskError, match=r"`compute_metrics` must return a dict of names and numbers, got "):
        task.evaluate([{"logits": torch.zeros(2, 3), "labels": torch.zeros(2)}], {})


@pytest.mark.parametrize("drop_last", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_loader_processes_fetch_what_the_process_would_fetch(drop_last: bool, tmp_path: Path) -> None:
    settings = {"dataloader_drop_last": drop_last, "eval_strategy": "epoch"}
    one, found = trial(0, {"per_device_train_batch_size": 5}), []
    for workers in (0, 1):
        args = arguments(tmp_path, dataloader_num_workers=workers, **settings)
        task = TrainerTask(bert, args, CLASSIFIED, CLASSIFIED[:12], sentences, score)
        sets = DataSets(task, CPU)
        assert [each.steps(5) for each in sets.of(one.config)] == ([4, 2] if drop_last else [5, 3])
        assert sets.of({**one.config, "learning_rate": 0.1}) is sets.of(one.config)
        found.append(by_shoal(task, [one], EPOCHS, tmp_path / str(workers))[0])
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)


def test_a_precision_of_the_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(TaskError, match=r"ACCELERATE_MIXED_PRECISION=bf16, .* set bf16=True"):
        TrainerTask(bert, args, CLASSIFIED, CLASSIFIED[:12], sentences)


def test_trials_do_not_generate_and_their_models_do_afterwards(tmp_path: Path) -> None:
    def lengths(prediction: Any) -> dict[str, float]:
        assert prediction.predictions.dtype == int  # tokens, not logits
        return {"length": float((prediction.predictions > 0).sum(1).mean())}

    settings: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 5, "use_cpu": True}
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), report_to="none", **settings)
    task = TrainerTask(t5, args, TRANSLATED, TRANSLATED[:4], translations, compute_metrics=lengths)
    (warning,) = [each for each in task._study_warnings([], None, {}) if "generate" in each]
    assert "give `evaluate_generated` of the task the models of the best trials" in warning
    model = task.model({})
    assert task.outputs(model, task.collate([TRANSLATED[0]])) is None
    trainer = Seq2SeqTrainer(
        model, args, data_collator=translations, eval_dataset=TRANSLATED[:4], compute_metrics=lengths
    )
    expected = trainer.evaluate()
    found = task.evaluate_generated(model)
    assert found == {"valid_loss": expected["eval_loss"], "length": expected["eval_length"]}
    with pytest.raises(TaskError, match="needs `args` with predict_with_generate=True"):
        TrainerTask(t5, arguments(tmp_path), TRANSLATED, TRANSLATED[:4], translations).evaluate_generated(model)


def documented() -> dict[str, list[str]]:
    """Kind of each row of the table of arguments in the guide -> names of its fields."""
    guide = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()
    rows = re.findall(r"^\| arguments (.+?) \| (.+) \|$", guide, re.MULTILINE)
    names = [field.name for field in fields(TrainingArguments)]
    found = {}
    for kind, cell in rows:
        patterns = re.findall(r"`([a-z0-9_*]+)`", cell)
        found[kind] = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
    return found


def test_the_guide_says_of_each_training_argument_what_a_study_does_with_it() -> None:
    found = [name for names in documented().values() for name in names]
    assert sorted(found) == sorted(field.name for field in fields(TrainingArguments))


@pytest.mark.parametrize("name", documented()["refused"])
def test_what_the_guide_calls_refused_is_refused(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    value: Any = {"train_sampling_strategy": "sequential"}.get(name, True)
    setattr(args, name, SimpleNamespace(split_batches=True) if name == "accelerator_config" else value)
    with pytest.raises(TaskError, match=f"{name}="):
        TrainerTask(bert, args, CLASSIFIED, CLASSIFIED[:12], sentences)


def test_what_the_guide_calls_without_effect_is_accepted(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    for name in documented()["without effect"]:
        setattr(args, name, True)
    assert TrainerTask(bert, args, CLASSIFIED, CLASSIFIED[:12], sentences).batch_size({}) == 3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "half precision": ({"fp16": True}, r"fp16=True \(schedules would count .*; set bf16=True\)"),
    "compiled": ({"torch_compile": True}, "torch_compile=True"),
    "a switch of precision that workers do not have": ({"tf32": False}, "tf32=False .*set them in `model_init`"),
    "groups of equal length": ({"train_sampling_strategy": "group_by_length"}, "pad_to_multiple_of"),
    "a schedule of losses": ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type='reduce_lr_on_plateau'"),
    "parts of epochs": ({"num_train_epochs": 1.5, "eval_strategy": "epoch"}, r"num_train_epochs=1\.5"),
    "steps of no batch": (
        {"gradient_accumulation_steps": 0},
        "gradient_accumulation_steps of TrainingArguments must be at least 1, got 0",
    ),
    "batches of no sample": ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size .* at least 1, got 0"),
    "parts that run again outside of the array": (
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        r"activation_checkpointing_kwargs=\{'use_reentrant': True\} .*set use_reentrant=False",
    ),
    "two at once": (
        {"neftune_noise_alpha": 5.0, "eval_on_start": True},
        r"neftune_noise_alpha=5\.0 .*; eval_on_start=True .*ReportCheckpointCallback",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_by_name(name: str, tmp_path: Path) -> None:
    settings, message = REFUSED[name]
    with pytest.raises(TaskError, match=message):
        TrainerTask(bert, arguments(tmp_path, **settings), CLASSIFIED, CLASSIFIED[:12], sentences)


OVERRIDES: dict[str, tuple[dict[str, Any], str]] = {
    "the study's": (
        {"num_train_epochs": 2},
        "'num_train_epochs' is an argument of the whole study; set it in TrainingArguments, and the epochs of trials",
    ),
    "the study's alone": ({"eval_steps": 2}, "'eval_steps' is an .*; set it in TrainingArguments$"),
    "the seed": ({"seed": 1}, "'seed' is an argument of the whole study; give `seed` to `shoal.tune`"),
    "the seed of samples": ({"data_seed": 1}, "'data_seed' is .*; give `data_seed` to `shoal.tune`"),
    **{
        name: ({name: "f1"}, f"'{name}' is an argument of the whole study; set it in TrainingArguments$")
        for name in ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
    },
    "unknown": ({"lr": 0.1}, "'lr' is not a field of TrainingArguments, and `model_init` takes no config"),
    "of another type": ({"gradient_accumulation_steps": 2.5}, "must be of type int, got 2.5"),
    "no number": ({"warmup_steps": "many"}, "must be of type float, got 'many'"),
    "refused": ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type='greedy'"),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_config_that_cannot_override_is_refused(name: str, tmp_path: Path) -> None:
    config, message = OVERRIDES[name]
    task = TrainerTask(bert, arguments(tmp_path), CLASSIFIED, CLASSIFIED[:12], sentences)
    with pytest.raises(TaskError, match=message):
        task.batch_size(config)


def test_a_share_may_replace_a_whole_number(tmp_path: Path) -> None:
    task = TrainerTask(bert, arguments(tmp_path, weight_decay=0), CLASSIFIED, CLASSIFIED[:12], sentences)
    args = task.arguments({"warmup_steps": 0.25, "weight_decay": 0.1})
    assert (args.get_warmup_steps(16), args.weight_decay) == (4, 0.1)


def test_optimizers_that_no_study_steps_are_refused(tmp_path: Path) -> None:
    task = TrainerTask(bert, arguments(tmp_path, optim="adafactor"), CLASSIFIED, CLASSIFIED[:12], sentences)
    model = task.model({})
    assert len(task.optimizer(model, {}).param_groups) == 2
    with pytest.raises(TaskError, match="eval_dataset` must be one data set"):
        TrainerTask(bert, arguments(tmp_path), CLASSIFIED, {"one": CLASSIFIED}, sentences)


def test_a_model_init_that_needs_a_config_says_when_it_is_called(tmp_path: Path) -> None:
    def needs(config: Any) -> nn.Module:
        assert config["width"]
        return bert()

    with pytest.raises(TypeError) as caught:
        TrainerTask(needs, arguments(tmp_path), CLASSIFIED, CLASSIFIED[:12])
    assert "called with None once" in caught.value.__notes__[0]
    assert "config = config or {...}" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("model", "pass `model_init`"),
        ("tokenizer", "pass it as `processing_class`"),
        ("callbacks", "the algorithm stops trials early"),
        ("optimizers", "subclass TrainerTask and override `optimizer` and `scheduler`"),
        ("compute_loss_func", "subclass TrainerTask and override `loss`"),
        ("evaluation_dataset", "nor does Trainer"),
    ],
)
def test_arguments_of_trainer_that_a_study_has_not_are_refused(name: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=f"takes no `{name}`: .*{remedy}"):
        TrainerTask(bert, arguments(tmp_path), CLASSIFIED, CLASSIFIED[:12], **{name: object()})


def test_a_tokenizer_pads_the_samples_of_a_batch(tmp_path: Path) -> None:
    words = {"[PAD]": 0, "[UNK]": 1, "a": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]", unk_token="[UNK]"
    )
    samples = [{"input_ids": [2] * length, "labels": 0} for length in (1, 3)]
    task = TrainerTask(bert, arguments(tmp_path), samples, samples, processing_class=tokenizer)
    batch = task.collate(samples)
    assert batch["input_ids"].tolist() == [[2, 0, 0], [2, 2, 2]]
    own = TrainerTask(bert, arguments(tmp_path), samples, samples, sentences, processing_class=tokenizer)
    assert own.data_collator is sentences


def test_a_name_that_model_init_does_not_read_is_noted(tmp_path: Path) -> None:
    def reads(config: Any) -> nn.Module:
        return bert() if (config or {}).get("layers", 1) else nn.Linear(1, 1)

    task = TrainerTask(reads, arguments(tmp_path), CLASSIFIED, CLASSIFIED[:12], sentences)
    trial = Trial(0, {"learning_rat": 0.1, "layers": 1, "learning_rate": 0.1}, seed=1, data_seed=2)
    _, raised, note = SignatureBuilder(task, DataSets(task, torch.device("cpu"))).find_keys([trial])
    assert not raised
    assert "no method of the task reads 'learning_rat' of the config" in note
