"""The failure matrix: whatever fails, wherever, on whichever ranks, the run ends as docs/coordinator.md says.

Continuous integration runs cells in which every two values of profile, place, ranks and kind meet. The whole matrix
runs at night, in parts if need be: `pytest tests/dist/test_failure_matrix.py -m nightly -k ddp --keep-table FOLDER`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.events import read_events
from allranks.lineage import committed
from failure_cells import BATCH, EVALUATED_AT, SAVED_EVERY, STEPS, Cell, all_cells, pairwise, runs_of
from failure_table import keep
from runs import Finished, config_of, launch

HANG_TIMEOUT_S = 10.0
"""More than loading takes between two looks at the stack on a loaded machine."""
START_S = 60.0
"""A start of all ranks on a loaded machine takes no longer; an undisturbed one takes 10 s."""
IN_PLACE_S = 20.0
LOSS_TOLERANCE = 1e-4
UPDATE_TOLERANCE = 2e-2
"""Adam turns the sign of rounding noise into an update of the learning rate's size."""

DEATHS = {
    "exit": {"native_exit"},
    "sigkill": {"killed"},
    "sigstop": {"hung"},
    "oom": {"cuda_oom"},
    "alloc": {"host_oom"},
}

Run = tuple[Cell, ...]
pytestmark = pytest.mark.timeout(900)


def _name(run: Run) -> str:
    """Of a run by its first cell: no two runs share a cell."""
    return run[0].name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    for name, samples in (("train", 60), ("eval", 11)):
        # Samples of nearly one length: micro-batches hold as many as the cap says, and can be halved.
        lines = [{"prompt": f"{n:02}:", "completion": "red green grey"[: 9 + n % 5]} for n in range(samples)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _config(model: Path, folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    chosen = {
        "training__max_steps": STEPS,
        "training__global_batch_size": 3 * BATCH,
        "training__per_device_train_batch_size": BATCH,
        "training__per_device_eval_batch_size": BATCH,
        "training__eval_steps": EVALUATED_AT,
        "data__eval": str(folder / "eval.jsonl"),
        "output__save_steps": SAVED_EVERY,
        "output__name": name,
        "oom__max_respawns": 1000,
        **changes,
    }
    return config_of(model, folder, **chosen)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama_dir: Path, folder: Path) -> Finished:
    run = launch(_config(tiny_llama_dir, folder, "undisturbed"), folder, profile="single", ranks=1)
    assert run.status == 0, run.output
    return run


@dataclass(frozen=True, kw_only=True)
class Became:
    """What became of one cell.

    Attributes:
        seconds: from the fault until the run had got past it or had stopped.
        wrong: how that differs from what the documentation says; empty if it doesn't.
    """

    seconds: float | None
    wrong: tuple[str, ...]


@pytest.mark.parametrize("cells", runs_of(pairwise(all_cells())), ids=_name)
def test_every_two_values_meet(
    cells: Run, undisturbed: Finished, tiny_llama_dir: Path, folder: Path, kept_tables: Path | None
) -> None:
    _run_and_judge(cells, undisturbed, tiny_llama_dir, folder, kept_tables)


@pytest.mark.nightly
@pytest.mark.parametrize("cells", runs_of(all_cells()), ids=_name)
def test_the_whole_matrix(
    cells: Run, undisturbed: Finished, tiny_llama_dir: Path, folder: Path, kept_tables: Path | None
) -> None:
    _run_and_judge(cells, undisturbed, tiny_llama_dir, folder, kept_tables)


def _run_and_judge(cells: Run, undisturbed: Finished, model: Path, folder: Path, tables: Path | None) -> None:
    changes = {"oom__hang_timeout_s": HANG_TIMEOUT_S} if any(cell.kind == "sigstop" for cell in cells) else {}
    deadline_s = START_S + sum(map(_deadline_s, cells))
    run = launch(
        _config(model, folder, f"{_name(cells)}-{len(cells)}", **changes),
        folder,
        profile=cells[0].profile,
        ranks=cells[0].ranks,
        inject=tuple(fault for cell in cells for fault in cell.faults),
        timeout_s=deadline_s,
    )
    became = dict(zip(cells, _judged(cells, run), strict=True))
    overall = _differs(run, undisturbed, cells[0].ranks) if cells[0].tier != "stop" else _stopped_otherwise(run)
    if tables is not None:
        keep(tables, [(cell, became[cell].seconds, (*became[cell].wrong, *overall)) for cell in cells])
    wrong = {cell.name: each.wrong for cell, each in became.items() if each.wrong}
    assert not wrong and not overall, f"{wrong}\n{overall}\n{run.output}"


def _deadline_s(cell: Cell) -> float:
    """Longest time from the fault until the run has got past it or has stopped.

    Where two ranks fail, the second may fail only after the first has been dealt with.
    """
    once = IN_PLACE_S if cell.tier == "in place" else START_S
    return len(cell.failing) * (once + (2 * HANG_TIMEOUT_S if cell.kind == "sigstop" else 0.0))


def _judged(cells: Run, run: Finished) -> Iterator[Became]:
    """Of each cell, from what rank 0 wrote between its first fault and that of the next one."""
    events = list(read_events(run.run_dir))
    fired = _fired(cells, run)
    for number, cell in enumerate(cells):
        if len(fired[cell]) < len(cell.failing):
            yield Became(seconds=None, wrong=("it did not happen",))
            continue
        at = min(fired[cell])
        until = min((min(fired[later]) for later in cells[number + 1 :] if fired[later]), default=time.time())
        yield _became(cell, at, [event for event in events if at <= event["time"] < until])


def _fired(cells: Sequence[Cell], run: Finished) -> dict[Cell, list[float]]:
    """When the faults of each cell happened, from the marks that the injector leaves just before."""
    marks = {path.name: path.stat().st_mtime for path in (run.run_dir / "injected").glob("L*/*")}
    fired: dict[Cell, list[float]] = {}
    number = 0
    for cell in cells:
        names = [f"{number + rank}-1" for rank in range(len(cell.failing))]
        fired[cell] = [marks[name] for name in names if name in marks]
        number += len(names)
    return fired


def _became(cell: Cell, at: float, events: list[dict[str, Any]]) -> Became:
    deaths = [event for event in events if event["kind"] == "respawn"]
    retries = [event for event in events if event["kind"] == "retry"]
    stops = [event for event in events if event["kind"] == "stop"]
    counts = {"restart": len(deaths), "in place": len(retries), "stop": len(stops)}
    wrong = [f"{tier}: {count} times" for tier, count in counts.items() if bool(count) != (tier == cell.tier)]
    if counts[cell.tier] > len(cell.failing):
        wrong.append(f"{cell.tier}: {counts[cell.tier]} times for {len(cell.failing)} faults")
    step = 0 if cell.place == "load" else cell.step
    for event in (*deaths, *retries):
        if event["step"] != step:
            wrong.append(f"{event['kind']} names step {event['step']}")
        if event["failed_rank"] not in (*cell.failing, None):
            wrong.append(f"{event['kind']} names rank {event['failed_rank']}")
    for death in deaths:
        if death["failure"] not in DEATHS[cell.kind]:
            wrong.append(f"it was taken for {death['failure']}")
        if death["resumed_step"] not in cell.resumed_steps:
            wrong.append(f"went on from step {death['resumed_step']}, not from {cell.resumed_steps}")
    seconds = _past_at(cell, events)
    if seconds is None:
        return Became(seconds=None, wrong=(*wrong, "the run did not get past it"))
    seconds -= at
    if seconds > _deadline_s(cell):
        wrong.append(f"took {seconds:.0f} s")
    return Became(seconds=seconds, wrong=tuple(wrong))


def _past_at(cell: Cell, events: list[dict[str, Any]]) -> float | None:
    """When the run had got past the fault for good, or had stopped."""
    by_phase = {"load": "model", "eval": "eval", "final": "finish"}
    kind = "stop" if cell.tier == "stop" else by_phase.get(cell.phase, "step")
    # What was done before the last restart does not count: a peer may have stepped when a rank died in the step.
    again = max((number for number, event in enumerate(events) if event["kind"] == "respawn"), default=0)
    past = (event for event in events[again:] if event["kind"] == kind)
    least = cell.step + 1 if cell.phase == "save" else cell.step  # a save is written while training goes on
    return next((event["time"] for event in past if kind in ("model", "stop") or event["step"] >= least), None)


def _differs(run: Finished, undisturbed: Finished, ranks: int) -> tuple[str, ...]:
    """How samples, losses and adapter of a run that had faults differ from those of the run that had none."""
    if run.status != 0:
        return (f"it ended with status {run.status}: {run.verdict['message']}",)
    wrong = []
    lineages = [committed(read_events(run.run_dir, rank), "step") for rank in range(ranks)]
    planned = undisturbed.committed()
    if {event["step"]: event["sample_ids"] for event in lineages[0]} != planned:
        wrong.append("other samples were planned")
    for step, ids in planned.items():
        taken = [
            sample
            for lineage in lineages
            for event in lineage
            if event["step"] == step
            for micro in event["micro_batches"]
            for sample in micro
        ]
        if sorted(taken) != sorted(ids):
            wrong.append(f"step {step} took {sorted(taken)}, not {sorted(ids)}")
    losses = [event["loss"] for event in lineages[0]]
    if losses != pytest.approx(undisturbed.losses(), rel=LOSS_TOLERANCE):
        wrong.append(f"losses {losses}, not {undisturbed.losses()}")
    distance = float((_update(run) - _update(undisturbed)).norm() / _update(undisturbed).norm())
    if not distance < UPDATE_TOLERANCE:
        wrong.append(f"the adapter is off by {distance:.2g}")
    return tuple(wrong)


def _stopped_otherwise(run: Finished) -> tuple[str, ...]:
    found = (run.status, run.verdict["reason"])
    return () if found == (3, "out_of_memory") else (f"it ended with {found}",)


def _update(run: Finished) -> torch.Tensor:
    """What training added; lora_B starts at zero, so it is its own update."""
    tensors = run.tensors("adapter/adapter_model.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors) if "lora_B" in name])
