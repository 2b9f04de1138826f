"""``python -m allranks.train``: the worker, one process per rank, started by `accelerate launch`.

Under `allranks run` it is given a run directory with a plan in it. By itself,
``accelerate launch --config_file profiles/zero2.yaml -m allranks.train run.yaml`` works too: rank 0 then plans.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from allranks import environment
from allranks.errors import AllranksError
from allranks.plan.plan import Plan
from allranks.rank_process import follow_parent, redirect_output
from allranks.rundir import launch_log_path

_ORPHAN_GRACE_S = 60.0


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one rank, and end its process."""
    status = _status(argv)
    from allranks.train.leaving import end_process

    end_process(status)


def _status(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m allranks.train", description="One rank of a training run.")
    parser.add_argument("config", nargs="?", type=Path, help="run.yaml, without `allranks run`")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--run-dir", type=Path, help="run directory with a plan, as `allranks run` gives it")
    arguments = parser.parse_args(argv)
    if (arguments.config is None) == (arguments.run_dir is None):
        parser.error("give either run.yaml or --run-dir")
    place = environment.rank_environment()
    if arguments.run_dir is not None and place.under_launcher:
        redirect_output(launch_log_path(arguments.run_dir, place.launch, place.rank))
        follow_parent(_ORPHAN_GRACE_S)
    # Only now: what the libraries say while they load belongs into the log.
    from allranks.coordinator.agreement import ControlPlaneLost
    from allranks.train.bare import start_bare
    from allranks.train.leaving import failed, lost, process_status
    from allranks.train.main import run
    from allranks.train.process import join, leave
    from allranks.train.quiet import quiet

    quiet()
    with ExitStack() as held:
        try:
            if arguments.run_dir is not None:
                plan, launch = Plan.read(arguments.run_dir), place.launch
                patience_s = plan.config.oom.hang_timeout_s
                rank, control = join(plan.profile_kind, plan.mixed_precision, patience_s=patience_s)
            else:
                plan, rank, control, launch = start_bare(arguments.config, arguments.overrides, held)
            code = run(plan, rank, control, launch)
            leave(control)
            return process_status(rank, code)
        except ControlPlaneLost as error:
            lost(error)
        except AllranksError as error:
            with suppress(OSError):
                print(error, file=sys.stderr, flush=True)
            return int(error.exit_code)
        except Exception:
            failed()


if __name__ == "__main__":
    main()
