"""The kinds of failure and what each means for this process and for its peers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Severity(IntEnum):
    """How much a failure asks of all ranks; the greatest one of the votes counts."""

    NONE = 0
    MEMORY = 1
    """Retry with smaller micro-batches."""
    RETRY_ONCE = 2
    """Retry unchanged, once."""
    STOP = 3
    RESPAWN = 4
    """This process or the data plane can't be used again."""


class FailureKind(StrEnum):
    """What went wrong. The order is part of a vote: all ranks run the same allranks."""

    CUDA_OOM = "cuda_oom"
    WORKSPACE_OOM = "workspace_oom"
    LIBRARY_AMBIGUOUS = "library_ambiguous"
    NCCL_OOM = "nccl_oom"
    HOST_OOM = "host_oom"
    KERNEL_LIMIT = "kernel_limit"
    SIZE_MISMATCH = "size_mismatch"
    DTYPE_MISMATCH = "dtype_mismatch"
    NOT_FINITE = "not_finite"
    ILLEGAL_ACCESS = "illegal_access"
    DEVICE_ASSERT = "device_assert"
    CUDA_FAULT = "cuda_fault"
    CUDA_REFUSED = "cuda_refused"
    COMMUNICATION = "communication"
    PEER = "peer"
    STOPPED_EARLY = "stopped_early"
    DATA = "data"
    STORAGE = "storage"
    USER = "user"
    KILLED = "killed"
    HOST_KILLED = "host_killed"
    CRASHED = "crashed"
    NATIVE_EXIT = "native_exit"
    NATIVE_OOM = "native_oom"
    HUNG = "hung"
    LOST = "lost"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a kind of failure means for the process and for its peers.

    Attributes:
        severity: what it asks of all ranks.
        advice: one line for the user, in the imperative.
        memory: less work at a time may help.
        sticky: this process can't use its GPU again.
        data_plane_damaged: the communicators can't be used again.
        secondary: a peer's failure seen from here; never the cause.
    """

    severity: Severity
    advice: str
    memory: bool = False
    sticky: bool = False
    data_plane_damaged: bool = False
    secondary: bool = False


_SMALLER = "lower training.per_device_train_batch_size or data.max_length"
TRAITS: dict[FailureKind, Traits] = {
    FailureKind.CUDA_OOM: Traits(severity=Severity.MEMORY, memory=True, advice=_SMALLER),
    FailureKind.WORKSPACE_OOM: Traits(
        severity=Severity.MEMORY,
        memory=True,
        advice=f"leave room outside torch's pool for the workspace of cuBLAS or cuDNN: {_SMALLER}",
    ),
    FailureKind.LIBRARY_AMBIGUOUS: Traits(
        severity=Severity.MEMORY,
        memory=True,
        advice="cuBLAS and cuDNN say this for want of memory and for unsupported shapes alike; if smaller "
        "micro-batches don't cure it, try another model.attn_implementation",
    ),
    FailureKind.NCCL_OOM: Traits(
        severity=Severity.RESPAWN,
        memory=True,
        data_plane_damaged=True,
        advice=f"leave room outside torch's pool for NCCL's buffers: {_SMALLER}",
    ),
    FailureKind.HOST_OOM: Traits(
        severity=Severity.MEMORY,
        memory=True,
        advice="the machine's memory (RAM) ran out, not the GPU's: run fewer ranks on it or give the job more memory",
    ),
    FailureKind.KERNEL_LIMIT: Traits(
        severity=Severity.STOP,
        advice="a kernel wants more shared memory or registers than this GPU has; not a lack of GPU memory: "
        "update triton or use another kernel",
    ),
    FailureKind.SIZE_MISMATCH: Traits(
        severity=Severity.RETRY_ONCE,
        advice="tensor shapes disagree; not a memory fault: check that model, adapter and checkpoint belong together",
    ),
    FailureKind.DTYPE_MISMATCH: Traits(
        severity=Severity.RETRY_ONCE,
        advice="tensor dtypes disagree; not a memory fault: check training.mixed_precision and the quantisation dtypes",
    ),
    FailureKind.NOT_FINITE: Traits(
        severity=Severity.STOP, advice="lower the learning rate, or look at the samples of this step"
    ),
    FailureKind.ILLEGAL_ACCESS: Traits(
        severity=Severity.RESPAWN,
        sticky=True,
        advice="a kernel read memory that isn't its own; set CUDA_LAUNCH_BLOCKING=1 to find it",
    ),
    FailureKind.DEVICE_ASSERT: Traits(
        severity=Severity.RESPAWN,
        sticky=True,
        advice="an assertion in a kernel failed, often a token id or label outside the model's range",
    ),
    FailureKind.CUDA_FAULT: Traits(
        severity=Severity.RESPAWN, sticky=True, advice="the GPU reported a fault; look for Xid lines in dmesg"
    ),
    FailureKind.CUDA_REFUSED: Traits(
        severity=Severity.STOP, advice="CUDA refused a call; check that this torch build supports this GPU"
    ),
    FailureKind.COMMUNICATION: Traits(
        severity=Severity.STOP,
        data_plane_damaged=True,
        advice="NCCL failed on this very rank; two ranks on one GPU are a usual reason, NCCL_DEBUG=INFO shows others",
    ),
    FailureKind.PEER: Traits(
        severity=Severity.RESPAWN,
        data_plane_damaged=True,
        secondary=True,
        advice="another rank was lost; its own log says why",
    ),
    FailureKind.STOPPED_EARLY: Traits(
        severity=Severity.MEMORY, secondary=True, advice="another rank failed first; its own log says why"
    ),
    FailureKind.DATA: Traits(
        severity=Severity.STOP, advice="a sample is broken or doesn't belong to this tokenizer and model"
    ),
    FailureKind.STORAGE: Traits(
        severity=Severity.STOP, advice="free space on the run directory's disk or allow writing there"
    ),
    FailureKind.KILLED: Traits(
        severity=Severity.RESPAWN, advice="somebody, or a scheduler's memory limit, killed the process: see dmesg"
    ),
    FailureKind.HOST_KILLED: Traits(
        severity=Severity.RESPAWN,
        advice="the machine's memory (RAM) ran out, not the GPU's: run fewer ranks on it or give the job more memory",
    ),
    FailureKind.CRASHED: Traits(
        severity=Severity.RESPAWN, advice="native code crashed; set PYTHONFAULTHANDLER=1 to see where"
    ),
    FailureKind.NATIVE_EXIT: Traits(
        severity=Severity.RESPAWN,
        advice="native code ended the process, as bitsandbytes does on any CUDA error; its log ends with the reason",
    ),
    FailureKind.NATIVE_OOM: Traits(
        severity=Severity.RESPAWN,
        memory=True,
        advice=f"native code found no GPU memory and ended the process: {_SMALLER}",
    ),
    FailureKind.HUNG: Traits(
        severity=Severity.RESPAWN,
        advice="see where each rank stood in the stacks; if it was at work, raise oom.hang_timeout_s",
    ),
    FailureKind.LOST: Traits(severity=Severity.RESPAWN, advice="the rank left no sign of why; look into its log"),
    FailureKind.USER: Traits(severity=Severity.STOP, advice="the message says what to change"),
    FailureKind.OTHER: Traits(severity=Severity.RETRY_ONCE, advice="that rank printed its traceback"),
}
