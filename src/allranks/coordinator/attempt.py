"""One rank's part of an attempt under guard, and the flag by which peers learn of a failure early."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Generic, Literal, Protocol, Self, TypeVar, cast

from allranks.coordinator.agreement import ControlPlaneLost
from allranks.coordinator.failure import MESSAGE_LIMIT, Classification, StoppedEarly, classify, release
from allranks.coordinator.kinds import Severity
from allranks.errors import StopTraining

T = TypeVar("T")

AttemptPhase = Literal["load", "step", "eval", "save"]
"""What is tried together: loading, a training step, an evaluation, a save."""


@dataclass(frozen=True, kw_only=True)
class AttemptKey:
    """The name of one attempt, the same on all ranks.

    Attributes:
        launch: number of the launch in this run directory, from 1.
        generation: life of the data-plane groups within the launch, from 0.
        step: optimizer step that is tried, from 1.
        phase: what is tried.
        attempt: number of the attempt, from 0.
    """

    launch: int
    generation: int
    step: int
    phase: AttemptPhase
    attempt: int

    def __str__(self) -> str:
        return f"L{self.launch}-g{self.generation}-s{self.step}-{self.phase}-a{self.attempt}"


@dataclass(frozen=True, kw_only=True)
class Success(Generic[T]):
    """The work was done; nothing is committed yet.

    Attributes:
        value: what it returned.
    """

    value: T


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The work raised, and nothing of it is held any more.

    Attributes:
        classification: what went wrong.
        message: the exception's class and text, cut at `MESSAGE_LIMIT` characters.
    """

    classification: Classification
    message: str


def run_attempt(
    work: Callable[[], T], on_failure: Callable[[BaseException], None] | None = None
) -> Success[T] | Failed:
    """Run this rank's part of an attempt and let go of everything it held if it fails.

    `work` keeps its tensors in its own variables: what the caller or a closure holds stays alive.
    KeyboardInterrupt and SystemExit pass, and so do StopTraining and ControlPlaneLost: on those the
    ranks have agreed already, or can't agree any more.

    Args:
        work: the part of this rank.
        on_failure: sees the exception while it still has its traceback, to log it; must not keep it.
    """
    failure: BaseException | None = None
    try:
        return Success(value=work())
    except (StopTraining, ControlPlaneLost):
        raise
    except Exception as exc:  # whatever it is, the peers must hear of it by the vote: `classify` says what it was
        failure = exc
    # Only here, behind the except block, does the interpreter no longer hold the traceback: its frames hold
    # the activations that must go before the retry.
    classification = classify(failure)
    # torch appends the C++ stack to some texts; the log has it.
    message = f"{type(failure).__name__}: {failure}".partition("\nException raised from ")[0][:MESSAGE_LIMIT]
    if on_failure is not None:
        on_failure(failure)
    if not release(failure):
        classification = replace(classification, sticky=True, severity=Severity.RESPAWN)
    return Failed(classification=classification, message=message)


class Store(Protocol):
    """What flag and watcher need of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """A value; waits for it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there; does not wait for them."""

    def clone(self) -> Self:
        """Another client of the same store."""


@dataclass(eq=False)
class _Request:
    key: str
    raises: bool
    answered: threading.Event


class FailureFlag:
    """Lets peers leave an attempt early when one rank has failed; the vote stays the truth.

    The flag is a key in the TCPStore of the default group, so it works on one node and on several.
    A thread with a store client of its own does the asking: a `wait` elsewhere on the shared client would
    block it, and a frozen store would block its asker without a time-out. A glance that gets no answer in
    time says "no", and the answer counts at the next glance. With one rank all of this does nothing.
    """

    GLANCE_S = 0.001
    """Longest that `is_raised` waits."""
    RAISE_S = 1.0
    """Longest that `raise_flag` waits."""

    def __init__(self, *, world_size: int, store: Store | None = None) -> None:
        """Connect a client of its own to `store`, by default that of the default group."""
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._raised: set[str] = set()
        self._lost = False
        self._glance: _Request | None = None
        self._alone = world_size == 1
        if not self._alone:
            client = (store or _default_store()).clone()
            threading.Thread(target=self._serve, args=(client,), daemon=True, name="failure-flag").start()

    def raise_flag(self, key: AttemptKey) -> None:
        """Tell the peers that this rank failed in the attempt; waits at most `RAISE_S`."""
        self._ask(str(key), raises=True).answered.wait(self.RAISE_S)

    def is_raised(self, key: AttemptKey) -> bool:
        """Whether a rank has failed in this attempt, or the store is gone; waits at most `GLANCE_S`."""
        if self._alone:
            return False
        if self._glance is None or self._glance.answered.is_set():
            self._glance = self._ask(str(key), raises=False)
        self._glance.answered.wait(self.GLANCE_S)
        return self._lost or str(key) in self._raised

    def leave_if_raised(self, key: AttemptKey) -> None:
        """Call between micro-steps.

        Raises:
            StoppedEarly: a peer has failed in this attempt.
        """
        if self.is_raised(key):
            raise StoppedEarly("a peer failed in this attempt")

    def close(self) -> None:
        """End the thread, once it is free."""
        self._requests.put(None)

    def _ask(self, key: str, *, raises: bool) -> _Request:
        request = _Request(key, raises, threading.Event())
        if self._alone:
            request.answered.set()
        else:
            self._requests.put(request)
        return request

    def _serve(self, store: Store) -> None:
        while (request := self._requests.get()) is not None:
            try:
                if request.raises:
                    store.set(request.key, "1")
                elif store.check([request.key]):
                    self._raised.add(request.key)
            except RuntimeError:
                # The store lives with rank 0: the vote will say that it is lost.
                self._lost = True
            request.answered.set()


def _default_store() -> Store:
    from torch.distributed import distributed_c10d

    return cast(Store, distributed_c10d._get_default_store())
