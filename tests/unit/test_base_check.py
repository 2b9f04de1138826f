"""Checksums of the frozen base."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.coordinator.agreement import ControlPlane
from allranks.errors import StopTraining
from allranks.train.base_check import checksum, require_intact


@given(values=st.lists(st.integers(0, 255), min_size=1, max_size=64), data=st.data())
def test_one_changed_byte_changes_the_checksum(values: list[int], data: st.DataObject) -> None:
    tensor = torch.tensor(values, dtype=torch.uint8)
    changed = tensor.clone()
    place = data.draw(st.integers(0, len(values) - 1))
    changed[place] = (int(changed[place]) + data.draw(st.integers(1, 255))) % 256
    assert checksum(tensor) != checksum(changed)


def test_places_count() -> None:
    first = torch.arange(64, dtype=torch.uint8)
    swapped = torch.cat([first[8:16], first[:8], first[16:]])
    assert checksum(first) != checksum(swapped)


def test_the_dtype_of_equal_bytes_does_not_count() -> None:
    packed = torch.randint(0, 256, (32,), dtype=torch.uint8)
    assert checksum(packed) == checksum(packed.view(torch.bfloat16)) == checksum(packed.view(torch.float32))


def test_changed_or_unseen_weights_stop_the_run() -> None:
    control = ControlPlane(rank=0, world_size=1)
    require_intact(control, {"layer": 1}, {"layer": 1})
    for seen in ({"layer": 2}, {}):
        with pytest.raises(StopTraining, match="other bytes in the forward pass"):
            require_intact(control, {"layer": 1}, seen)
