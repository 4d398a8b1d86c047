"""Quality of the searches, which the papers make faster without another result: regret on recorded loss curves."""

from papers.experiment import Experiment, Figures
from papers.measurement import CORE, Measurement

__all__ = ["EXPERIMENTS"]


def measurement(part: str, title: str, least: int, most: int, *needs: str) -> Measurement:
    """A part of `regret.py`."""
    files = ("benchmarks/regret.py", "benchmarks/surrogates.py", "benchmarks/rival_searches.py")
    recorded = ("benchmarks/fine_tuning_curves.json",) if part == "fine_tuning" else ()
    command = ("benchmarks/regret.py", part)
    code = (*files, *recorded, "src/shoal/algorithms")
    return Measurement(
        f"regret-{part.replace('_', '-')}", title, least, most, command, (*command, "--quick"), code, (*CORE, *needs)
    )


SEARCHES = measurement("searches", "Searches beside Syne Tune's and Optuna's", 110, 600, "optuna", "syne_tune")
DEFAULT = measurement("default", "Searches by default", 40, 240, "optuna")
FINE_TUNING = measurement("fine_tuning", "Early stopping of fine-tuning", 8, 60, "optuna")

SAME = "similar final accuracy while BOHB and ASHA take 30 % less time and synchronous BOHB half (words, no table)"
SETTING = (
    "recorded curves of 8 tasks of TaskSet, 1000 configurations, 27 epochs (the paper trains on CIFAR-10); 10 seeds, "
    "8 trials at a time, {epochs} epochs in all; regret averaged over these, of the rival over Shoal's"
)


def beside(algorithm: str, rival: str, why: str = "") -> Experiment:
    """A search of Shoal's beside another library's at equal epochs."""
    return Experiment(
        title=f"Regret of {algorithm}, beside {rival}",
        place="Fluid, abstract",
        reported=SAME,
        setting=SETTING.format(epochs=357 if algorithm == "Hyperband" else 540),
        measurement=SEARCHES,
        figure=lambda found: float(found["searches"][algorithm][rival]["ratio"]),
        asked=0.95,
        noise=0.02,
        why=why,
    )


def default(rival: str, key: str) -> Experiment:
    """What `tune` does without an algorithm beside what another does."""

    def figure(found: Figures) -> float:
        regret = found["default"]["27 epochs, 8 at once"]
        return float(regret[key] / regret["Shoal"])

    return Experiment(
        title=f"Regret of `tune` without an algorithm, beside {rival}",
        place="none",
        reported="no paper chooses an algorithm; a library's default is what most users run",
        setting="tasks and seeds as above; 64 trials of 27 epochs, 8 at a time, at the epochs that Shoal spends",
        measurement=DEFAULT,
        figure=figure,
        asked=0.95,
        noise=0.02,
    )


def least_saved(found: Figures) -> float:
    """Percent of the samples that `LossTrend` saves in the task where it saves least."""
    return 100 * min(float(task["LossTrend"]["saved"]) for task in found["fine_tuning"].values())


def greatest_excess(found: Figures) -> float:
    """Regret of `LossTrend` less that of ASHA in the task where it is worst beside ASHA."""
    return max(float(task["LossTrend"]["regret"] - task["ASHA"]["regret"]) for task in found["fine_tuning"].values())


PAUSES = "Optuna stops trials at rungs, and the first on a rung goes on at once; Shoal's pause until three are there"
LAST_VALUES = "Syne Tune models the newest value of every trial whatever its epoch, Shoal the values of a rung"
WAITS = "brackets begin with random trials and wait for whole rungs, as in the paper of BOHB; the other is asynchronous"

EXPERIMENTS = (
    beside("ASHA", "Syne Tune's ASHA"),
    beside("ASHA", "Optuna's halving (random)", PAUSES),
    beside("ASHA with TPE", "Syne Tune's BOHB", LAST_VALUES),
    beside("ASHA with TPE", "Optuna's halving (TPE)"),
    beside("Hyperband", "Syne Tune's ASHA (4 brackets)"),
    beside("Hyperband", "Optuna's Hyperband (random)"),
    beside("BOHB", "Syne Tune's BOHB", WAITS),
    beside("BOHB", "Optuna's Hyperband (TPE)", WAITS),
    default("Optuna's default", "Optuna"),
    default("random whole trials", "random"),
    Experiment(
        title="Samples that `LossTrend` saves",
        place="ALTO (arXiv 2604.05426)",
        reported="configurations ended early by their loss curves save 72 to 83 % of the samples",
        setting="recorded curves of 3 x 64 adapters on a small Llama, 20 reports; 100 orders, 8 at a time; worst task",
        measurement=FINE_TUNING,
        figure=least_saved,
        asked=60,
        unit="%",
        published=72,
        noise=0.02,
        why="a trial that may still become the best is kept, so the best one of two tasks is found in every order",
    ),
    Experiment(
        title="Regret of `LossTrend` less that of ASHA",
        place="ALTO (arXiv 2604.05426)",
        reported="early exit without a loss of the adapters' quality (words)",
        setting="as above; regret is 0 for the best configuration and 1 for the median one; worst task",
        measurement=FINE_TUNING,
        figure=greatest_excess,
        asked=0.0,
        better="at most",
        unit="regret",
        noise=0.02,
        why="where early ranks are final ASHA finds the best trial more often; in the other two tasks it is far behind",
    ),
)
