"""Which run directory a launch goes into, and whether it may. Nothing is written here, and nothing ever deleted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from stat import S_ISDIR
from typing import Literal

from allranks.checkpoints.resume import resume_differences
from allranks.checkpoints.store import CHECKPOINTS_DIR, CheckpointStore
from allranks.config.schema import RunConfig
from allranks.errors import Problem, ProblemsError, UserError
from allranks.events import EVENTS_DIR
from allranks.plan.plan import PLAN_FILE
from allranks.rundir import LOGS_DIR


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a launch goes.

    Attributes:
        run_dir: absolute path of the run directory, which need not exist.
        recorded_global_batch: samples per step of the checkpoint that the run goes on from; None: it starts anew.
        notes: what is not as asked, one line each.
    """

    run_dir: Path
    recorded_global_batch: int | None = None
    notes: tuple[str, ...] = ()


def destination(wanted: Path, config: RunConfig, resume: Literal["auto", "never", "must"]) -> Destination:
    """The run directory of a launch of `config`.

    Args:
        wanted: the directory by name.
        config: what will be trained.
        resume: ``auto`` and ``must`` go on in `wanted`; ``never`` takes the first free of ``wanted``, ``wanted-2``, ….

    Raises:
        UserError: `wanted` can't be a folder, or a file is in the place of one in it.
        ProblemsError: `wanted` holds a checkpoint of another run, or ``must`` finds none.
        StorageError: there are checkpoints, but not one is usable.
    """
    _refuse_an_impossible_place(wanted)
    _refuse_files_for_folders(wanted)
    if resume == "never":
        free = _first_free(wanted)
        notes = (f"{wanted.name} exists and is left alone: this run is {free.name}",) if free != wanted else ()
        return Destination(run_dir=free, notes=notes)
    store = CheckpointStore(wanted, keep=1)
    ref = store.latest()
    if ref is None:
        if resume == "must":
            problem = Problem(
                path="--resume must",
                message="there is no checkpoint to go on from",
                fix="leave out --resume to start at step 0, or give the --name of the run that has one",
            )
            raise ProblemsError(str(wanted), [problem])
        return Destination(run_dir=wanted)
    saved = store.saved_plan(ref)
    problems = resume_differences(saved.config, config, recorded_global_batch_size=saved.global_batch_size)
    if problems:
        raise ProblemsError(f"{wanted} holds a run of another configuration, at step {ref.step}", problems)
    return Destination(run_dir=wanted, recorded_global_batch=saved.global_batch_size, notes=ref.notes)


def _first_free(wanted: Path) -> Path:
    candidates = (wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}") for number in count(1))
    return next(path for path in candidates if not (path / PLAN_FILE).exists())


def _refuse_files_for_folders(wanted: Path) -> None:
    for name in (EVENTS_DIR, LOGS_DIR, CHECKPOINTS_DIR):
        if (wanted / name).exists() and not (wanted / name).is_dir():
            raise UserError(
                f"{wanted / name} is a file, and a run needs a folder there\n"
                "    fix: give another output.dir or --name, or move it away"
            )


def _refuse_an_impossible_place(wanted: Path) -> None:
    """A folder that is not there yet is fine; a file in its place or above it, or a name that is too long, is not."""
    shown = str(wanted)
    try:
        word = None if S_ISDIR(wanted.stat().st_mode) else "it is not a folder"
    except FileNotFoundError:
        return
    except OSError as error:
        word = error.strerror
    except ValueError:  # Python's own words for it differ from version to version
        shown, word = repr(shown), "embedded null byte"
    if word is not None:
        raise UserError(
            f"the run directory {shown} can't be made or used: {word}\n    fix: give another output.dir or --name"
        )
