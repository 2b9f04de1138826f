"""The way out when ranks sit in a collective that a failed rank will never enter.

A rank that failed inside such a collective, or beside peers that are in one, can't be waited for in a vote: its
peers' main threads hang. Each rank has a watcher, a thread with a store client of its own. It sees the failed
rank's declaration, acknowledges it, and when all ranks have, or the deadline passes, ends its process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from allranks.coordinator.attempt import Store

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What the watchers of all ranks read.

    Attributes:
        message: the failed rank's own words, for the verdict.
        silent_ranks: ranks that did not acknowledge before the deadline.
    """

    message: str
    silent_ranks: tuple[int, ...]


class Watcher:
    """Watches for a declared failure of this launch; with one rank there is nobody to watch for.

    Args:
        store: the default group's store; a client of its own is made of it. None with one rank.
        key: prefix of the keys, unique to the launch.
        deadline_s: longest time between a declaration and the end of the process.
        leave: called in the watcher's thread, on every rank; must end the process.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: Store | None,
        key: str,
        deadline_s: float,
        leave: Callable[[Declared], None],
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._key = f"{key}/damaged"
        self._deadline_s = deadline_s
        self._leave = leave
        self._closed = threading.Event()
        self._declared = threading.Event()
        self._main = store
        if store is not None and world_size > 1:
            threading.Thread(target=self._watch, args=(store.clone(),), daemon=True, name="watcher").start()

    def declare(self, message: str) -> NoReturn:
        """Say that this rank failed where peers can't be reached by a vote. Does not return: all ranks leave."""
        if self._main is None or self._world_size == 1:
            self._leave(Declared(message=message, silent_ranks=()))
        else:
            self._main.set(self._key, message)
            time.sleep(self._deadline_s * 2)  # the watcher's thread ends the process meanwhile
        raise AssertionError("the watcher left this process running")

    def give_way(self) -> None:
        """Call it when the peers are gone: if one had declared a failure, the watcher is about to end this process."""
        if self._declared.is_set():
            time.sleep(self._deadline_s * 2)  # the watcher's thread ends the process meanwhile

    def close(self) -> None:
        """Stop watching: the run is over and the store is about to go."""
        self._closed.set()

    def _watch(self, store: Store) -> None:
        try:
            while not store.check([self._key]):
                if self._closed.wait(_POLL_S):
                    return
            self._declared.set()
            message = bytes(store.get(self._key)).decode()
        except RuntimeError:
            return  # the store went with rank 0: the vote, or the agent that started the ranks, will notice
        self._leave(Declared(message=message, silent_ranks=self._gather(store)))

    def _gather(self, store: Store) -> tuple[int, ...]:
        """Acknowledge, then wait for the others; the ranks that stayed silent."""
        waiting = set(range(self._world_size))
        until = time.monotonic() + self._deadline_s
        try:
            store.set(f"{self._key}/{self._rank}", "1")
            while waiting and time.monotonic() < until:
                waiting = {rank for rank in waiting if not store.check([f"{self._key}/{rank}"])}
                if waiting:
                    time.sleep(_POLL_S)  # waiting for the keys would end in an error if one never comes
        except RuntimeError:
            return ()  # rank 0 has heard all of them, and left with the store
        return tuple(sorted(waiting))
