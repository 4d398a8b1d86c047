"""Data as TRL prepares it: the constructors of its trainers run up to that of `transformers.Trainer`."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from accelerate import PartialState
from datasets import Dataset, are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from torch import nn
from torch.utils.data import Dataset as TorchDataset
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase, TrainingArguments
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_trainer import SFTTrainer

from shoal.core.errors import TaskError
from shoal.fuse.generators import PythonRngSnapshot, forked_rng

__all__ = ["PreparedData", "Rows", "check_columns", "prepare"]


class _EndOfPreparationError(Exception):
    """A constructor of TRL has prepared the data."""


class _Recorder(_BaseTrainer):
    """Takes the place of `transformers.Trainer` behind a constructor of TRL: keeps what it is given, and ends there."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        raise _EndOfPreparationError


class _SFT(SFTTrainer, _Recorder):
    pass


class _DPO(DPOTrainer, _Recorder):
    pass


class _Reward(RewardTrainer, _Recorder):
    pass


_TRAINERS = {"SFTConfig": _SFT, "DPOConfig": _DPO, "RewardConfig": _Reward}


class _NoModel(nn.Module):
    """The parts of a model that TRL's constructors read and write before they have prepared the data."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig()
        self.config.num_labels = 1
        self.generation_config = GenerationConfig()


class Rows(TorchDataset[Any]):
    """Prepared rows, each with the collator of its set: what a batch is made of may differ between trials."""

    def __init__(self, dataset: Dataset, collator: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collator = collator

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Callable[[list[Any]], Any], dict[str, Any]]:
        """Return the collator and a row."""
        return self._collator, self._dataset[index]


class PreparedData(NamedTuple):
    """Both sets as a trainer of TRL has them after its constructor."""

    train: Rows
    valid: Rows


def prepare(
    args: TrainingArguments,
    train: Dataset,
    valid: Dataset,
    processing_class: PreTrainedTokenizerBase,
    *,
    probe: bool = False,
    **others: Any,
) -> PreparedData:
    """Prepare both sets by the constructor of TRL's trainer for these arguments; what it is given stays as it is.

    Args:
        probe: Whether the sets are only some rows, of which none need be left.
        others: Further arguments of the trainer.

    Raises:
        TaskError: TRL refuses the arguments or the data, or leaves no row.
    """
    name = type(args).__name__
    given: Any = copy.copy(args)
    given.activation_checkpointing = given.gradient_checkpointing = False
    given.activation_checkpointing_kwargs = given.gradient_checkpointing_kwargs = None
    given.accelerator_config = copy.copy(given.accelerator_config)
    if probe:
        given.dataset_num_proc = None
    PartialState(cpu=given.use_cpu)  # which the log of TRL needs, in the processes of workers, too
    kind: Any = _TRAINERS[name]
    trainer, python = kind.__new__(kind), PythonRngSnapshot()
    tokenizer = copy.deepcopy(processing_class)
    with forked_rng(devices=[]), _without_progress_bars():  # the constructor seeds all generators
        try:
            trainer.__init__(
                _NoModel(), args=given, train_dataset=train, eval_dataset=valid, processing_class=tokenizer, **others
            )
        except _EndOfPreparationError:
            pass
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            hint = "" if tokenizer.eos_token else "; the tokenizer has no eos_token, which TRL appends to each text"
            raise TaskError(f"{_trainer(name)} refuses its arguments or data: {error}{hint}") from error
        finally:
            python.restore()
    found: dict[str, Any] = trainer.given
    columns = _signature_columns(trainer) if args.remove_unused_columns else None
    sets = {"train_dataset": found["train_dataset"], "eval_dataset": found["eval_dataset"]}
    for which, dataset in sets.items():
        if not len(dataset) and not probe:
            raise TaskError(
                f"no row of `{which}` is left as {_trainer(name)} prepares it with max_length="
                f"{getattr(args, 'max_length', None)}: prompts alone may be that long; set a larger max_length"
            )
    rows = [Rows(_selected(dataset, columns), found["data_collator"]) for dataset in sets.values()]
    return PreparedData(rows[0], rows[1])


def _trainer(config: str) -> str:
    return config.replace("Config", "Trainer")


def _signature_columns(trainer: Any) -> Collection[str]:
    """The columns that the data loader of a trainer keeps."""
    trainer._signature_columns = None
    trainer._set_signature_columns_if_needed()
    columns: Collection[str] = trainer._signature_columns
    return columns


def _selected(dataset: Dataset, columns: Collection[str] | None) -> Dataset:
    if columns is None:
        return dataset
    return dataset.select_columns([name for name in dataset.column_names if name in columns])


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Context manager in which `datasets` shows no progress."""
    shown = not are_progress_bars_disabled()
    if shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


_FORMATS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "SFTConfig": (("input_ids",), ("messages",), ("conversations",), ("prompt", "completion")),
    "DPOConfig": (("chosen", "rejected"),),
    "RewardConfig": (("chosen", "rejected"), ("chosen_ids", "rejected_ids")),
}
"""Class of arguments -> sets of columns of which one must be there; of SFTConfig also that of dataset_text_field."""


def check_columns(args: TrainingArguments, name: str, dataset: Any, free: bool) -> None:
    """Check that a set has the columns that the trainer of these arguments needs.

    Args:
        name: Name of the set in messages.
        free: Whether the columns are those that a function of the user reads.

    Raises:
        TaskError: It lacks them, it is no `datasets.Dataset`, or it has pictures.
    """
    trainer = _trainer(type(args).__name__)
    if not isinstance(dataset, Dataset):
        raise TaskError(
            f"`{name}` must be a datasets.Dataset, as {trainer} takes it, with a length; got {type(dataset).__name__}: "
            "make one by Dataset.from_list, or read an iterable one to its end"
        )
    columns = dataset.column_names
    if pictures := sorted({"image", "images"} & set(columns)):
        raise TaskError(f"`{name}` has a column {pictures[0]!r}; a study trains on text only: remove the column")
    formats = _FORMATS[type(args).__name__]
    if (text := getattr(args, "dataset_text_field", None)) is not None:
        formats = ((text,), *formats)
    if not len(dataset):
        raise TaskError(f"`{name}` has no rows")
    free = free or bool((getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"))
    if not free and not any(set(wanted) <= set(columns) for wanted in formats):
        raise TaskError(
            f"`{name}` has the columns {', '.join(map(repr, columns))}, and {trainer} needs "
            + " or ".join(" and ".join(map(repr, wanted)) for wanted in formats)
            + "; rename them by Dataset.rename_column"
        )
