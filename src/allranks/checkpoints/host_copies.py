"""Host copies of a checkpoint's tensors, one behind the other in memory that the next checkpoint uses again."""

from __future__ import annotations

import torch

_BLOCK_BYTES = 32 * 2**20


class HostCopies:
    """Makes the copies of one checkpoint at a time.

    A checkpoint of an adapter is a thousand small tensors. Were each a write of its own, the writer's thread would take
    Python's lock from training a few thousand times in a second (measured at the shape of Llama-3-8B: the steps beside
    the write took a third longer). Copies that lie side by side are written in one piece (`tensor_file_chunks`). Fresh
    memory for each checkpoint would cost its page faults each time.
    """

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, list[torch.Tensor]] = {}
        self._next: dict[torch.dtype, tuple[int, int]] = {}

    def begin(self) -> None:
        """A new checkpoint: the copies made so far are overwritten from now on."""
        self._next.clear()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor`, right behind the one before of the same dtype, as long as a block lasts."""
        place = self._place(tensor.dtype, tensor.numel()).view(tensor.shape)
        place.copy_(tensor.detach())
        return place

    def _place(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        blocks = self._blocks.setdefault(dtype, [])
        index, start = self._next.get(dtype, (0, 0))
        if index < len(blocks) and blocks[index].numel() - start < size:
            index, start = index + 1, 0
        if index == len(blocks) or blocks[index].numel() < size:
            blocks.insert(index, torch.empty(max(size, _BLOCK_BYTES // dtype.itemsize), dtype=dtype, device="cpu"))
        self._next[dtype] = (index, start + size)
        return blocks[index][start : start + size]
