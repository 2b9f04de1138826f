from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from allranks.checkpoints import host_copies
from allranks.checkpoints.durable import tensor_file_bytes, tensor_file_chunks, write_file
from allranks.checkpoints.host_copies import HostCopies

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)
Shapes = list[tuple[torch.dtype, list[int]]]
SHAPES = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=12)


def filled(dtype: torch.dtype, shape: list[int], at: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) + at).to(dtype)


@given(first=SHAPES, second=SHAPES, block_bytes=st.sampled_from((8, 64, 4096)))
def test_copies_are_whole_and_the_file_of_them_too(
    tmp_path_factory: pytest.TempPathFactory, first: Shapes, second: Shapes, block_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "_BLOCK_BYTES", block_bytes)
        copies = HostCopies()
        for shapes in (first, second):
            copies.begin()
            tensors = {str(at): filled(dtype, shape, at) for at, (dtype, shape) in enumerate(shapes)}
            kept = {name: copies.copy(tensor) for name, tensor in tensors.items()}
            for tensor in tensors.values():
                tensor.zero_()  # a copy shares nothing with what it is a copy of
            path = tmp_path_factory.mktemp("file") / "file"
            assert write_file(path, tensor_file_chunks(kept)).bytes == tensor_file_bytes(kept)
            loaded = load_file(path)
            assert loaded.keys() == tensors.keys()
            for at, (dtype, shape) in enumerate(shapes):
                expected = filled(dtype, shape, at)
                assert loaded[str(at)].dtype == expected.dtype
                assert torch.equal(loaded[str(at)], expected)


def test_an_adapter_is_written_in_a_few_pieces_and_the_next_one_takes_the_same_memory(tmp_path: Path) -> None:
    copies = HostCopies()
    places = []
    for value in (1.0, 2.0):
        copies.begin()
        kept = {}
        for layer in range(100):
            kept[f"step/{layer}"] = copies.copy(torch.tensor(value))
            kept[f"exp_avg/{layer}"] = copies.copy(torch.full((16, 64), value))
        _, *chunks = tensor_file_chunks(kept)
        assert [len(chunk) for chunk in chunks] == [100 * (16 * 64 + 1) * 4]
        places.append([tensor.data_ptr() for tensor in kept.values()])
    assert places[0] == places[1]


def test_a_tensor_larger_than_a_block_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "_BLOCK_BYTES", 16)
    copies = HostCopies()
    small, large, last = torch.ones(3), torch.arange(100.0).reshape(4, 25).T, torch.zeros(2)
    kept = [copies.copy(tensor) for tensor in (small, large, last)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(kept, (small, large, last), strict=True))
