"""The plan: everything the launcher decided, frozen, as JSON in the run directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from allranks.config.schema import RunConfig

PLAN_FILE = "plan.json"
PLAN_VERSION = 1

ProfileKind = Literal["single", "ddp", "zero2", "zero3", "fsdp"]
Phase = Literal["load", "forward", "backward", "vote", "reduce", "step", "eval", "save", "final"]
FaultKind = Literal["oom", "alloc", "error", "exit", "sigkill", "sigstop", "hang", "nan"]


@dataclass(frozen=True, kw_only=True)
class Injection:
    """A fault that `allranks drill` makes happen, once.

    Attributes:
        rank: rank that fails.
        step: optimizer step at which it fails, from 1; with phase ``final``, the last one.
        phase: where in the step; ``vote`` is the vote before the reduction, ``final`` the adapter at the end.
        kind: ``oom`` raises torch.OutOfMemoryError; ``alloc`` asks the CPU allocator (or the GPU's, on a GPU)
            for more than the machine has; ``error`` raises a RuntimeError that is no memory fault; ``exit`` calls
            ``os._exit(1)``; ``sigkill`` kills the process, ``sigstop`` stops it; ``hang`` never returns; ``nan`` makes
            the loss NaN.
        times: how many attempts in a row fail.
    """

    rank: int
    step: int
    phase: Phase
    kind: FaultKind
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run does. Pure data: config + profile + hardware in, this out.

    Attributes:
        name: name of the run, the last part of `run_dir`.
        run_dir: absolute path of the run directory.
        config: the validated configuration.
        profile_kind: how the model is spread.
        profile_file: absolute path of the accelerate config file.
        profile: that file's content.
        world_size: ranks over all nodes.
        device: ``cuda`` or ``cpu``.
        mixed_precision: what accelerate is told: ``bf16``, ``fp16`` or ``no``.
        global_batch_size: samples per optimizer step over all ranks, fixed for the life of the run.
        smoke: 3 steps, one evaluation, one save.
        resume: ``auto`` resumes if a checkpoint of the same config exists, ``never`` starts anew,
            ``must`` fails without one.
        injections: faults to make happen.
        notes: what differs from what was asked, one line each; the worker prints and logs them.
    """

    name: str
    run_dir: str
    config: RunConfig
    profile_kind: ProfileKind
    profile_file: str
    profile: dict[str, Any]
    world_size: int
    device: Literal["cuda", "cpu"]
    mixed_precision: Literal["bf16", "fp16", "no"]
    global_batch_size: int
    smoke: bool = False
    resume: Literal["auto", "never", "must"] = "auto"
    injections: tuple[Injection, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """This plan as indented JSON; `from_json` is its inverse."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["config"] = self.config.model_dump()
        fields["injections"] = [asdict(injection) for injection in self.injections]
        return json.dumps({"plan_version": PLAN_VERSION, **fields}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is of another plan version.
        """
        fields = json.loads(text)
        version = fields.pop("plan_version", None)
        if version != PLAN_VERSION:
            raise ValueError(f"plan version {version!r} is not {PLAN_VERSION}: written by another allranks")
        fields["config"] = RunConfig.model_validate(fields["config"])
        fields["injections"] = tuple(Injection(**injection) for injection in fields["injections"])
        fields["notes"] = tuple(fields["notes"])
        return cls(**fields)

    @classmethod
    def read(cls, run_dir: Path) -> Plan:
        """The plan of the run in `run_dir`."""
        return cls.from_json((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
