from __future__ import annotations

import errno
import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed

from allranks.coordinator.attempt import Failed, Success, run_attempt
from allranks.coordinator.failure import (
    MESSAGE_LIMIT,
    FailureRecord,
    StoppedEarly,
    classify,
    read_all,
    release,
)
from allranks.coordinator.kinds import TRAITS, FailureKind, Severity
from allranks.errors import ExitCode, StopTraining, UserError
from allranks.units import GIB, MIB

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
CUDA_OOM_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 20.81 GiB memory in use. Of the allocated memory 12.09 GiB "
    "is allocated by PyTorch, and 4.84 GiB is reserved by PyTorch but unallocated."
)
FRACTION_TEXT = (
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 120.00 GiB is "
    "free. Process 7 has 19.00 GiB memory in use. 8.00 GiB allowed; Of the allocated memory 6.00 GiB is allocated by "
    "PyTorch, with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and 512.00 MiB is reserved by PyTorch but "
    "unallocated."
)


def raised(act: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:
        act()
    return caught.value


class OutOfResources(Exception):
    """Named as Triton's."""


class SafetensorError(Exception):
    """Named as safetensors'."""


REAL = {
    FailureKind.HOST_OOM: [lambda: torch.empty(2**60), lambda: bytearray(2**60)],
    FailureKind.SIZE_MISMATCH: [
        lambda: torch.ones(3, 4) @ torch.ones(3, 4),
        lambda: torch.ones(3) + torch.ones(4),
        lambda: torch.cat([torch.ones(2, 3), torch.ones(2, 4)]),
        lambda: torch.ones(6).view(4),
        lambda: torch.ones(3).expand(4),
        lambda: torch.nn.functional.cross_entropy(torch.ones(3, 5), torch.ones(4, dtype=torch.long)),
        lambda: torch.nn.Linear(3, 4).load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(4)}),
    ],
    FailureKind.DTYPE_MISMATCH: [
        lambda: torch.ones(3, 3) @ torch.ones(3, 3).half(),
        lambda: torch.nn.functional.linear(torch.ones(3, 3), torch.ones(3, 3).bfloat16()),
    ],
    FailureKind.DATA: [
        lambda: torch.nn.Embedding(3, 4)(torch.tensor([9])),
        lambda: json.loads('{"prompt": '),
        lambda: b"\xff".decode(),
    ],
    FailureKind.OTHER: [lambda: {}["missing"], lambda: torch.ones(2).to("nowhere")],
}


@pytest.mark.parametrize(
    ("kind", "act"), [(kind, act) for kind, acts in REAL.items() for act in acts], ids=lambda v: str(v)[:20]
)
def test_exceptions_really_raised_are_classified(kind: FailureKind, act: Callable[[], object]) -> None:
    assert classify(raised(act)).kind == kind


BY_TEXT = [
    (torch.OutOfMemoryError(CUDA_OOM_TEXT), FailureKind.CUDA_OOM),
    (RuntimeError("Caught OutOfMemoryError in replica 0.\n" + CUDA_OOM_TEXT), FailureKind.CUDA_OOM),
    (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be", 2), FailureKind.CUDA_OOM),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "workspace_oom"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), FailureKind.WORKSPACE_OOM),
    (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"), FailureKind.LIBRARY_AMBIGUOUS),
    (
        torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function "
            "failed.\nLast error:\nFailed to CUDA calloc async 6291456 bytes"
        ),
        FailureKind.NCCL_OOM,
    ),
    (
        torch.distributed.DistBackendError(
            "NCCL error\nncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'"
        ),
        FailureKind.NCCL_OOM,
    ),
    (
        torch.distributed.DistBackendError(
            "NCCL error\nncclInvalidUsage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0"
        ),
        FailureKind.COMMUNICATION,
    ),
    (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0."), FailureKind.PEER),
    (torch.distributed.DistBackendError("ncclRemoteError: A call failed possibly due to a network"), FailureKind.PEER),
    (torch.distributed.DistNetworkError("Failed to recv, got 0 bytes."), FailureKind.PEER),
    (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:61"), FailureKind.PEER),
    (RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms"), FailureKind.PEER),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        "library_ambiguous",
    ),
    (torch.AcceleratorError("CUDA error: too many resources requested for launch", 701), FailureKind.KERNEL_LIMIT),
    (OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376."), "kernel_limit"),
    (torch.AcceleratorError("CUDA error: device-side assert triggered", 710), FailureKind.DEVICE_ASSERT),
    (torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700), FailureKind.ILLEGAL_ACCESS),
    (torch.AcceleratorError("CUDA error: unspecified launch failure", 719), FailureKind.CUDA_FAULT),
    (torch.AcceleratorError("CUDA error: no kernel image is available for execution", 209), FailureKind.CUDA_REFUSED),
    (RuntimeError("Function 'MulBackward0' returned nan values in its 0th output."), FailureKind.NOT_FINITE),
    (FloatingPointError("loss"), FailureKind.NOT_FINITE),
    (OSError(errno.ENOSPC, "No space left on device"), FailureKind.STORAGE),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), FailureKind.STORAGE),
    (OSError(errno.EROFS, "Read-only file system"), FailureKind.STORAGE),
    (PermissionError(errno.EACCES, "Permission denied"), FailureKind.STORAGE),
    (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "storage"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), FailureKind.HOST_OOM),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), FailureKind.OTHER),
    (FileNotFoundError(errno.ENOENT, "No such file"), FailureKind.OTHER),
    (UserError("bad value"), FailureKind.USER),
    (StoppedEarly("a peer failed"), FailureKind.STOPPED_EARLY),
    (AttributeError("'NoneType' object has no attribute 'x'"), FailureKind.OTHER),
]


@pytest.mark.parametrize(("exc", "kind"), BY_TEXT, ids=[f"{kind}-{i}" for i, (_, kind) in enumerate(BY_TEXT)])
def test_known_texts_are_classified(exc: Exception, kind: FailureKind) -> None:
    assert classify(exc).kind == kind


OF_THE_DEAD = {"killed", "host_killed", "crashed", "native_exit", "native_oom", "hung", "lost"}
"""Kinds that no exception has: nobody was left to raise it (tests/unit/test_autopsy.py)."""


def test_every_kind_is_covered_by_an_example_and_has_advice() -> None:
    raised_kinds = {*REAL, *(FailureKind(kind) for _, kind in BY_TEXT)}
    assert raised_kinds | OF_THE_DEAD == set(FailureKind) == set(TRAITS)
    assert not raised_kinds & OF_THE_DEAD
    assert all(traits.advice and "\n" not in traits.advice for traits in TRAITS.values())


def test_what_follows_from_a_kind() -> None:
    memory = {kind for kind, traits in TRAITS.items() if traits.memory}
    assert memory == {"cuda_oom", "workspace_oom", "library_ambiguous", "nccl_oom", "host_oom", "native_oom"}
    assert {kind for kind, traits in TRAITS.items() if traits.sticky} == {
        "illegal_access",
        "device_assert",
        "cuda_fault",
    }
    assert {kind for kind, traits in TRAITS.items() if traits.secondary} == {"peer", "stopped_early"}
    assert {kind for kind, traits in TRAITS.items() if traits.data_plane_damaged} == {
        "nccl_oom",
        "communication",
        "peer",
    }
    assert Severity.NONE < Severity.MEMORY < Severity.RETRY_ONCE < Severity.STOP < Severity.RESPAWN
    respawn = {kind for kind, traits in TRAITS.items() if traits.severity is Severity.RESPAWN}
    assert respawn == {"nccl_oom", "peer", "illegal_access", "device_assert", "cuda_fault", *OF_THE_DEAD}


def test_bytes_are_read_from_the_texts() -> None:
    oom = classify(torch.OutOfMemoryError(CUDA_OOM_TEXT))
    assert (oom.bytes_asked, oom.bytes_free) == (2 * GIB, 512 * MIB)
    under_fraction = classify(torch.OutOfMemoryError(FRACTION_TEXT))
    assert (under_fraction.bytes_asked, under_fraction.bytes_free) == (4 * GIB, 8 * GIB - 6 * GIB - 512 * MIB)
    host = classify(raised(lambda: torch.empty(2**60, dtype=torch.uint8)))
    assert (host.bytes_asked, host.bytes_free) == (2**60, None)
    array = classify(MemoryError("Unable to allocate 8.00 GiB for an array with shape (1073741824,)"))
    assert array.bytes_asked == 8 * GIB
    assert classify(RuntimeError("NCCL: Failed to CUDA calloc async 6291456 bytes")).bytes_asked == 6291456
    assert classify(torch.OutOfMemoryError("CUDA out of memory.")).bytes_asked is None


def test_a_wrapper_is_looked_through() -> None:
    def wrapped() -> None:
        try:
            raise torch.OutOfMemoryError(CUDA_OOM_TEXT)
        except RuntimeError as exc:
            raise ValueError("backend compiler failed") from exc

    assert classify(raised(wrapped)).kind == "cuda_oom"

    def hidden() -> None:
        try:
            raise torch.OutOfMemoryError(CUDA_OOM_TEXT)
        except RuntimeError:
            raise ValueError("unrelated") from None

    assert classify(raised(hidden)).kind == "other"


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert classify(one).kind == "other"
    assert release(one)


def hold(dead: list[weakref.ref[torch.Tensor]]) -> None:
    weight = torch.ones(8, requires_grad=True)
    activation = weight * 2
    cycle: list[object] = [activation]
    cycle.append(cycle)
    dead.extend([weakref.ref(weight), weakref.ref(activation)])
    try:
        deeper(activation, dead)
    except RuntimeError as exc:
        raise ValueError("wrapped") from exc


def deeper(activation: torch.Tensor, dead: list[weakref.ref[torch.Tensor]]) -> None:
    squared = activation**2
    dead.append(weakref.ref(squared))
    raise torch.OutOfMemoryError(CUDA_OOM_TEXT)


def test_release_lets_go_of_every_tensor_even_while_the_exception_is_kept() -> None:
    dead: list[weakref.ref[torch.Tensor]] = []
    gc.disable()
    try:
        kept, logged = None, None
        try:
            hold(dead)
        except ValueError as exc:
            kept, logged = exc, exc.__traceback__
        assert len(dead) == 3
        assert all(ref() is not None for ref in dead), "nothing held the tensors: this test shows nothing"
        assert release(kept)
        assert all(ref() is None for ref in dead)
        assert logged is not None, "a logger may keep the traceback; its frames are empty"
        assert (kept.__traceback__, kept.__cause__, kept.__context__) == (None, None, None)
    finally:
        gc.enable()


def test_a_failed_attempt_holds_no_tensor_and_shows_its_traceback_once() -> None:
    dead: list[weakref.ref[torch.Tensor]] = []
    seen: list[bool] = []
    outcome = run_attempt(lambda: hold(dead), on_failure=lambda exc: seen.append(exc.__traceback__ is not None))
    assert isinstance(outcome, Failed)
    assert outcome.classification.kind == "cuda_oom"
    assert outcome.message == "ValueError: wrapped"
    assert seen == [True]
    assert len(dead) == 3
    assert all(ref() is None for ref in dead)


def test_an_attempt_that_succeeds_gives_its_value() -> None:
    assert run_attempt(lambda: 7) == Success(value=7)


@pytest.mark.parametrize(
    "exc", [KeyboardInterrupt(), SystemExit(3), StopTraining("finished", "agreed", ExitCode.OK)], ids=repr
)
def test_the_guard_lets_deliberate_ends_pass(exc: BaseException) -> None:
    def work() -> None:
        raise exc

    with pytest.raises(type(exc)):
        run_attempt(work)


def record(**changed: object) -> FailureRecord:
    fields: dict[str, object] = {
        "launch": 1,
        "generation": 0,
        "step": 7,
        "phase": "backward",
        "attempt": 0,
        "rank": 1,
        "kind": FailureKind.CUDA_OOM,
        "message": "CUDA out of memory",
        "sticky": False,
        "bytes_asked": 2 * GIB,
        "micro_step": 2,
        "samples": 4,
        "tokens": 512,
        "sample_ids": (3, 1, 4, 1),
    }
    return FailureRecord(**{**fields, **changed})  # type: ignore[arg-type]


def test_records_come_back_as_written(tmp_path: Path) -> None:
    written = [record(), record(rank=0), record(step=8, attempt=1), record(launch=2, phase="eval")]
    assert [path.name for path in filter(None, (one.write(tmp_path) for one in written))] == [
        "L0001-g0-s00000007-backward-a0-rank1.json",
        "L0001-g0-s00000007-backward-a0-rank0.json",
        "L0001-g0-s00000008-backward-a1-rank1.json",
        "L0002-g0-s00000007-eval-a0-rank1.json",
    ]
    assert read_all(tmp_path) == [written[1], written[0], written[2], written[3]]
    assert read_all(tmp_path, launch=2) == [written[3]]
    assert read_all(tmp_path, launch=1, step=8) == [written[2]]
    assert sorted(path.suffix for path in (tmp_path / "failures").iterdir()) == [".json"] * 4


def test_a_run_without_failures_has_no_records(tmp_path: Path) -> None:
    assert read_all(tmp_path) == []


def test_a_long_message_is_cut() -> None:
    assert record(message="x" * 10 * MESSAGE_LIMIT).message == "x" * MESSAGE_LIMIT


def test_a_draft_left_by_a_kill_is_not_read(tmp_path: Path) -> None:
    path = record().write(tmp_path)
    assert path is not None
    path.with_suffix(".99.tmp").write_text('{"launch": 1,')
    assert read_all(tmp_path) == [record()]


def test_a_disk_that_refuses_the_record_does_not_stop_the_rank(tmp_path: Path) -> None:
    (tmp_path / "failures").write_text("in the way")
    assert record().write(tmp_path) is None


def test_classification_needs_no_torch() -> None:
    code = (
        "import sys, allranks.coordinator.failure as f, allranks.coordinator.policy, allranks.coordinator.attempt\n"
        "assert f.release(ValueError()) and f.classify(MemoryError()).memory\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@needs_gpu
@pytest.mark.gpu
def test_a_real_cuda_oom_leaves_the_gpu_usable() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    outcome = run_attempt(lambda: torch.empty(total + 1, dtype=torch.uint8, device="cuda"))
    assert isinstance(outcome, Failed)
    assert outcome.classification.kind == "cuda_oom"
    assert not outcome.classification.sticky
    assert outcome.classification.bytes_asked == pytest.approx(total, rel=0.01)
    assert outcome.classification.bytes_free == pytest.approx(torch.cuda.mem_get_info()[0], rel=0.1)
    assert torch.ones(4, device="cuda").sum().item() == 4


@needs_gpu
@pytest.mark.gpu
def test_under_a_memory_fraction_the_free_bytes_are_those_of_the_fraction() -> None:
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        allowed = int(torch.cuda.get_device_properties(0).total_memory * 0.01)
        outcome = run_attempt(lambda: torch.empty(allowed * 2, dtype=torch.uint8, device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert isinstance(outcome, Failed)
    assert outcome.classification.bytes_free is not None
    # torch writes its figures with two decimals.
    assert outcome.classification.bytes_free <= allowed * 1.01
