"""Checkpoints of a run: fresh folders, and one pointer file that says which of them count.

``checkpoints/latest.json`` lists the published checkpoints, newest first. A checkpoint gets its final name when it is
published; what never was has a name of its own (`allranks.checkpoints.published`). Nothing is removed that could be
the only one. Only rank 0 writes.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from allranks.checkpoints.adapter_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    adapter_config_json,
    by_peft_key,
    check_optimizer,
    check_tensors,
    peft_key,
    tied_names,
)
from allranks.checkpoints.durable import (
    StorageError,
    free_bytes,
    fsync_folder,
    not_written,
    replace_file,
    tensor_file_bytes,
    tensor_file_chunks,
    write_file,
)
from allranks.checkpoints.published import (
    POINTER_FILE,
    STATE_FILE,
    UNFINISHED,
    Published,
    checkpoint_names,
    damage,
    described,
    pointer_content,
    published,
    unlisted,
)
from allranks.checkpoints.state import CheckpointRef, TrainState
from allranks.errors import UserError
from allranks.plan.plan import PLAN_FILE, Plan

if TYPE_CHECKING:
    import torch

__all__ = [
    "CheckpointRef",
    "CheckpointStore",
    "StorageError",
    "TrainState",
    "check_optimizer",
    "check_tensors",
    "tied_names",
]

CHECKPOINTS_DIR = "checkpoints"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_VERSION = 1


class CheckpointStore:
    """The checkpoints of one run directory. `write`, `publish` and `prune` are rank 0's alone, in one
    thread at a time.

    Attributes:
        folder: ``checkpoints/`` of the run.
        keep: published checkpoints that stay.
    """

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.folder = run_dir / CHECKPOINTS_DIR
        self.keep = keep
        self._run_dir = run_dir
        self._pointer = self.folder / POINTER_FILE
        self._unpublished: set[str] = set()
        self._damaged: set[str] = set()
        self._told: set[str] = set()

    def path(self, ref: CheckpointRef) -> Path:
        """The folder of a checkpoint; plain PEFT loads the adapter from it."""
        return self.folder / (ref.folder + UNFINISHED * (ref.folder in self._unpublished))

    def write(
        self,
        state: TrainState,
        adapter: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, Mapping[str, torch.Tensor]],
        adapter_config: Mapping[str, Any] | None,
        *,
        tied: Mapping[str, str] = MappingProxyType({}),
        moved: Callable[[], None] = lambda: None,
    ) -> CheckpointRef:
        """Write a checkpoint into a fresh folder, whole and fsynced. It counts only once it is published.

        Args:
            state: of the committed step.
            adapter: fp32 masters in host memory by the PeftModel's parameter name.
            optimizer: parameter name → field (``exp_avg``, ``step``, …; raw fields of 8-bit state) → tensor.
            adapter_config: PEFT's `LoraConfig.to_dict`; None leaves the file out.
            tied: `tied_names` of the PeftModel.
            moved: called whenever a tensor or a file has been written.

        Raises:
            StorageError: no space, no permission, …; the partial folder is removed, earlier checkpoints stay usable.
        """
        name = f"step-{state.step:08d}-{secrets.token_hex(4)}"
        folder = self.folder / (name + UNFINISHED)
        weights = by_peft_key(adapter, tied)
        moments = {f"{field}/{name}": t for name, state_of in optimizer.items() for field, t in state_of.items()}
        needed = tensor_file_bytes(weights) + tensor_file_bytes(moments)
        free = free_bytes(folder)
        if free is not None and free < needed:
            raise self._not_written(state.step, folder, needed, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        self._unpublished.add(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            files = {
                ADAPTER_FILE: write_file(folder / ADAPTER_FILE, _told(tensor_file_chunks(weights), moved)),
                OPTIMIZER_FILE: write_file(folder / OPTIMIZER_FILE, _told(tensor_file_chunks(moments), moved)),
                PLAN_FILE: write_file(folder / PLAN_FILE, [(self._run_dir / PLAN_FILE).read_bytes()]),
            }
            if adapter_config is not None:
                content = adapter_config_json(adapter_config)
                files[ADAPTER_CONFIG_FILE] = write_file(folder / ADAPTER_CONFIG_FILE, [content])
            content_of_state = {
                "state_version": STATE_VERSION,
                "state": asdict(state),
                "parameters": {name: peft_key(name) for name in adapter},
                "files": {name: asdict(record) for name, record in files.items()},
            }
            # Last, so that a folder with a state file is complete as soon as the sizes in it agree.
            files[STATE_FILE] = write_file(folder / STATE_FILE, [json.dumps(content_of_state, indent=1).encode()])
            fsync_folder(folder)
            moved()
            fsync_folder(self.folder)
            moved()
        except Exception as error:  # whatever it was, no partial folder stays; all but OSError goes on as it is
            self._remove(name)
            if isinstance(error, OSError):
                raise self._not_written(state.step, folder, needed, error) from error
            raise
        return CheckpointRef(step=state.step, folder=name, files=files)

    def publish(self, ref: CheckpointRef) -> None:
        """Make `ref` the checkpoint that a resume takes; all ranks have agreed that its step is committed.

        Raises:
            StorageError: the pointer could not be replaced; the earlier checkpoints stay usable.
        """
        before = self._published()
        others = [other for other in before.refs if other.folder != ref.folder]
        older = self._whole(others)[: self.keep - 1]
        kept = {other.folder for other in older}
        gone = {*before.dropped, *(other.folder for other in others)} - kept
        dropped = sorted(name for name in gone if os.path.lexists(self.folder / name))
        try:
            if ref.folder in self._unpublished:
                self.path(ref).rename(self.folder / ref.folder)
                self._unpublished.discard(ref.folder)
                fsync_folder(self.folder)
            replace_file(self._pointer, pointer_content(ref, older, dropped))
        except OSError as error:
            now = self._published()
            if not now.by_pointer or ref.folder not in {listed.folder for listed in now.refs}:
                self._remove(ref.folder)
            raise self._not_written(ref.step, self._pointer, ref.bytes, error) from error

    def prune(self) -> tuple[str, ...]:
        """Remove what `publish` dropped, and what was never published and is not whole or no longer needed.

        To be called after `publish`, and after `latest` at the start of a launch: the run's lock makes every other
        writer a dead one. A folder that ``latest.json`` neither lists nor drops is somebody else's and stays.

        Returns:
            One line for each folder that would not go, that is left alone, or that was all there was; said once.
        """
        now = self._published()
        whole = [ref.folder for ref in self._whole(now.refs)]
        counting = {ref.folder for ref in now.refs if now.by_pointer or not ref.folder.endswith(UNFINISHED)}
        left_out = {*counting, *whole[:1], *self._own()}
        try:
            names = [name for name in checkpoint_names(self.folder) if name not in left_out]
        except OSError as error:
            return (f"{self.folder} can't be listed: {error.strerror}",)
        words = []
        for name in names:
            folder = self.folder / name
            never_published = name.endswith(UNFINISHED)
            if name in now.dropped or (never_published and (whole or isinstance(described(folder), str))):
                if not self._remove(name):
                    words.append(f"{folder} is no longer needed but could not be removed")
                elif not whole:
                    words.append(f"{folder} was of a save that never ended, and is removed; there is no checkpoint yet")
            elif never_published:
                words.append(f"{folder} is of a save that never ended; it stays until there is a checkpoint")
            elif now.by_pointer:
                words.append(f"{folder} is not in {POINTER_FILE} and is left alone")
        fresh = tuple(word for word in words if word not in self._told)
        self._told.update(fresh)
        return fresh

    def latest(self) -> CheckpointRef | None:
        """The newest published checkpoint, every byte of it verified; None if none was ever published.

        Its notes say so if it is not the one that should have been the newest.

        Raises:
            StorageError: there are checkpoints, but not one is usable.
        """
        now = self._published()
        notes = list(now.words)
        ref = self._first_whole(now.refs, notes)
        if ref is None and now.by_pointer:
            rest = unlisted(self.folder, {*(listed.folder for listed in now.refs), *now.dropped, *self._own()})
            notes += rest.words
            ref = self._first_whole(rest.refs, notes)
        if ref is not None:
            if notes:
                notes.append(f"taking the newest usable checkpoint instead: step {ref.step}, {self.path(ref)}")
            return replace(ref, notes=tuple(notes))
        if not notes:
            return None
        fix = (
            f"fix: bring back the content of {self.folder}; or start anew with --resume never, which leaves it alone, "
            "or by moving that folder to another place"
        )
        raise StorageError("\n    ".join([f"no usable checkpoint in {self.folder}", *notes, fix]))

    def saved_plan(self, ref: CheckpointRef) -> Plan:
        """The plan that the run had when `ref` was written.

        Raises:
            UserError: another version of allranks wrote it.
        """
        try:
            return Plan.from_json((self.path(ref) / PLAN_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"the plan of the checkpoint {self.path(ref)} does not suit this version of allranks: {error}\n"
                "    fix: resume with the version that wrote it, or start anew with --resume never"
            ) from error

    def state(self, ref: CheckpointRef) -> TrainState:
        """The state of a checkpoint alone; its files are not verified (`latest` did).

        Raises:
            UserError: another version of allranks wrote it.
        """
        return TrainState.from_dict(self._content_of(ref)["state"])

    def _content_of(self, ref: CheckpointRef) -> dict[str, Any]:
        folder = self.path(ref)
        content: dict[str, Any] = json.loads((folder / STATE_FILE).read_bytes())
        if content["state_version"] != STATE_VERSION:
            raise UserError(
                f"checkpoint {folder} has state version {content['state_version']}, not {STATE_VERSION}\n"
                "    fix: resume with the version of allranks that wrote it, or start anew with --resume never"
            )
        return content

    def load(
        self, ref: CheckpointRef
    ) -> tuple[TrainState, dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
        """Read a checkpoint on any rank: state, adapter and optimizer, in the form that `write` took them.

        Raises:
            StorageError: a file is missing or is not the one that was written.
            UserError: another version of allranks wrote it.
        """
        from safetensors.torch import load

        folder = self.path(ref)
        word = damage(folder, ref, checksums=True)
        if word is not None:
            raise StorageError(
                f"checkpoint {folder} is damaged: {word}\n"
                "    fix: run again; the newest checkpoint that is whole is taken"
            )
        content = self._content_of(ref)
        # From memory, not mapped from the file: the tensors outlive the folder, which a later prune removes.
        weights = load((folder / ADAPTER_FILE).read_bytes())
        adapter = {name: weights[key] for name, key in content["parameters"].items()}
        optimizer: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in load((folder / OPTIMIZER_FILE).read_bytes()).items():
            field, _, name = key.partition("/")
            optimizer.setdefault(name, {})[field] = tensor
        return TrainState.from_dict(content["state"]), adapter, optimizer

    def set_aside(self) -> Path | None:
        """Rename ``checkpoints/`` for a run that starts anew, so that the two lineages never mix.

        Returns:
            Where the earlier checkpoints are now; None if there were none.

        Raises:
            StorageError: the folder could not be renamed.
        """
        aside = self.folder.with_name(f"{CHECKPOINTS_DIR}-set-aside-{secrets.token_hex(4)}")
        try:
            return self.folder.rename(aside)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(
                f"{self.folder} could not be renamed to {aside.name} for a fresh start: {error.strerror}\n"
                "    fix: rename or remove it by hand, or choose another output.name"
            ) from error

    def _published(self) -> Published:
        return published(self.folder, own=self._own())

    def _own(self) -> set[str]:
        return {name + ending for name in self._unpublished for ending in ("", UNFINISHED)}

    def _first_whole(self, refs: Iterable[CheckpointRef], notes: list[str]) -> CheckpointRef | None:
        """The first of `refs` that is whole to the byte; what is wrong with those before it goes to `notes`."""
        for ref in refs:
            word = damage(self.path(ref), ref, checksums=True)
            if word is None:
                return ref
            self._damaged.add(ref.folder)
            notes.append(f"checkpoint {ref.folder} is damaged: {word}")
        return None

    def _whole(self, refs: Iterable[CheckpointRef]) -> list[CheckpointRef]:
        return [
            ref
            for ref in refs
            if ref.folder not in self._damaged and damage(self.path(ref), ref, checksums=False) is None
        ]

    def _remove(self, name: str) -> bool:
        self._unpublished.discard(name)
        gone = self.folder / name
        doomed = self.folder / (name.removesuffix(UNFINISHED) + UNFINISHED)
        with suppress(OSError):
            # A kill while files go must not leave what looks like a damaged checkpoint.
            gone.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        return not os.path.lexists(gone) and not os.path.lexists(doomed)

    def _not_written(self, step: int, path: Path, needed: int, error: OSError) -> StorageError:
        now = self._published()
        usable = self._whole(now.refs)
        if usable:
            words = f"the checkpoint of step {usable[0].step}"
        else:
            words = "no checkpoint yet" if not now.words else f"unknown, {now.words[0]}"
        return StorageError(not_written(f"the checkpoint of step {step}", path, needed, error, words))


def _told(chunks: Iterable[bytes | memoryview], moved: Callable[[], None]) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        yield chunk
        moved()
