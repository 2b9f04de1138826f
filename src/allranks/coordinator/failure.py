"""What went wrong on this rank: its class, its record on disk, and letting go of what it held.

Torch is not imported: exceptions are known by the names of their classes and by their texts, so
that the same table serves torch, bitsandbytes, Triton, NCCL and gloo. Texts were read from torch
2.11 and 2.13 where they could be raised, else from public reports (docs/coordinator.md).
"""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from allranks.coordinator.kinds import TRAITS, FailureKind, Traits
from allranks.errors import AllranksError, ExitCode

FAILURES_DIR = "failures"
MESSAGE_LIMIT = 2000
"""Characters of an exception's text that a record keeps."""


class StoppedEarly(Exception):
    """This rank left its attempt because a peer had failed; classified as secondary."""


@dataclass(frozen=True, kw_only=True)
class Classification(Traits):
    """The class of one exception: the traits of its kind, and what its text tells.

    Attributes:
        kind: what went wrong.
        bytes_asked: what the failing allocation wanted, in bytes, if its text says so.
        bytes_free: what was free for it, in bytes, if its text says so; under a memory fraction, of that fraction.
    """

    kind: FailureKind
    bytes_asked: int | None = None
    bytes_free: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """Fits if a class of the exception's ancestry is in `types` or its lower-case text holds one of `texts`."""

    kind: FailureKind
    types: frozenset[str] = frozenset()
    texts: tuple[str, ...] = ()

    def fits(self, names: frozenset[str], text: str) -> bool:
        return bool(names & self.types) or any(part in text for part in self.texts)


_AMBIGUOUS = (
    "cudnn_status_not_supported",
    "cudnn_status_internal_error",
    "cudnn_status_not_initialized",
    "cublas_status_not_initialized",
    "unable to find an engine to execute",
)
_REFUSED = (
    "cublas_status_invalid_value",
    "cublas_status_not_supported",
    "cuda error: invalid configuration argument",
    "cuda error: invalid argument",
    "cuda error: no kernel image",
    "cuda error: invalid device ordinal",
)
_SHAPES = (
    "size mismatch",
    "shapes cannot be multiplied",
    "must match the size of tensor",
    "must match the existing size",
    "sizes of tensors must match",
    "is invalid for input of size",
    "to match target batch_size",
)
_DTYPES = ("same dtype", "expected scalar type", "and bias type", "not implemented for '", "found dtype")
_NO_ROOM = ("no space left on device", "disk quota exceeded", "read-only file system", "permission denied")
_BAD_DATA = frozenset({"JSONDecodeError", "UnicodeDecodeError", "ArrowInvalid", "DatasetGenerationError"})
_NCCL_HERE = ("ncclinvalidusage", "ncclinvalidargument", "ncclunhandledcudaerror")
_PEER_TYPES = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
_PEER_TEXTS = ("connection closed by peer", "gloo/transport", "gloo timeout", "nccl communicator was aborted")

# The first rule that fits decides, so the narrow ones stand before the wide ones: NCCL's own lack of
# memory before peers' DistBackendError, a failed cuBLAS allocation before "CUDA error: ...".
_RULES = (
    _Rule(kind=FailureKind.STOPPED_EARLY, types=frozenset({"StoppedEarly"})),
    _Rule(kind=FailureKind.CUDA_OOM, types=frozenset({"OutOfMemoryError"}), texts=("cuda out of memory",)),
    _Rule(
        kind=FailureKind.KERNEL_LIMIT,
        types=frozenset({"OutOfResources"}),
        texts=("out of resource: ", "too many resources requested"),
    ),
    _Rule(kind=FailureKind.NCCL_OOM, texts=("failed to cuda calloc", "failed to cuda malloc")),
    _Rule(kind=FailureKind.WORKSPACE_OOM, texts=("cublas_status_alloc_failed", "cudnn_status_alloc_failed")),
    _Rule(kind=FailureKind.LIBRARY_AMBIGUOUS, texts=_AMBIGUOUS),
    _Rule(kind=FailureKind.CUDA_OOM, texts=("cuda error: out of memory",)),
    _Rule(kind=FailureKind.DEVICE_ASSERT, texts=("device-side assert",)),
    _Rule(kind=FailureKind.ILLEGAL_ACCESS, texts=("illegal memory access",)),
    _Rule(kind=FailureKind.CUDA_REFUSED, texts=_REFUSED),
    _Rule(kind=FailureKind.COMMUNICATION, texts=_NCCL_HERE),
    _Rule(kind=FailureKind.PEER, types=_PEER_TYPES, texts=_PEER_TEXTS),
    _Rule(
        kind=FailureKind.CUDA_FAULT,
        types=frozenset({"AcceleratorError"}),
        texts=("cuda error: ", "cudnn_status_execution_failed"),
    ),
    _Rule(
        kind=FailureKind.HOST_OOM,
        types=frozenset({"MemoryError"}),
        texts=("defaultcpuallocator", "std::bad_alloc", "cannot allocate memory", "out of shared memory (shm)"),
    ),
    _Rule(kind=FailureKind.SIZE_MISMATCH, texts=_SHAPES),
    _Rule(kind=FailureKind.DTYPE_MISMATCH, texts=_DTYPES),
    _Rule(kind=FailureKind.NOT_FINITE, types=frozenset({"FloatingPointError"}), texts=("returned nan values in its",)),
    _Rule(kind=FailureKind.DATA, types=_BAD_DATA, texts=("index out of range in self",)),
    _Rule(kind=FailureKind.STORAGE, texts=_NO_ROOM),
)
_ERRNOS = {
    errno.ENOMEM: FailureKind.HOST_OOM,
    errno.ENOSPC: FailureKind.STORAGE,
    errno.EDQUOT: FailureKind.STORAGE,
    errno.EROFS: FailureKind.STORAGE,
    errno.EACCES: FailureKind.STORAGE,
    errno.EPERM: FailureKind.STORAGE,
}


def classify(exc: BaseException) -> Classification:
    """The class of `exc`, or of what it was raised from when it says nothing itself.

    A wrapper (a compiler's, a data loader's) is looked through along ``__cause__`` and ``__context__``.
    """
    for link in _chain(exc):
        kind = _kind(link)
        if kind is not FailureKind.OTHER:
            asked, free = _bytes_in(str(link)) if TRAITS[kind].memory else (None, None)
            return Classification(kind=kind, bytes_asked=asked, bytes_free=free, **asdict(TRAITS[kind]))
    return Classification(kind=FailureKind.OTHER, **asdict(TRAITS[FailureKind.OTHER]))


def kind_of_words(raised: str) -> FailureKind:
    """The kind of an exception of which there are only the words, e.g. the last line of a traceback."""
    name, _, text = raised.partition(":")
    names = frozenset({name.rpartition(".")[2]})
    return next((rule.kind for rule in _RULES if rule.fits(names, text.lower())), FailureKind.OTHER)


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """`exc` and what it was raised from, outermost first; a chain that bites its tail ends."""
    seen: set[int] = set()
    link: BaseException | None = exc
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _kind(exc: BaseException) -> FailureKind:
    if isinstance(exc, AllranksError):
        return FailureKind.STORAGE if exc.exit_code is ExitCode.STORAGE else FailureKind.USER
    if isinstance(exc, OSError) and exc.errno is not None:
        # By number alone: a broken connection to the hub is an OSError too, and no lost peer.
        return _ERRNOS.get(exc.errno, FailureKind.OTHER)
    names = frozenset(ancestor.__name__ for ancestor in type(exc).__mro__)
    text = str(exc).lower()
    if "nccl" in text and "out of memory" in text and "OutOfMemoryError" not in names:
        return FailureKind.NCCL_OOM
    return next((rule.kind for rule in _RULES if rule.fits(names, text)), FailureKind.OTHER)


_UNITS = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50, "e": 2**60}
_SIZE = r"([\d.]+) ?(bytes?|[KMGTPE]iB)"
_ASKED = re.compile(rf"(?:tried to allocate|unable to allocate|calloc(?: async)?|malloc|mmap) {_SIZE}", re.IGNORECASE)
_FREE = re.compile(rf"of which {_SIZE} is free")
_FRACTION = re.compile(
    rf"{_SIZE} allowed; Of the allocated memory {_SIZE} is allocated by PyTorch.*?{_SIZE} is reserved by PyTorch"
)


def _bytes_in(text: str) -> tuple[int | None, int | None]:
    """Bytes asked and bytes free, as torch's, NumPy's and NCCL's texts give them (rounded there to 0.01 of a unit)."""
    asked = _ASKED.search(text)
    free = _FREE.search(text)
    fraction = _FRACTION.search(text)
    free_bytes = _size(*free.groups()) if free else None
    if fraction is not None:
        # Under set_per_process_memory_fraction the card's free memory is not what this process may take.
        parts = fraction.groups()
        allowed, allocated, cached = (_size(parts[i], parts[i + 1]) for i in (0, 2, 4))
        allowance = max(0, allowed - allocated - cached)
        free_bytes = allowance if free_bytes is None else min(free_bytes, allowance)
    return (_size(*asked.groups()) if asked else None), free_bytes


def _size(number: str, unit: str) -> int:
    scale = _UNITS[unit[0].lower()]
    return int(number) * scale if number.isdigit() else int(float(number) * scale)


def release(exc: BaseException) -> bool:
    """Let go of everything `exc` holds, empty the GPU cache, and try the GPU.

    Call it after the ``except`` block was left: inside it the interpreter still holds the exception.
    Frames that are still running keep their variables.

    Returns:
        Whether the GPU answered a synchronise; True where none is in use.
    """
    for link in list(_chain(exc)):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = link.__cause__ = link.__context__ = None
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """What a failing rank leaves on disk, one file per failure.

    Attributes:
        launch: number of the launch in this run directory, from 1.
        generation: life of the data-plane groups within the launch, from 0.
        step: optimizer step that was being tried, from 1.
        phase: where in it, e.g. ``backward``.
        attempt: number of the attempt, from 0.
        rank: who failed.
        kind: what went wrong.
        message: the exception's text, cut at `MESSAGE_LIMIT` characters.
        sticky: the process can't use its GPU again.
        bytes_asked: bytes the allocation wanted, if known.
        bytes_free: bytes that were free for it, if known.
        micro_step: index of the failing micro-step, if it was in one.
        samples: samples in the failing micro-batch; 0 outside one.
        tokens: its tokens, padding included.
        sample_ids: its samples.
        gpu_processes: other processes on the GPU, of a rank that found no room while it loaded.
    """

    launch: int
    generation: int
    step: int
    phase: str
    attempt: int
    rank: int
    kind: FailureKind
    message: str
    sticky: bool
    bytes_asked: int | None = None
    bytes_free: int | None = None
    micro_step: int | None = None
    samples: int = 0
    tokens: int = 0
    sample_ids: tuple[int, ...] = ()
    gpu_processes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", self.message[:MESSAGE_LIMIT])

    @property
    def file_name(self) -> str:
        """Unique within the run directory; sorts by time. The phase keeps an evaluation apart from its step."""
        place = f"L{self.launch:04d}-g{self.generation}-s{self.step:08d}-{self.phase}"
        return f"{place}-a{self.attempt}-rank{self.rank}.json"

    def write(self, run_dir: Path) -> Path | None:
        """Write this record in one piece. It outlives the process, and waits for no disk: all ranks wait for the vote.

        Returns:
            Its path, or None if the disk refused: the vote must go on without it.
        """
        path = run_dir / FAILURES_DIR / self.file_name
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
            draft.replace(path)
        except OSError:
            return None
        return path


def read_all(run_dir: Path, *, launch: int | None = None, step: int | None = None) -> list[FailureRecord]:
    """The records of a run, oldest first; of one launch or step, if given."""
    wanted_launch = "*" if launch is None else f"{launch:04d}"
    wanted_step = "*" if step is None else f"{step:08d}"
    records = []
    for path in sorted((run_dir / FAILURES_DIR).glob(f"L{wanted_launch}-g*-s{wanted_step}-*.json")):
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields |= {name: tuple(fields.get(name, ())) for name in ("sample_ids", "gpu_processes")}
        fields["kind"] = FailureKind(fields["kind"])
        records.append(FailureRecord(**fields))
    return records
