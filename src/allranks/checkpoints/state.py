"""What a checkpoint says besides its tensors: the state of the run, and which files belong to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from allranks.caps import Caps
from allranks.checkpoints.durable import FileRecord
from allranks.errors import UserError
from allranks.plan.plan import ProfileKind


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a resumed run needs besides its tensors and its plan.

    Attributes:
        step: committed optimizer steps.
        epoch: running epoch, from 0.
        consumed: samples of that epoch that the committed steps took.
        global_batch_size: samples per step, fixed at the first launch.
        fingerprint: of the tokenised training set, which the order of samples is a function of.
        seed: of that order.
        window: steps inside which samples are grouped by length.
        caps: of a training micro-batch, as the ranks last agreed.
        eval_caps: of an evaluation micro-batch, likewise.
        checkpointing: activations are recomputed in backward, as configured or as the ranks agreed.
        skipped: samples that they agreed to leave out.
        cost: (a, b, c) of the fitted cost a·tokens + b·tokens² of a sample and c of a micro-batch.
        scaler: state of the fp16 loss scaler; None with bf16 and fp32.
        optimizer: kind of the optimizer whose state was saved, e.g. ``adamw_torch_fused``.
        world_size: ranks at the save.
        profile_kind: how the model was spread at the save.
        versions: of allranks and the libraries beneath it, by name.
        wall_s: seconds of training over all launches of the run.
        approximate: optimizer state was requantised on the way here, so the run is not exactly the uninterrupted one.
    """

    step: int
    epoch: int
    consumed: int
    global_batch_size: int
    fingerprint: str
    seed: int
    window: int
    caps: Caps
    eval_caps: Caps
    checkpointing: bool
    skipped: tuple[int, ...]
    cost: tuple[float, ...]
    scaler: dict[str, Any] | None
    optimizer: str
    world_size: int
    profile_kind: ProfileKind
    versions: dict[str, str]
    wall_s: float
    approximate: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainState:
        """Inverse of `dataclasses.asdict`, also after a way through JSON.

        Raises:
            UserError: fields are missing or unknown: another version of allranks wrote them.
        """
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise UserError(
                "the checkpoint's state was written by another version of allranks: "
                f"missing {sorted(names - set(values))}, unknown {sorted(set(values) - names)}\n"
                "    fix: resume with the version that wrote it, or start anew with --resume never"
            )
        return cls(
            **{
                **values,
                "caps": Caps(**values["caps"]),
                "eval_caps": Caps(**values["eval_caps"]),
                "cost": tuple(values["cost"]),
                "skipped": tuple(values["skipped"]),
            }
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointRef:
    """One complete checkpoint.

    Attributes:
        step: committed step it holds.
        folder: name of its folder below ``checkpoints/``.
        files: every file in it, by name.
        notes: what `CheckpointStore.latest` has to say about choosing it; nothing, as a rule.
    """

    step: int
    folder: str
    files: Mapping[str, FileRecord]
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of all its files."""
        return sum(record.bytes for record in self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """For the pointer file: without the notes, which belong to one reading of it."""
        return {"step": self.step, "folder": self.folder, "files": {n: asdict(f) for n, f in self.files.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckpointRef:
        """Inverse of `to_dict`; further keys are left alone."""
        files = {name: FileRecord(**record) for name, record in values["files"].items()}
        return cls(step=values["step"], folder=values["folder"], files=files)

    def to_json(self) -> str:
        """As one line of JSON, for the other ranks."""
        return json.dumps({**self.to_dict(), "notes": self.notes})

    @classmethod
    def from_json(cls, text: str) -> CheckpointRef:
        """Inverse of `to_json`."""
        values = json.loads(text)
        return replace(cls.from_dict(values), notes=tuple(values["notes"]))
