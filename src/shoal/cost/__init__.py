"""What jobs cost: their demand, the measurements behind it, and the history that keeps them."""

from shoal.core.demand import Demand, Profile
from shoal.cost.estimate import best_size, fitting, job_demand, memory, seconds, step_seconds
from shoal.cost.history import History, cache_directory

__all__ = [
    "Demand",
    "History",
    "Profile",
    "best_size",
    "cache_directory",
    "fitting",
    "job_demand",
    "memory",
    "seconds",
    "step_seconds",
]
