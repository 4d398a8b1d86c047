"""Training as by TRL's `SFTTrainer`, `DPOTrainer` and `RewardTrainer`: tasks whose trials train as arrays."""

from shoal.integrations.trl.preferences import DPOTask, RewardTask
from shoal.integrations.trl.sft import SFTTask

__all__ = ["DPOTask", "RewardTask", "SFTTask"]
