"""The worker without our launcher: accelerate started it, so rank 0 makes the plan that a launcher would have made."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from allranks import environment
from allranks.config.load import load_run_config
from allranks.coordinator.agreement import ControlPlane
from allranks.errors import AllranksError, ExitCode
from allranks.plan.hardware import detect
from allranks.plan.plan import PLAN_FILE, Plan
from allranks.plan.planner import make_plan, run_directory
from allranks.profiles import profile_from_values
from allranks.rundir import discard_stop_request, launch_lock, launch_log_dir, next_launch, replace_text
from allranks.train.process import Rank, configured_profile, join
from allranks.verdict import prepare_verdict

_OFF = (
    "started by accelerate itself, not by `allranks run`: no rank logs in the run directory, no care for orphans, "
    "and accelerate's own exit code instead of the run's"
)


def start_bare(config_file: Path, overrides: Sequence[str], held: ExitStack) -> tuple[Plan, Rank, ControlPlane, int]:
    """Join the ranks and agree on a plan.

    Args:
        config_file: run.yaml.
        overrides: values of ``--set``.
        held: holds the run directory for as long as the process lives.

    Returns:
        The plan, this rank, the control plane, and the number of the launch.

    Raises:
        AllranksError: something the user gave is wrong; the same on all ranks.
    """
    place = environment.rank_environment()
    config = load_run_config(config_file, overrides)
    run_dir = run_directory(config, config_file)
    profile = profile_from_values(configured_profile(), path=run_dir)
    recorded = Plan.read(run_dir).global_batch_size if (run_dir / PLAN_FILE).exists() else None
    plan = make_plan(
        config,
        profile,
        detect(),
        run_dir=run_dir,
        gpus=place.world_size,
        recorded_global_batch=recorded,
    )
    plan = replace(plan, notes=(*plan.notes, _OFF))
    rank, control = join(profile.kind, plan.mixed_precision, patience_s=config.oom.hang_timeout_s)
    answer = ""
    if place.rank == 0:
        try:
            held.enter_context(launch_lock(run_dir))
            launch = next_launch(run_dir)
            launch_log_dir(run_dir, launch).mkdir(parents=True)
            discard_stop_request(run_dir)
            prepare_verdict(run_dir)
            replace_text(run_dir / PLAN_FILE, plan.to_json())
            answer = str(launch)
        except (AllranksError, OSError) as error:
            answer = f"{run_dir}: {error}"
    answer = control.broadcast_text(answer)
    if not answer.isdecimal():
        raise _Refused(answer)
    return plan, rank, control, int(answer)


class _Refused(AllranksError):
    """Rank 0 could not take the run directory; every rank raises it."""

    exit_code = ExitCode.USAGE
