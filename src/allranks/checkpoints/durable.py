"""Files that are on the disk whole: written fresh, hashed on the way, fsynced, replaced atomically.

The functions raise plain `OSError`; `not_written` is the text of the `StorageError` that callers make of it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.errors import AllranksError, ExitCode
from allranks.units import human_bytes

if TYPE_CHECKING:
    import torch


class StorageError(AllranksError):
    """A file of the run could not be written or is damaged. The message says what is still usable, and the fix."""

    exit_code = ExitCode.STORAGE


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What one finished file must look like.

    Attributes:
        bytes: its size.
        sha256: hex digest of its content.
    """

    bytes: int
    sha256: str


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a file that must not exist yet and fsync it; its folder still needs `fsync_folder`."""
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def fsync_file(path: Path) -> None:
    """Bring a file that a library wrote to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Bring the names in `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` new content so that a reader, or the next start after a kill, sees the old or the new, whole."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)  # left by a kill; the run's lock keeps other writers out
    write_file(fresh, [content])
    fresh.replace(path)
    fsync_folder(path.parent)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(path: Path) -> int | None:
    """Bytes that could at most be written below `path`, which need not exist; None if the file system won't say."""
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    try:
        figures = os.statvfs(existing)
    except OSError:
        return None
    if figures.f_blocks == 0:
        return None
    # Some blocks are kept for root.
    return figures.f_frsize * (figures.f_bfree if os.geteuid() == 0 else figures.f_bavail)


def not_written(what: str, path: Path, needed: int, error: OSError, usable: str) -> str:
    """The text of a `StorageError` for a failed write.

    Args:
        what: in words, e.g. ``the checkpoint of step 50``.
        path: file or folder that was to be written.
        needed: bytes of it.
        error: what the operating system said.
        usable: what still is, in words.
    """
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    free = free_bytes(path)
    fixes = {
        errno.EDQUOT: "free some of your quota there, or ask for a larger one",
        errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
        errno.ENOSPC: f"free space or file entries there, {human_bytes(needed)} or more",
        errno.EACCES: f"make {path.parent} writable for this user",
        errno.EPERM: f"make {path.parent} writable for this user",
        errno.EROFS: "mount the file system for writing",
    }
    fix = fixes.get(error.errno or 0, f"make sure that {path.parent} is a healthy folder")
    return "\n    ".join(
        [
            f"{what} was not written to {path}: {error.strerror or error}",
            f"needs {human_bytes(needed)}, free {'unknown' if free is None else human_bytes(free)}",
            f"still usable: {usable}",
            f"fix: {fix}{', or move the run directory and set output.dir' if full else ''}; then run again to resume",
        ]
    )


def tensor_file_header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The head of a safetensors file: its length in 8 bytes, then JSON with dtype, shape and place of each tensor.

    Format: https://github.com/huggingface/safetensors#format. The library's own writer neither tells the errno of a
    failed write nor hashes on the way, and refuses tensors that share memory.

    Raises:
        ValueError: a tensor is not in host memory, or of a dtype that optimizers and adapters do not have: our fault.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in _file_order(tensors):
        tensor = tensors[name]
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}, not in host memory")
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _safetensors_dtype(tensor),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors start aligned
    return len(text).to_bytes(8, "little") + text


def tensor_file_chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file without a second copy of it in memory; neighbours in memory are one chunk."""
    import torch

    yield tensor_file_header(tensors)
    runs: list[tuple[torch.Tensor, int]] = []
    for name in _file_order(tensors):
        tensor = tensors[name].detach().contiguous()
        if runs and _follows(*runs[-1], tensor):
            runs[-1] = (runs[-1][0], runs[-1][1] + tensor.nbytes)
        else:
            runs.append((tensor, tensor.nbytes))
    for first, size in runs:
        start = first.storage_offset() * first.element_size()
        yield torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage(), start, (size,), (1,)).numpy().data


def _follows(first: torch.Tensor, size: int, tensor: torch.Tensor) -> bool:
    """`tensor` lies right behind the `size` bytes that begin with `first`, in the same storage."""
    same = first.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return same and first.data_ptr() + size == tensor.data_ptr()


def tensor_file_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Size of the safetensors file of `tensors`, before it is written."""
    return len(tensor_file_header(tensors)) + sum(t.numel() * t.element_size() for t in tensors.values())


def _file_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    # Widest dtype first keeps every tensor aligned to its own element size, as the library's writer does.
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def _safetensors_dtype(tensor: torch.Tensor) -> str:
    import torch

    names = {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
    if tensor.dtype not in names:
        raise ValueError(f"dtype {tensor.dtype} is none of {', '.join(str(dtype) for dtype in names)}")
    return names[tensor.dtype]
