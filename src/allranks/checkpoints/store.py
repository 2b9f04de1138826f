"""Checkpoints of a run: fresh folders, and one pointer file that says which of them count.

``checkpoints/latest.json`` lists the published checkpoints, newest first. A folder that it does not list was never
published: a kill or a failed save left it, and `CheckpointStore.prune` removes it. Only rank 0 writes.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Mapping
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
    FileRecord,
    StorageError,
    free_bytes,
    fsync_folder,
    not_written,
    replace_file,
    sha256_of,
    tensor_file_bytes,
    tensor_file_chunks,
    write_file,
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
POINTER_FILE = "latest.json"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
STATE_VERSION = 1
POINTER_VERSION = 1


class CheckpointStore:
    """The checkpoints of one run directory. `write`, `publish`, `discard` and `prune` are rank 0's alone.

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

    def path(self, ref: CheckpointRef) -> Path:
        """The folder of a checkpoint; plain PEFT loads the adapter from it."""
        return self.folder / ref.folder

    def write(
        self,
        state: TrainState,
        adapter: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, Mapping[str, torch.Tensor]],
        adapter_config: Mapping[str, Any] | None,
        *,
        tied: Mapping[str, str] = MappingProxyType({}),
    ) -> CheckpointRef:
        """Write a checkpoint into a fresh folder, whole and fsynced. It counts only once it is published.

        Args:
            state: of the committed step.
            adapter: fp32 masters in host memory by the PeftModel's parameter name.
            optimizer: parameter name → field (``exp_avg``, ``step``, …; raw fields of 8-bit state) → tensor.
            adapter_config: PEFT's `LoraConfig.to_dict`; None leaves the file out.
            tied: `tied_names` of the PeftModel.

        Raises:
            StorageError: no space, no permission, …; the partial folder is removed, earlier checkpoints stay usable.
        """
        name = f"step-{state.step:08d}-{secrets.token_hex(4)}"
        folder = self.folder / name
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
                ADAPTER_FILE: write_file(folder / ADAPTER_FILE, tensor_file_chunks(weights)),
                OPTIMIZER_FILE: write_file(folder / OPTIMIZER_FILE, tensor_file_chunks(moments)),
                PLAN_FILE: write_file(folder / PLAN_FILE, [(self._run_dir / PLAN_FILE).read_bytes()]),
            }
            if adapter_config is not None:
                content = adapter_config_json(adapter_config)
                files[ADAPTER_CONFIG_FILE] = write_file(folder / ADAPTER_CONFIG_FILE, [content])
            described = {
                "state_version": STATE_VERSION,
                "state": asdict(state),
                "parameters": {name: peft_key(name) for name in adapter},
                "files": {name: asdict(record) for name, record in files.items()},
            }
            # Last, so that a folder with a state file is complete as soon as the sizes in it agree.
            files[STATE_FILE] = write_file(folder / STATE_FILE, [json.dumps(described, indent=1).encode()])
            fsync_folder(folder)
            fsync_folder(self.folder)
        except Exception as error:
            self._remove(name)
            if isinstance(error, OSError):
                raise self._not_written(state.step, folder, needed, error) from error
            raise
        return CheckpointRef(step=state.step, folder=name, files=files)

    def publish(self, ref: CheckpointRef) -> None:
        """Make `ref` the checkpoint that a resume takes, once every rank has acknowledged it.

        Raises:
            StorageError: the pointer could not be replaced; the earlier checkpoints stay usable.
        """
        older = self._whole(self._published()[0])
        pointer = {
            "pointer_version": POINTER_VERSION,
            **ref.to_dict(),
            "older": [other.to_dict() for other in older[: self.keep - 1]],
        }
        try:
            replace_file(self._pointer, json.dumps(pointer, indent=1).encode())
        except OSError as error:
            if ref.folder not in {listed.folder for listed in self._published()[0]}:
                self._remove(ref.folder)
            raise self._not_written(ref.step, self._pointer, ref.bytes, error) from error
        self._unpublished.discard(ref.folder)

    def discard(self, ref: CheckpointRef) -> None:
        """Remove a written checkpoint on which the ranks did not agree."""
        self._remove(ref.folder)

    def prune(self) -> tuple[str, ...]:
        """Remove all but the pointed checkpoint and the newest `keep` whole ones, and what a dead writer left.

        To be called after `publish`, and after `latest` at the start of a launch: the run's lock makes every other
        writer a dead one.

        Returns:
            One line for each folder that would not go.
        """
        published = self._published()[0]
        kept = {ref.folder for ref in (*published[:1], *self._whole(published)[: self.keep])} | self._unpublished
        try:
            stale = [folder for folder in self._folders() if folder.name not in kept]
        except OSError as error:
            return (f"{self.folder} can't be listed: {error.strerror}",)
        return tuple(
            f"{folder} is no longer needed but could not be removed"
            for folder in stale
            if not self._remove(folder.name)
        )

    def latest(self) -> CheckpointRef | None:
        """The newest published checkpoint, every byte of it verified; None if there is none yet.

        Its notes say so if it is not the one that should have been the newest.

        Raises:
            StorageError: there are checkpoints, but not one is usable.
        """
        published, word = self._published()
        notes = [word] if word is not None else []
        for ref in published:
            damage = self._damage(ref, checksums=True)
            if damage is None:
                if notes:
                    notes.append(f"taking the newest usable checkpoint instead: step {ref.step}, {self.path(ref)}")
                return replace(ref, notes=tuple(notes))
            self._damaged.add(ref.folder)
            notes.append(f"checkpoint of step {ref.step} is damaged: {damage}")
        if not notes:
            return None
        fix = f"fix: bring back the content of {self.folder}, or start anew with --resume never"
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
        return TrainState.from_dict(self._described(ref)["state"])

    def _described(self, ref: CheckpointRef) -> dict[str, Any]:
        folder = self.path(ref)
        described: dict[str, Any] = json.loads((folder / STATE_FILE).read_bytes())
        if described["state_version"] != STATE_VERSION:
            raise UserError(
                f"checkpoint {folder} has state version {described['state_version']}, not {STATE_VERSION}\n"
                "    fix: resume with the version of allranks that wrote it, or start anew with --resume never"
            )
        return described

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
        damage = self._damage(ref, checksums=True)
        if damage is not None:
            raise StorageError(
                f"checkpoint {folder} is damaged: {damage}\n"
                "    fix: run again; the newest checkpoint that is whole is taken"
            )
        described = self._described(ref)
        # From memory, not mapped from the file: the tensors outlive the folder, which a later prune removes.
        weights = load((folder / ADAPTER_FILE).read_bytes())
        adapter = {name: weights[key] for name, key in described["parameters"].items()}
        optimizer: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in load((folder / OPTIMIZER_FILE).read_bytes()).items():
            field, _, name = key.partition("/")
            optimizer.setdefault(name, {})[field] = tensor
        return TrainState.from_dict(described["state"]), adapter, optimizer

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

    def _published(self) -> tuple[list[CheckpointRef], str | None]:
        """The published checkpoints, newest first; without a readable pointer, the complete folders and a word."""
        try:
            pointer = json.loads(self._pointer.read_bytes())
            if pointer["pointer_version"] != POINTER_VERSION:
                raise ValueError(f"pointer version {pointer['pointer_version']}")
            return [CheckpointRef.from_dict(entry) for entry in (pointer, *pointer["older"])], None
        except FileNotFoundError:
            word = f"{self._pointer} is missing"
            missing = True
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            word = f"{self._pointer} is not readable: {error!r}"
            missing = False
        try:
            complete = [
                (ref.step, (folder / STATE_FILE).stat().st_mtime_ns, ref)
                for folder in self._folders()
                if folder.name not in self._unpublished and (ref := _complete(folder)) is not None
            ]
        except OSError as error:
            return [], f"{self.folder} can't be listed: {error.strerror}"
        complete.sort(key=lambda found: found[:2], reverse=True)
        return [ref for _, _, ref in complete], None if missing and not complete else word

    def _folders(self) -> list[Path]:
        try:
            return [folder for folder in self.folder.iterdir() if folder.name.startswith("step-")]
        except FileNotFoundError:
            return []

    def _whole(self, refs: list[CheckpointRef]) -> list[CheckpointRef]:
        return [ref for ref in refs if ref.folder not in self._damaged and self._damage(ref, checksums=False) is None]

    def _damage(self, ref: CheckpointRef, *, checksums: bool) -> str | None:
        for name, record in ref.files.items():
            path = self.path(ref) / name
            try:
                size = path.stat().st_size
                if size != record.bytes:
                    return f"{name} has {size} bytes, not {record.bytes}"
                if checksums and sha256_of(path) != record.sha256:
                    return f"the content of {name} changed since it was written"
            except OSError as error:
                return f"{name} can't be read: {error.strerror}"
        return None

    def _remove(self, name: str) -> bool:
        self._unpublished.discard(name)
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return not os.path.lexists(self.folder / name)

    def _not_written(self, step: int, path: Path, needed: int, error: OSError) -> StorageError:
        published, word = self._published()
        usable = self._whole(published)
        if usable:
            words = f"the checkpoint of step {usable[0].step}"
        else:
            words = "no checkpoint yet" if word is None else f"unknown, {word}"
        return StorageError(not_written(f"the checkpoint of step {step}", path, needed, error, words))


def _complete(folder: Path) -> CheckpointRef | None:
    """The checkpoint in `folder` by its own state file, if every file has its size."""
    state_file = folder / STATE_FILE
    try:
        described = json.loads(state_file.read_bytes())
        files = {name: FileRecord(**record) for name, record in described["files"].items()}
        if any((folder / name).stat().st_size != record.bytes for name, record in files.items()):
            return None
        files[STATE_FILE] = FileRecord(bytes=state_file.stat().st_size, sha256=sha256_of(state_file))
        return CheckpointRef(step=described["state"]["step"], folder=folder.name, files=files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
