"""Writing a checkpoint in the background: one at a time, in a thread, from host copies that nothing else changes."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.checkpoints.durable import StorageError
from allranks.checkpoints.state import TrainState
from allranks.checkpoints.store import CheckpointStore

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a checkpoint is made of. The tensors lie in host memory and share nothing with what is trained.

    Attributes:
        state: of the committed step.
        adapter: as `CheckpointStore.write` takes it.
        optimizer: likewise.
        peft_config: PEFT's `LoraConfig.to_dict`.
        tied: `tied_names` of the PeftModel.
    """

    state: TrainState
    adapter: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Mapping[str, torch.Tensor]]
    peft_config: Mapping[str, Any]
    tied: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that counts.

    Attributes:
        step: committed step it holds.
        path: its folder.
        bytes: size of its files.
        published: when it began to count, on the clock of `time.monotonic`.
        words: what there is to say about older folders, one line each.
    """

    step: int
    path: Path
    bytes: int
    published: float
    words: tuple[str, ...]


class BackgroundWriter:
    """Writes and publishes one checkpoint at a time in a thread. Its methods are for one other thread, the main one.

    From `begin` until `wait` has returned or `take` has given something, the store is the writer's alone.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._moved = threading.Event()
        self._saved: Saved | None = None
        self._failure: StorageError | None = None

    def begin(self, store: CheckpointStore, snapshot: Snapshot, *, on_failure: Callable[[], None]) -> None:
        """Hand over `snapshot`, of which the caller keeps nothing; the one before was waited for or taken.

        Args:
            store: where to.
            snapshot: what.
            on_failure: called in the thread when the checkpoint could not be written.
        """
        assert not self.busy and self._saved is None
        self._failure = None
        arguments = (store, snapshot, on_failure)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True, name="checkpoint-writer")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """A checkpoint is being written."""
        return self._thread is not None and self._saved is None and self._failure is None

    @property
    def failure(self) -> StorageError | None:
        """Why the last checkpoint could not be written; None if it could, or is not finished."""
        return self._failure

    def wait(self, moved: Callable[[], None]) -> None:
        """Return when nothing is being written any more; `moved` is called here whenever the write has come further.

        There is no polling: who looks at this thread sees it stand still if the disk does.
        """
        while self.busy:
            self._moved.wait()
            self._moved.clear()
            moved()
        if self._thread is not None:
            self._thread.join()  # only then is the snapshot gone
            self._thread = None

    def let_end(self, limit_s: float) -> None:
        """Return when nothing is being written any more, or after `limit_s` seconds; for a rank that leaves, from any
        of its threads.
        """
        thread = self._thread
        if thread is not None:
            thread.join(limit_s)

    def take(self) -> Saved | None:
        """The checkpoint that has been published since the last call, once; None if there is none."""
        saved = self._saved
        if saved is None:
            return None
        self.wait(lambda: None)
        self._saved = None
        return saved

    def _run(self, store: CheckpointStore, snapshot: Snapshot, on_failure: Callable[[], None]) -> None:
        try:
            self._saved = self._tried_twice(store, snapshot)
        except StorageError as error:
            self._failure = error
            on_failure()
        self._moved.set()

    def _tried_twice(self, store: CheckpointStore, snapshot: Snapshot) -> Saved:
        """What the disk refuses, it refuses again; anything else may pass."""
        try:
            return self._written(store, snapshot)
        except StorageError:
            raise
        except Exception:  # in a thread nobody else would hear of it: a MemoryError, say, may pass
            traceback.print_exc()
        try:
            return self._written(store, snapshot)
        except StorageError:
            raise
        except Exception as error:  # the main thread raises it, so that all ranks stop with a message
            raise StorageError(
                f"the checkpoint of step {snapshot.state.step} could not be written, twice: "
                f"{type(error).__name__}: {error}\n"
                "    still usable: the checkpoints before it\n"
                "    fix: see the traceback in the log of rank 0; then run again to resume"
            ) from error

    def _written(self, store: CheckpointStore, snapshot: Snapshot) -> Saved:
        ref = store.write(
            snapshot.state,
            snapshot.adapter,
            snapshot.optimizer,
            snapshot.peft_config,
            tied=snapshot.tied,
            moved=self._moved.set,
        )
        store.publish(ref)
        published = time.monotonic()
        self._moved.set()
        return Saved(step=ref.step, path=store.path(ref), bytes=ref.bytes, published=published, words=store.prune())
