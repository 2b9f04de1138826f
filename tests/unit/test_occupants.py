"""Other processes on a GPU, with NVML's Python module in disguise."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allranks.train.occupants import other_processes

GIB = 2**30
GPU = torch.device("cuda", 0)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the disguised NVML knows, and what it was asked."""
    known: dict[str, Any] = {"processes": [], "asked": []}

    def handle(uuid: str) -> str:
        known["asked"].append(uuid)
        return "handle"

    module = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: known["asked"].append("shutdown"),
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetComputeRunningProcesses=lambda _handle: known["processes"],
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="1234-ab"))
    return known


def test_the_others_are_named_most_memory_first(nvml: dict[str, Any]) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        nvml["processes"] = [
            SimpleNamespace(pid=other.pid, usedGpuMemory=2 * GIB),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=9 * GIB),
            SimpleNamespace(pid=2**22 + 1, usedGpuMemory=71 * GIB),
            SimpleNamespace(pid=2**22 + 2, usedGpuMemory=None),
        ]
        found = other_processes(GPU)
        other.kill()
    assert found == (
        f"pid {2**22 + 1} (unknown here): 71 GiB",
        f"pid {other.pid} (sleep): 2 GiB",
        f"pid {2**22 + 2} (unknown here): memory not told",
    )
    assert nvml["asked"] == ["GPU-1234-ab", "shutdown"]


def test_a_machine_without_nvml_or_gpu_has_nothing_to_tell(
    monkeypatch: pytest.MonkeyPatch, nvml: dict[str, Any]
) -> None:
    assert other_processes(torch.device("cpu")) == ()
    assert nvml["asked"] == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert other_processes(GPU) == ()


@pytest.mark.gpu
def test_another_process_on_a_real_gpu_is_seen() -> None:
    program = "import torch, sys; x = torch.zeros(2**28, device='cuda'); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        found = other_processes(torch.device("cuda", 0))
        other.kill()
    # In a container NVML may give the host's numbers, so only that there is one is asked.
    assert found
