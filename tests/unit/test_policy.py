from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.caps import Caps
from allranks.config.schema import OomConfig
from allranks.coordinator.ballots import Ballot, StepBallot, StepTally, Tally
from allranks.coordinator.failure import Classification
from allranks.coordinator.kinds import TRAITS, FailureKind
from allranks.coordinator.policy import (
    LEAK_FAILURES,
    Go,
    Retry,
    Stop,
    decide,
    decide_step,
)
from allranks.coordinator.policy_state import LEAK_WINDOW_STEPS, PolicyState
from allranks.errors import ExitCode
from allranks.units import GIB, MIB

OOM = OomConfig()
FINE = Ballot(committed_step=6, caps_fingerprint=1)


def failing(kind: FailureKind, samples: int = 0, tokens: int = 0, *, step: int = 6, **told: int) -> Ballot:
    what = Classification(kind=kind, **vars(TRAITS[kind]), **told)
    return replace(FINE, committed_step=step).failing(what, samples=samples, tokens=tokens)


def tally(*ballots: Ballot) -> Tally:
    return Tally(ballots=ballots)


def oom(samples: int, tokens: int, *, step: int = 6, rank: int = 1) -> Tally:
    fine = replace(FINE, committed_step=step)
    failed = failing(FailureKind.CUDA_OOM, samples, tokens, step=step, bytes_asked=2 * GIB, bytes_free=512 * MIB)
    return tally(*(failed if r == rank else fine for r in range(2)))


def start(max_samples: int = 8, max_tokens: int | None = None) -> PolicyState:
    return PolicyState.start(
        train=Caps(max_samples=max_samples, max_tokens=max_tokens), evaluation=Caps(max_samples=4, max_tokens=None)
    )


def test_all_fine_goes_on_unchanged() -> None:
    assert decide(start(), tally(FINE, FINE), OOM) == Go(state=start())


@pytest.mark.parametrize(
    ("caps", "held", "expected"),
    [
        ((8, None), (8, 4000), (4, 2000)),
        ((8, None), (5, 4001), (2, 2000)),
        ((8, 1024), (3, 900), (1, 450)),
        ((8, 1024), (2, 1500), (1, 512)),
        ((2, None), (2, 1), (1, 1)),
        ((4, None), (8, 4000), (2, 2000)),
    ],
)
def test_the_caps_become_half_of_the_cap_or_of_what_failed(
    caps: tuple[int, int | None], held: tuple[int, int], expected: tuple[int, int]
) -> None:
    decision = decide(start(*caps), oom(*held), OOM)
    assert isinstance(decision, Retry)
    assert decision.state.train.caps == Caps(max_samples=expected[0], max_tokens=expected[1])
    assert decision.state.retries == 1


def test_a_retry_says_who_what_where_and_the_new_caps() -> None:
    decision = decide(start(), oom(4, 2048), OOM)
    assert isinstance(decision, Retry)
    assert decision.message == (
        "rank 1 ran out of GPU memory (cuda_oom) in step 7 on a micro-batch of 4 samples, 2048 tokens (longest 512): "
        "asked 2 GiB, 512 MiB free; all ranks retry with at most 2 samples and 1024 tokens per micro-batch"
    )


def test_one_sample_that_never_fitted_stops_with_the_ways_out() -> None:
    decision = decide(start(), oom(1, 4096), OOM)
    assert decision == Stop(
        reason="out_of_memory",
        message="rank 1 ran out of GPU memory (cuda_oom) in step 7 on a micro-batch of 1 sample, 4096 tokens: "
        "asked 2 GiB, 512 MiB free; a micro-batch of one sample can't be split: shorten data.max_length, let such "
        "samples be left out (oom.max_skipped_samples), adapt fewer lora.target_modules, or take another profile "
        "(zero3 and fsdp spread the model)",
        exit_code=ExitCode.OUT_OF_MEMORY,
    )
    error = decision.error()
    assert (error.reason, str(error), error.exit_code) == (decision.reason, decision.message, decision.exit_code)


def test_one_sample_that_had_fitted_is_retried_once_then_stops() -> None:
    state = start(1).finished("step", largest_tokens=512, longest_tokens=512)
    first = decide(state, oom(1, 500), OOM)
    assert isinstance(first, Retry)
    assert first.state.train.caps == state.train.caps
    assert "although 512 tokens had fitted; all ranks retry once with nothing smaller to try" in first.message
    second = decide(first.state, oom(1, 500), OOM)
    assert isinstance(second, Stop)
    assert "although 512 tokens had fitted; a micro-batch of one sample can't be split" in second.message
    recovered = decide(first.state.finished("step"), oom(1, 500, step=9), OOM)
    assert isinstance(recovered, Retry), "the next step has its retry again"
    assert recovered.state.retries == 1


def alone(sample_id: int, *, tokens: int = 4096) -> Tally:
    return tally(FINE, replace(failing(FailureKind.CUDA_OOM, 1, tokens), sample_id=sample_id))


def test_at_one_sample_gradient_checkpointing_comes_first_then_the_sample_is_left_out_then_the_run_stops() -> None:
    config = OomConfig(max_skipped_samples=2)
    state = PolicyState.start(
        train=Caps(max_samples=1, max_tokens=None), evaluation=Caps(max_samples=1, max_tokens=None), checkpointing=False
    )
    raised = decide(state, alone(17), config)
    assert isinstance(raised, Retry)
    assert (raised.state.checkpointing, raised.state.skipped) == (True, ())
    assert raised.state.train.caps == state.train.caps
    assert "all ranks turn on gradient checkpointing, from here on, and retry" in raised.message
    left_out = decide(raised.state, alone(17), config)
    assert isinstance(left_out, Retry)
    assert left_out.state.skipped == (17,)
    assert (
        "all ranks leave sample 17 out, from here on, and retry (1 of 2, oom.max_skipped_samples)" in left_out.message
    )
    another = decide(left_out.state, alone(3), config)
    assert isinstance(another, Retry)
    assert another.state.skipped == (3, 17)
    stop = decide(another.state, alone(5), config)
    assert isinstance(stop, Stop)
    assert "can't be split; 2 were left out already (oom.max_skipped_samples): shorten data.max_length" in stop.message


def test_an_evaluation_leaves_no_sample_out() -> None:
    decision = decide(start(), alone(17), OomConfig(max_skipped_samples=9), phase="eval")
    assert isinstance(decision, Stop)


def test_the_same_footprint_gives_ranks_the_same_fingerprint_and_survives_json() -> None:
    state = start().with_side("step", start().train.cut(samples=4, tokens=100))
    state = replace(state, checkpointing=False, skipped=(3, 9), pressed_at=(4, 5), growth=state.growth.shrunk(7))
    for step in range(12):
        state = state.observed("step", tally(replace(FINE, committed_step=step, held_bytes=100 * GIB + step)))
    assert PolicyState.from_json(state.to_json()) == state
    assert state.reborn().footprint == state.footprint
    assert state.reborn().trend.points == ()
    one, other = replace(state, skipped=(3,)), replace(state, checkpointing=True)
    assert one.within(other).footprint == (*state.footprint[:2], True, (3, 9))


def test_a_place_and_a_gpu_are_told() -> None:
    failed = replace(failing(FailureKind.CUDA_OOM, 4, 400), place="backward", gpu=3)
    assert Ballot.from_row(failed.to_row()) == failed
    decision = decide(start(), tally(FINE, failed), OOM)
    assert isinstance(decision, Retry)
    assert "(cuda_oom) in step 7 (backward, GPU 3) on a micro-batch of 4 samples, 400 tokens (longest 100)" in (
        decision.message
    )
    elsewhere = Ballot.from_row(replace(failed, place="an unknown place").to_row())
    assert elsewhere.place is None


def test_an_evaluation_out_of_memory_shrinks_only_the_evaluation() -> None:
    decision = decide(start(), oom(4, 800), OOM, phase="eval")
    assert isinstance(decision, Retry)
    assert decision.state.train == start().train
    assert decision.state.evaluation.caps == Caps(max_samples=2, max_tokens=400)
    assert "in the evaluation after step 6" in decision.message


def test_host_memory_shrinks_too_and_says_host() -> None:
    decision = decide(start(), tally(failing(FailureKind.HOST_OOM, 4, 400), FINE), OOM)
    assert isinstance(decision, Retry)
    assert decision.state.train.caps == Caps(max_samples=2, max_tokens=200)
    assert decision.message.startswith("rank 0 ran out of host memory (RAM) (host_oom) in step 7")


def test_a_leak_is_named_and_not_chased_to_one() -> None:
    state = start(1024).finished("step", largest_tokens=100_000, longest_tokens=100)
    samples, cuts = 1024, 0
    while isinstance(decision := decide(state, oom(samples, samples * 90, step=6 + cuts), OOM), Retry):
        cuts += 1
        state = decision.state.finished("step", largest_tokens=samples * 40, longest_tokens=90)
        samples = state.train.caps.max_samples
    assert isinstance(decision, Stop)
    assert cuts == LEAK_FAILURES - 1
    assert samples == 1024 // 2**cuts
    assert decision.exit_code is ExitCode.OUT_OF_MEMORY
    assert "the 4th such failure in 100 steps without any growth in work: memory is leaking" in decision.message


def test_growth_in_work_and_time_clear_the_suspicion_of_a_leak() -> None:
    state = start(64).finished("step", largest_tokens=1000, longest_tokens=100)
    for step in range(LEAK_FAILURES - 1):
        decision = decide(state, oom(2, 200, step=step), OOM)
        assert isinstance(decision, Retry)
        state = decision.state
    assert isinstance(decide(state, oom(2, 200, step=LEAK_FAILURES), OOM), Stop)
    grown = state.finished("step", largest_tokens=1001, longest_tokens=100)
    assert isinstance(decide(grown, oom(2, 200, step=LEAK_FAILURES), OOM), Retry)
    assert isinstance(decide(state, oom(2, 200, step=LEAK_FAILURES + LEAK_WINDOW_STEPS), OOM), Retry)


def test_looking_for_the_size_that_fits_at_the_start_is_no_leak() -> None:
    state, samples = start(512), 512
    while samples > 1:
        decision = decide(state, oom(samples, samples * 100, step=0), OOM)
        assert isinstance(decision, Retry)
        state, samples = decision.state, decision.state.train.caps.max_samples
    assert state.retries == 9


def test_longer_samples_than_ever_are_growth() -> None:
    state = start(64).finished("step", largest_tokens=4000, longest_tokens=100)
    assert not state.train.has_fitted(samples=2, tokens=2000)
    assert state.train.has_fitted(samples=20, tokens=2000)


def test_a_size_mismatch_is_retried_once_unchanged_and_said_to_be_no_memory_fault() -> None:
    mismatch = tally(FINE, failing(FailureKind.SIZE_MISMATCH, 4, 400))
    first = decide(start(), mismatch, OOM)
    assert isinstance(first, Retry)
    assert first.state.train == start().train
    assert "rank 1 failed (size_mismatch) in step 7" in first.message
    assert "(not a memory fault); all ranks retry once, unchanged" in first.message
    second = decide(first.state, mismatch, OOM)
    assert isinstance(second, Stop)
    assert (second.reason, second.exit_code) == ("failure", ExitCode.CRASH)
    assert "it failed twice" in second.message


def test_a_size_mismatch_at_load_is_a_configuration_error() -> None:
    decision = decide(start(), tally(failing(FailureKind.SIZE_MISMATCH), FINE), OOM, phase="load")
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.USAGE
    assert "check that model, adapter and checkpoint belong together" in decision.message


def test_a_model_that_does_not_fit_is_not_retried() -> None:
    decision = decide(start(), tally(failing(FailureKind.CUDA_OOM), FINE), OOM, phase="load")
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.OUT_OF_MEMORY
    assert "not even the model fits" in decision.message


def test_a_save_out_of_memory_is_retried_once_and_cuts_nothing() -> None:
    saving = tally(failing(FailureKind.CUDA_OOM, 4, 400), FINE)
    first = decide(start(), saving, OOM, phase="save")
    assert isinstance(first, Retry)
    assert (first.state.train, first.state.evaluation) == (start().train, start().evaluation)
    assert "not a memory fault" not in first.message
    assert isinstance(decide(first.state, saving, OOM, phase="save"), Stop)


@pytest.mark.parametrize(
    ("kind", "reason", "code"),
    [
        (FailureKind.NOT_FINITE, "not_finite", ExitCode.DIVERGED),
        (FailureKind.STORAGE, "storage", ExitCode.STORAGE),
        (FailureKind.DATA, "failure", ExitCode.USAGE),
        (FailureKind.USER, "failure", ExitCode.USAGE),
        (FailureKind.KERNEL_LIMIT, "failure", ExitCode.CRASH),
        (FailureKind.DEVICE_ASSERT, "failure", ExitCode.CRASH),
        (FailureKind.NCCL_OOM, "out_of_memory", ExitCode.OUT_OF_MEMORY),
        (FailureKind.COMMUNICATION, "failure", ExitCode.CRASH),
    ],
)
def test_what_stops_at_once(kind: FailureKind, reason: str, code: ExitCode) -> None:
    decision = decide(start(), tally(FINE, failing(kind, 4, 400)), OOM)
    assert isinstance(decision, Stop)
    assert (decision.reason, decision.exit_code) == (reason, code)
    assert TRAITS[kind].advice in decision.message


def test_a_profile_that_can_not_retry_stops_and_names_those_that_can() -> None:
    decision = decide(start(), oom(4, 400), OOM, can_retry=False)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.OUT_OF_MEMORY
    assert "this profile can't retry in place, ddp and zero2 can" in decision.message


def test_memory_lost_inside_a_collective_stops() -> None:
    what = Classification(kind=FailureKind.CUDA_OOM, **vars(TRAITS[FailureKind.CUDA_OOM]))
    decision = decide(start(), tally(FINE, FINE.failing(what, samples=0, tokens=0, in_collective=True)), OOM)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.OUT_OF_MEMORY
    assert "a collective was left half-done" in decision.message


def test_a_secondary_failure_is_never_the_cause() -> None:
    peer, cause = failing(FailureKind.PEER), failing(FailureKind.CUDA_OOM, 4, 400)
    decision = decide(start(), tally(peer, cause), OOM)
    assert isinstance(decision, Stop)
    assert decision.exit_code is ExitCode.OUT_OF_MEMORY
    assert decision.message.startswith("rank 1 ran out of GPU memory")
    unknown = decide(start(), tally(peer, FINE), OOM)
    assert unknown == Stop(
        reason="failure",
        message="ranks [0] lost a peer and no rank knows why; look into the rank logs",
        exit_code=ExitCode.RANK_LOST,
    )


def test_peers_that_stopped_early_do_not_hinder_a_retry() -> None:
    early = failing(FailureKind.STOPPED_EARLY)
    decision = decide(start(), tally(early, failing(FailureKind.CUDA_OOM, 4, 400), early), OOM)
    assert isinstance(decision, Retry)
    assert decision.state.train.caps.max_samples == 2


def test_the_bound_on_retries_is_the_users() -> None:
    decision = decide(start(), oom(8, 800), OomConfig(max_retries_per_step=0))
    assert isinstance(decision, Stop)
    assert "it still fails after 0 retries (oom.max_retries_per_step)" in decision.message


def test_ambiguous_cudnn_errors_shrink_but_are_not_called_out_of_memory_at_the_floor() -> None:
    ambiguous = failing(FailureKind.LIBRARY_AMBIGUOUS, 4, 400)
    assert isinstance(decide(start(), tally(ambiguous), OOM), Retry)
    decision = decide(start(), tally(replace(ambiguous, samples=1)), OOM)
    assert isinstance(decision, Stop)
    assert (decision.reason, decision.exit_code) == ("failure", ExitCode.CRASH)


def test_what_stops_after_vote_two() -> None:
    fine = StepBallot(
        committed_step=6, caps_fingerprint=1, reduced=True, loss_sum=1.0, grad_norm=1.0, tokens=5, expected_tokens=10
    )
    assert decide_step(start(), StepTally(ballots=(fine, fine))) == Go(state=start())
    diverged = decide_step(start(), StepTally(ballots=(fine, replace(fine, loss_sum=float("nan")))))
    assert isinstance(diverged, Stop)
    assert (diverged.reason, diverged.exit_code) == ("not_finite", ExitCode.DIVERGED)
    assert diverged.message.startswith("step 7: loss or gradient norm is not finite on ranks [1]")
    broken = decide_step(start(), StepTally(ballots=(replace(fine, reduced=False), fine)))
    assert isinstance(broken, Stop)
    assert "could not be reduced on ranks [0]" in broken.message


KINDS = st.sampled_from(list(FailureKind))
CAPS = st.builds(Caps, max_samples=st.integers(1, 4096), max_tokens=st.none() | st.integers(1, 10**6))


@given(
    caps=CAPS,
    fitting_samples=st.integers(0, 64),
    length=st.integers(1, 5000),
    fitted=st.integers(0, 10**6),
    limit=st.integers(0, 20),
    phase=st.sampled_from(["step", "eval"]),
)
def test_a_machine_of_any_size_ends_in_success_or_in_one_stop(
    caps: Caps, fitting_samples: int, length: int, fitted: int, limit: int, phase: str
) -> None:
    """A device that holds `fitting_samples` samples: the policy finds a fitting cap or stops, within its bound."""
    config = OomConfig(max_retries_per_step=limit)
    state = PolicyState.start(train=caps, evaluation=caps)
    state = state.finished(phase, largest_tokens=fitted, longest_tokens=length)  # type: ignore[arg-type]
    seen = [state.side(phase).caps]  # type: ignore[arg-type]
    for _ in range(limit + 1):
        now = seen[-1]
        by_tokens = now.max_samples if now.max_tokens is None else max(1, now.max_tokens // length)
        held = min(now.max_samples, by_tokens)
        if held <= fitting_samples:
            return
        decision = decide(state, oom(held, held * length), config, phase=phase)  # type: ignore[arg-type]
        if isinstance(decision, Stop):
            assert decision.reason == "out_of_memory"
            assert held == 1 or state.retries == limit or len(state.side(phase).unexplained_at) >= LEAK_FAILURES - 1  # type: ignore[arg-type]
            return
        assert isinstance(decision, Retry)
        state = decision.state
        seen.append(state.side(phase).caps)  # type: ignore[arg-type]
        assert seen[-1].max_samples >= 1
        assert seen[-1].max_tokens is None or seen[-1].max_tokens >= 1
        assert seen[-1].max_samples < now.max_samples or held == 1
    raise AssertionError(f"more than {limit} retries")


@given(
    ballots=st.lists(
        st.one_of(
            st.just(FINE),
            st.builds(failing, KINDS, st.integers(0, 64), st.integers(0, 10**5)),
        ),
        min_size=1,
        max_size=8,
    ),
    phase=st.sampled_from(["load", "step", "eval", "save"]),
    can_retry=st.booleans(),
)
def test_every_vote_has_a_decision_that_never_grows_the_caps(
    ballots: list[Ballot], phase: str, can_retry: bool
) -> None:
    vote = tally(*ballots)
    decision = decide(start(), vote, OOM, phase=phase, can_retry=can_retry)  # type: ignore[arg-type]
    assert decision == decide(start(), vote, OOM, phase=phase, can_retry=can_retry)  # type: ignore[arg-type]
    assert isinstance(decision, Go) == (not vote.failed)
    if isinstance(decision, Retry):
        assert can_retry
        assert phase != "load"
        assert decision.state.train.caps.max_samples <= start().train.caps.max_samples
        assert phase == "eval" or decision.state.evaluation == start().evaluation
        assert phase == "step" or decision.state.train == start().train
    if isinstance(decision, Stop):
        assert decision.exit_code is not ExitCode.OK
        assert decision.message
