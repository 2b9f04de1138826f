"""Faults on purpose, for `allranks drill` and for the tests: by rank, step and phase.

``oom``, ``alloc`` and ``error`` raise, ``exit`` and ``sigkill`` end the process at once, ``sigstop`` and ``hang`` have
it wait for ever; ``nan`` raises nothing: the loop asks `FaultInjector.poison` and makes its own loss NaN. ``alloc`` is
no imitation: it asks the allocator of the rank's device for more than there is.

Phase ``vote`` lies outside every guard: what is raised there ends the process, as a fault of the coordinator would.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from allranks.plan.plan import FaultKind, Injection, Phase

_BEYOND_ANY_HOST_BYTES = 2**60


class FaultInjector:
    """Makes the planned faults of one rank happen.

    A fault fires the first ``times`` times that the rank comes by, so that with ``times=2`` the step succeeds at its
    third attempt, or in the third life of the ranks.
    The step is not compared in phase ``load``, which comes before any step.
    """

    def __init__(
        self, injections: tuple[Injection, ...], *, rank: int, device: str = "cpu", fired: Path | None = None
    ) -> None:
        """Keep the faults of this rank.

        Args:
            injections: faults of all ranks.
            rank: this one.
            device: a torch device such as ``cuda:0`` or ``cpu``.
            fired: folder that remembers what has happened, for ranks that are started again.
        """
        self._mine = {number: injection for number, injection in enumerate(injections) if injection.rank == rank}
        self._fired = dict.fromkeys(self._mine, 0)
        self._memory = fired
        if fired is not None and self._mine:
            fired.mkdir(parents=True, exist_ok=True)
            self._fired = {number: len(list(fired.glob(f"{number}-*"))) for number in self._mine}
        self._rank = rank
        self._device = device

    def at(self, phase: Phase, step: int) -> None:
        """Call on entering `phase` of `step` (from 1); most often nothing happens.

        Raises:
            torch.OutOfMemoryError: kind ``oom``, or ``alloc`` on a GPU.
            RuntimeError: kind ``error``, or ``alloc`` on the CPU.
        """
        for number, injection in self._mine.items():
            due = self._fired[number] < injection.times and self._is_at(injection, phase, step)
            if due and injection.kind != "nan":
                self._note(number)
                _fail(injection.kind, self._rank, self._device)

    def in_backward(self, step: int) -> Callable[[object], None]:
        """A hook for `torch.Tensor.register_hook` that is `at("backward", ...)`.

        Autograd calls it when the gradient of that tensor has been computed, so the fault happens inside
        backward with its graph alive. Register it on a tensor in the middle of the graph (the logits, a hidden
        state); on the loss itself it would fire before backward has done anything.
        """

        def hook(_gradient: object) -> None:
            self.at("backward", step)

        return hook

    def poison(self, step: int, attempt: int) -> bool:
        """Whether the loop makes its loss NaN in this attempt; kind ``nan`` in any phase of the step."""
        due = [
            number
            for number, injection in self._mine.items()
            if injection.kind == "nan" and injection.step == step and attempt < injection.times
        ]
        for number in due:
            self._mark(number, attempt + 1)
        return bool(due)

    @staticmethod
    def _is_at(injection: Injection, phase: Phase, step: int) -> bool:
        return injection.phase == phase and (phase == "load" or injection.step == step)

    def _note(self, number: int) -> None:
        """Before it happens: afterwards there may be nobody to note it."""
        self._fired[number] += 1
        self._mark(number, self._fired[number])

    def _mark(self, number: int, time: int) -> None:
        if self._memory is not None:
            (self._memory / f"{number}-{time}").touch()


def _fail(kind: FaultKind, rank: int, device: str) -> NoReturn:
    if kind == "exit":
        os._exit(1)
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind in ("hang", "sigstop"):
        threading.Event().wait()
    if kind == "error":
        raise RuntimeError("size mismatch, 3 against 4 (injected)")

    import torch

    if kind == "alloc":
        on_gpu = device.startswith("cuda")
        size_bytes = torch.cuda.get_device_properties(device).total_memory + 1 if on_gpu else _BEYOND_ANY_HOST_BYTES
        torch.empty(size_bytes, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate 2.00 GiB. GPU {rank} has a total capacity of 24.00 GiB of which "
        "512.00 MiB is free. Including non-PyTorch memory, this process has 23.50 GiB memory in use. Of the "
        "allocated memory 22.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated. "
        "(injected)"
    )
