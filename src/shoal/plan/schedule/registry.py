"""Registry of policies: name to class, and `make_policy`."""

from collections.abc import Mapping
from math import isfinite

from shoal.core.errors import PolicyError
from shoal.core.names import nearest_name_hint
from shoal.plan.schedule.auto import Auto, check_objective
from shoal.plan.schedule.base import Policy
from shoal.plan.schedule.convergence import Convergence
from shoal.plan.schedule.exact import Exact
from shoal.plan.schedule.expected_finish import ExpectedFinish
from shoal.plan.schedule.knapsack import FF, FFD, WF, WFD, Fifo
from shoal.plan.schedule.water_filling import WaterFilling

__all__ = [
    "BASELINES",
    "POLICIES",
    "baseline_text",
    "check_losses",
    "check_objective_of_study",
    "make_policy",
    "unknown",
]

POLICIES: dict[str, type[Policy]] = {
    "auto": Auto,
    "convergence": Convergence,
    "exact": Exact,
    "ff": FF,
    "ffd": FFD,
    "fifo": Fifo,
    "expected_finish": ExpectedFinish,
    "water_filling": WaterFilling,
    "wf": WF,
    "wfd": WFD,
}


BASELINES = ("batch_size", "best_fit", "knn", "random", "round_robin", "shortest_first", "slaq")
"""Policies and packings of papers that nobody should choose; their code is not in the package."""


def baseline_text(name: str) -> str:
    """Return where one of `BASELINES` is."""
    return f"{name!r} is a baseline of the papers, to compare with: benchmarks/baselines of Shoal's source tree has it"


def make_policy(policy: str | Policy, objective: str = "makespan") -> Policy:
    """Return the policy of this name; a policy object is returned unchanged.

    Args:
        policy: A name of `POLICIES`, or a policy.
        objective: Objective of `auto`; the other policies ignore it.

    Raises:
        PolicyError: There is no such policy, or no such objective.
    """
    if isinstance(policy, Policy):
        return policy
    check_objective(objective)
    if not isinstance(policy, str) or policy not in POLICIES:
        raise PolicyError(unknown("policy", policy, POLICIES))
    if policy == "auto":
        return Auto(objective)
    return POLICIES[policy]()


def check_objective_of_study(policy: str | Policy, objective: str | None, target: float | None, metrics: int) -> None:
    """Check the arguments `objective` and `target` of `shoal.tune`."""
    if objective is not None:
        check_objective(objective)
        if policy != "auto":
            raise PolicyError(
                f"`objective` is what the policy 'auto' chooses by, and this study has the policy {policy!r}; leave "
                "`objective` out, or pass shoal.plan.schedule.Auto(objective=...) as `policy`"
            )
    if objective == "time_to_target" and target is None:
        raise PolicyError(
            "the objective 'time_to_target' needs a target: pass `target` (`--target`), the value of the metric that "
            "is good enough; 'time_to_good' needs none"
        )
    if target is None:
        return
    if isinstance(target, bool) or not isinstance(target, int | float) or not isfinite(target):
        raise PolicyError(f"`target` must be a finite number, got {target!r}")
    if metrics > 1:
        raise PolicyError(f"`target` is a value of one metric, and this study has {metrics}; leave it out")


def check_losses(policy: Policy, loss: str | None, *, begun: bool = False) -> None:
    """Check that a policy can compare the programs of a study.

    Args:
        loss: Reported value that is their loss, or None.
        begun: Whether the study has begun, so that its loss cannot be named any more.
    """
    if policy.needs_losses and loss is None:
        name = next((name for name, kind in POLICIES.items() if type(policy) is kind), type(policy).__name__)
        objective = f" with the objective {policy.objective!r}" if isinstance(policy, Auto) else ""
        remedy = "name the reported value that is the loss (loss=, --loss), or choose "
        if begun:
            remedy = "choose "
        elif objective:
            remedy += "another objective, or "
        raise PolicyError(
            f"the policy {name!r}{objective} compares losses, and the metric of this study is maximised; {remedy}"
            f"a policy that needs none, such as 'fifo'{' (--policy fifo)' if begun else ''}"
        )


def unknown(what: str, name: object, known: Mapping[str, object]) -> str:
    """Return the error message for an unknown name, with the known names."""
    if name in BASELINES:
        return f"{baseline_text(str(name))}; `{what}` is a {what.capitalize()} or one of {', '.join(known)}"
    hint = nearest_name_hint(name, known)
    return f"there is no {what} {name!r}{hint}; `{what}` is a {what.capitalize()} or one of {', '.join(known)}"
