"""Which ranks still move: judged by heartbeats in the store, never by the time-out of a collective.

The main thread says where it is (`Pulse`). A thread of each rank publishes about once a second whether the main
thread has moved, and reads what the others publish. Who does not move for `hang_timeout_s` and waits for nobody is
hung, and so is who publishes nothing for that long. Then every rank that still can writes its stacks and calls
`on_hang`.

A main thread has moved if it beat or if its Python stack is another than before. So a long compilation, a slow save
or a slow rank moves, although nobody beats. What can't be told from a hang is one call into C that takes longer than
`hang_timeout_s`. What moves for ever is a loop in Python that polls for something which never comes.

No clock of another host is read, and time in which this process itself was stopped does not count.
"""

from __future__ import annotations

import faulthandler
import json
import platform
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import psutil

from allranks.coordinator.attempt import Store
from allranks.coordinator.heartbeats import Heartbeat, Hung, Place, Pulse, Sighting, find_hung, place_of

_PUBLISH_S = 1.0
_LOOKS_PER_TIMEOUT = 8
_STACKS_PER_LOOK = 4
"""A main thread that is mostly inside one call of its loop shows the same stack at two looks out of five."""
_TOLD_POLL_S = 0.05
_ANSWER_S = 3.0
"""How long ranks that know of a hang wait for the others to have heard of it: three times `_PUBLISH_S`."""
_WRITE_S = 2.0
"""Longest that writing the stacks may take; the disk may be what hangs."""
_CLOSE_S = 1.0
_SAME_PROCESS_S = 1.0
"""psutil adds the time since boot to the boot time, which the kernel may shift when it sets its clock."""


class LivenessStore(Store, Protocol):
    """What liveness needs of a `torch.distributed.Store`."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Store a value if the key has the expected one, or with "" if there is no key; the value there afterwards."""


class Liveness:
    """Watches the ranks from now on; with one rank, that rank.

    Args:
        store: the default group's store; a client of its own is made of it. With one rank, a `HashStore`.
        key: prefix of the keys, unique to launch and generation.
        hang_timeout_s: how long a rank may show no progress.
        stacks_dir: folder for the stacks, unique to launch and generation; made when it is needed.
        on_hang: called once on every rank that still can, in a thread of liveness; may end the process.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: LivenessStore,
        key: str,
        pulse: Pulse,
        hang_timeout_s: float,
        stacks_dir: Path,
        on_hang: Callable[[Hung], None],
    ) -> None:
        self._rank = rank
        self._key = f"{key}/alive"
        self._pulse = pulse
        self._hang_timeout_s = hang_timeout_s
        self._stacks_dir = stacks_dir
        self._on_hang = on_hang
        self._interval_s = min(_PUBLISH_S, hang_timeout_s / _LOOKS_PER_TIMEOUT)
        self._host = platform.node()
        self._process = psutil.Process()
        self._started = self._process.create_time()
        self._seen = [Sighting() for _ in range(world_size)]
        self._number = self._progress = 0
        self._last_look: tuple[int, int] | None = None
        self._answers = 0
        self._store_lost = False
        self._closed, self._done = threading.Event(), threading.Event()
        self._found, self._concluded = threading.Event(), threading.Event()
        self._concluding = threading.Lock()
        self._threads = [
            threading.Thread(target=self._watch, args=(store.clone(),), daemon=True, name="liveness"),
            threading.Thread(target=self._guard, daemon=True, name="liveness-guard"),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop watching and tell the peers. Call it before the last thing that all ranks do together."""
        self._closed.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)

    def give_way(self) -> None:
        """Call it on the main thread when it has lost its peers: if a hang was found, `on_hang` comes first.

        A peer may end a moment earlier and tear the connections down, so that the loss is no news. Returns at once
        if no hang was found; else when `on_hang` has returned, if it does, and after seconds in any case.
        """
        if self._found.is_set():
            self._concluded.wait(_WRITE_S + _ANSWER_S + 2 * self._interval_s)

    def kill_not_answering(self, hung: Hung) -> tuple[int, ...]:
        """End with SIGKILL the ranks of this host that don't answer or are stopped: its lowest rank that answers does.

        The others end themselves, in their `on_hang`. Nobody has to wait until a stopped process heeds SIGTERM.

        Returns:
            The ranks whose processes were killed.
        """
        killed = []
        for rank, process in self._neighbours(hung):
            with suppress(psutil.Error):
                process.kill()
                killed.append(rank)
        return tuple(killed)

    def _watch(self, store: LivenessStore) -> None:
        """Thread: publish and look, until something is found or this rank leaves."""
        hung = None
        try:
            hung = self._look_until_hung(store)
        except RuntimeError:
            self._store_lost = True  # it went with rank 0: the vote, or the agent that started the ranks, will notice
        if hung is not None:
            self._found.set()
            self._write_stacks(hung)
            self._gather(store, hung)
        self._done.set()
        if hung is not None:
            self._conclude(hung)

    def _look_until_hung(self, store: LivenessStore) -> Hung | None:
        looked = time.monotonic()
        while True:
            before, looked = looked, time.monotonic()
            # More has passed if this process was stopped or the store gave no answer: nobody else's fault.
            hung = self._look(store, min(looked - before, 2 * self._interval_s))
            self._answers += 1
            if hung is not None:
                return hung
            for _ in range(_STACKS_PER_LOOK):
                self._notice()
                if self._closed.wait(self._interval_s / _STACKS_PER_LOOK):
                    self._publish(store, left=True)
                    return None

    def _look(self, store: LivenessStore, passed_s: float) -> Hung | None:
        self._publish(store)
        declared = f"{self._key}/hung"
        if store.check([declared]):
            return _read_hung(store.get(declared))
        for rank, sighting in enumerate(self._seen):
            key = f"{self._key}/{rank}"
            known = sighting.heartbeat is not None or store.check([key])
            sighting.look(Heartbeat(**json.loads(bytes(store.get(key)))) if known else None, passed_s)
        hung = find_hung(self._seen, self._hang_timeout_s, self._stacks_dir)
        if hung is None:
            return None
        # Who comes second reads what the first one found: all ranks are told the same.
        return _read_hung(store.compare_set(declared, "", json.dumps(asdict(hung), default=str)))

    def _notice(self) -> Place:
        """See whether the main thread has moved since the last look at it."""
        place = self._pulse.place()
        look = (place.beats, _main_stack())
        self._progress += look != self._last_look
        self._last_look = look
        return place

    def _publish(self, store: LivenessStore, *, left: bool = False) -> None:
        # From one look: who has just stopped to wait must not be published with the progress of its wait.
        place = self._notice()
        self._number += 1
        heartbeat = Heartbeat(
            number=self._number,
            progress=self._progress,
            where=place.where,
            waiting=place.waiting,
            host=self._host,
            pid=self._process.pid,
            started=self._started,
            left=left,
        )
        store.set(f"{self._key}/{self._rank}", json.dumps(asdict(heartbeat)))

    def _guard(self) -> None:
        """Thread: see that the store answers. A call to one whose process is stopped never returns."""
        answers, unanswered_s, looked = -1, 0.0, time.monotonic()
        while unanswered_s < self._hang_timeout_s and not self._done.wait(self._interval_s):
            before, looked = looked, time.monotonic()
            unanswered_s += min(looked - before, 2 * self._interval_s)
            if answers != self._answers:
                answers, unanswered_s = self._answers, 0.0
        # A peer that saw it a little earlier may have killed rank 0: then the call has ended with an error.
        enough_s = self._hang_timeout_s / 2 if self._store_lost else self._hang_timeout_s
        if unanswered_s < enough_s or self._closed.is_set():
            return
        self._found.set()
        hung = Hung(
            ranks=(0,),
            not_answering=(0,),
            where=(place_of(self._seen[0]),),
            for_s=unanswered_s,
            stacks=self._stacks_dir,
        )
        self._write_stacks(hung)
        # The others can't be asked. Each finds it within this time, and what one of them does next hurries none.
        time.sleep(2 * self._interval_s)
        self._conclude(hung)

    def _gather(self, store: LivenessStore, hung: Hung) -> None:
        """Wait until all that answer know of it: rank 0 takes the store along when it leaves."""
        waiting = {rank for rank, one in enumerate(self._seen) if not one.left} - set(hung.not_answering)
        until = time.monotonic() + _ANSWER_S
        with suppress(RuntimeError):  # rank 0 has waited for all, and left
            store.set(f"{self._key}/told/{self._rank}", "1")
            while waiting and time.monotonic() < until:
                waiting = {rank for rank in waiting if not store.check([f"{self._key}/told/{rank}"])}
                self._answers += 1
                if waiting:
                    time.sleep(_TOLD_POLL_S)  # waiting for the keys would end in an error if one never comes

    def _conclude(self, hung: Hung) -> None:
        # Never given back: both threads may come here, one goes on.
        if self._concluding.acquire(blocking=False) and not self._closed.is_set():
            self._on_hang(hung)
            self._concluded.set()

    def _neighbours(self, hung: Hung) -> list[tuple[int, psutil.Process]]:
        """The ranks of this host that can't leave, with their processes, if this rank is the one to see to them."""
        lost = {}
        for rank, one in enumerate(self._seen):
            if one.heartbeat is None or one.heartbeat.host != self._host or one.left:
                continue
            # Of ranks stopped together with rank 0, which has the store, nobody can say that they don't answer.
            if rank in hung.not_answering or _is_stopped(one.heartbeat):
                lost[rank] = one.heartbeat
            elif rank < self._rank:
                return []
        found = {rank: _process_of(heartbeat) for rank, heartbeat in lost.items() if rank != self._rank}
        return [(rank, process) for rank, process in found.items() if process is not None]

    def _write_stacks(self, hung: Hung) -> None:
        writer = threading.Thread(target=self._write, args=(hung,), daemon=True, name="liveness-stacks")
        writer.start()
        writer.join(min(_WRITE_S, self._hang_timeout_s / 2))

    def _write(self, hung: Hung) -> None:
        with suppress(OSError):
            self._stacks_dir.mkdir(parents=True, exist_ok=True)
            with (self._stacks_dir / f"rank{self._rank}.txt").open("w") as file:
                place = f"{self._pulse.place().where}; process {self._process.pid} on {self._host}"
                file.write(f"rank {self._rank} in {place}; main thread {threading.main_thread().ident or 0:#018x}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            for rank, process in self._neighbours(hung):
                text = (
                    f"rank {rank} does not answer; process {process.pid} on {self._host}\n\n{_of_system(process.pid)}"
                )
                (self._stacks_dir / f"rank{rank}.txt").write_text(text)


def _read_hung(value: bytes) -> Hung:
    found = json.loads(bytes(value))
    return Hung(
        ranks=tuple(found["ranks"]),
        not_answering=tuple(found["not_answering"]),
        where=tuple(found["where"]),
        for_s=found["for_s"],
        stacks=Path(found["stacks"]),
    )


def _main_stack() -> int:
    """A number that is another one when the main thread has moved in Python code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    chain = []
    while frame is not None:
        # The frame object lives as long as its call, so a second call of the same function is mostly seen too.
        chain.append((id(frame), id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(chain))


def _process_of(heartbeat: Heartbeat) -> psutil.Process | None:
    """The process that sent it; None if it is gone, or its number belongs to another one by now."""
    try:
        process = psutil.Process(heartbeat.pid)
        same = abs(process.create_time() - heartbeat.started) < _SAME_PROCESS_S
    except psutil.Error:
        return None
    return process if same else None


def _is_stopped(heartbeat: Heartbeat) -> bool:
    process = _process_of(heartbeat)
    try:
        return process is not None and process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _of_system(pid: int) -> str:
    """State, kernel function and kernel stack of a process, as far as they may be read."""
    parts = []
    for name in ("status", "wchan", "stack"):
        try:
            text = Path(f"/proc/{pid}/{name}").read_text()
        except OSError as exc:
            text = f"not readable: {exc.strerror}"
        if name == "status":
            text = "\n".join(line for line in text.splitlines() if line.startswith(("Name:", "State:", "not readable")))
        parts.append(f"{name}: {text.strip()}" if name == "wchan" else text.strip())
    return "\n".join(parts) + "\n"
