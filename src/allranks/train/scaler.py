"""Dynamic loss scaling for fp16, the same for every profile: it acts on the reduced gradient."""

from __future__ import annotations

import math
from typing import Any

GROWTH_INTERVAL = 2000
INITIAL_SCALE = 2.0**16


class LossScale:
    """Keeps fp16 gradients in range. With bf16 and fp32 the scale is 1 and stays.

    The constants are those of torch.amp.GradScaler. Every rank updates it from the same reduced norm, so
    all ranks hold the same scale without a word between them.
    """

    def __init__(self, precision: str) -> None:
        self.enabled = precision == "fp16"
        self.value = INITIAL_SCALE if self.enabled else 1.0
        self._good_steps = 0

    def skips(self, scaled_norm: float) -> bool:
        """Take note of a step's reduced norm; whether the step must be left out because it overflowed."""
        if not self.enabled:
            return False
        if not math.isfinite(scaled_norm):
            self.value *= 0.5
            self._good_steps = 0
            return True
        self._good_steps += 1
        if self._good_steps == GROWTH_INTERVAL:
            self.value *= 2.0
            self._good_steps = 0
        return False

    def state(self) -> dict[str, Any] | None:
        """For the checkpoint; None where no scale is in use."""
        return {"scale": self.value, "good_steps": self._good_steps} if self.enabled else None

    def load(self, state: dict[str, Any] | None) -> None:
        """Inverse of `state`."""
        if self.enabled and state is not None:
            self.value = float(state["scale"])
            self._good_steps = int(state["good_steps"])
