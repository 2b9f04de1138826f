"""Votes among real processes over gloo: agreement, its loss, and what happens without it.

The small loop here is the coordinator's contract without a model: samples are whole numbers, the gradient of a
sample is itself, and the share of a rank depends on the caps, as in the real split. So a rank that goes its own
way loses or repeats samples, and the audit sees it.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.caps import Caps
from allranks.config.schema import OomConfig
from allranks.coordinator import agreement
from allranks.coordinator.agreement import ControlPlane, ControlPlaneLost
from allranks.coordinator.attempt import AttemptKey, Failed, FailureFlag, run_attempt
from allranks.coordinator.ballots import Ballot, StepBallot, VotesDisagree, fingerprint, tally_one, tally_two
from allranks.coordinator.failure import Classification, classify
from allranks.coordinator.injection import FaultInjector
from allranks.coordinator.kinds import TRAITS, FailureKind
from allranks.coordinator.policy import Retry, Stop, decide, decide_step
from allranks.coordinator.policy_state import PolicyState
from allranks.errors import StopTraining
from allranks.plan.plan import Injection

DEADLINE_S = 120
GLOBAL_BATCH = 16
STEPS = 4

Result = dict[str, Any]
Worker = Callable[[int, int, ControlPlane, dict[str, Any]], Result]


def enter(worker: Worker, rank: int, world: int, port: int, folder: Path, given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    control = ControlPlane(rank=rank, world_size=world)
    result = worker(rank, world, control, given)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    if "error" not in result:
        control.close()
        dist.destroy_process_group()


def run_ranks(worker: Worker, world: int, folder: Path, **given: Any) -> list[Result | None]:
    """What each rank returned; None for one that died or was still running at the deadline."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    ranks = [
        spawn.Process(target=enter, args=(worker, rank, world, server.port, folder, given)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    until = time.monotonic() + DEADLINE_S
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    paths = [folder / f"rank{rank}.json" for rank in range(world)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def exchanges(rank: int, world: int, control: ControlPlane, given: dict[str, Any]) -> Result:
    extremes = [math.nan, math.inf, -math.inf, 2.0**53, -1.5][: rank + 1] if rank < world - 1 else [0.0]
    row = [float(rank), *extremes, *[7.0] * (5 - len(extremes))]
    table = control.exchange(row)
    text = control.broadcast_text("what rank 0 found: π" if rank == 0 else None)

    verdicts = []
    for failing_rank in range(world):
        ballot = Ballot(committed_step=3, caps_fingerprint=1, headroom_bytes=2**40 + rank, seconds=rank / 7)
        if rank == failing_rank:
            what = Classification(kind=FailureKind.CUDA_OOM, **vars(TRAITS[FailureKind.CUDA_OOM]), bytes_asked=2**50)
            ballot = ballot.failing(what, samples=rank + 2, tokens=100 * rank)
        tally = agreement.vote_one(control, ballot)
        assert tally.cause is not None
        verdicts.append(
            {
                "verdict": tally.verdict,
                "rank": tally.cause_rank,
                "samples": tally.cause.samples,
                "asked": tally.cause.bytes_asked,
                "headroom": tally.headroom_bytes,
                "seconds": [one.seconds for one in tally.ballots],
            }
        )
    return {"table": [[repr(number) for number in row] for row in table], "verdicts": verdicts, "text": text}


@pytest.mark.timeout(240)
def test_all_ranks_read_the_same_rows_and_verdicts_whoever_fails(together: list[Result]) -> None:
    world = len(together)
    first, *others = [result["exchanges"] for result in together]
    assert all(other == first for other in others)
    assert [row[0] for row in first["table"]] == [repr(float(rank)) for rank in range(world)]
    assert first["table"][0][1] == "nan"
    assert "nan" not in first["table"][world - 1], "a NaN stays in its own row"
    if world == 4:
        assert first["table"][2][2:4] == ["inf", "-inf"]
    assert first["text"] == "what rank 0 found: π"
    assert first["verdicts"] == [
        {
            "verdict": "retry",
            "rank": rank,
            "samples": rank + 2,
            "asked": 2**50,
            "headroom": 2**40,
            "seconds": [other / 7 for other in range(world)],
        }
        for rank in range(world)
    ]


def partings(rank: int, world: int, control: ControlPlane, given: dict[str, Any]) -> Result:
    told = []
    last = rank == world - 1
    ballot = Ballot(committed_step=3, caps_fingerprint=1)
    step = StepBallot(
        committed_step=3,
        caps_fingerprint=1,
        reduced=True,
        loss_sum=1.0,
        grad_norm=1.0,
        tokens=4,
        expected_tokens=4 * world,
    )
    for act in (
        lambda: agreement.vote_one(control, replace(ballot, committed_step=4) if last else ballot),
        lambda: agreement.vote_one(control, replace(ballot, caps_fingerprint=2) if last else ballot),
        lambda: agreement.vote_two(control, replace(step, tokens=5) if last else step),
        lambda: agreement.vote_one(control, ballot) if last else agreement.vote_two(control, step),
        lambda: control.exchange([1.0, 2.0] if last else [1.0]),
    ):
        try:
            act()
            told.append("nothing")
        except VotesDisagree as exc:
            told.append(str(exc))
    return {"told": told}


@pytest.mark.timeout(240)
def test_ranks_that_parted_are_told_so_on_every_rank(together: list[Result]) -> None:
    first, *others = [result["partings"] for result in together]
    assert all(other == first for other in others)
    width_one, width_two = len(fields(Ballot)), len(fields(StepBallot))
    expected = [
        r"last committed step by rank is \[3, (3, 3, )?4\]",
        r"fingerprint of the caps by rank is \[1, (1, 1, )?2\]",
        r"has (8|16) target tokens but all ranks together counted (9|17): a sample was lost or taken twice",
        rf"\(exchange, topic, width\) by rank is .*, 2\.0, {width_two}\.0\), \(\d+\.0, 1\.0, {width_one}\.0\)\]",
        r"\(exchange, topic, width\) by rank is .*, 0\.0, 1\.0\), \(\d+\.0, 0\.0, 2\.0\)\]",
    ]
    assert len(first["told"]) == len(expected)
    for text, pattern in zip(first["told"], expected, strict=True):
        assert re.search(pattern, text), text


def deaths(rank: int, world: int, control: ControlPlane, given: dict[str, Any]) -> Result:
    control.exchange([1.0])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        control.exchange([1.0])
    except ControlPlaneLost as exc:
        message, cause = str(exc), classify(exc.__cause__ or exc)
    noticed_s = time.monotonic() - begun
    again = time.monotonic()
    with pytest.raises(ControlPlaneLost) as twice:
        control.exchange([1.0])
    control.close()
    return {
        "error": message,
        "again": str(twice.value),
        "kind": cause.kind,
        "noticed_s": noticed_s,
        "again_s": time.monotonic() - again,
    }


@pytest.mark.timeout(240)
def test_a_killed_rank_is_noticed_and_the_group_never_used_again(tmp_path: Path) -> None:
    survivor, dead = run_ranks(deaths, 2, tmp_path)
    assert dead is None
    assert survivor is not None
    assert survivor["error"].startswith("rank 0 lost its peers: ")
    assert survivor["again"] == survivor["error"]
    assert survivor["kind"] == "peer"
    assert survivor["noticed_s"] < 30
    assert survivor["again_s"] < 1


def early(rank: int, world: int, control: ControlPlane, given: dict[str, Any]) -> Result:
    flag = FailureFlag(world_size=world)
    seen: list[dict[str, Any]] = []
    for failing_rank in range(world):
        key = AttemptKey(launch=9, generation=0, step=1, phase="step", attempt=failing_rank)
        control.exchange([0.0])
        begun = time.monotonic()
        if rank == failing_rank:
            flag.raise_flag(key)
        else:

            def work(key: AttemptKey = key, begun: float = begun) -> None:
                while time.monotonic() - begun < 20:
                    flag.leave_if_raised(key)
                    time.sleep(0.005)

            outcome = run_attempt(work)
            assert isinstance(outcome, Failed), "the flag was not seen in 20 s"
            seen.append({"kind": outcome.classification.kind, "seconds": time.monotonic() - begun})
        control.exchange([0.0])
        assert not flag.is_raised(replace(key, step=2))
    flag.close()
    return {"seen": seen}


@pytest.mark.timeout(240)
def test_peers_of_a_failed_rank_leave_their_attempt_early(together: list[Result]) -> None:
    for result in together:
        seen = result["early"]["seen"]
        assert [one["kind"] for one in seen] == ["stopped_early"] * (len(together) - 1)
        assert all(one["seconds"] < 15 for one in seen)


def shares(sample_ids: list[int], world: int, caps: Caps) -> list[list[list[int]]]:
    """Micro-batches of at most `max_samples`, dealt to the ranks in turn."""
    size = caps.max_samples
    micro_batches = [sample_ids[start : start + size] for start in range(0, len(sample_ids), size)]
    return [micro_batches[rank::world] for rank in range(world)]


def loop(rank: int, world: int, control: ControlPlane, given: dict[str, Any]) -> Result:
    if "vote_one" in given["without"]:
        agreement.vote_one = lambda control, ballot: tally_one([ballot])
    if "vote_two" in given["without"]:
        own_truth = lambda ballot: replace(ballot, expected_tokens=ballot.tokens)  # noqa: E731
        agreement.vote_two = lambda control, ballot: tally_two([own_truth(ballot)])
    faults = FaultInjector(tuple(Injection(**fault) for fault in given["faults"]), rank=rank)
    # Without a vote the flag stays off too: whether it is seen in time would decide how the ranks part.
    flag = FailureFlag(world_size=1 if given["without"] else world)
    result: Result = {"launch": given.get("launch", 1), "consumed": [], "weight": 0.0, "retries": 0}
    caps = Caps(max_samples=4, max_tokens=None)
    state = PolicyState.start(train=caps, evaluation=caps)
    try:
        for step in range(1, STEPS + 1):
            state = train_step(step, rank, world, control, state, faults, flag, result)
    except (StopTraining, ControlPlaneLost) as exc:
        result["error"] = f"{type(exc).__name__}: {exc}"
    result["caps"] = [state.train.caps.max_samples, state.train.caps.max_tokens]
    return result


def train_step(
    step: int,
    rank: int,
    world: int,
    control: ControlPlane,
    state: PolicyState,
    faults: FaultInjector,
    flag: FailureFlag,
    result: Result,
) -> PolicyState:
    sample_ids = list(range((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH))
    attempt = 0
    while True:
        caps = state.train.caps
        mine = shares(sample_ids, world, caps)[rank]
        key = AttemptKey(launch=result["launch"], generation=0, step=step, phase="step", attempt=attempt)
        done: list[int] = []

        def work(
            attempt: int = attempt, mine: list[list[int]] = mine, key: AttemptKey = key, done: list[int] = done
        ) -> None:
            for micro_batch in mine:
                flag.leave_if_raised(key)
                faults.at("forward", step)
                done.extend(micro_batch)

        outcome = run_attempt(work)
        ballot = Ballot(committed_step=step - 1, caps_fingerprint=fingerprint(caps))
        if isinstance(outcome, Failed):
            if not outcome.classification.secondary:
                flag.raise_flag(key)
            held = len(mine[0])
            ballot = ballot.failing(outcome.classification, samples=held, tokens=held)
        decision = decide(state, agreement.vote_one(control, ballot), OomConfig())
        if isinstance(decision, Stop):
            raise decision.error()
        if isinstance(decision, Retry):
            state, attempt = decision.state, attempt + 1
            result["retries"] += 1
            continue
        gradient = torch.tensor([float(sum(done))], dtype=torch.float64)
        dist.all_reduce(gradient)
        step_ballot = StepBallot(
            committed_step=step - 1,
            caps_fingerprint=fingerprint(caps),
            reduced=True,
            loss_sum=math.nan if faults.poison(step, attempt) else float(sum(done)),
            grad_norm=gradient.item(),
            tokens=len(done),
            expected_tokens=len(sample_ids),
        )
        stop = decide_step(state, agreement.vote_two(control, step_ballot))
        if isinstance(stop, Stop):
            raise stop.error()
        result["weight"] += gradient.item()
        result["consumed"].append(done)
        return state.finished("step", largest_tokens=caps.max_samples, longest_tokens=1)


def audit(results: list[Result | None], steps: int = STEPS) -> list[str]:
    """What is wrong with a run of the small loop; nothing, if all ranks acted together."""
    wrong = []
    whole = [result for result in results if result is not None]
    if len(whole) < len(results):
        wrong.append("a rank hung or died")
    if len({(json.dumps(one["caps"]), one["weight"], one["retries"], one.get("error")) for one in whole}) != 1:
        wrong.append("the ranks ended differently")
    if any(len(one["consumed"]) != steps for one in whole):
        wrong.append(f"not {steps} steps")
    for step in range(steps):
        taken = sorted(i for one in whole for i in (one["consumed"][step] if step < len(one["consumed"]) else []))
        if taken != list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)):
            wrong.append(f"samples lost or repeated in step {step + 1}")
    if any(one["weight"] != sum(range(steps * GLOBAL_BATCH)) for one in whole):
        wrong.append("the weight is not that of the samples")
    return wrong


def fault(rank: int, step: int, kind: str, times: int = 1) -> dict[str, Any]:
    return {"rank": rank, "step": step, "phase": "forward", "kind": kind, "times": times}


def all_of_it(rank: int, world: int, control: ControlPlane, given: dict[str, Any]) -> Result:
    """What ranks that act together survive, one thing after the other: a start of four processes is slow."""
    in_turn = [[fault(one, 2, "alloc"), fault(world - 1 - one, 3, "oom")] for one in range(world)]
    runs = [*in_turn, [fault(1, 3, "nan")], [fault(1, 2, "error", times=9)]]
    return {
        "exchanges": exchanges(rank, world, control, given),
        "partings": partings(rank, world, control, given),
        "early": early(rank, world, control, given),
        "loops": [
            loop(rank, world, control, {"faults": faults, "without": [], "launch": launch})
            for launch, faults in enumerate(runs, start=1)
        ],
    }


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    results = run_ranks(all_of_it, request.param, tmp_path_factory.mktemp("together"))
    whole = [result for result in results if result is not None]
    assert len(whole) == request.param, "a rank hung or died"
    return whole


@pytest.mark.timeout(240)
def test_every_rank_in_turn_runs_out_of_memory_and_no_sample_is_lost(together: list[Result]) -> None:
    for turn in range(len(together)):
        results = [result["loops"][turn] for result in together]
        assert audit(results) == []
        assert results[0]["caps"] == [1, 1]
        assert results[0]["retries"] == 2


@pytest.mark.timeout(240)
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_the_step(together: list[Result]) -> None:
    results = [result["loops"][-2] for result in together]
    assert audit(results, steps=2) == []
    assert "step 3: loss or gradient norm is not finite on ranks [1]" in results[0]["error"]


@pytest.mark.timeout(240)
def test_a_rank_that_can_not_go_on_stops_all_with_the_same_words(together: list[Result]) -> None:
    results = [result["loops"][-1] for result in together]
    assert audit(results, steps=1) == []
    assert results[0]["retries"] == 1
    assert "rank 1 failed (size_mismatch) in step 2" in results[0]["error"]


@pytest.mark.timeout(240)
def test_without_vote_one_the_ranks_part_and_it_is_found(tmp_path: Path) -> None:
    results = run_ranks(loop, 2, tmp_path, faults=[fault(1, 2, "alloc")], without=["vote_one"])
    assert audit(results) != []
    errors = [result["error"] for result in results if result is not None]
    assert len(errors) == 2
    assert all("fingerprint of the caps" in error for error in errors), "vote 2 finds what vote 1 was for"


@pytest.mark.timeout(240)
def test_without_any_vote_samples_are_lost(tmp_path: Path) -> None:
    results = run_ranks(loop, 2, tmp_path, faults=[fault(1, 2, "alloc")], without=["vote_one", "vote_two"])
    assert "samples lost or repeated in step 2" in audit(results)


@pytest.mark.timeout(240)
def test_without_vote_two_one_rank_steps_alone(tmp_path: Path) -> None:
    results = run_ranks(loop, 2, tmp_path, faults=[fault(1, 3, "nan")], without=["vote_two"])
    assert "the ranks ended differently" in audit(results, steps=2)
    assert results[0] is not None
    assert results[0]["error"].startswith("ControlPlaneLost")
