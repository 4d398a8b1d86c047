"""A search of any program gives what its trials give in plain PyTorch, fused or with a reason why not.

Each runs with the step modes of a search, and with those of `MODES` in turns.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
from corpus_base import Labels, Program, Words
from corpus_harness import MODES, examine
from corpus_more import Counted

FUSED = {
    "corpus_state": """
        CumulativeMean BuffersInPlace BuffersSwapped WeightAverage TargetNetwork Curriculum SmoothingSchedule
        MomentumSchedule TensorMean MemoryBank Codebook CachedPositions HiddenState CachedMask MeterObject
        LateList LateArray SharedClock
        MeterOfTensors ActivationsInList ActivationsInDict LossHistory
    """,
    "corpus_random": """
        ManualDropout Gumbel StochasticDepth MixupNumpy MixupDistribution CutOut Variational ShuffledChannels
        NegativeSampling Reinforce
    """,
    "corpus_structure": """
        TiedEmbedding TiedTransposed Parametrized SpectralNorm OldSpectralNorm WeightNorm Lazy LowRank
        DataclassOutput EarlyExit Spectrum SharedBackbone CopiedInForward
    """,
    "corpus_steps": """
        Clipping SharpnessAware Accumulation UpdateByHand WeightClamp Checkpointed CheckpointedDropout
        HardExamples ScatterInPlace
        WritesToInput Groups TeacherStudent NotANumber FreezesMidway NumbersInMetrics
    """,
    "corpus_globals": "GlobalCache GlobalMemo",
    "corpus_more": """
        Averaged DropoutSchedule StatisticsFrozen TeacherEvaluates ForkedNoise OwnOptimizer GradientSurgery
        GradientNoise MovingWeights Plateau Rollback SeedByHand Unfreezes
    """,
}
"""Trained at once: module -> programs."""

REFUSED = {
    "corpus_state": """
        FloatMean FloatWindow Locked ModelCopied
    """,
    "corpus_random": "OwnGenerator NumpyGenerator",
    "corpus_structure": """
        Scripted LateParameter LatePartOfOptimizer ClosureOverList SparseEmbedding Compiled
    """,
    "corpus_steps": """
        GradientPenalty Binarised ReentrantCheckpoint GradientHook BackwardHook BranchOnLoss
        NumpyInLoss Reinitialised RateInStep QuasiNewton RaisesOnLargeLoss DividesByZero
    """,
    "corpus_globals": """
        GlobalLog GlobalCounter GlobalTensor ClassCounter TaskHistory CounterOfForward ContainerOfClass GlobalCentre
        GlobalArray GlobalGenerator LateGlobal
    """,
    "corpus_more": "LayerReplaced HeadDropped LateBuffer SkipsBadSteps HaltsWhenSure",
}
"""Trained each by itself, with a reason in the log."""

BASES = (Program, Labels, Words, Counted)

FAILING = {"DividesByZero": {5}, "NotANumber": {5}, "RaisesOnLargeLoss": {0, 1, 3}}
"""Trials that fail, as they do alone."""

THOROUGH = """
    BuffersInPlace SmoothingSchedule TensorMean CachedMask MeterObject FloatWindow ActivationsInDict
    MixupDistribution NumpyGenerator Variational ShuffledChannels NegativeSampling TiedEmbedding OldSpectralNorm
    EarlyExit WeightNorm LatePartOfOptimizer CopiedInForward Compiled WeightClamp HardExamples
    CheckpointedDropout NumpyInLoss RateInStep GlobalMemo ClassCounter Accumulation Averaged LateBuffer
    StatisticsFrozen SeedByHand ForkedNoise OwnOptimizer GradientNoise SkipsBadSteps MovingWeights Plateau
    LayerReplaced Rollback CutOut StochasticDepth MixupNumpy Spectrum GlobalCache FloatMean
"""
"""What is much like another program, or slow."""

COMPILED = "CumulativeMean Codebook TiedEmbedding SpectralNorm LowRank Groups"
"""Programs whose steps are compiled, too."""


def programs() -> Iterator[pytest.param]:
    for outcome, table in {"fused": FUSED, "refused": REFUSED}.items():
        for module, name in ((module, name) for module, names in table.items() for name in names.split()):
            for modes in _modes(module, name):
                late = name in THOROUGH.split() or modes in ("eager", "compiled")
                marks = [pytest.mark.thorough] if late else []
                yield pytest.param(module, name, modes, outcome, marks=marks, id=f"{name}-{modes}")


def _modes(module: str, name: str) -> list[str]:
    """Step modes of a program: a `step` of its own has only one."""
    if getattr(import_module(module), name).step is not Program.step:
        return ["default"]
    return [modes for modes in MODES if modes != "compiled" or name in COMPILED.split()]


@pytest.mark.in_turns(6)
@pytest.mark.parametrize(("module", "name", "modes", "outcome"), list(programs()))
def test_fused_exactly_or_refused(
    module: str, name: str, modes: str, outcome: str, process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    found = process.submit(examine, module, name, tmp_path / "study", modes).result()
    assert not found.differences, "\n".join(found.differences)
    assert found.failures.keys() == FAILING.get(name, set())
    assert found.outcome == outcome, found.reasons


def test_the_table_has_every_program_once() -> None:
    listed = [name for table in (FUSED, REFUSED) for names in table.values() for name in names.split()]
    written = [
        name
        for module in {**FUSED, **REFUSED}
        for name, kind in vars(import_module(module)).items()
        if isinstance(kind, type) and issubclass(kind, Program) and kind not in BASES
    ]
    assert sorted(listed) == sorted(written)
    assert set(listed) >= {*THOROUGH.split(), *COMPILED.split(), *FAILING}
    assert [len(" ".join(table.values()).split()) for table in (FUSED, REFUSED)] == [75, 40]
    assert len(set(listed) - {*THOROUGH.split()}) == 70
