"""Members of an array train as TRL's own trainers do on the same order of samples, with the same dropout."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.nn.functional as F
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import shoal
from shoal.core.array import Array, Member
from shoal.core.event import Reported
from shoal.core.job import Job, WorkerContext
from shoal.core.trial import Trial
from shoal.fuse.generators import seed_all
from shoal.integrations.trl import DPOTask, RewardTask, SFTTask
from shoal.integrations.trl.task import TRLTask
from shoal.train import run
from shoal.train.bases import bases_of
from shoal.train.checkpoint import load_newest
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache, WorkerState

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

CPU = torch.device("cpu")
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]
ROWS, DATA_SEED, EPOCHS = 13, 5, 2


def tokenizer(**names: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, **(names or {"pad_token": "<pad>", "eos_token": "<eos>"}))


def words(number: int, count: int) -> str:
    numbers = torch.randint(0, 30, (count,), generator=torch.Generator().manual_seed(number))
    return " ".join(f"w{each}" for each in numbers.tolist())


TEXTS = Dataset.from_list([{"text": words(n, 3 + n % 5)} for n in range(ROWS)])
ANSWERS = Dataset.from_list(
    [{"prompt": words(n, 2 + n % 3), "completion": f" {words(100 + n, 2 + n % 4)}"} for n in range(ROWS)]
)
PAIRS = Dataset.from_list(
    [
        {
            "prompt": words(n, 2 + n % 3),
            "chosen": f" {words(100 + n, 2 + n % 4)}",
            "rejected": f" {words(200 + n, 1 + n % 5)}",
        }
        for n in range(ROWS)
    ]
)
MARGINS = PAIRS.add_column("margin", [0.1 * n for n in range(ROWS)])


def small(kind: Any, **settings: Any) -> Any:
    """A GPT-2, which computes in float64 throughout."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
    none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return kind(GPT2Config(vocab_size=len(WORDS), **sizes, **{**none, **settings})).double()


def gpt2() -> Any:
    return small(GPT2LMHeadModel)


def scorer() -> Any:
    return small(GPT2ForSequenceClassification, num_labels=1)


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **sizes))


class Exact:
    """Stands for TRL's fused head, whose statistics are float32 whatever the model's type."""

    @staticmethod
    def apply(hidden: Any, weight: Any, bias: Any, targets: Any, temperature: Any, *rest: Any) -> Any:
        logits = F.linear(hidden, weight, bias) / temperature
        log_p = logits.log_softmax(-1)
        found = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
            return found, entropy, (2 * log_p).logsumexp(-1), logits.mean(-1), logits.argmax(-1) == targets


class Ordered(torch.utils.data.Sampler[int]):
    """Each pass in Shoal's order."""

    def __init__(self, size: int) -> None:
        self.size, self.passes = size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(shoal.sample_order(trial(0, {}), self.passes - 1, self.size).tolist())


class InOrder:
    """A trainer of TRL that draws a trial's random numbers."""

    batches = 0
    of_trial: Any = None

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return Ordered(len(self.train_dataset))  # type: ignore[attr-defined]

    def compute_loss(self, model: Any, *arguments: Any, **rest: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, *arguments, **rest)  # type: ignore[misc]
        self.batches += 1
        with shoal.randomness(self.of_trial, self.batches - 1):
            return super().compute_loss(model, *arguments, **rest)  # type: ignore[misc]


class SFTInOrder(InOrder, SFTTrainer):  # type: ignore[misc]
    pass


class DPOInOrder(InOrder, DPOTrainer):  # type: ignore[misc]
    pass


class RewardInOrder(InOrder, RewardTrainer):  # type: ignore[misc]
    pass


class Evaluations(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **rest: Any) -> None:
        self.found.append(dict(metrics))


def lora(**settings: Any) -> LoraConfig:
    usual = {"r": 2, "lora_alpha": 4, "target_modules": ["c_attn"], "task_type": "CAUSAL_LM", "fan_in_fan_out": True}
    return LoraConfig(**{**usual, **settings})


@dataclass(frozen=True)
class Case:
    task: type[TRLTask]
    settings: dict[str, Any]
    data: Any
    configs: list[dict[str, Any]]
    make: Callable[[], Any] = gpt2
    adapter: LoraConfig = field(default_factory=lora)
    tolerance: float = 1e-9


KINDS: dict[Any, tuple[Any, Any]] = {
    SFTTask: (SFTConfig, SFTInOrder),
    DPOTask: (DPOConfig, DPOInOrder),
    RewardTask: (RewardConfig, RewardInOrder),
}


def several(count: int, **settings: Any) -> list[dict[str, Any]]:
    """Configs of several ranks, alphas, dropouts and learning rates; a list among the settings gives each its own."""
    found = []
    for b in range(count):
        one = {
            "r": 1 + b % 3,
            "lora_alpha": 2.0 + b,
            "lora_dropout": 0.1 * (1 + b % 4),
            "learning_rate": 1e-3 * (b + 1),
        }
        found.append({**one, **{name: each[b] if isinstance(each, list) else each for name, each in settings.items()}})
    return found


def arguments(directory: Path, kind: Any, **settings: Any) -> Any:
    usual = {"num_train_epochs": EPOCHS, "per_device_train_batch_size": 3, "per_device_eval_batch_size": 3}
    usual |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    usual |= {"bf16": False, "activation_checkpointing": False, "report_to": "none", "logging_strategy": "no"}
    return kind(output_dir=str(directory / "out"), **{**usual, **settings})


def made(case: Case, directory: Path, **settings: Any) -> TRLTask:
    args = arguments(directory, KINDS[case.task][0], **{**case.settings, **settings})
    valid = case.data.select(range(7))
    task: Any = case.task
    return task(
        case.make, args=args, train_dataset=case.data, eval_dataset=valid, processing_class=tokenizer(),
        peft_config=case.adapter,
    )  # fmt: skip


def trial(number: int, config: dict[str, Any]) -> Trial:
    return Trial(number, config, seed=100 + number, data_seed=DATA_SEED)


def by_shoal(
    task: TRLTask, trials: list[Trial], epochs: int, directory: Path
) -> dict[int, tuple[list[Any], dict[str, Tensor]]]:
    """What each trial of an array reports after each step, and its final weights."""
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


def by_trl(case: Case, task: TRLTask, one: Trial, directory: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Evaluations after each step and final weights of the trainer of TRL, from the trial's initial adapter."""
    kind, trainer_class = KINDS[case.task]
    names = {each.name for each in fields(kind)}
    own = {name: value for name, value in one.config.items() if name in names}
    of_adapter = {name: value for name, value in one.config.items() if name not in names}
    evaluations = Evaluations()
    trainer = trainer_class(
        model=case.make(), args=arguments(directory, kind, **{**case.settings, **own}), train_dataset=case.data,
        eval_dataset=case.data.select(range(7)), processing_class=tokenizer(), callbacks=[evaluations],
        peft_config=LoraConfig(**{**case.adapter.to_dict(), **of_adapter}),
    )  # fmt: skip
    trainer.of_trial = one
    seed_all(one.seed, CPU)
    trainer.model.load_state_dict(bases_of(task, CPU).model(one.config).state_dict())
    trainer.train()
    return evaluations.found, trainer.model.state_dict()


CASES = {
    "completions, twelve members": Case(SFTTask, {"gradient_accumulation_steps": 2}, ANSWERS, several(12)),
    "the whole text, dft": Case(SFTTask, {"loss_type": "dft", "max_length": 5}, TEXTS, several(2)),
    "packed": Case(SFTTask, {"packing": True, "max_length": 9}, TEXTS, several(2)),
    "cut from a stream": Case(
        SFTTask, {"packing": True, "packing_strategy": "wrapped", "max_length": 6}, TEXTS, several(2)
    ),
    "smoothed labels": Case(
        SFTTask, {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}, ANSWERS, several(2), tolerance=1e-5
    ),
    "a Llama": Case(
        SFTTask, {}, ANSWERS, several(2), llama, lora(target_modules=["q_proj"], fan_in_fan_out=False), tolerance=1e-5
    ),
    "pairs": Case(DPOTask, {"gradient_accumulation_steps": 2}, PAIRS, several(3, beta=[0.1, 0.3, 0.5])),
    "weighted pairs": Case(
        DPOTask,
        {"loss_type": ["sigmoid_norm", "apo_zero"], "loss_weights": [0.8, 0.3], "use_weighting": True, "max_length": 6},
        PAIRS, several(2, ld_alpha=[0.3, 0.7]),
    ),
    "rewards": Case(
        RewardTask, {"gradient_accumulation_steps": 2}, MARGINS,
        several(3, center_rewards_coefficient=[0.01, 0.02, 0.0]), scorer,
        lora(task_type="SEQ_CLS", modules_to_save=["score"]),
    ),
}  # fmt: skip

UNCOMPARED = ("runtime", "samples_per_second", "steps_per_second", "num_tokens", "epoch")
"""What TRL reports of a run, not of a model."""


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Exact)


@pytest.mark.parametrize("name", CASES)
def test_members_of_an_array_are_as_by_trl(name: str, exact: None, tmp_path: Path, caplog: Any) -> None:
    case = CASES[name]
    trials = [trial(b, config) for b, config in enumerate(case.configs)]
    task = made(case, tmp_path)
    batches = math.ceil(len(task.data({})[0]) / 3)
    epochs = EPOCHS * math.ceil(batches / case.settings.get("gradient_accumulation_steps", 1))
    found = by_shoal(task, trials, epochs, tmp_path)
    assert not [record for record in caplog.records if "plain PyTorch" in record.getMessage()]
    assert not [record for record in caplog.records if "one after another" in record.getMessage()]
    for one in trials:
        evaluations, weights = by_trl(case, task, one, tmp_path)
        reports, mine = found[one.number]
        assert len(reports) == len(evaluations) == epochs
        for report, evaluation in zip(reports, evaluations, strict=True):
            wanted = {key.removeprefix("eval_"): value for key, value in evaluation.items()}
            wanted = {key: value for key, value in wanted.items() if key not in UNCOMPARED}
            wanted["valid_loss"] = wanted.pop("loss")
            rest = {key: value for key, value in report.items() if key in wanted}
            assert rest == pytest.approx(wanted, rel=max(case.tolerance, 1e-6), abs=1e-7)
        assert mine, "the adapter"
        its = {name: weights[name] for name in mine}
        torch.testing.assert_close(mine, its, rtol=case.tolerance, atol=case.tolerance)
