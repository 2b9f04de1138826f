"""The GPUs that this process may use, asked from the CUDA driver without torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from allranks import environment
from allranks.errors import UserError

_LIBRARY = "libcuda.so.1"
_SUCCESS, _NO_DEVICE, _NAME_LENGTH = 0, 100, 256
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute, cuda.h


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One visible GPU.

    Attributes:
        name: e.g. ``NVIDIA H200``.
        total_bytes: its memory.
        compute_capability: major and minor, e.g. (9, 0).
    """

    name: str
    total_bytes: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What this machine offers.

    Attributes:
        gpus: visible GPUs, in CUDA's order.
        cpu_count: CPUs that this process may use.
        notes: what was found but can't be used, one line each.
    """

    gpus: tuple[Gpu, ...]
    cpu_count: int
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """Where ranks compute."""
        return "cuda" if self.gpus else "cpu"

    @property
    def bf16(self) -> bool:
        """Every GPU multiplies in bfloat16, as those of compute capability 8.0 and above do."""
        return all(gpu.compute_capability >= (8, 0) for gpu in self.gpus)


def detect(load_library: Callable[[str], Any] = ctypes.CDLL, torch_version: str | None = None) -> Hardware:
    """Find the visible GPUs; none is no error.

    The driver itself applies CUDA_VISIBLE_DEVICES, whatever its form (numbers, UUIDs, MIG instances), so this sees
    what the ranks will see; NVML would not. No context is made: no GPU memory is taken.

    Args:
        load_library: opens a shared library, and raises OSError where there is none.
        torch_version: of the installed torch, e.g. ``2.13.0+cpu``; None: look it up.

    Raises:
        UserError: there is a driver and it does not work.
    """
    cpu_count = len(os.sched_getaffinity(0))
    try:
        driver = load_library(_LIBRARY)
    except OSError:
        return Hardware(gpus=(), cpu_count=cpu_count)
    gpus = _visible_gpus(driver)
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if not gpus and named:
        return Hardware(gpus=(), cpu_count=cpu_count, notes=(f"CUDA_VISIBLE_DEVICES={named} leaves no GPU visible",))
    version = _torch_version() if torch_version is None else torch_version
    if gpus and version.endswith("+cpu"):
        note = f"{len(gpus)} GPU(s) not used: torch {version} is a build for CPUs; install one for CUDA to use them"
        return Hardware(gpus=(), cpu_count=cpu_count, notes=(note,))
    return Hardware(gpus=gpus, cpu_count=cpu_count)


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # torch that was built in place
        return "unknown"


def _visible_gpus(driver: Any) -> tuple[Gpu, ...]:
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        return ()
    _check(driver, "cuInit", status)
    count = ctypes.c_int()
    _check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    return tuple(_gpu(driver, ordinal) for ordinal in range(count.value))


def _gpu(driver: Any, ordinal: int) -> Gpu:
    device, total, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(_NAME_LENGTH)
    _check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
    _check(driver, "cuDeviceGetName", driver.cuDeviceGetName(name, _NAME_LENGTH, device))
    _check(driver, "cuDeviceTotalMem", driver.cuDeviceTotalMem_v2(ctypes.byref(total), device))
    return Gpu(
        name=name.value.decode(),
        total_bytes=total.value,
        compute_capability=(
            _attribute(driver, _CAPABILITY_MAJOR, device),
            _attribute(driver, _CAPABILITY_MINOR, device),
        ),
    )


def _attribute(driver: Any, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _check(driver, "cuDeviceGetAttribute", driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
    return value.value


def _check(driver: Any, function: str, status: int) -> None:
    if status == _SUCCESS:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(status, ctypes.byref(text))
    reason = text.value.decode() if text.value else "unknown error"
    raise UserError(
        f"the NVIDIA driver is there but {function} failed: {reason} (CUDA error {status})\n"
        "    fix: see what nvidia-smi says and what CUDA_VISIBLE_DEVICES names; set it empty to train on the CPU"
    )
