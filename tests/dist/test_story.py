"""The whole story of each failure, from the event logs alone: no rank log, no failure record, no console."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from allranks.lineage import committed
from runs import Finished, config_of, launch

pytestmark = pytest.mark.timeout(300)

Event = dict[str, Any]
STEPS = 5
SAVED_EVERY = 2
FAULTS = (
    "rank=1,step=2,phase=backward,kind=oom",
    "rank=1,step=4,phase=forward,kind=sigkill",
    "rank=0,step=5,phase=reduce,kind=alloc",
)


@dataclass(frozen=True, kw_only=True)
class Story:
    """One failure, as an outsider can tell it.

    Attributes:
        rank: who failed.
        step: optimizer step that was being tried.
        phase: where in it.
        kind: what went wrong.
        bytes_asked: memory that was asked for; None if it is not known.
        bytes_free: memory that was free; None if it is not known.
        samples: ids of the micro-batch under way; of a rank that could not say it, none.
        decision: what all ranks did.
        decided_by: ranks that say so.
        caps: samples per micro-batch before and after.
        abandoned: committed steps that were given up.
        made_again: steps that were made a second time.
        resumed_step: checkpoint from which all went on; None if all went on in place.
        seconds: from the last sign before it until the step was committed after all.
    """

    rank: int
    step: int
    phase: str
    kind: str
    bytes_asked: int | None
    bytes_free: int | None
    samples: tuple[int, ...]
    decision: str
    decided_by: tuple[int, ...]
    caps: tuple[int, int]
    abandoned: tuple[int, ...]
    made_again: tuple[int, ...]
    resumed_step: int | None
    seconds: float


def read_stories(events_dir: Path) -> list[Story]:
    """The failures of a run that got past all of them, oldest first."""
    logs = {
        int(path.stem.removeprefix("rank")): [json.loads(line) for line in path.read_text().splitlines()]
        for path in events_dir.iterdir()
    }
    return [_story(logs, decided) for decided in logs[0] if decided["kind"] in ("retry", "respawn")]


def _story(logs: dict[int, list[Event]], decided: Event) -> Story:
    again = decided["kind"] == "respawn"
    life = decided["generation"] - again
    rank = decided["failed_rank"]
    before = [event for log in logs.values() for event in log if event["time"] < decided["time"]]
    after = [event for event in logs[0] if event["time"] > decided["time"]]
    told = [e for e in before if e["kind"] == "failure" and (e["rank"], e["step"]) == (rank, decided["step"])]
    # Of a rank that died without a word there is only what the next generation found out.
    failure = told[-1] if told and told[-1]["generation"] == life else {**decided, "sample_ids": []}
    steps_before = [event for event in before if event["kind"] == "step"]
    last_sign = max(event["time"] for event in before if event["generation"] == life)
    past = next(event for event in after if event["kind"] == "step" and event["step"] == decided["step"])
    lost = decided.get("abandoned_steps") or (1, 0)
    abandoned = tuple(range(lost[0], lost[1] + 1))
    step_until_past = [event["step"] for event in after if event["kind"] == "step" and event["time"] < past["time"]]
    return Story(
        rank=rank,
        step=decided["step"],
        phase=failure["phase"],
        kind=failure["failure"],
        bytes_asked=failure.get("bytes_asked"),
        bytes_free=failure.get("bytes_free"),
        samples=tuple(failure["sample_ids"]),
        decision="all start again" if again else "again in place",
        decided_by=tuple(sorted(rank for rank, log in logs.items() if any(_same(decided, event) for event in log))),
        caps=(max(steps_before, key=lambda event: event["time"])["caps"][0], decided["caps"][0]),
        abandoned=abandoned,
        made_again=tuple(step for step in step_until_past if step in abandoned),
        resumed_step=decided["resumed_step"] if again else None,
        seconds=past["time"] - (failure["time"] if told else last_sign),
    )


def _same(decided: Event, other: Event) -> bool:
    own = ("time", "rank")
    return {k: v for k, v in decided.items() if k not in own} == {k: v for k, v in other.items() if k not in own}


@pytest.fixture(scope="module")
def run(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("story")
    config = config_of(tiny_llama_dir, folder, training__max_steps=STEPS, output__save_steps=SAVED_EVERY)
    finished = launch(config, folder, profile="ddp", ranks=2, inject=FAULTS)
    assert finished.status == 0, finished.output
    return finished


def test_the_events_tell_what_failed_and_what_all_ranks_did(run: Finished) -> None:
    first, second, third = read_stories(run.run_dir / "events")

    assert (first.rank, first.step, first.phase, first.kind) == (1, 2, "backward", "cuda_oom")
    assert (first.bytes_asked, first.bytes_free) == (2 * 2**30, 512 * 2**20)
    assert (first.decision, first.decided_by) == ("again in place", (0, 1))
    assert (first.caps, first.abandoned, first.resumed_step) == ((4, 2), (), None)
    assert len(first.samples) == 4
    assert set(first.samples) < set(run.committed()[2])

    assert (second.rank, second.step, second.phase, second.kind) == (1, 4, "forward", "killed")
    assert (second.decision, second.decided_by) == ("all start again", (0, 1))
    assert second.resumed_step in (2, 0)  # the checkpoint of step 2 is written while training goes on
    assert second.abandoned == second.made_again == tuple(range(second.resumed_step + 1, 4))
    assert second.caps == (2, 2)

    assert (third.rank, third.step, third.phase, third.kind) == (0, 5, "reduce", "host_oom")
    assert (third.bytes_asked, third.bytes_free) == (2**60, None)
    assert (third.decision, third.decided_by) == ("all start again", (0, 1))
    assert third.resumed_step in (4, 2)
    assert third.abandoned == third.made_again == tuple(range(third.resumed_step + 1, 5))
    assert third.caps == (2, 2)

    assert 0 < first.seconds < 5 < second.seconds
    assert third.seconds > 5


def test_each_event_says_it_in_words_too(run: Finished) -> None:
    said = [event["message"] for kind in ("retry", "respawn") for event in run.events(kind)]
    assert [word.split(" in step")[0] for word in said] == [
        "rank 1 ran out of GPU memory (cuda_oom)",
        "rank 1 was killed by SIGKILL",
        "rank 0 ran out of host memory (RAM) (host_oom)",
    ]
    assert said[0].endswith("per micro-batch")


def test_the_lineage_of_every_rank_ends_with_each_step_once(run: Finished) -> None:
    for rank in (0, 1):
        log = [json.loads(line) for line in (run.run_dir / "events" / f"rank{rank}.jsonl").read_text().splitlines()]
        assert [event["step"] for event in committed(log, "step")] == list(range(1, STEPS + 1))
