"""Who else uses a GPU, for the message of a rank that finds no room while it loads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import torch

from allranks.units import human_bytes


def other_processes(device: torch.device) -> tuple[str, ...]:
    """The other processes on the GPU of `device`, most memory first, e.g. ``pid 4242 (python): 71.3 GiB``.

    As ``nvidia-smi`` lists them, by NVML (package nvidia-ml-py). In a container the numbers may be those of the host,
    and the names then unknown. Empty where there is no GPU, no such process, or no NVML.
    """
    if device.type != "cuda":
        return ()
    try:
        found = sorted(_processes(str(torch.cuda.get_device_properties(device).uuid)), key=lambda each: -each[1])
    except Exception:  # NVML is a courtesy here: whatever is wrong with it, the failure at hand is told
        return ()
    return tuple(_words(pid, used_bytes) for pid, used_bytes in found if pid != os.getpid())


def _processes(uuid: str) -> Iterator[tuple[int, int]]:
    """Process id and bytes of each process that computes on the GPU with this UUID."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            yield process.pid, process.usedGpuMemory or 0
    finally:
        pynvml.nvmlShutdown()


def _words(pid: int, used_bytes: int) -> str:
    try:
        name = psutil.Process(pid).name()
    except psutil.Error:
        name = "unknown here"
    used = human_bytes(used_bytes) if used_bytes else "memory not told"
    return f"pid {pid} ({name}): {used}"
