"""Members of an array train as TRL's own trainers do on the same order of samples, with the same dropout."""

import gc
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast
from weakref import ref

os.environ["HF_HUB_OFFLINE"] = "1"

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
import trl.trainer.utils
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import AdaptionPromptConfig, LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import shoal
from shoal.core.array import Array, Member
from shoal.core.errors import TaskError
from shoal.core.event import Reported
from shoal.core.job import Job, WorkerContext
from shoal.core.trial import Trial
from shoal.fuse.generators import seed_all
from shoal.fuse.shard import IndivisibleStepError
from shoal.integrations import transformers as transformers_task
from shoal.integrations.trl import DPOTask, RewardTask, SFTTask, preferences
from shoal.integrations.trl import task as trl_task
from shoal.integrations.trl.task import TRLTask
from shoal.train import run
from shoal.train.bases import bases_of
from shoal.train.checkpoint import load_newest
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.team.exchange import first_rows
from shoal.train.worker_state import TrialCache, WorkerState

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

CPU = torch.device("cpu")
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]
ROWS, DATA_SEED, EPOCHS = 13, 5, 2
CHAT = (
    "{% for each in messages %}{% if each.role == 'assistant' %}{% generation %}{{ each.content }} {{ eos_token }}"
    "{% endgeneration %}{% else %}{{ each.content }} {% endif %}{% endfor %}"
)


def tokenizer(**names: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    names = names or {"pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHAT, **names)


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


def adapter_for(task: Any) -> LoraConfig:
    return lora(task_type="SEQ_CLS", modules_to_save=["score"]) if task is RewardTask else lora()


@dataclass(frozen=True)
class Case:
    task: type[TRLTask]
    settings: dict[str, Any]
    data: Any
    configs: list[dict[str, Any]]
    make: Callable[[], Any] = gpt2
    adapter: LoraConfig = field(default_factory=lora)
    tolerance: float = 1e-9
    micro_batch_size: int | None = None


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
    task: Any = case.task(
        case.make, args=args, train_dataset=case.data, eval_dataset=valid, processing_class=tokenizer(),
        peft_config=case.adapter,
    )  # fmt: skip
    task.micro_batch_size = case.micro_batch_size
    return cast("TRLTask", task)


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
    "mixed precision": Case(
        SFTTask, {"bf16": True}, ANSWERS, several(2), llama, lora(target_modules=["q_proj"], fan_in_fan_out=False),
        tolerance=1e-2,
    ),
    "steps of one, two and three batches": Case(
        SFTTask, {"eval_strategy": "epoch"}, ANSWERS, several(6, gradient_accumulation_steps=[1, 2, 3, 1, 2, 3])
    ),
    "batches of two, four and six samples": Case(
        SFTTask, {"eval_strategy": "epoch"}, ANSWERS,
        several(6, lora_dropout=0.0, per_device_train_batch_size=[2, 4, 6, 6, 4, 2]),
        micro_batch_size=2,
    ),
    "batches of two, four and six pairs": Case(
        DPOTask, {"eval_strategy": "epoch"}, PAIRS,
        several(6, per_device_train_batch_size=[2, 4, 6] * 2, gradient_accumulation_steps=[1, 2, 1, 1, 1, 2]),
        micro_batch_size=2,
    ),
    "rewards, mixed precision": Case(
        RewardTask, {"bf16": True}, MARGINS, several(2), scorer, adapter_for(RewardTask), tolerance=1e-2
    ),
    "pairs": Case(DPOTask, {"gradient_accumulation_steps": 2}, PAIRS, several(3, beta=[0.1, 0.3, 0.5])),
    "weighted pairs": Case(
        DPOTask,
        {"loss_type": ["sigmoid_norm", "apo_zero"], "loss_weights": [0.8, 0.3], "use_weighting": True, "max_length": 6},
        PAIRS, several(2, ld_alpha=[0.3, 0.7]),
    ),
    "checkpointed": Case(SFTTask, {"activation_checkpointing": True}, ANSWERS, several(3)),
    "checkpointed pairs": Case(DPOTask, {"activation_checkpointing": True}, PAIRS, several(3)),
    "rewards": Case(
        RewardTask, {"gradient_accumulation_steps": 2}, MARGINS,
        several(3, center_rewards_coefficient=[0.01, 0.02, 0.0]), scorer,
        adapter_for(RewardTask),
    ),
}  # fmt: skip

UNCOMPARED = ("runtime", "samples_per_second", "steps_per_second", "num_tokens", "epoch")
"""What TRL reports of a run, not of a model."""


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Exact)


FAST = {"completions, twelve members", "packed", "pairs", "rewards"}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.thorough) for name in CASES]
)
def test_members_of_an_array_are_as_by_trl(name: str, exact: None, tmp_path: Path, caplog: Any) -> None:
    case = CASES[name]
    trials = [trial(b, config) for b, config in enumerate(case.configs)]
    task = made(case, tmp_path)
    batches = math.ceil(len(task.data({})[0]) / 3)
    steps = math.ceil(batches / case.settings.get("gradient_accumulation_steps", 1))
    epochs = EPOCHS if case.settings.get("eval_strategy") == "epoch" else EPOCHS * steps
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


LOSSES: dict[str, dict[str, Any]] = {
    **{loss: {} for loss in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")},
    **{loss: {} for loss in ("discopop", "sft", "sigmoid_norm")},
    **{loss: {"label_smoothing": 0.2} for loss in ("robust", "aot", "aot_unpaired")},
    "exo_pair": {"label_smoothing": 0.25},  # exact in float32, of which TRL takes logarithms
}
VARIANTS: list[dict[str, Any]] = [
    *({"loss_type": [loss], **settings} for loss, settings in LOSSES.items()),
    *({"f_divergence_type": kind} for kind in ("forward_kl", "js_divergence")),
    {"loss_type": ["sigmoid", "ipo"], "loss_weights": [0.7, 2.0], "ld_alpha": 0.4},
    {"use_weighting": True, "beta": 0.7},
]


def test_each_loss_of_dpo_and_its_metrics_are_trls(exact: None, tmp_path: Path) -> None:
    """One trainer, whose settings are changed as its constructor sets them."""
    case = Case(DPOTask, {"eval_strategy": "no"}, PAIRS, [])
    task = made(case, tmp_path)
    train, _ = task.data({})
    trainer = DPOTrainer(
        model=gpt2(), args=task.args, train_dataset=PAIRS, processing_class=tokenizer(), peft_config=lora(r=3)
    )
    for name, each in trainer.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(each, generator=torch.Generator().manual_seed(1))
    samples = [train[n] for n in range(5)]
    inputs = trainer.data_collator([row for _, row in samples])
    trainer.model.eval()
    for settings in VARIANTS:
        own: Any = task.arguments(settings)
        trainer.loss_types, trainer.loss_weights = own.loss_type, own.loss_weights or [1.0] * len(own.loss_type)
        for name in ("beta", "label_smoothing", "ld_alpha", "use_weighting", "f_divergence_type"):
            setattr(trainer, name, getattr(own, name))
        model = bases_of(task, CPU).model({"r": 3, **settings})
        model.load_state_dict(trainer.model.state_dict())
        with torch.no_grad():
            wanted = trainer.compute_loss(trainer.model, dict(inputs))
            found = task.loss(model.eval(), task.collate(samples))
        assert found.item() == pytest.approx(wanted.item(), rel=1e-9), settings
        logged = {name: values[-1] for name, values in trainer._metrics["eval"].items() if name != "num_tokens"}
        mine = task.evaluate([task.outputs(model, task.collate(samples))], {})
        assert mine == pytest.approx(logged, rel=1e-6), settings


def test_twelve_members_share_one_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base runs once for all members of an array, of whatever rank, with the flags of their adapters put back."""
    task = made(Case(DPOTask, {}, PAIRS, []), tmp_path)
    models = [bases_of(task, CPU).model({"r": 1 + b % 3, "beta": 0.1 * (b + 1)}) for b in range(12)]
    array = shoal.fuse(models, strict=False)
    batch = task.collate([task.data({})[0][n] for n in range(3)])
    kinds = []
    score = preferences.causal_lm_log_probs

    def scored(*arguments: Any) -> Any:
        found = score(*arguments)
        kinds.append(type(found).__name__)
        return found

    monkeypatch.setattr(preferences, "causal_lm_log_probs", scored)
    losses = array.map(task.loss, batch)
    assert kinds == ["Stacked", "Tensor"]
    alone = torch.stack([task.loss(model, batch) for model in models])
    torch.testing.assert_close(losses, alone, rtol=1e-12, atol=0)


def real(case: Case, directory: Path) -> Any:
    kind, trainer_class = KINDS[case.task]
    return trainer_class(
        model=case.make(), args=arguments(directory, kind, **case.settings), train_dataset=case.data,
        eval_dataset=case.data.select(range(7)), processing_class=tokenizer(), peft_config=case.adapter,
    )  # fmt: skip


TURNS = Dataset.from_list(
    [
        {
            "messages": [
                {"role": role, "content": words(k + n, 2 + n % 3)} for k, role in enumerate(("user", "assistant"))
            ]
        }
        for n in range(ROWS)
    ]
)
DATA = {
    "texts in another column": Case(SFTTask, {"dataset_text_field": "words"}, TEXTS.rename_column("text", "words"), []),
    "only the end of long rows": Case(SFTTask, {"max_length": 4, "shuffle_dataset": True}, ANSWERS, []),
    "packed as documents": Case(SFTTask, {"packing": True, "max_length": 7, "eval_packing": False}, TEXTS, []),
    "padding free": Case(SFTTask, {"padding_free": True, "max_length": None, "pad_to_multiple_of": 4}, TEXTS, []),
    "answers of a chat": Case(SFTTask, {"assistant_only_loss": True}, TURNS, []),
    "pairs, cut": Case(DPOTask, {"max_length": 5, "pad_to_multiple_of": 8}, PAIRS, []),
    "rewards, short ones": Case(RewardTask, {"max_length": 8}, MARGINS, [], scorer, adapter_for(RewardTask)),
}


@pytest.mark.parametrize("name", DATA)
def test_the_data_is_what_the_trainer_has(name: str, tmp_path: Path) -> None:
    case = DATA[name]
    task, trainer = made(case, tmp_path), real(case, tmp_path)
    trainer._set_signature_columns_if_needed()
    for mine, its in zip(task.data({}), (trainer.train_dataset, trainer.eval_dataset), strict=True):
        rows = its.select_columns([each for each in its.column_names if each in trainer._signature_columns])
        assert [mine[n][1] for n in range(len(mine))] == list(rows)
        wanted = trainer.data_collator(list(rows.select(range(3))))
        found = task.collate([mine[n] for n in range(3)])
        for key, value in wanted.items():
            own = found[key]
            if isinstance(own, Tensor) and own.dim() == 3:
                own = own.transpose(0, 1).flatten(0, 1)  # pairs
            torch.testing.assert_close(own, value, msg=key)


def test_trials_share_the_data_of_equal_values(tmp_path: Path) -> None:
    task = made(Case(SFTTask, {}, ANSWERS, []), tmp_path)
    sets = DataSets(task, CPU)
    configs = [{"max_length": 5 + b % 2, "learning_rate": 0.1 * b, "r": b} for b in range(6)]
    assert len({id(sets.of(config)[0]) for config in configs}) == 2
    assert sets.names_read(configs[0]) == {*task.known.data}
    assert len(task._prepared) == 2


def test_prepared_data_used_last_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_task, "_MAX_PREPARED", 2)
    task = made(Case(SFTTask, {}, ANSWERS, []), tmp_path)
    first, _, same, _ = (task._sets({"max_length": length})[0] for length in (5, 6, 5, 7))
    assert same is first
    assert task._sets({"max_length": 5})[0] is first, "that of 6 was dropped"
    assert len(task._prepared) == 2


@pytest.mark.parametrize("task", [SFTTask, DPOTask, RewardTask])
def test_each_field_of_a_config_is_known(task: type[TRLTask]) -> None:
    known = task.known
    groups = [known.data, known.training, known.no_effect.keys(), known.refused.keys()]
    assert sum(map(len, groups)) == len(known.names), "no field is in two tables"
    of_trainer = {each.name for each in fields(TrainingArguments)}
    own = {each.name for each in fields(known.kind)} - of_trainer
    assert own == known.names
    assert all(known.no_effect.values())
    assert all(known.refused.values())


def test_a_config_as_it_comes_is_taken(tmp_path: Path) -> None:
    pairs = {"train_dataset": PAIRS, "eval_dataset": PAIRS, "processing_class": tokenizer()}
    for task, kind, make in (
        (SFTTask, SFTConfig, gpt2),
        (DPOTask, DPOConfig, gpt2),
        (RewardTask, RewardConfig, scorer),
    ):
        data = {**pairs, "train_dataset": ANSWERS, "eval_dataset": ANSWERS} if task is SFTTask else pairs
        args = kind(output_dir=str(tmp_path), use_cpu=True)
        made_task = task(make, args=args, **data, peft_config=adapter_for(task))
        assert made_task.precision({}) == "bf16-mixed"
        assert made_task.arguments({}).learning_rate == args.learning_rate


REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "a model itself": (SFTTask, {"model": nn.Linear(1, 1)}, {}, "`model` of SFTTask must be a name .*got a Linear"),
    "a model that is not there": (
        SFTTask, {"model": "/nothing"}, {}, "cannot read the `model` '/nothing'; give a directory .* or a function"
    ),
    "a tokenizer that is not there": (
        RewardTask, {"model": "/nothing", "processing_class": None}, {}, "cannot read the `model` '/nothing'; give a"
    ),
    "no adapter": (DPOTask, {"peft_config": None}, {}, "DPOTask needs a `peft_config`.*function that runs DPOTrainer"),
    "a reference": (DPOTask, {"ref_model": 1}, {}, "no `ref_model`: the reference is the model without its adapter"),
    "no adapter of peft": (SFTTask, {"peft_config": {"r": 8}}, {}, r"`peft_config` must be .*got {'r': 8}"),
    "virtual tokens": (
        SFTTask, {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}, {},
        "no PromptTuningConfig, which puts virtual tokens",
    ),
    "an adapter of another forward pass": (
        DPOTask,
        {
            "model": llama,
            "peft_config": AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"),
        },
        {},
        "the adapter of AdaptionPromptModel changes the forward pass, and DPOTask runs the layers alone",
    ),
    "an adapter of the head": (
        SFTTask, {"peft_config": lora(target_modules=["lm_head"])}, {}, "'lm_head'.*is not trained"
    ),
    "an adapter put already": (
        SFTTask, {"model": lambda: get_peft_model(gpt2(), lora())}, {}, "has an adapter already"
    ),
    "other columns": (
        SFTTask, {"train_dataset": PAIRS.remove_columns("prompt")}, {},
        "`train_dataset` has the columns 'chosen', 'rejected', and SFTTrainer needs 'text' or .* or 'prompt' and",
    ),
    "columns of another trainer": (DPOTask, {"eval_dataset": ANSWERS}, {}, "`eval_dataset` has .* needs 'chosen' and"),
    "a list": (SFTTask, {"train_dataset": [{"text": "w1"}]}, {}, "must be a datasets.Dataset.*got list"),
    "pictures": (SFTTask, {"train_dataset": TEXTS.add_column("image", [0] * ROWS)}, {}, "a column 'image'"),
    "no evaluation": (SFTTask, {"eval_dataset": None}, {}, "SFTTask needs a `eval_dataset`"),
    "no tokenizer": (SFTTask, {"processing_class": None}, {}, "`processing_class` of SFTTask must be a tokenizer"),
    "no token to pad with": (
        SFTTask, {"processing_class": tokenizer(bos_token="<eos>")}, {}, "neither a pad_token nor an eos_token"
    ),
    "a config of another trainer": (
        SFTTask, {"args": "grpo"}, {}, "must be a SFTConfig, got GRPOConfig.*GRPOTrainer.*give `shoal.tune` a function"
    ),
    "metrics of logits": (SFTTask, {"compute_metrics": print}, {}, "takes no `compute_metrics`.*override `outputs`"),
    "a moving reference": (DPOTask, {}, {"sync_ref_model": True}, "sync_ref_model=True .*DPOTrainer"),
    "arguments of a name": (SFTTask, {}, {"model_init_kwargs": {"dtype": "auto"}}, "model_init_kwargs=.*your function"),
    "packing without a length": (
        SFTTask, {}, {"packing": True, "max_length": None}, "SFTTrainer refuses .*`max_length` can't be `None`"
    ),
    "a score of two labels": (
        RewardTask, {"model": lambda: small(GPT2ForSequenceClassification, num_labels=2)}, {}, "one label, and .* has 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_study_cannot_do_is_refused(name: str, tmp_path: Path) -> None:
    kind, given, settings, message = REFUSED[name]
    config = KINDS[kind][0]
    args = arguments(tmp_path, config, **settings)
    data = ANSWERS if kind is SFTTask else PAIRS
    usual = {"model": scorer if kind is RewardTask else gpt2, "args": args, "train_dataset": data, "eval_dataset": data}
    usual |= {
        "processing_class": tokenizer(),
        "peft_config": adapter_for(kind),
    }
    if given.get("args") == "grpo":
        given = {"args": GRPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False)}
    with pytest.raises(TaskError, match=f"(?s){message}"):
        kind(**{**usual, **given})


def test_no_row_that_fits_is_an_error_of_the_data(tmp_path: Path) -> None:
    task = made(Case(SFTTask, {"max_length": 1}, ANSWERS, []), tmp_path)
    with pytest.raises(TaskError, match=r"no row of `train_dataset` is left as SFTTrainer .* max_length=1"):
        task.data({})


IMPOSSIBLE: list[tuple[Any, dict[str, Any], str]] = [
    (
        SFTTask,
        {"lora_alfa": 0.1},
        r"'lora_alfa' is not a field of SFTConfig or of `peft_config` \(did you mean 'lora_alpha'\?\), and `model`",
    ),
    (SFTTask, {"lr": 0.1}, "'lr' is not a field of SFTConfig or of `peft_config`, and `model` takes no config"),
    (SFTTask, {"loss_type": "mse"}, "loss_type of SFTConfig must be 'nll' or 'dft', got 'mse'"),
    (SFTTask, {"seed": 1}, "give `seed` to `shoal.tune`"),
    (DPOTask, {"loss_type": "dpo"}, "loss_type of DPOConfig must be of .*got 'dpo'"),
    (DPOTask, {"loss_type": "exo_pair"}, "needs label_smoothing above 0"),
    (DPOTask, {"loss_type": "aot", "use_weighting": True}, "loss_type='aot' mixes those of a batch"),
    (DPOTask, {"loss_type": "nca_pair", "f_divergence_type": "forward_kl"}, "no meaning for loss_type='nca_pair'"),
    (DPOTask, {"f_divergence_type": "kl"}, "f_divergence_type of DPOConfig must be of .*got 'kl'"),
    (DPOTask, {"loss_weights": [1.0, 2.0]}, r"must have a number for each of \['sigmoid'\], got"),
]


def test_a_value_of_a_trial_that_is_not_possible_is_refused(tmp_path: Path) -> None:
    tasks = {kind: made(Case(kind, {}, data, []), tmp_path) for kind, data in ((SFTTask, ANSWERS), (DPOTask, PAIRS))}
    for kind, config, message in IMPOSSIBLE:
        with pytest.raises(TaskError, match=message):
            tasks[kind].arguments(config)


def test_an_evaluation_leaves_no_model_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it look for another loss of the model, since TRL's is taken."""
    monkeypatch.setattr(transformers_task, "mark_bounded", pytest.fail)
    task = made(Case(DPOTask, {}, PAIRS, []), tmp_path)
    train, _ = task.data({})
    model, batch = task.model({}, task.base({})).eval(), task.collate([train[n] for n in range(3)])
    task.loss(model, batch)
    kept = ref(model)
    del model
    gc.collect()
    assert kept() is None


def test_what_the_user_gave_stays_as_it_is(tmp_path: Path) -> None:
    """The tokenizer without a pad token, arguments and the seed of the process."""
    given, args = tokenizer(eos_token="<eos>"), arguments(tmp_path, SFTConfig, max_length=6)
    before = (args.to_dict(), torch.random.get_rng_state())
    task = SFTTask(
        gpt2, args=args, train_dataset=ANSWERS, eval_dataset=ANSWERS, processing_class=given, peft_config=lora()
    )
    train, _ = task.data({})
    assert given.pad_token is None
    assert args.to_dict() == before[0]
    batch = task.collate([train[n] for n in range(3)])
    assert WORDS[int(batch["input_ids"][batch["attention_mask"] == 0][0])] == "<eos>"
    model: Any = bases_of(task, CPU).model({})
    assert model.config.pad_token_id == WORDS.index("<eos>")


def test_a_search_over_the_name_of_a_model(tmp_path: Path, caplog: Any) -> None:
    """Fields of both configs vary, also the loss, which the members of one array compute apart."""
    llama().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    args = arguments(tmp_path, DPOConfig, eval_strategy="epoch", learning_rate=1e-3)
    task = DPOTask(
        str(tmp_path / "base"), args=args, train_dataset=PAIRS, eval_dataset=PAIRS.select(range(7)),
        peft_config=lora(target_modules=["q_proj"], fan_in_fan_out=False),
    )  # fmt: skip
    space = {"r": shoal.choice([1, 3]), "loss_type": shoal.choice(["sigmoid", "ipo"]), "beta": 0.2}
    study = shoal.tune(
        task, space, metric="rewards/accuracies", mode="max", algorithm=shoal.Grid(epochs=2), devices="cpu:1",
        backend="inline", directory=tmp_path / "study", show_progress=False,
    )  # fmt: skip
    assert not [record for record in caplog.records if record.name.startswith("shoal.train")]
    best: Any = study.best_model()
    assert best.peft_config["default"].r == study.best_trial.config["r"]
    assert 0 <= study.best_trial.metrics["rewards/accuracies"] <= 1


def test_a_search_over_dropout_that_is_disabled_is_said(tmp_path: Path) -> None:
    task = made(Case(DPOTask, {}, PAIRS, []), tmp_path)
    (warning,) = [each for each in task._study_warnings([], None, {"lora_dropout": 0.1}) if "dropout" in each]
    assert "disable_dropout of DPOConfig is True, its default; set disable_dropout=False" in warning
    assert not task._study_warnings([], None, {"lora_dropout": 0.1, "disable_dropout": False})


def test_a_division_of_a_batch_keeps_pairs(tmp_path: Path) -> None:
    """What a team of several devices gives each of them; rows of tokens without padding are not divided."""
    task = made(Case(DPOTask, {}, PAIRS, []), tmp_path)
    samples = [task.data({})[0][n] for n in range(4)]
    model = bases_of(task, CPU).model({"r": 2})
    nn.init.ones_(next(each for name, each in model.named_parameters() if "lora_B" in name))
    found, wanted = (
        task.loss(model, each) for each in (first_rows(task.collate(samples), 2), task.collate(samples[:2]))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    packed = made(Case(SFTTask, {"packing": True, "max_length": 9}, TEXTS, []), tmp_path)
    batch = packed.collate([packed.data({})[0][n] for n in range(3)])
    with pytest.raises(IndivisibleStepError, match="a batch of 3 samples has a tensor"):
        first_rows(batch, 1)


def test_adapters_of_a_quantised_base_are_in_bfloat16(tmp_path: Path) -> None:
    """As TRL has them, but for the magnitudes of DoRA."""

    def quantised() -> Any:
        model = llama()
        model.is_loaded_in_4bit = True
        return model

    adapter = lora(use_dora=True, target_modules=["q_proj"], fan_in_fan_out=False)
    task = made(Case(SFTTask, {}, ANSWERS, [], quantised, adapter), tmp_path)
    model = bases_of(task, CPU).model({})
    found = {name: each.dtype for name, each in model.named_parameters() if each.requires_grad}
    assert {kind for name, kind in found.items() if "magnitude" in name} == {torch.float32}
    assert {kind for name, kind in found.items() if "magnitude" not in name} == {torch.bfloat16}


def test_a_function_makes_texts_of_any_columns(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"question": words(n, 2), "answer": words(n + 1, 3)} for n in range(ROWS)])
    task = SFTTask(
        gpt2, args=arguments(tmp_path, SFTConfig), train_dataset=rows, eval_dataset=rows, processing_class=tokenizer(),
        peft_config=lora(), formatting_func=lambda row: f"{row['question']} {row['answer']}",
    )  # fmt: skip
    _, row = task.data({})[0][0]
    assert [WORDS[each] for each in row["input_ids"]] == [
        *rows[0]["question"].split(),
        *rows[0]["answer"].split(),
        "<eos>",
    ]


def test_a_worker_prepares_data_of_which_trl_warns(tmp_path: Path) -> None:
    """Its process has only unpickled the arguments, and TRL's log asks for the state of `accelerate`."""
    settings = {"padding_free": True, "max_length": None, "per_device_train_batch_size": 1}
    task = cloudpickle.loads(cloudpickle.dumps(made(Case(SFTTask, settings, TEXTS, []), tmp_path)))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert len(task.data({})[0]) == ROWS
