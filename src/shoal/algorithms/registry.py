"""Registry of the search algorithms by name."""

from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Algorithm
from shoal.algorithms.bohb import BOHB, SyncBOHB
from shoal.algorithms.grid import Grid
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.median import Median
from shoal.algorithms.optuna_search import OptunaSearch
from shoal.algorithms.pbt import PBT
from shoal.algorithms.random import Random
from shoal.algorithms.successive_halving import SuccessiveHalving

__all__ = ["ALGORITHMS"]

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grid": Grid,
    "random": Random,
    "successive_halving": SuccessiveHalving,
    "hyperband": Hyperband,
    "asha": ASHA,
    "bohb": BOHB,
    "sync_bohb": SyncBOHB,
    "median": Median,
    "pbt": PBT,
    "optuna": OptunaSearch,
}
