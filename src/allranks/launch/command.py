"""From a plan to the command line and environment of one launch. Pure: nothing is started, read or written here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allranks.environment import LAUNCH_NUMBER, LAUNCHER_FLAG, LIVE_LINE_FLAG
from allranks.plan.plan import Plan
from allranks.rundir import launch_log_dir

TORCHRUN_DIR = "torchrun"
"""Below the log folder: what ranks say before they have their own logs."""

_NO_LIMIT = 10_000

_LAUNCHER_ONLY = (LAUNCHER_FLAG, LAUNCH_NUMBER, LIVE_LINE_FLAG, "PET_REDIRECTS")

_OF_ANOTHER_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
"""Variables that place a process in somebody else's job: a rank that inherits them joins the wrong one."""

_TORCHRUN_PREFIX = "PET_"
"""Variables that torchrun reads for options which accelerate does not set; some clusters export them."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """One launch, ready to be printed or started.

    Attributes:
        argv: command line, program first.
        env: variables to add to the inherited environment.
        unset: inherited variables that must not reach the ranks.
        log_dir: absolute path of the folder of this launch's logs.
        launch: its number, from 1.
        restarts: ranks that die are started again, all of them.
        one_process: accelerate starts the only rank itself, without torchrun: restarting it is the launcher's part.
        notes: what differs from what the environment asked for, one line each.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    unset: tuple[str, ...]
    log_dir: Path
    launch: int
    restarts: bool = False
    one_process: bool = False
    notes: tuple[str, ...] = ()

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the launched process."""
        return {name: value for name, value in inherited.items() if name not in self.unset} | self.env


def build_launch(
    plan: Plan,
    *,
    port: int,
    launch_no: int,
    environ: Mapping[str, str],
    python: str,
    live_line: bool = False,
) -> LaunchRequest:
    """The request that starts all ranks of `plan` on this machine.

    Args:
        plan: the plan, which must lie in its run directory before the request is acted on.
        port: of the rendezvous store; 0 lets the store take a free one, so that nothing can take it first.
        launch_no: number of this launch of the run, from 1.
        environ: what the launched process would inherit.
        python: interpreter that runs accelerate and the ranks.
        live_line: the launcher writes to a terminal.
    """
    log_dir = launch_log_dir(Path(plan.run_dir), launch_no)
    unset = tuple(name for name in environ if name in _OF_ANOTHER_LAUNCHER or name.startswith(_TORCHRUN_PREFIX))
    notes = [f"left out of the ranks' environment: {', '.join(unset)} (of another launcher)"] if unset else []
    env = {
        LAUNCHER_FLAG: "1",
        LAUNCH_NUMBER: str(launch_no),
        **({LIVE_LINE_FLAG: "1"} if live_line else {}),
        **_torchrun_env(plan, port),
        "DS_ACCELERATOR": plan.device,
        "PYTHONUNBUFFERED": "1",
        **_unless_set(
            environ,
            TOKENIZERS_PARALLELISM="false",
            CUDA_DEVICE_ORDER="PCI_BUS_ID",
            TORCH_CPP_LOG_LEVEL="ERROR",  # C++ stacks of connections that end because their peers have
            PYTHONWARNINGS="ignore::FutureWarning",  # words of one library to another's developers, on every rank
        ),
    }
    if plan.device == "cpu":
        # Hides GPUs from every library at once: each of them would pick one by itself.
        env["CUDA_VISIBLE_DEVICES"] = ""
        env |= _unless_set(environ, OMP_NUM_THREADS="1")
        if "OMP_NUM_THREADS" in environ:
            notes.append(f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']} kept as set; a CPU rank has 1 by default")
    elif "PYTORCH_ALLOC_CONF" not in environ and "PYTORCH_CUDA_ALLOC_CONF" not in environ:
        # Not the newer PYTORCH_ALLOC_CONF: some releases of torch read only its general part (pytorch#183387).
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return LaunchRequest(
        argv=(
            *(python, "-m", "accelerate.commands.launch"),
            *("--config_file", plan.profile_file),
            *("--num_processes", str(plan.world_size), "--num_machines", "1", "--machine_rank", "0"),
            *("--mixed_precision", plan.mixed_precision),
            *(() if _one_process(plan) else _torchrun_flags(log_dir, plan)),
            *("-m", "allranks.train", "--run-dir", plan.run_dir),
        ),
        env=env,
        unset=unset,
        log_dir=log_dir,
        launch=launch_no,
        restarts=plan.config.oom.max_respawns > 0,
        one_process=_one_process(plan),
        notes=tuple(notes),
    )


def _one_process(plan: Plan) -> bool:
    # For this type accelerate starts the process itself; for every other one it calls torchrun, even for one rank.
    return bool(plan.profile.get("distributed_type") == "NO")


def _torchrun_flags(log_dir: Path, plan: Plan) -> tuple[str, ...]:
    # The ranks count by cause how often they may start again; torchelastic's own number only has to be out of the way.
    restarts = _NO_LIMIT if plan.config.oom.max_respawns else 0
    # The rendezvous has its own port; 0 keeps accelerate from looking for the default one and warning that it is taken.
    return (
        *("--main_process_port", "0", "--rdzv_backend", "c10d", "--max_restarts", str(restarts)),
        *("--log_dir", str(log_dir / TORCHRUN_DIR)),
    )


def _torchrun_env(plan: Plan, port: int) -> dict[str, str]:
    if _one_process(plan):
        return {}
    return {
        # accelerate has no flags for these three. Without the first, c10d takes its default port on every machine;
        # without the second, the ranks meet at the machine's full name, which need not resolve; without the third,
        # what several ranks say before they have their logs is torn into pieces of each other.
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_LOCAL_ADDR": "127.0.0.1",
        "PET_REDIRECTS": "3",
        # The agent's own store would keep the keys of ranks that died.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _unless_set(environ: Mapping[str, str], **values: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if name not in environ}


def render_dry_run(request: LaunchRequest, plan: Plan) -> str:
    """Shell text that does by hand what the request does, plan file included.

    Left out are the variables through which `allranks run` takes over the ranks' output and exit codes, and restarts:
    without them a deliberate stop is an exit code that torchelastic would take for a failure.
    """
    run_dir = shlex.quote(plan.run_dir)
    assignments = [f"{name}={shlex.quote(value)}" for name, value in request.env.items() if name not in _LAUNCHER_ONLY]
    unset = [f"-u {name}" for name in request.unset]
    ranks = f"{plan.world_size} {plan.device} rank{'s' if plan.world_size > 1 else ''}"
    lines = [
        f"# {plan.profile_kind} on {ranks}, global batch {plan.global_batch_size}",
        *(f"# {note}" for note in (*plan.notes, *request.notes)),
        f"mkdir -p {run_dir}",
        f"cat > {run_dir}/plan.json <<'PLAN'",
        plan.to_json(),
        "PLAN",
        " \\\n    ".join(["env", *unset, *assignments, *_paired(_without_restarts(request.argv))]),
    ]
    return "\n".join(lines) + "\n"


def _without_restarts(argv: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("0" if before == "--max_restarts" else word for before, word in zip(("", *argv), argv, strict=False))


def _paired(argv: tuple[str, ...]) -> list[str]:
    """The quoted command line with each option and its value together, for one line each."""
    parts: list[str] = []
    for word in argv:
        quoted = shlex.quote(word)
        if parts and not word.startswith("-") and parts[-1].startswith("-") and " " not in parts[-1]:
            parts[-1] += f" {quoted}"
        else:
            parts.append(quoted)
    return parts
