"""Finding GPUs: the CUDA driver is a C library built for the test, so the calls and their types are real."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

import pytest

from allranks.errors import UserError
from allranks.plan.hardware import Gpu, Hardware, detect

DRIVER = r"""
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { return atoi(getenv("FAKE_CUINIT")); }
int cuDeviceGetCount(int *count) { *count = atoi(getenv("FAKE_GPUS")); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) {
  strncpy(name, device ? "Tesla T4" : "NVIDIA H200", length);
  return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = device ? 16000000000u : 150000000000u; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? (device ? 7 : 9) : attribute == 76 ? (device ? 5 : 0) : -1;
  return 0;
}
int cuGetErrorString(int status, const char **text) {
  *text = status == 803 ? "system has unsupported display driver / cuda driver combination" : NULL;
  return status == 803 ? 0 : 1;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the driver that stands in for NVIDIA's can't be built")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER, encoding="utf-8")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "driver.c"], check=True, timeout=60)
    return ctypes.CDLL(str(library))


def found(driver: ctypes.CDLL, torch_version: str = "2.11.0+cu130") -> Hardware:
    def load(name: str) -> ctypes.CDLL:
        assert name == "libcuda.so.1"
        return driver

    return detect(load, torch_version)


def test_gpus_are_described(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUINIT", "0")
    monkeypatch.setenv("FAKE_GPUS", "2")
    hardware = found(driver)
    assert hardware.gpus == (
        Gpu(name="NVIDIA H200", total_bytes=150_000_000_000, compute_capability=(9, 0)),
        Gpu(name="Tesla T4", total_bytes=16_000_000_000, compute_capability=(7, 5)),
    )
    assert (hardware.device, hardware.bf16) == ("cuda", False)
    monkeypatch.setenv("FAKE_GPUS", "1")
    assert found(driver).bf16


@pytest.mark.parametrize(("status", "gpus"), [("100", "0"), ("0", "0")])
def test_a_driver_without_visible_gpus(
    driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, status: str, gpus: str
) -> None:
    monkeypatch.setenv("FAKE_CUINIT", status)
    monkeypatch.setenv("FAKE_GPUS", gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert found(driver) == Hardware(gpus=(), cpu_count=len(os.sched_getaffinity(0)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert found(driver).notes == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert found(driver).notes == ("CUDA_VISIBLE_DEVICES=7 leaves no GPU visible",)


def test_a_driver_that_does_not_work_is_said(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUINIT", "803")
    with pytest.raises(UserError, match=r"cuInit failed: system has unsupported .* \(CUDA error 803\)\n    fix: "):
        found(driver)
    monkeypatch.setenv("FAKE_CUINIT", "999")
    with pytest.raises(UserError, match=r"cuInit failed: unknown error \(CUDA error 999\)"):
        found(driver)


def test_gpus_that_this_torch_cannot_use_are_said(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUINIT", "0")
    monkeypatch.setenv("FAKE_GPUS", "2")
    hardware = found(driver, "2.13.0+cpu")
    assert hardware.device == "cpu"
    assert hardware.notes == (
        "2 GPU(s) not used: torch 2.13.0+cpu is a build for CPUs; install one for CUDA to use them",
    )


def test_no_driver_is_a_cpu_machine() -> None:
    def load(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    assert detect(load) == Hardware(gpus=(), cpu_count=len(os.sched_getaffinity(0)))


@pytest.mark.gpu
def test_the_driver_sees_what_torch_sees() -> None:
    import torch

    hardware = detect()
    assert len(hardware.gpus) == torch.cuda.device_count() > 0
    for ordinal, gpu in enumerate(hardware.gpus):
        assert gpu.name == torch.cuda.get_device_name(ordinal)
        assert gpu.compute_capability == torch.cuda.get_device_capability(ordinal)
        assert gpu.total_bytes >= torch.cuda.get_device_properties(ordinal).total_memory
