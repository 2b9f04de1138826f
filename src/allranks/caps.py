"""What one micro-batch may hold."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.units import plural


@dataclass(frozen=True, kw_only=True)
class Caps:
    """The largest micro-batch that every rank may form; the same on all ranks.

    Attributes:
        max_samples: most samples in one micro-batch, at least 1.
        max_tokens: most tokens in one micro-batch, padding included; None: no limit but `max_samples`.
            One sample above it travels alone.
    """

    max_samples: int
    max_tokens: int | None

    def words(self) -> str:
        """Both limits, e.g. ``at most 2 samples and 190 tokens per micro-batch``."""
        tokens = "" if self.max_tokens is None else f" and {plural(self.max_tokens, 'token')}"
        return f"at most {plural(self.max_samples, 'sample')}{tokens} per micro-batch"

    def within(self, other: Caps) -> Caps:
        """The smaller of the two in each respect."""
        tokens = [cap for cap in (self.max_tokens, other.max_tokens) if cap is not None]
        return Caps(max_samples=min(self.max_samples, other.max_samples), max_tokens=min(tokens, default=None))
