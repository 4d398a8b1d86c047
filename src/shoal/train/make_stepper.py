"""The choice of a stepper for trials: fused, or in plain PyTorch where that is impossible, or not worth an array."""

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from torch.nn.parameter import is_lazy

from shoal.core.demand import Profile
from shoal.core.errors import FusionError
from shoal.core.event import Outcome
from shoal.fuse.capture import records_graphs
from shoal.fuse.capture_decision import CaptureDecision
from shoal.fuse.rows import is_small_part, storage_address
from shoal.task import Task
from shoal.train.failures import outcome_of
from shoal.train.fused_stepper import FusedStepper, epochs_differ
from shoal.train.outside import OutsideState
from shoal.train.proof import Proof
from shoal.train.stepper import MixedEpochsError, PlainStepper, Stepper, StepRefusedError
from shoal.train.trial_runtime import TrialRuntime

__all__ = ["make_stepper"]

_log = logging.getLogger("shoal.train")


def make_stepper(
    task: Task,
    runtimes: Sequence[TrialRuntime],
    profile: Profile | None = None,
    compiling: CaptureDecision | None = None,
    plain: bool = False,
    global_rng: AbstractSet[int] = frozenset(),
    proof: Proof | None = None,
    outside: OutsideState | None = None,
    divided: bool = False,
) -> Stepper:
    """Return the fastest stepper that trains these trials correctly.

    The results of a trial and its random numbers do not depend on the other trials.

    Args:
        plain: Whether to train in plain PyTorch, because a fused step of such trials was refused.
        divided: Whether helpers may compute a part of the gradients, for which a single trial is an array as well.

    Raises:
        MixedEpochsError: The trials are at different epochs and therefore cannot be an array.
    """
    if plain:
        return PlainStepper(task, runtimes, global_rng, check_draws=True, outside=outside)
    if len(runtimes) == 1 and type(task).step is not Task.step:
        return PlainStepper(task, runtimes, outside=outside)
    if len(runtimes) == 1 and not divided and not _is_worth_an_array(runtimes[0], compiling):
        stepper = PlainStepper(task, runtimes, keep_shared=True, outside=outside)
        stepper.may_be_array = True
        return stepper
    try:
        return FusedStepper(task, runtimes, profile, compiling, proof)
    except StepRefusedError:
        raise
    except Exception as reason:  # also one that Shoal did not foresee: plain PyTorch raises what is the user's own
        if outcome_of(reason) is Outcome.OUT_OF_MEMORY:
            raise
        if epochs_differ(runtimes):
            raise MixedEpochsError(reason) from reason
        stepper = PlainStepper(task, runtimes, outside=outside)
        stepper.refusal = _log_refusal(runtimes, reason)
        return stepper


def _is_worth_an_array(runtime: TrialRuntime, compiling: CaptureDecision | None) -> bool:
    """Return whether a single trial is to be an array, as its step may be captured, or its memory is one row of many.

    A new array copies such rows, so that the others' memory is free.
    """
    if compiling is None or compiling.can_pay(records_graphs(runtime.device), runtime.settings.accumulate):
        return True
    tensors = (*runtime.model.parameters(), *runtime.model.buffers())
    held = (each for each in tensors if not is_lazy(each) and storage_address(each))
    return any(is_small_part(each, 1) for each in held)


def _log_refusal(runtimes: Sequence[TrialRuntime], error: Exception) -> str:
    """Log why trials cannot be an array, with the traceback of an error that is no refusal; return the reason."""
    reason = str(error)
    if not isinstance(error, FusionError):
        reason = f"{type(error).__name__} when their models were fused: {' '.join(str(error).split())}"
        _log.warning("%s", reason, exc_info=error)
    trials = [runtime.trial.number for runtime in runtimes]
    if len(trials) > 1:
        _log.warning("trials %s cannot be one array, and train in plain PyTorch: %s", trials, reason)
    else:
        _log.info("trial %s cannot be captured or compiled: %s", trials[0], reason)
    return reason
