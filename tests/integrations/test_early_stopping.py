"""Early stopping callbacks of Lightning and of Trainer become rules of the study, which stop where they would."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from test_lightning_task import Classifier, Data
from test_trainer_task import bert
from transformers import EarlyStoppingCallback, TrainingArguments

from shoal.algorithms.rules import Moment, Patience
from shoal.core.errors import TaskError
from shoal.core.objective import Objective
from shoal.integrations.lightning import LightningTask
from shoal.integrations.transformers import TrainerTask

GOAL = Objective("val_loss", "min")
CURVES = st.lists(st.sampled_from([0.0, 0.5, 0.75, 1.0, 2.0, math.inf]), min_size=1, max_size=12)


def ends(rule: Patience, goal: Objective, curve: list[float]) -> int | None:
    memory = None
    for epoch, value in enumerate(curve, 1):
        memory, reason = rule.decide(memory, Moment(goal, epoch, value, math.inf, []))
        if reason:
            return epoch
    return None


@given(
    curve=CURVES, patience=st.integers(1, 4), delta=st.sampled_from([0.0, 0.5]), mode=st.sampled_from(["min", "max"])
)
def test_patience_is_that_of_lightning(curve: list[float], patience: int, delta: float, mode: str) -> None:
    theirs: Any = EarlyStopping("val_loss", delta, patience, mode=mode, check_finite=False)
    curve = [value if mode == "min" else -value for value in curve]
    stops = (
        epoch
        for epoch, value in enumerate(curve, 1)
        if theirs._evaluate_stopping_criteria(torch.tensor(value, dtype=torch.float64))[0]
    )
    task: Any = LightningTask(Classifier, Data(), callbacks=[EarlyStopping("val_loss", delta, patience, mode=mode)])
    goal = Objective("val_loss", mode)
    (rule,) = task._stop_rules([goal])
    assert ends(rule, goal, curve) == next(stops, None)


@given(curve=CURVES.filter(lambda curve: math.isfinite(curve[0])), patience=st.integers(1, 4))
def test_patience_is_that_of_trainer(curve: list[float], patience: int) -> None:
    theirs, state = EarlyStoppingCallback(patience), SimpleNamespace(best_metric=None)
    wanted = None
    for epoch, value in enumerate(curve, 1):
        theirs.check_metric_value(SimpleNamespace(greater_is_better=False), state, None, value)
        if wanted is None and theirs.early_stopping_patience_counter >= patience:
            wanted = epoch
        state.best_metric = value if state.best_metric is None else min(value, state.best_metric)
    assert ends(Patience(patience), GOAL, curve) == wanted


def trainer_task(tmp_path: Path, callback: Any, **arguments: Any) -> Any:
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, eval_strategy="epoch", **arguments)
    return TrainerTask(bert, args, [{}], [{}], data_collator=dict, callbacks=[callback])


@pytest.mark.parametrize(
    ("arguments", "goal"),
    [
        ({"metric_for_best_model": "eval_loss"}, Objective("valid_loss", "min")),
        ({"metric_for_best_model": "loss", "greater_is_better": False}, Objective("valid_loss", "min")),
        ({"metric_for_best_model": "f1"}, Objective("f1", "max")),
    ],
)
def test_trainers_callback_monitors_its_best_metric(arguments: dict[str, Any], goal: Objective, tmp_path: Path) -> None:
    task = trainer_task(tmp_path, EarlyStoppingCallback(4, 0.25), **arguments)
    assert task._stop_rules([goal]) == [Patience(4, 0.25)]
    with pytest.raises(TaskError, match=f"means metric='{goal.metric}'.*make them agree"):
        task._stop_rules([Objective("other", "max")])


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        pytest.param([LearningRateMonitor()], "takes no `callbacks`.*a task takes EarlyStopping", id="another"),
        pytest.param(
            [EarlyStopping("val_loss"), LearningRateMonitor()], "takes no `callbacks`", id="another beside it"
        ),
        pytest.param(
            [EarlyStopping("val_loss", stopping_threshold=0.1)], "takes no stopping_threshold.*target=", id="threshold"
        ),
    ],
)
def test_other_callbacks_of_lightning_are_refused(callbacks: list[Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        LightningTask(Classifier, Data(), callbacks=callbacks)


@pytest.mark.parametrize(
    ("callbacks", "rules"),
    [
        pytest.param(None, [], id="none"),
        pytest.param([], [], id="an empty list"),
        pytest.param(EarlyStopping("val_loss", patience=4), [Patience(4)], id="a single one"),
    ],
)
def test_callbacks_have_the_forms_of_lightning(callbacks: Any, rules: list[Patience]) -> None:
    assert LightningTask(Classifier, Data(), callbacks=callbacks)._stop_rules([Objective("val_loss", "min")]) == rules


@pytest.mark.parametrize("callbacks", [None, []])
def test_trainer_may_have_no_callbacks(callbacks: Any, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    task = TrainerTask(bert, args, [{}], [{}], data_collator=dict, callbacks=callbacks)
    assert task._stop_rules([Objective("valid_loss", "min")]) == []


def test_a_callback_that_monitors_something_else_is_refused_by_tune() -> None:
    task: Any = LightningTask(Classifier, Data(), callbacks=[EarlyStopping("val_loss")])
    with pytest.raises(TaskError, match=r"EarlyStopping\(monitor='val_loss'\) means .*given metric='acc', mode='max'"):
        task._stop_rules([Objective("acc", "max")])


def test_trainers_callback_needs_a_metric(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="needs metric_for_best_model"):
        trainer_task(tmp_path, EarlyStoppingCallback())
