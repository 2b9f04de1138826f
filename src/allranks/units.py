"""Numbers as people read them. Inside the program bytes are ints and times are seconds."""

from __future__ import annotations

GIB = 1024**3
MIB = 1024**2


def human_bytes(count: int) -> str:
    """`count` bytes in the greatest binary unit, with three significant figures, e.g. ``10.2 GiB``."""
    for size, unit in ((2**60, "EiB"), (2**50, "PiB"), (2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if abs(count) < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count} B"


def plural(count: int, noun: str) -> str:
    """`count` and its noun, e.g. ``1 sample`` or ``2 samples``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def human_seconds(seconds: float) -> str:
    """`seconds` as ``1 h 02 min``, ``3 min 07 s`` or ``4.2 s``."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{seconds:.1f} s"
