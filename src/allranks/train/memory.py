"""How much memory this rank used at most."""

from __future__ import annotations

import resource

import torch


def peak_bytes(device: torch.device) -> int:
    """GPU memory that torch allocated at most, in bytes; on a CPU, the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux gives KiB
