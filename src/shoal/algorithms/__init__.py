"""Search algorithms: which configurations to try, and for how many epochs."""

from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Algorithm, Totals
from shoal.algorithms.bohb import BOHB, SyncBOHB
from shoal.algorithms.grid import Grid
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.median import Median
from shoal.algorithms.optuna_search import OptunaSearch
from shoal.algorithms.pbt import PBT
from shoal.algorithms.random import Random
from shoal.algorithms.registry import ALGORITHMS
from shoal.algorithms.successive_halving import SuccessiveHalving

__all__ = [
    "ALGORITHMS",
    "ASHA",
    "BOHB",
    "PBT",
    "Algorithm",
    "Grid",
    "Hyperband",
    "Median",
    "OptunaSearch",
    "Random",
    "SuccessiveHalving",
    "SyncBOHB",
    "Totals",
]
