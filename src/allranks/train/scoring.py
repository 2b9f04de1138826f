"""What one model makes of a set: loss, and right answers or classes; in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from allranks.batches.split import Cost, split
from allranks.caps import Caps
from allranks.coordinator.attempt import Success, run_attempt
from allranks.data.collate import pad_batch
from allranks.data.tokens import TokenSet
from allranks.errors import ExitCode, StopTraining
from allranks.train.answers import ShortAnswer, greedy_answers
from allranks.train.loss import split_off_targets, weighted_loss
from allranks.train.process import Rank
from allranks.train.together import print_traceback

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one model makes of the set.

    Attributes:
        loss: mean over all target tokens (causal-lm) or samples (sequence-classification).
        accuracy: share of the samples whose class is right; None for causal-lm.
        exact_match: share of the short answers that are right; None without any.
    """

    loss: float
    accuracy: float | None
    exact_match: float | None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Everything that is the same for both models.

    Attributes:
        model: the PEFT model, in evaluation mode, its adapter on or off.
        rank: the only one.
        tokenizer: of the model, with a padding token.
        data: the samples.
        count: the first so many samples of `data`.
        answers: to be compared word for word.
        classes: the model is a classifier.
        caps: of a micro-batch.
        cost: of a sample.
        progress: told how far it is.
    """

    model: Any
    rank: Rank
    tokenizer: Any
    data: TokenSet
    count: int
    answers: tuple[ShortAnswer, ...] | None
    classes: bool
    caps: Caps
    cost: Cost
    progress: Callable[[str], None]

    def score(self, name: str) -> Score:
        """Every sample once through the model as it is now; `name` stands in the progress line.

        Raises:
            StopTraining: not even one sample fits into memory, or a library failed.
        """
        lengths = self.data.lengths[: self.count].tolist()
        parts = self._over(lengths, self._losses, f"{name}: loss")
        counted = sum(samples for samples, _, _ in parts)
        if counted != self.count:
            raise AssertionError(f"{counted} samples evaluated of {self.count}")
        exact = None
        if self.answers:
            lengths = [len(answer.prompt) + len(answer.ids) for answer in self.answers]
            exact = sum(self._over(lengths, self._right, f"{name}: answers")) / len(self.answers)
        return Score(
            loss=sum(loss for _, loss, _ in parts) / int(self.data.n_targets[: self.count].sum()),
            accuracy=sum(right for _, _, right in parts) / self.count if self.classes else None,
            exact_match=exact,
        )

    def _over(self, lengths: list[int], work: Callable[[tuple[int, ...]], T], what: str) -> list[T]:
        """`work` on every micro-batch; one that does not fit is halved."""
        (batches,) = split(lengths, world_size=1, caps=self.caps, lockstep=False, cost=self.cost)
        results: list[T] = []
        waiting, done = list(reversed(batches)), 0
        while waiting:
            ids = waiting.pop()
            outcome = run_attempt(partial(self._guarded, work, ids), on_failure=print_traceback)
            if isinstance(outcome, Success):
                results.append(outcome.value)
                done += len(ids)
                self.progress(f"{what} {done:,} of {len(lengths):,} samples")
            elif outcome.classification.memory and len(ids) > 1:
                waiting += [ids[len(ids) // 2 :], ids[: len(ids) // 2]]
            elif outcome.classification.memory:
                words = f"one sample of {lengths[ids[0]]} tokens does not fit: {outcome.message}"
                raise StopTraining("out_of_memory", words, ExitCode.OUT_OF_MEMORY)
            else:
                raise StopTraining("failure", outcome.message, ExitCode.CRASH)
        return results

    def _guarded(self, work: Callable[[tuple[int, ...]], T], ids: tuple[int, ...]) -> T:
        with torch.no_grad(), self.rank.accelerator.autocast():
            return work(ids)

    def _losses(self, ids: tuple[int, ...]) -> tuple[int, float, int]:
        """Samples, summed loss, and samples of the right class."""
        batch = pad_batch([self.data[i] for i in ids], self.tokenizer.pad_token_id)
        inputs, targets = split_off_targets(batch, [1.0] * len(ids), self.rank.device)
        logits = self.model(**inputs).logits
        loss = weighted_loss(logits, targets).double()
        right = int((logits.argmax(-1).cpu() == batch["labels"]).sum()) if self.classes else 0
        return len(ids), float(loss), right

    def _right(self, positions: tuple[int, ...]) -> int:
        assert self.answers is not None
        asked = [self.answers[i] for i in positions]
        given = greedy_answers(self.model.get_base_model(), self.tokenizer, asked, self.rank.device)
        return sum(answer.text(self.tokenizer) == text for answer, text in zip(asked, given, strict=True))
