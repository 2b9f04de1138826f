"""What a rank reads of its memory, and what it keeps of the first time that it runs out."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.config.schema import RunConfig, recomputes_all
from allranks.train.memory import MemoryMeter
from allranks.train.model import checkpoint_activations
from allranks.train.setup import first_caps
from allranks.train.snapshot import FirstOom
from allranks.units import MIB

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")


def test_on_a_cpu_the_resident_set_is_what_is_held() -> None:
    meter = MemoryMeter(CPU)
    meter.begin()
    before = meter.end(headroom=True)
    ballast = torch.ones(32 * MIB, dtype=torch.uint8)
    meter.begin()
    after = meter.end(headroom=True)
    assert before.held_bytes is not None
    assert after.held_bytes is not None
    assert after.held_bytes - before.held_bytes > 24 * MIB
    assert (after.peak_bytes, after.headroom_bytes, after.allocator_retries) == (None, None, 0)
    assert meter.reserved_bytes >= 32 * MIB
    assert meter.peak_bytes >= after.held_bytes - 24 * MIB
    assert len(ballast) == 32 * MIB


class Card:
    """Stands in for the driver and the allocator of a GPU."""

    def __init__(self) -> None:
        self.stats = {"allocated_bytes.all.current": 10, "allocated_bytes.all.peak": 70, "num_alloc_retries": 4}
        self.stats["reserved_bytes.all.current"] = 80
        self.free, self.fraction = 20, 1.0

    def reset_peak(self, _device: object) -> None:
        self.stats["allocated_bytes.all.peak"] = self.stats["allocated_bytes.all.current"]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _device: dict(card.stats))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: card.stats["allocated_bytes.all.peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", card.reset_peak)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (card.free, 100))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: card.fraction)
    return card


def test_each_attempt_has_its_own_peak_and_the_run_the_highest(card: Card) -> None:
    meter = MemoryMeter(GPU)
    meter.begin()
    card.stats |= {"allocated_bytes.all.peak": 60, "num_alloc_retries": 6}
    reading = meter.end(headroom=True)
    assert (reading.held_bytes, reading.peak_bytes, reading.allocator_retries) == (10, 60, 2)
    assert reading.headroom_bytes == 80 + 20 - 60
    assert meter.peak_bytes == 70
    assert meter.end(headroom=False).headroom_bytes is None


def test_headroom_ends_where_the_process_may_have_no_more(card: Card) -> None:
    meter = MemoryMeter(GPU)
    meter.begin()
    card.fraction = 0.5
    card.stats["allocated_bytes.all.peak"] = 40
    assert meter.end(headroom=True).headroom_bytes == 10


def test_the_first_time_is_kept_once_for_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, object]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: told.append(options))
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda _device: "a table")
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(pickle.dumps({"segments": []}))
    )
    first = FirstOom(GPU, tmp_path, launch=3, rank=1, history=50)
    assert told == [{"context": "alloc", "stacks": "python", "max_entries": 50}]
    snapshot = first.write()
    assert snapshot == tmp_path / "memory" / "L0003-rank1.pickle"
    assert pickle.loads(snapshot.read_bytes()) == {"segments": []}
    assert snapshot.with_suffix(".txt").read_text() == "a table"
    assert first.write() is None
    assert FirstOom(GPU, tmp_path, launch=3, rank=1, history=0).write() is None, "after a restart of the ranks too"
    assert FirstOom(GPU, tmp_path, launch=3, rank=0, history=0).write() is not None
    assert len(told) == 1


def test_on_a_cpu_nothing_is_kept(tmp_path: Path) -> None:
    assert FirstOom(CPU, tmp_path, launch=1, rank=0, history=50).write() is None
    assert not list(tmp_path.iterdir())


def test_checkpointing_turned_on_between_two_steps_recomputes_and_changes_nothing(tiny_llama_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model.train()
    layer = model.model.layers[0]
    calls: list[int] = []
    layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.arange(12).reshape(2, 6)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        calls.clear()
        model(input_ids=ids, labels=ids).loss.backward()
        return layer.mlp.up_proj.weight.grad.clone()

    plain = gradient()
    assert len(calls) == 1
    checkpoint_activations(model)
    recomputed = gradient()
    assert len(calls) == 2
    assert torch.equal(plain, recomputed)


def test_the_first_layers_recompute_and_the_last_ones_keep_their_activations(tiny_llama_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model.train()
    calls: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, number=number: calls.append(number))
    ids = torch.arange(12).reshape(2, 6)

    def forwards() -> list[int]:
        calls.clear()
        model(input_ids=ids, labels=ids).loss.backward()
        return calls

    assert checkpoint_activations(model, 1) == 2
    assert forwards() == [0, 1, 0]
    assert checkpoint_activations(model, 2) == 2
    assert forwards() == [0, 1, 1, 0]
    checkpoint_activations(model, 1)
    checkpoint_activations(model)  # as the ranks do when one sample does not fit
    assert forwards() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("training", "all_recompute"),
    [({}, True), ({"gradient_checkpointing": False}, False), ({"gradient_checkpointing_layers": 1}, False)],
)
def test_ranks_may_still_ask_for_more_recomputation(training: dict[str, Any], all_recompute: bool) -> None:
    config = RunConfig.model_validate(
        {"model": {"name_or_path": "org/model"}, "data": {"train": "org/data"}, "training": training}
    )
    state = first_caps(config)
    assert state.checkpointing == all_recompute
    assert (state.reborn().checkpointing, recomputes_all(config.training)) == (all_recompute, all_recompute)
