"""Conformance suite for fusion rules: compares each member of a fused call with a call of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse import autotune
from shoal.fuse.generators import seed_all
from shoal.fuse.intercept import FunctionInterceptor, member_run
from shoal.fuse.randomness import RandomSource, use_source
from shoal.fuse.rules.base import Layout, Rule, channel_major, name_of
from shoal.fuse.rules.table import RULES
from shoal.fuse.stacked import NeedsMemberError, Stacked

__all__ = ["Case", "check_rule"]

Case = Callable[[Callable[..., Any]], Any]
"""Calls the given function with arguments of one member: `lambda f: f(torch.randn(4, 3), dim=1)`."""

TOLERANCE = 1e-9
_MAX_COMBINED = 3
"""Largest number of tensors of which every combination is shared; of more, all but one, one, and none are shared."""
_ARGUMENT_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""Errors of torch for arguments that a function does not take."""


def check_rule(
    rule: Rule, cases: Mapping[str, Case], functions: Sequence[Any] | None = None, device: str = "cpu"
) -> None:
    """Compare the results of a rule with those of each member alone: values, gradients, and arguments written in place.

    Floating-point numbers are compared to 1e-9 (let cases use float64), all else must be equal. Each function of the
    rule runs on each case that it accepts: with any of the tensors shared by all members and the others their own (of
    more than three tensors: one, all but one, or all their own), in both memory layouts, for 1, 2 and 5 members, by
    each lowering. If the rule declines, its replacement is compared. Random functions draw from seeds of the members'
    own. In-place functions without a gradient in torch are compared without.

    Args:
        rule: Rule, registered or not.
        cases: Name of each special feature -> case. Each is called once for each member, torch's generator being seeded
            by the member's number; the members' tensors must agree in shape.
        functions: Functions of the rule to check; all by default.
        device: Device to which the tensors of the cases are moved.

    Raises:
        AssertionError: the contract of `shoal.fuse.Rule` is broken; names function, case and arguments. Or a function
            accepts no case, or the rule declines all of them.
    """
    record = _CallRecord(rule)
    with record.installed():
        for func in rule.functions if functions is None else functions:
            accepted = {
                name: with_gradients
                for name, case in cases.items()
                if (with_gradients := _accepts(func, case, device)) is not None
            }
            assert accepted, f"{name_of(func)} accepts none of the cases {', '.join(cases)}"
            for name, with_gradients in accepted.items():
                for call in _calls(rule, cases[name], with_gradients, device):
                    try:
                        call.check(func, record)
                    except AssertionError as error:
                        raise AssertionError(f"{name_of(func)}, {name}, {call.settings()}: {error}") from error
    assert record.covered, f"the rule of {name_of(rule.functions[0])} declines every case, or is never called"


class _CallRecord:
    """Runs a rule, and records whether it declines or raises."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.covered = 0
        self.declined = False
        self.raised: Exception | None = None

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self.rule.run(func, *args, **kwargs)
        except NeedsMemberError:
            self.covered += 1
            raise
        except Exception as error:
            self.raised = error
            raise
        self.declined = result is NotImplemented
        self.covered += not self.declined
        return result

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Dispatch the functions of the rule to `run` within this context."""
        before = {func: RULES[func] for func in self.rule.functions if func in RULES}
        RULES.update(dict.fromkeys(self.rule.functions, replace(self.rule, run=self.run)))
        try:
            yield
        finally:
            for func in self.rule.functions:
                del RULES[func]
            RULES.update(before)


def _arguments(case: Case, seed: int, device: str) -> tuple[list[Any], Any]:
    """Return a member's arguments, as the leaves of a tree and its structure."""
    seed_all(seed, torch.device(device))
    found: list[Any] = []
    case(lambda *args, **kwargs: found.append((args, kwargs)))
    leaves, spec = pytree.tree_flatten(found[0])
    return [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


def _accepts(func: Any, case: Case, device: str) -> bool | None:
    """Return whether a function has gradients on a case; None if it does not accept the case."""
    leaves, spec = _arguments(case, 0, device)
    for with_gradients in (True, False):
        try:
            call_result = _call_alone(func, leaves, spec, torch.tensor([0]), with_gradients)
        except _ARGUMENT_ERRORS:
            continue
        return None if call_result.result is NotImplemented else with_gradients
    return None


def _calls(rule: Rule, case: Case, with_gradients: bool, device: str) -> Iterator["_CallVariant"]:
    """Yield all variants of a case; several lowerings are tried with two members."""
    tensors = sum(isinstance(leaf, Tensor) for leaf in _arguments(case, 0, device)[0])
    every = (True,) * tensors
    for members in (1, 5):
        yield _CallVariant(case, every, Layout.MODEL_MAJOR, members, None, with_gradients, device)
    all_combinations = tensors <= _MAX_COMBINED
    for own in product((True, False), repeat=tensors):
        for layout in Layout if any(own) and (all_combinations or sum(own) in (1, tensors - 1, tensors)) else ():
            for lowering in rule.lowerings if len(rule.lowerings) > 1 else (None,):
                yield _CallVariant(case, own, layout, 2, lowering, with_gradients, device)


@dataclass(frozen=True)
class _CallResult:
    result: Any
    after: list[Any]
    gradients: list[Tensor | None]


def _call(
    func: Callable[..., Any], leaves: Sequence[Any], own: Sequence[bool], spec: Any, members: int, with_gradients: bool
) -> _CallResult:
    """Call a function on leaves, of which those marked in `own` are [B, *shape]; with gradients if `with_gradients`."""
    inputs = [_leaf(leaf, with_gradients) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in inputs]
    given = [Stacked(leaf) if mine else leaf for leaf, mine in zip(given, own, strict=True)]
    args, kwargs = pytree.tree_unflatten(given, spec)
    result = func(*args, **kwargs)
    outputs: list[Tensor] = []
    for leaf in pytree.tree_leaves([result, given]):
        if isinstance(leaf, Stacked):
            outputs.append(leaf.whole)
        elif isinstance(leaf, Tensor):
            outputs.append(leaf.expand(members, *leaf.shape))  # the same for each member
    total = [end.cos().sum() for end in outputs if end.requires_grad]
    differentiated = [leaf for leaf in inputs if isinstance(leaf, Tensor) and leaf.requires_grad]
    found = iter(torch.autograd.grad(torch.stack(total).sum(), differentiated, allow_unused=True) if total else [])
    gradients = [next(found, None) if isinstance(x, Tensor) and x.requires_grad else None for x in inputs]
    return _CallResult(result, given, gradients)


def _leaf(tensor: Tensor, with_gradients: bool) -> Tensor:
    return tensor.detach().requires_grad_(with_gradients and tensor.is_floating_point())


def _call_alone(func: Any, leaves: Sequence[Any], spec: Any, key: Tensor, with_gradients: bool) -> _CallResult:
    def run(*args: Any, **kwargs: Any) -> Any:
        with member_run(RandomSource(key, single_member=True)):
            return func(*args, **kwargs)

    return _call(run, leaves, [False] * len(leaves), spec, 1, with_gradients)


@dataclass(frozen=True)
class _CallVariant:
    """One call of a function for all members."""

    case: Case
    own: Sequence[bool]
    layout: Layout
    members: int
    lowering: str | None
    with_gradients: bool
    device: str

    def settings(self) -> str:
        sharing = ", ".join("own" if mine else "shared" for mine in self.own)
        return (
            f"{self.members} members, tensors {sharing}, {self.layout.value}, lowering {self.lowering or 'by default'}"
        )

    def check(self, func: Any, record: _CallRecord) -> None:
        columns = [_arguments(self.case, b, self.device) for b in range(self.members)]
        spec = columns[0][1]
        own_of_tensors = iter(self.own)
        own = [isinstance(leaf, Tensor) and next(own_of_tensors) for leaf in columns[0][0]]
        rows = [
            [mine if is_own else first for mine, first, is_own in zip(leaves, columns[0][0], own, strict=True)]
            for leaves, _ in columns
        ]
        keys = torch.arange(1, 1 + self.members)
        alone = [_call_alone(func, row, spec, keys[b : b + 1], self.with_gradients) for b, row in enumerate(rows)]
        given = [
            self._stacked(column) if is_own else column[0]
            for column, is_own in zip(zip(*rows, strict=True), own, strict=True)
        ]

        def run(*args: Any, **kwargs: Any) -> Any:
            with (
                use_source(source := RandomSource(keys)),
                self._force_lowering(func),
                FunctionInterceptor(self.members, source),
            ):
                return func(*args, **kwargs)

        record.raised = None
        try:
            together = _call(run, given, own, spec, self.members, self.with_gradients)
        except (NeedsMemberError, FusionError):  # the user's function is refused in words
            return
        finally:
            assert record.raised is None, f"raises {record.raised!r} where it is to return NotImplemented"
        for b, mine in enumerate(alone):
            _compare([together.result, together.after], [mine.result, mine.after], b)
        for i, gradient in enumerate(together.gradients):
            expected = [mine.gradients[i] for mine in alone]
            _compare_gradient(gradient, expected if own[i] else [_sum(expected)], own[i])
        if (
            record.rule.output_layout is Layout.CHANNEL_MAJOR
            and self.layout is Layout.CHANNEL_MAJOR
            and not record.declined
        ):
            self._check_layout(together)

    def _stacked(self, column: Sequence[Tensor]) -> Tensor:
        data = torch.stack(list(column))
        if self.layout is Layout.CHANNEL_MAJOR and data.dim() > 2:
            return data.transpose(0, 1).contiguous().transpose(0, 1)
        return data

    def _force_lowering(self, func: Any) -> Any:
        return (
            autotune.without_autotuning()
            if self.lowering is None
            else autotune.forced_lowerings({name_of(func): self.lowering})
        )

    def _check_layout(self, call_result: _CallResult) -> None:
        """Check the layout of image batches, whose channels stay merged along chains of convolutions."""
        first = call_result.after[0]
        for leaf in pytree.tree_leaves(call_result.result) if isinstance(first, Stacked) and first.dim() > 3 else []:
            if isinstance(leaf, Stacked) and leaf.dim() == first.dim():
                assert channel_major(leaf.whole), "a result of channel-major tensors is not channel-major"


def _compare(together: Any, alone: Any, b: int) -> None:
    mine, others = pytree.tree_leaves(together), pytree.tree_leaves(alone)
    assert len(mine) == len(others), f"member {b} gets {len(others)} values alone, and {len(mine)} here"
    for value, own in zip(mine, others, strict=True):
        if isinstance(own, Tensor):
            found = value.whole[b] if isinstance(value, Stacked) else value
            _assert_close(found.detach(), own.detach(), f"of member {b}")
        else:
            assert value == own, f"member {b} gets {own!r} alone, and {value!r} here"


def _compare_gradient(gradient: Tensor | None, expected: Sequence[Tensor | None], own: bool) -> None:
    if gradient is None:
        assert all(one is None or not one.any() for one in expected), "a gradient is missing"
        return
    for b, one in enumerate(expected):
        found = gradient[b] if own else gradient
        _assert_close(found, torch.zeros_like(found) if one is None else one, f"gradient of member {b}")


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    given = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(given).sum(0) if given else None


def _assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.dtype == expected.dtype, f"{what}: {found.dtype} instead of {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    tolerance = TOLERANCE if expected.dtype.itemsize >= 8 else 1e-5
    if not expected.is_floating_point() and not expected.is_complex():
        tolerance = 0.0
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )
