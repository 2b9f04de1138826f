"""What failed, in one clause. Pure."""

from __future__ import annotations

from allranks.coordinator.attempt import AttemptPhase
from allranks.coordinator.ballots import Ballot, Tally
from allranks.coordinator.kinds import FailureKind
from allranks.units import human_bytes, plural

_NAMES = {
    FailureKind.CUDA_OOM: "ran out of GPU memory",
    FailureKind.WORKSPACE_OOM: "found no GPU memory for a workspace",
    FailureKind.LIBRARY_AMBIGUOUS: "was refused by cuBLAS or cuDNN, perhaps for want of GPU memory",
    FailureKind.NCCL_OOM: "found no GPU memory for NCCL",
    FailureKind.HOST_OOM: "ran out of host memory (RAM)",
}
_DOING: dict[AttemptPhase, str] = {
    "load": "while loading",
    "step": "in step",
    "eval": "in the evaluation after step",
    "save": "in the save after step",
}


def what_failed(tally: Tally, cause: Ballot, rank: int, phase: AttemptPhase) -> str:
    """Who failed, of what, where, on how much work, and for want of how many bytes; without a full stop.

    Args:
        tally: the vote.
        cause: the ballot of the rank that failed.
        rank: that rank.
        phase: what was tried.
    """
    kind = cause.kind or FailureKind.OTHER
    step = tally.committed_step + 1 if phase == "step" else tally.committed_step
    where = _DOING[phase] if phase == "load" else f"{_DOING[phase]} {step}"
    gpu = None if cause.gpu is None else f"GPU {cause.gpu}"
    place = None if cause.place in (None, phase) else cause.place
    detail = ", ".join(part for part in (place, gpu) if part)
    text = f"rank {rank} {_NAMES.get(kind, 'failed')} ({kind}) {where}"
    if detail:
        text += f" ({detail})"
    if cause.samples:
        text += f" on a micro-batch of {plural(cause.samples, 'sample')}, {plural(cause.tokens, 'token')}"
        if cause.samples > 1:
            text += f" (longest {cause.tokens // cause.samples})"
    asked = None if cause.bytes_asked is None else f"asked {human_bytes(cause.bytes_asked)}"
    free = None if cause.bytes_free is None else f"{human_bytes(cause.bytes_free)} free"
    figures = ", ".join(part for part in (asked, free) if part)
    return f"{text}: {figures}" if figures else text
