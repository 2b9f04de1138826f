"""From configuration, profile and hardware to the plan. Pure: nothing is read, written or started here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from allranks.config.paths import expanded
from allranks.config.schema import RunConfig, TrainingConfig
from allranks.errors import Problem, ProblemsError
from allranks.plan.hardware import Hardware
from allranks.plan.plan import Injection, Plan
from allranks.profiles import Precision, Profile, check_profile_against_run

SMOKE_STEPS = 3
"""Optimizer steps of a smoke run."""


def run_directory(config: RunConfig, config_file: Path) -> Path:
    """Absolute path of the run directory: ``output.dir`` from the working directory, then the run's name."""
    return expanded(config.output.dir).absolute() / (config.output.name or config_file.stem)


def make_plan(
    config: RunConfig,
    profile: Profile,
    hardware: Hardware,
    *,
    run_dir: Path,
    gpus: int | None = None,
    smoke: bool = False,
    resume: Literal["auto", "never", "must"] = "auto",
    injections: Sequence[Injection] = (),
    recorded_global_batch: int | None = None,
) -> Plan:
    """Decide everything that a launch needs.

    Args:
        config: what is trained.
        profile: how the model is spread.
        hardware: what this machine offers.
        run_dir: absolute path of the run directory.
        gpus: ranks, as given by ``--gpus``; None: one per visible GPU, or as many as the profile says on CPUs.
        smoke: 3 steps, one evaluation, one save.
        resume: see `Plan`.
        injections: found to make happen.
        recorded_global_batch: samples per step of the run's first launch, if it goes on with this one.

    Raises:
        ProblemsError: everything in which these contradict each other.
    """
    found = _Findings()
    found.problems += check_profile_against_run(profile, config)
    found.notes += hardware.notes
    world_size = _world_size(profile, hardware, gpus, found)
    precision = _precision(config, profile, hardware, found)
    recorded = None if resume == "never" else recorded_global_batch
    global_batch_size = _global_batch_size(config.training, world_size, recorded, found)
    if smoke:
        evaluation = "one evaluation" if config.data.eval is not None else "no evaluation (data.eval is not set)"
        found.notes.append(f"smoke run: {SMOKE_STEPS} steps, {evaluation}, one save")
    for injection in injections:
        wrong = _never_happens(injection, world_size, config, _last_step(config.training, smoke=smoke))
        found.problems += [Problem(path="injection", message=message) for message in wrong]
    if found.problems:
        raise ProblemsError(f"run {run_dir.name} with profile {profile.name}", found.problems)
    return Plan(
        name=run_dir.name,
        run_dir=str(run_dir),
        config=config,
        profile_kind=profile.kind,
        profile_file=str(profile.path),
        profile=profile.content,
        world_size=world_size,
        device=hardware.device,
        mixed_precision=precision,
        global_batch_size=global_batch_size,
        smoke=smoke,
        resume=resume,
        injections=tuple(injections),
        notes=tuple(found.notes),
    )


@dataclass(kw_only=True)
class _Findings:
    """What comes to light on the way to a plan."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _world_size(profile: Profile, hardware: Hardware, gpus: int | None, found: _Findings) -> int:
    visible = len(hardware.gpus)
    if gpus is not None and gpus < 1:
        found.problems.append(
            Problem(path="--gpus", message=f"{gpus} is not a number of ranks", fix="give 1 or more, or leave it out")
        )
        gpus = None
    if profile.kind == "single":
        if gpus is not None and gpus > 1:
            found.problems.append(
                Problem(
                    path="--gpus",
                    message=f"{gpus} contradicts profile {profile.name}, which is one process",
                    choices=("ddp", "zero2", "zero3", "fsdp"),
                    fix="take one of these profiles, or leave out --gpus",
                )
            )
        if visible == 0:
            found.notes.append("no GPU is visible: one process on the CPU")
        elif visible > 1:
            found.notes.append(f"profile {profile.name} uses 1 of {visible} visible GPUs; ddp would use all of them")
        return 1
    world_size = gpus or visible or int(profile.content["num_processes"])
    if world_size == 1:
        shared = " (two ranks that share the GPU, for a test)" if visible else ""
        found.problems.append(
            Problem(
                path="--profile",
                message=f"{profile.name} runs on several ranks, and there is one",
                fix=f"take --profile single, or --gpus 2{shared}",
            )
        )
    elif visible == 0:
        found.notes.append(f"no GPU is visible: {world_size} ranks on {hardware.cpu_count} CPUs, over gloo")
    elif world_size > visible:
        found.notes.append(
            f"{world_size} ranks share {visible} GPU{'s' if visible > 1 else ''}: for tests only, slow, "
            "and each has only its share of the memory"
        )
    elif world_size < visible:
        found.notes.append(f"{world_size} of {visible} visible GPUs are used, as --gpus says")
    return world_size


def _precision(config: RunConfig, profile: Profile, hardware: Hardware, found: _Findings) -> Precision:
    asked = config.training.mixed_precision
    explicit = asked != "auto"
    wanted = profile.mixed_precision if asked == "auto" else asked
    if hardware.device == "cpu":
        if wanted != "no" and not explicit:
            found.notes.append(f"CPU ranks compute in fp32; profile {profile.name} asks for {wanted}")
            return "no"
        return wanted
    if hardware.bf16:
        return wanted
    old = next(gpu.name for gpu in hardware.gpus if gpu.compute_capability < (8, 0))
    if config.quantization.bnb_4bit_compute_dtype == "bfloat16":
        found.problems.append(
            Problem(
                path="quantization.bnb_4bit_compute_dtype",
                message=f"bfloat16 is not what {old} computes in",
                fix="set it to auto or float16",
            )
        )
    if wanted == "bf16" and explicit:
        found.problems.append(
            Problem(
                path="training.mixed_precision",
                message=f"'bf16' is not what {old} computes in",
                fix="set it to auto: fp16 is then taken, with a dynamic loss scale",
            )
        )
    elif wanted == "bf16":
        found.notes.append(f"{old} has no bf16: fp16 is used, with a dynamic loss scale")
        return "fp16"
    return wanted


def _global_batch_size(training: TrainingConfig, world_size: int, recorded: int | None, found: _Findings) -> int:
    """Samples per step (design rule B3): given, else recorded, else the product at the first launch."""
    given = training.global_batch_size
    samples, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    product = samples * (accumulation or 1) * world_size
    formula = (
        "per_device_train_batch_size × gradient_accumulation_steps × ranks = "
        f"{samples} × {accumulation or 1} × {world_size} = {product}"
    )
    if given is None:
        if recorded is not None and recorded != product:
            found.notes.append(f"global batch stays {recorded} as at the run's first launch; now {formula}")
        return recorded or product
    samples_given = "per_device_train_batch_size" in training.model_fields_set
    if recorded is not None and recorded != given:
        found.problems.append(
            Problem(
                path="training.global_batch_size",
                message=f"{given} contradicts {recorded}, with which this run began",
                fix=f"set it to {recorded}, or begin another run: give another output.name",
            )
        )
    elif recorded is None and accumulation is not None and samples_given and product != given:
        found.problems.append(
            Problem(
                path="training.global_batch_size",
                message=f"{given} contradicts {formula}",
                fix="remove gradient_accumulation_steps: micro-steps follow from the other two",
            )
        )
    elif accumulation is not None and not samples_given:
        found.notes.append(
            f"gradient_accumulation_steps: {accumulation} has no effect beside global_batch_size: {given}; "
            "micro-steps follow from per_device_train_batch_size"
        )
    if given < world_size:
        found.notes.append(f"global batch {given} is smaller than {world_size} ranks: some idle in every step")
    return given


def _last_step(training: TrainingConfig, *, smoke: bool) -> int | None:
    """None: only the data tells."""
    if smoke:
        return SMOKE_STEPS if training.max_steps is None else min(SMOKE_STEPS, training.max_steps)
    return training.max_steps


def _never_happens(injection: Injection, world_size: int, config: RunConfig, last_step: int | None) -> list[str]:
    """Why this fault can't happen in the run, as far as that is known before the data is."""
    step, phase, kind = injection.step, injection.phase, injection.kind
    wrong = []
    if not 0 <= injection.rank < world_size:
        wrong.append(f"there is no rank {injection.rank} among {world_size}; ranks count from 0")
    if step < 1:
        wrong.append(f"there is no step {step}; steps count from 1")
    if last_step is not None and step > last_step:
        wrong.append(f"step {step} is never reached: the run ends after {last_step}")
    if kind == "nan" and phase not in ("forward", "backward"):
        wrong.append(f"nan spoils the loss of a step, which phase {phase} has not; valid: forward, backward")
    if injection.times < 1:
        wrong.append(f"{injection.times} times is never")
    if phase == "eval" and config.data.eval is None:
        wrong.append("there is no evaluation, for data.eval is not set")
    elif last_step is not None and 1 <= step < last_step:
        intervals = {"eval": config.training.eval_steps, "save": config.output.save_steps, "final": None}
        if phase in intervals and ((every := intervals[phase]) is None or step % every != 0):
            steps = f"step {last_step}" if every is None else f"every {every} steps and after step {last_step}"
            wrong.append(f"phase {phase} does not come after step {step}, but after {steps}")
    return wrong
