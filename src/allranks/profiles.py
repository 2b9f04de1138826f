"""Profiles: accelerate config files, checked so that nothing in them is silently ignored."""

from __future__ import annotations

import importlib.util
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from allranks.config.document import read_document, shown
from allranks.config.fields import nearest, section_models
from allranks.config.schema import RunConfig
from allranks.errors import Problem, ProblemsError
from allranks.plan.plan import ProfileKind
from allranks.profile_keys import DEEPSPEED, FSDP, REQUIRED, TOP_LEVEL, KeyRule

Precision = Literal["bf16", "fp16", "no"]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A checked accelerate config file.

    Attributes:
        kind: how the model is spread, derived from the content.
        path: absolute path of the file.
        content: what it says.
    """

    kind: ProfileKind
    path: Path
    content: dict[str, Any]

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem

    @property
    def mixed_precision(self) -> Precision:
        """What accelerate computes in, if it is not told otherwise."""
        return cast(Precision, self.content.get("mixed_precision", "no"))


def shipped_folder() -> Path:
    """Folder of the shipped profiles: in an installed package inside it, else `profiles/` of the repository."""
    package = importlib.util.find_spec("allranks._profiles")
    if package is not None and package.submodule_search_locations:
        return Path(next(iter(package.submodule_search_locations)))
    return Path(__file__).resolve().parents[2] / "profiles"


def list_profiles() -> tuple[Profile, ...]:
    """The shipped profiles, by name."""
    return tuple(_read(path) for path in sorted(shipped_folder().glob("*.yaml")))


def load_profile(name_or_path: str) -> Profile:
    """Read and check a profile.

    Args:
        name_or_path: name of a shipped profile, or path of an accelerate config file.

    Raises:
        ProblemsError: there is none, or all that is wrong with it.
    """
    shipped = {path.stem: path for path in sorted(shipped_folder().glob("*.yaml"))}
    path = shipped.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        problem = Problem(
            path="--profile",
            message=f"{shown(name_or_path)} is neither a shipped profile nor a file" if name_or_path else "not given",
            choices=tuple(shipped),
            nearest=nearest(name_or_path, shipped),
            fix=None if name_or_path else "add --profile NAME, or the path of an accelerate config file",
        )
        raise ProblemsError("profile", [problem])
    return _read(path)


def profile_from_values(content: dict[str, Any], path: Path) -> Profile:
    """Check values that come from elsewhere than a file, e.g. what accelerate told its worker.

    Args:
        content: as an accelerate config file would say it.
        path: file that stands for them.

    Raises:
        ProblemsError: all that is wrong with them.
    """
    problems = [*_wrong_keys(content), *_wrong_shape(content)]
    if problems:
        raise ProblemsError("accelerate's configuration", problems)
    return Profile(kind=_kind(content), path=path, content=content)


def _read(path: Path) -> Profile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemsError(str(path), [Problem(path="the file", message=f"can't be read: {error}")]) from None
    # The loader that accelerate uses: a word such as NO must mean here what it means there.
    document = read_document(text, yaml.SafeLoader)
    content = document.values
    if content and content.keys() <= set(section_models()):
        problem = Problem(
            path="--profile",
            message="is the configuration of a run, not a profile",
            choices=tuple(sorted(shipped.stem for shipped in shipped_folder().glob("*.yaml"))),
            fix="give a profile by its name, or the path of an accelerate config file",
        )
        raise ProblemsError(str(path), [problem])
    problems = list(document.problems)
    if content or not problems:
        problems += [*_wrong_keys(content), *_wrong_shape(content)]
    if problems:
        lines = document.lines
        problems.sort(key=lambda problem: lines.get(problem.path, math.inf))
        raise ProblemsError(
            str(path),
            [
                replace(problem, message=f"{problem.message} (line {lines[problem.path]})")
                if problem.path in lines
                else problem
                for problem in problems
            ],
        )
    return Profile(kind=_kind(content), path=path.resolve(), content=content)


def _kind(content: Mapping[str, Any]) -> ProfileKind:
    match content["distributed_type"]:
        case "NO":
            return "single"
        case "MULTI_GPU":
            return "ddp"
        case "DEEPSPEED":
            return "zero2" if content["deepspeed_config"]["zero_stage"] == 2 else "zero3"
        case _:
            return "fsdp"


_SECTIONS = {"deepspeed_config": DEEPSPEED, "fsdp_config": FSDP}
_SECTION_OF_TYPE: dict[Any, str] = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config"}


def _wrong_keys(content: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in content.items():
        if key in TOP_LEVEL:
            yield from _wrong_value(key, TOP_LEVEL[key], value)
        elif key not in _SECTIONS:
            yield _unknown(key, value, [*TOP_LEVEL, *_SECTIONS])
        elif isinstance(value, dict):
            rules = _SECTIONS[key]
            for inner, item in value.items():
                path = f"{key}.{inner}"
                yield from (
                    _wrong_value(path, rules[inner], item) if inner in rules else [_unknown(path, item, [*rules])]
                )


def _unknown(path: str, value: object, siblings: list[str]) -> Problem:
    section, _, key = path.rpartition(".")
    # accelerate takes fsdp_config's keys without their prefix as well
    near = nearest(key, siblings, 0.7) or nearest(f"fsdp_{key}", siblings, 0.9)
    return Problem(
        path=path,
        message=f"is not a key that allranks knows in an accelerate file, with the value {shown(value)}",
        nearest=f"{section}.{near}" if near and section else near,
        choices=() if near else tuple(siblings),
        fix="remove it, or correct its name",
    )


def _wrong_value(path: str, rule: KeyRule, value: object) -> Iterator[Problem]:
    if not rule.accepts(value):
        yield Problem(
            path=path,
            message=f"{shown(value)} is not {rule.takes or 'supported'}",
            choices=tuple(shown(value) for value in rule.values),
            fix=rule.why,
        )


def _wrong_shape(content: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with the file as a whole."""
    types = TOP_LEVEL["distributed_type"].values
    kind = content.get("distributed_type")
    if kind is None:
        yield Problem(path="distributed_type", message="is missing", choices=types, fix="say how the model is spread")
    processes = content.get("num_processes", 1 if kind == "NO" else None)
    if kind in types and (processes is None or (kind == "NO") != (processes == 1)):
        yield Problem(
            path="num_processes",
            message=f"{shown(processes)} does not suit distributed_type: {kind}",
            fix="write 1 for 'NO', and 2 or more for the others",
        )
    if kind not in types:
        return
    for section in _SECTIONS:
        given = content.get(section)
        if _SECTION_OF_TYPE.get(kind) == section:
            yield from _missing(section, given)
        elif given:
            yield Problem(
                path=section,
                message=f"has no effect with distributed_type: {shown(kind)}",
                fix="remove it, or change distributed_type",
            )


def _missing(section: str, given: object) -> Iterator[Problem]:
    if not isinstance(given, dict):
        yield Problem(path=section, message=f"{shown(given)} is not a section", fix=f"write keys below {section}:")
        return
    for key in REQUIRED[section]:
        needless = key == "zero3_init_flag" and given.get("zero_stage") == 2
        if key not in given and not needless:
            rule = _SECTIONS[section][key]
            yield Problem(
                path=f"{section}.{key}",
                message="is missing",
                choices=tuple(shown(value) for value in rule.values),
                fix=rule.why,
            )


def check_profile_against_run(profile: Profile, config: RunConfig) -> list[Problem]:
    """Where a run and a profile contradict each other.

    Args:
        profile: how the model is spread.
        config: what is trained.
    """
    return [
        *_precision(profile, config),
        *_clipping(profile, config),
        *_eight_bit_optimizer(profile, config),
        *_quant_storage(profile, config),
    ]


def _precision(profile: Profile, config: RunConfig) -> Iterator[Problem]:
    wanted = config.training.mixed_precision
    if wanted not in ("auto", profile.mixed_precision):
        yield Problem(
            path="training.mixed_precision",
            message=f"{shown(wanted)} contradicts mixed_precision: {profile.mixed_precision} of profile {profile.name}",
            fix=f"set it to auto, or take a copy (allranks profiles cp {shlex.quote(profile.name)} my.yaml), "
            f"write mixed_precision: {shown(wanted)} there and run with --profile my.yaml",
        )


def _clipping(profile: Profile, config: RunConfig) -> Iterator[Problem]:
    bound = profile.content.get("deepspeed_config", {}).get("gradient_clipping", "auto")
    if bound not in ("auto", config.training.max_grad_norm):
        yield Problem(
            path="training.max_grad_norm",
            message=f"{config.training.max_grad_norm} contradicts deepspeed_config.gradient_clipping: {bound} of "
            f"profile {profile.name}",
            fix="remove gradient_clipping from the profile, or set both to the same number",
        )


_NO_EIGHT_BIT = {
    "fsdp": "fails at the first step under fsdp: bitsandbytes can't update sharded tensors",
    "zero2": "is not supported under zero2: its state is one flat buffer and can't be saved by parameter name",
    "zero3": "is not supported under zero3: its state is one flat buffer and can't be saved by parameter name",
}


def _eight_bit_optimizer(profile: Profile, config: RunConfig) -> Iterator[Problem]:
    if config.training.optim != "adamw_torch_fused" and profile.kind in _NO_EIGHT_BIT:
        yield Problem(
            path="training.optim",
            message=f"{config.training.optim} {_NO_EIGHT_BIT[profile.kind]}",
            fix="set training.optim to adamw_torch_fused, or run with --profile ddp",
        )


_UNSAFE_STORAGE = {
    ("fsdp", "uint8"): "can't be sharded: torch shards floating-point parameters only",
    ("zero2", "float32"): "is not known to survive DeepSpeed, which casts floating-point parameters",
    ("zero3", "float32"): "is not known to survive DeepSpeed, which casts floating-point parameters",
}


def _quant_storage(profile: Profile, config: RunConfig) -> Iterator[Problem]:
    storage = config.quantization.bnb_4bit_quant_storage
    reason = _UNSAFE_STORAGE.get((profile.kind, storage))
    if reason is not None and config.quantization.load_in_4bit:
        yield Problem(
            path="quantization.bnb_4bit_quant_storage",
            message=f"{storage} {reason}",
            choices=tuple(
                name for name in ("auto", "uint8", "bfloat16", "float32") if (profile.kind, name) not in _UNSAFE_STORAGE
            ),
            fix="set it to auto",
        )
