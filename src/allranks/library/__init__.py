"""The coordinator for loops that are not ours: accelerate's with DDP or one process, and transformers.Trainer."""

from allranks.coordinator.agreement import ControlPlaneLost
from allranks.errors import StopTraining, UserError
from allranks.library.coordinator import Coordinator, Step

__all__ = ["ControlPlaneLost", "Coordinator", "Step", "StopTraining", "UserError"]
