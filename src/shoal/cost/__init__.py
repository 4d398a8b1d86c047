"""Cost of jobs: profiles, estimates of time, memory and demand, and the job history on disk."""

from shoal.core.demand import Demand, Profile
from shoal.cost.estimate import best_size, job_demand, largest_fitting, memory, seconds, step_seconds
from shoal.cost.history import History, cache_directory

__all__ = [
    "Demand",
    "History",
    "Profile",
    "best_size",
    "cache_directory",
    "job_demand",
    "largest_fitting",
    "memory",
    "seconds",
    "step_seconds",
]
