from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.coordinator.agreement import ROW_WIDTH, ControlPlane, ControlPlaneLost, vote_one, vote_two
from allranks.coordinator.ballots import (
    Ballot,
    StepBallot,
    StepVerdict,
    Tally,
    Verdict,
    VotesDisagree,
    fingerprint,
    tally_one,
    tally_two,
)
from allranks.coordinator.failure import Classification
from allranks.coordinator.kinds import TRAITS, FailureKind, Severity
from allranks.errors import ExitCode

FINE = Ballot(committed_step=6, caps_fingerprint=1)
STEP = StepBallot(
    committed_step=6, caps_fingerprint=1, reduced=True, loss_sum=0.5, grad_norm=1.0, tokens=5, expected_tokens=10
)


def failing(kind: FailureKind, samples: int = 4, tokens: int = 400) -> Ballot:
    return FINE.failing(Classification(kind=kind, **vars(TRAITS[kind])), samples=samples, tokens=tokens)


EXACT = st.integers(0, 2**53)
BALLOTS = st.builds(
    Ballot,
    committed_step=EXACT,
    caps_fingerprint=st.integers(0, 2**48 - 1),
    failed=st.booleans(),
    severity=st.sampled_from(list(Severity)),
    kind=st.none() | st.sampled_from(list(FailureKind)),
    secondary=st.booleans(),
    data_plane_damaged=st.booleans(),
    samples=EXACT,
    tokens=EXACT,
    bytes_asked=st.none() | EXACT,
    bytes_free=st.none() | EXACT,
    headroom_bytes=st.none() | EXACT,
    seconds=st.floats(0, 1e9),
    stop_requested=st.booleans(),
)


@given(BALLOTS)
def test_a_ballot_survives_its_row(ballot: Ballot) -> None:
    row = ballot.to_row()
    assert len(row) <= ROW_WIDTH
    assert all(type(number) is float for number in row)
    assert Ballot.from_row(row) == ballot


def test_a_step_ballot_survives_its_row_with_what_is_not_finite() -> None:
    ballot = replace(STEP, loss_sum=math.inf, grad_norm=math.nan)
    back = StepBallot.from_row(ballot.to_row())
    assert back.loss_sum == math.inf
    assert math.isnan(back.grad_norm)
    assert replace(back, grad_norm=1.0) == replace(ballot, grad_norm=1.0)


def test_every_kind_asks_for_its_verdict() -> None:
    expected = {
        Severity.MEMORY: Verdict.RETRY,
        Severity.RETRY_ONCE: Verdict.RETRY,
        Severity.STOP: Verdict.STOP,
        Severity.RESPAWN: Verdict.RESPAWN,
    }
    assert tally_one([FINE, FINE]).verdict is Verdict.GO
    for kind, traits in TRAITS.items():
        assert tally_one([FINE, failing(kind)]).verdict is expected[traits.severity]


def test_the_cause_is_the_lowest_rank_that_failed_by_itself() -> None:
    peer, oom = failing(FailureKind.PEER), failing(FailureKind.CUDA_OOM)
    tally = tally_one([peer, FINE, oom, replace(oom, samples=1)])
    assert (tally.cause_rank, tally.cause) == (2, oom)
    assert tally.severity is Severity.RESPAWN
    assert tally.data_plane_damaged
    assert tally_one([peer, FINE]).cause is None


def test_among_causes_the_most_severe_counts() -> None:
    tally = tally_one([failing(FailureKind.CUDA_OOM), failing(FailureKind.NOT_FINITE), failing(FailureKind.NOT_FINITE)])
    assert tally.cause_rank == 1


def test_headroom_is_the_least_and_a_stop_request_is_anyones() -> None:
    tally = tally_one([replace(FINE, headroom_bytes=9), replace(FINE, headroom_bytes=5, stop_requested=True), FINE])
    assert (tally.headroom_bytes, tally.stop_requested, tally.failed) == (5, True, False)
    assert tally_one([FINE]).headroom_bytes is None
    assert tally_one([FINE]).committed_step == 6


def test_a_failure_in_a_collective_damages_the_data_plane_whatever_its_kind() -> None:
    what = Classification(kind=FailureKind.CUDA_OOM, **vars(TRAITS[FailureKind.CUDA_OOM]))
    ballot = FINE.failing(what, samples=0, tokens=0, in_collective=True)
    assert tally_one([FINE, ballot]).verdict is Verdict.RESPAWN
    assert tally_one([FINE, ballot]).data_plane_damaged


@pytest.mark.parametrize(
    ("field", "name"), [("committed_step", "last committed step"), ("caps_fingerprint", "fingerprint of the caps")]
)
def test_ranks_that_parted_are_found_in_either_vote(field: str, name: str) -> None:
    with pytest.raises(VotesDisagree, match=rf"the ranks disagree: {name} by rank is \[.*, 7\]") as caught:
        tally_one([FINE, replace(FINE, **{field: 7})])
    assert (caught.value.reason, caught.value.exit_code) == ("failure", ExitCode.CRASH)
    with pytest.raises(VotesDisagree, match=name):
        tally_two([STEP, replace(STEP, **{field: 7})])


def test_vote_two_sums_the_loss_and_checks_that_every_target_was_counted_once() -> None:
    tally = tally_two([STEP, replace(STEP, loss_sum=0.25)])
    assert (tally.verdict, tally.loss_sum, tally.tokens) == (StepVerdict.STEP, 0.75, 10)
    with pytest.raises(VotesDisagree, match="has 10 target tokens but all ranks together counted 11"):
        tally_two([STEP, replace(STEP, tokens=6)])
    with pytest.raises(VotesDisagree, match="target tokens of the global batch by rank"):
        tally_two([STEP, replace(STEP, expected_tokens=11)])


def test_vote_two_names_the_ranks_that_are_not_finite() -> None:
    nan, inf = replace(STEP, loss_sum=math.nan), replace(STEP, grad_norm=math.inf)
    assert tally_two([STEP, nan]).verdict is StepVerdict.NOT_FINITE
    assert tally_two([inf, replace(nan, grad_norm=math.inf)]).not_finite_ranks == (1,)
    assert tally_two([inf, inf]).not_finite_ranks == (0, 1)


def test_a_failed_reduction_comes_before_everything_else() -> None:
    tally = tally_two([STEP, replace(STEP, reduced=False, tokens=0, loss_sum=math.nan)])
    assert tally.verdict is StepVerdict.RESTORE
    assert tally.not_reduced_ranks == (1,)


def test_one_rank_votes_without_any_group() -> None:
    control = ControlPlane(rank=0, world_size=1)
    assert control.exchange([1.5, 2.0**53]) == [[1.5, 2.0**53]]
    assert vote_one(control, FINE) == Tally(ballots=(FINE,))
    assert vote_two(control, replace(STEP, tokens=10)).verdict is StepVerdict.STEP
    with pytest.raises(ValueError, match=f"{ROW_WIDTH + 1} numbers in a row of {ROW_WIDTH}"):
        control.exchange([0.0] * (ROW_WIDTH + 1))
    control.close()
    with pytest.raises(ControlPlaneLost, match="closed"):
        control.exchange([1.0])


def test_a_fingerprint_is_exact_in_a_row_and_tells_values_apart() -> None:
    prints = {fingerprint(samples, tokens) for samples in range(50) for tokens in (None, *range(50))}
    assert len(prints) == 50 * 51
    assert all(int(float(number)) == number for number in prints)
    assert fingerprint(1, None) == fingerprint(1, None)
