"""One global batch on all ranks, taken again until all have done it, then reduced: the two votes of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from allranks.caps import Caps
from allranks.config.schema import OomConfig
from allranks.coordinator.agreement import ControlPlane, ControlPlaneLost, vote_two
from allranks.coordinator.attempt import AttemptKey, Failed, FailureFlag, run_attempt
from allranks.coordinator.ballots import Ballot, StepBallot, StepVerdict, Tally, fingerprint, tally_one
from allranks.coordinator.failure import classify
from allranks.coordinator.policy import Go, Retry, Stop, decide, decide_step
from allranks.coordinator.policy_state import PolicyState
from allranks.errors import ExitCode, StopTraining, UserError
from allranks.library.accounts import LOG, Accounts, Place
from allranks.library.replica import Replica
from allranks.library.samples import MicroBatch

_NUMBERS = itertools.count(1)
"""Of the coordinators of this process; all ranks make them in the same order, so a number has one meaning."""

Work = Callable[[MicroBatch, Place], tuple[torch.Tensor, int]]
"""Forward and backward of one micro-batch; its loss, detached, and its targets."""


@dataclass(kw_only=True)
class _Share:
    """What one rank has done in an attempt; grows with each micro-step whose gradients are in the buffer.

    Attributes:
        losses: scalars on the device; not yet looked at.
        samples: samples.
        targets: targets.
        largest_tokens: size of the largest micro-batch, padding included.
        longest_tokens: size of the longest sample.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    samples: int = 0
    targets: int = 0
    largest_tokens: int = 0
    longest_tokens: int = 0

    def add(self, micro_batch: MicroBatch, loss: torch.Tensor, targets: int) -> None:
        self.losses.append(loss)
        self.samples += len(micro_batch.positions)
        self.targets += targets
        self.largest_tokens = max(self.largest_tokens, micro_batch.tokens)
        self.longest_tokens = max(self.longest_tokens, micro_batch.longest)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What all ranks read from vote 1 beside the ballots.

    Attributes:
        samples: of the global batch, as the ranks were given them.
        targets: of the global batch.
        largest_tokens: of any rank's micro-batches.
        longest_tokens: of any rank's samples.
    """

    samples: int
    targets: int
    largest_tokens: int
    longest_tokens: int


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A global batch on which all ranks agree; its gradients are with the parameters.

    Attributes:
        share: sum of this rank's own losses.
        loss: sum of all ranks' losses, divided.
        grad_norm: of the reduced gradient, before clipping.
        overflowed: fp16 gradients are not finite, so the scaler is going to skip the update.
        samples: of the global batch.
        targets: of the global batch.
        retries: times it was taken again.
    """

    share: float
    loss: float
    grad_norm: float
    overflowed: bool
    samples: int
    targets: int
    retries: int


class Together:
    """The votes of one training loop. All ranks make it at the same place.

    Attributes:
        policy: caps and what is known about them; the same on all ranks.
        committed_step: optimizer steps made; the same on all ranks.
        replica: model and gradients of this rank.
    """

    def __init__(
        self, accelerator: Any, replica: Replica, *, caps: Caps, max_retries: int, record_dir: str | Path | None
    ) -> None:
        _require("max_samples", caps.max_samples, at_least=1)
        if caps.max_tokens is not None:
            _require("max_tokens", caps.max_tokens, at_least=1)
        _require("max_retries", max_retries, at_least=0)
        self.replica = replica
        self.policy = PolicyState.start(train=caps, evaluation=caps)
        self.committed_step = 0
        self._oom = OomConfig(max_retries_per_step=max_retries)
        scaler = accelerator.scaler
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self._scaler is not None:
            # It comes to life with its first loss, and this rank may have no sample in the first step.
            self._scaler.scale(torch.zeros((), device=replica.device))
        self._rank: int = accelerator.process_index
        self._launch = next(_NUMBERS)
        self._control = ControlPlane(rank=self._rank, world_size=accelerator.num_processes)
        self._flag = FailureFlag(world_size=accelerator.num_processes)
        self._accounts = Accounts(
            rank=self._rank,
            world_size=accelerator.num_processes,
            folder=None if record_dir is None else Path(record_dir),
        )

    def reduced(
        self, n_samples: int, cut: Callable[[Caps], list[MicroBatch]], work: Work, divisor: float | None = None
    ) -> Reduced:
        """Work through this rank's samples on all ranks until all have done it, then reduce the gradients.

        Args:
            n_samples: samples of this rank; 0 where it has none.
            cut: all of them in micro-batches under some caps.
            work: forward and backward of one micro-batch.
            divisor: of losses and gradients, after they were summed over the ranks; None: the number of targets.

        Raises:
            StopTraining: on all ranks, which agreed to stop.
            ControlPlaneLost: a rank is gone.
        """
        share, asked, retries = self._agreed(n_samples, cut, work)
        by = float(asked.targets) if divisor is None else divisor
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        outcome = run_attempt(partial(self._reduce, share, by), on_failure=_log)
        own, norm = (math.nan, math.nan) if isinstance(outcome, Failed) else outcome.value
        ballot = StepBallot(
            committed_step=self.committed_step,
            caps_fingerprint=fingerprint(self.policy.train.caps),
            reduced=not isinstance(outcome, Failed),
            loss_sum=own / by,
            grad_norm=norm / scale,
            # Samples, not targets: how many there must be is known before any of them was touched.
            tokens=share.samples,
            expected_tokens=asked.samples,
        )
        with _with_peers(self.committed_step + 1):
            vote = vote_two(self._control, ballot)
        overflowed = self._scaler is not None and math.isfinite(vote.loss_sum) and not math.isfinite(norm)
        if vote.verdict is not StepVerdict.STEP and not (vote.verdict is StepVerdict.NOT_FINITE and overflowed):
            stop = decide_step(self.policy, vote)
            assert isinstance(stop, Stop)
            raise stop.error()
        self.policy = self.policy.finished(
            "step", largest_tokens=asked.largest_tokens, longest_tokens=asked.longest_tokens
        )
        return Reduced(
            share=own,
            loss=vote.loss_sum,
            grad_norm=vote.ballots[0].grad_norm,
            overflowed=overflowed,
            samples=asked.samples,
            targets=asked.targets,
            retries=retries,
        )

    def updated(self, update: Callable[[], None]) -> None:
        """Make the optimizer step on all ranks, and let all of them know if one of them could not.

        Raises:
            StopTraining: on all ranks: the update failed on one of them.
            ControlPlaneLost: a rank is gone.
        """
        self.committed()
        outcome = run_attempt(update, on_failure=_log)
        failed = isinstance(outcome, Failed)
        if isinstance(outcome, Failed):
            self._accounts.leave(outcome, Place(key=self._key(self.committed_step, 0), phase="update"))
        with _with_peers(self.committed_step):
            rows = self._control.exchange([float(failed)], topic=3)
        ranks = [rank for rank, row in enumerate(rows) if row[0]]
        if ranks:
            words = self._accounts.of(ranks[0], self._key(self.committed_step, 0))
            raise StopTraining(
                "failure",
                f"step {self.committed_step}: the optimizer step failed on ranks {ranks}, so the ranks hold different "
                f"weights now; go back to your last checkpoint\n{words}".rstrip(),
                ExitCode.CRASH,
            )

    def committed(self) -> None:
        """Go on to the next step; where the optimizer step is another's to make."""
        self.committed_step += 1

    def close(self) -> None:
        """Give thread and process group back, on all ranks."""
        self._flag.close()
        self._control.close()

    def _key(self, step: int, attempt: int) -> AttemptKey:
        return AttemptKey(launch=self._launch, generation=0, step=step, phase="step", attempt=attempt)

    def _agreed(
        self, n_samples: int, cut: Callable[[Caps], list[MicroBatch]], work: Work
    ) -> tuple[_Share, _Asked, int]:
        """Vote 1, as often as it takes."""
        attempt = 0
        while True:
            place = Place(key=self._key(self.committed_step + 1, attempt))
            share = _Share()
            outcome = run_attempt(partial(self._part, place, share, cut, work), on_failure=_log)
            ballot = Ballot(committed_step=self.committed_step, caps_fingerprint=fingerprint(self.policy.train.caps))
            if isinstance(outcome, Failed):
                if not outcome.classification.secondary:
                    self._flag.raise_flag(place.key)
                    self._accounts.leave(outcome, place)
                ballot = ballot.failing(outcome.classification, samples=len(place.positions), tokens=place.tokens)
            tally, asked = self._vote_one(ballot, n_samples, share)
            decision = decide(self.policy, tally, self._oom)
            if isinstance(decision, Stop):
                self._stop(decision, tally, place.key)
            if isinstance(decision, Go):
                if asked.targets == 0:
                    raise StopTraining(
                        "failure",
                        f"step {place.key.step}: the global batch has {asked.samples} samples and no target\n"
                        "    fix: leave it out on all ranks, or look at why its samples have none (labels that are all "
                        "-100, for one)",
                        ExitCode.USAGE,
                    )
                return share, asked, attempt
            assert isinstance(decision, Retry)
            self._retry(decision)
            attempt += 1

    def _part(self, place: Place, share: _Share, cut: Callable[[Caps], list[MicroBatch]], work: Work) -> None:
        """This rank's part of an attempt."""
        self.replica.begin()
        for micro_step, micro_batch in enumerate(cut(self.policy.train.caps)):
            if micro_step > 0:
                self._flag.leave_if_raised(place.key)
            place.phase, place.micro_step, place.micro_batch = "forward", micro_step, micro_batch
            with self._own_randomness(place), self.replica.micro_step():
                loss, targets = work(micro_batch, place)
            share.add(micro_batch, loss, targets)
        place.phase, place.micro_step, place.micro_batch = "end", None, None

    @contextmanager
    def _own_randomness(self, place: Place) -> Iterator[None]:
        """Dropout by step and micro-step; outside, torch's generators stay where a loop without retries has them."""
        device = self.replica.device
        kind = {} if device.type == "cpu" else {"device_type": device.type}
        with torch.random.fork_rng(devices=[device] if kind else [], **kind):
            torch.manual_seed(fingerprint(torch.initial_seed(), place.key.step, place.micro_step, self._rank))
            yield

    def _vote_one(self, ballot: Ballot, n_samples: int, share: _Share) -> tuple[Tally, _Asked]:
        """Vote 1 with the sizes of this rank's part in the same exchange."""
        row = ballot.to_row()
        width = len(row)
        row += [n_samples, share.targets, share.largest_tokens, share.longest_tokens]
        with _with_peers(self.committed_step + 1):
            rows = self._control.exchange(row, topic=1)
        sizes = [list(map(int, other[width:])) for other in rows]
        asked = _Asked(
            samples=sum(size[0] for size in sizes),
            targets=sum(size[1] for size in sizes),
            largest_tokens=max(size[2] for size in sizes),
            longest_tokens=max(size[3] for size in sizes),
        )
        return tally_one([Ballot.from_row(other[:width]) for other in rows]), asked

    def _reduce(self, share: _Share, divisor: float) -> tuple[float, float]:
        """This rank's loss and the norm of the reduced gradient: the one point of a step that waits for the GPU."""
        norm = self.replica.reduce(divisor)
        self.replica.hand_over()
        return math.fsum(torch.stack(share.losses).tolist()) if share.losses else 0.0, float(norm)

    def _retry(self, decision: Retry) -> None:
        self.policy = decision.state
        if self._rank == 0:
            LOG.warning("%s", decision.message)

    def _stop(self, stop: Stop, tally: Tally, key: AttemptKey) -> NoReturn:
        """Raise the stop with the failed rank's own words, where they say more than the stop does."""
        cause, rank = tally.cause, tally.cause_rank
        if cause is None or rank is None or cause.memory:
            raise stop.error()
        raise replace(stop, message=f"{stop.message}\n{self._accounts.of(rank, key)}".rstrip()).error()


def _require(name: str, value: int, *, at_least: int) -> None:
    if value < at_least:
        raise UserError(f"{name}={value}: must be a whole number from {at_least}")


@contextmanager
def _with_peers(step: int) -> Iterator[None]:
    """Around a vote of `step`: one of the two ways to lose a peer is a fault of the loop around it."""
    try:
        yield
    except ControlPlaneLost as error:
        raise ControlPlaneLost(
            f"step {step}: {error}\n    fix: see what the other ranks said last: one has died, or has left the loop "
            "while this one goes on; all ranks must make as many steps, a rank without samples with an empty batch"
        ) from error


def _log(error: BaseException) -> None:
    """On this rank's stderr, with its traceback where the message alone does not say where to look."""
    what = classify(error)
    if not (what.memory or what.secondary):
        LOG.error("a step failed: %s", error, exc_info=error)
