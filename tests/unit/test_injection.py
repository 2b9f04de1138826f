from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from allranks.coordinator.attempt import Failed, run_attempt
from allranks.coordinator.failure import classify
from allranks.coordinator.injection import FaultInjector
from allranks.plan.plan import FaultKind, Injection, Phase


def injector(kind: FaultKind, phase: Phase = "forward", *, times: int = 1, step: int = 3) -> FaultInjector:
    fault = Injection(rank=1, step=step, phase=phase, kind=kind, times=times)
    return FaultInjector((fault,), rank=1, device="cpu")


def _fires(faults: FaultInjector, phase: Phase, step: int) -> bool:
    return isinstance(run_attempt(lambda: faults.at(phase, step)), Failed)


@pytest.mark.parametrize("phase", get_args(Phase))
def test_a_fault_fires_at_its_rank_step_and_phase_only(phase: Phase) -> None:
    fault = Injection(rank=1, step=3, phase=phase, kind="oom", times=1)
    places = itertools.product(range(3), range(5), get_args(Phase))
    fired = {(rank, step, at) for rank, step, at in places if _fires(FaultInjector((fault,), rank=rank), at, step)}
    assert fired == {(1, step, phase) for step in (range(5) if phase == "load" else (3,))}


def test_a_fault_fires_so_many_times_over_all_lives_of_its_rank(tmp_path: Path) -> None:
    faults = (
        Injection(rank=1, step=3, phase="forward", kind="oom", times=3),
        Injection(rank=1, step=3, phase="save", kind="oom"),
    )
    first = FaultInjector(faults, rank=1, fired=tmp_path / "injected")
    assert [_fires(first, "forward", 3) for _ in range(2)] == [True, True]
    reborn = FaultInjector(faults, rank=1, fired=tmp_path / "injected")
    assert [_fires(reborn, "forward", 3) for _ in range(3)] == [True, False, False]
    assert [_fires(reborn, "save", 3) for _ in range(2)] == [True, False]
    assert not _fires(FaultInjector(faults, rank=1, fired=tmp_path / "injected"), "save", 3)


@pytest.mark.parametrize(("kind", "expected"), [("oom", "cuda_oom"), ("alloc", "host_oom"), ("error", "size_mismatch")])
def test_the_raising_kinds_are_classified_as_what_they_stand_for(kind: FaultKind, expected: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        injector(kind).at("forward", 3)
    what = classify(caught.value)
    assert what.kind == expected
    assert (what.bytes_asked is not None) == (kind != "error")
    assert ("(injected)" in str(caught.value)) == (kind != "alloc"), "a real failure is not marked"


def test_a_fault_in_backward_happens_inside_backward() -> None:
    faults = injector("alloc", "backward")
    weight = torch.ones(4, requires_grad=True)
    entered: list[str] = []

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            entered.append("behind the fault")
            return gradient * 2

    hidden = Layer.apply(weight)
    hidden.register_hook(faults.in_backward(3))
    hidden.register_hook(lambda gradient: entered.append("beside the fault"))
    logits = hidden * 3
    logits.register_hook(lambda gradient: entered.append("before the fault"))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        logits.sum().backward()
    assert entered == ["before the fault"]
    assert weight.grad is None
    assert classify(caught.value).kind == "host_oom"

    again = Layer.apply(weight)
    again.register_hook(faults.in_backward(3))
    again.sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), 2.0)), "the hook leaves the gradient alone"


def test_nan_raises_nothing_and_poisons_its_attempts() -> None:
    faults = injector("nan", times=2)
    faults.at("forward", 3)
    assert [faults.poison(3, attempt) for attempt in range(3)] == [True, True, False]
    assert not faults.poison(4, 0)
    assert not injector("oom").poison(3, 0)


@pytest.mark.parametrize(("kind", "code"), [("exit", 1), ("sigkill", -signal.SIGKILL)])
def test_the_deadly_kinds_end_the_process_without_a_word(kind: FaultKind, code: int) -> None:
    program = (
        "import atexit; from allranks.coordinator.injection import FaultInjector as F;"
        "from allranks.plan.plan import Injection as I; atexit.register(print, 'a last word');"
        f"F((I(rank=0, step=1, phase='save', kind='{kind}'),), rank=0).at('save', 1); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, b"")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_alloc_on_a_gpu_is_a_real_cuda_oom() -> None:
    faults = FaultInjector((Injection(rank=0, step=1, phase="forward", kind="alloc"),), rank=0, device="cuda:0")
    outcome = run_attempt(lambda: faults.at("forward", 1))
    assert isinstance(outcome, Failed)
    assert outcome.classification.kind == "cuda_oom"
    assert "(injected)" not in outcome.message
