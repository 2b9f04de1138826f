"""Restarts over two nodes: two torchelastic agents, each with one rank, on one machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from allranks.environment import LAUNCH_NUMBER, LAUNCHER_FLAG
from allranks.rundir import launch_lock, launch_log_dir
from runs import ROOT, Finished, command, config_of, environment, free_port, launch

pytestmark = pytest.mark.timeout(300)

STEPS = 6


def _plan(argv: list[str], folder: Path) -> str:
    text = subprocess.run(
        [*argv, "--dry-run"], env=environment(), cwd=folder, capture_output=True, text=True, check=True
    )
    return text.stdout.partition("<<'PLAN'\n")[2].partition("\nPLAN\n")[0]


@pytest.mark.parametrize("profile", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_a_rank_killed_on_one_node_has_the_ranks_of_both_start_again(
    profile: str, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    changes = {"training__max_steps": STEPS, "output__save_steps": 2}
    alone = launch(
        config_of(tiny_llama_dir, tmp_path, output__name="whole", **changes), tmp_path, profile="single", ranks=1
    )
    assert alone.status == 0, alone.output

    faults = ("rank=1,step=4,phase=forward,kind=sigkill", "rank=0,step=6,phase=backward,kind=exit")
    config = config_of(tiny_llama_dir, tmp_path, output__name="nodes", **changes)
    argv, run_dir = command(config, tmp_path, profile=profile, ranks=2, inject=faults)
    port = free_port()
    with launch_lock(run_dir), ExitStack() as agents:
        (run_dir / "plan.json").write_text(_plan(argv, tmp_path), encoding="utf-8")
        launch_log_dir(run_dir, 1).mkdir(parents=True)
        nodes: list[subprocess.Popen[bytes]] = []
        for number in range(2):
            nodes.append(agents.enter_context(_node(number, profile, port, run_dir, tmp_path)))
            agents.callback(_end, nodes[-1])
            # Both addresses are local here, so the agent that comes first serves the rendezvous, and accelerate
            # refuses to start the first node where the port is served already.
            _wait_until(lambda: _served(port) or _failed(nodes), seconds=60)
        _wait_until(lambda: all(node.poll() is not None for node in nodes) or _failed(nodes), seconds=180)
    told = "\n".join((tmp_path / f"node{number}.log").read_text()[-3000:] for number in range(2))
    assert [node.returncode for node in nodes] == [0, 0], told

    run = Finished(run_dir=run_dir, status=0, output=told)
    assert run.verdict["reason"] == "finished"
    first, second = run.events("respawn")
    assert (first["step"], first["failed_rank"], first["resumed_step"]) == (4, 1, 2)
    assert (second["step"], second["failed_rank"], second["resumed_step"]) == (6, 0, 4)
    for event in (first, second):  # without our launcher nobody noted an exit status
        assert event["failure"] == "lost"
        assert "ended without a word" in event["message"]
    assert run.committed() == alone.committed()
    losses = {event["step"]: event["loss"] for event in run.events("step")}
    assert [losses[step] for step in sorted(losses)] == pytest.approx(alone.losses(), rel=1e-4)


def _wait_until(reached: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.1)


def _failed(nodes: list[subprocess.Popen[bytes]]) -> bool:
    return any(node.poll() not in (None, 0) for node in nodes)


def _end(node: subprocess.Popen[bytes]) -> None:
    """SIGTERM first, for an agent that is killed leaves its rank behind."""
    node.terminate()
    try:
        node.wait(timeout=40)
    except subprocess.TimeoutExpired:
        node.kill()


def _served(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _node(number: int, profile: str, port: int, run_dir: Path, folder: Path) -> subprocess.Popen[bytes]:
    """What a multi-node launch starts on one node."""
    argv = [sys.executable, "-m", "accelerate.commands.launch"]
    argv += ["--config_file", str(ROOT / f"profiles/{profile}.yaml"), "--mixed_precision", "no"]
    argv += ["--num_machines", "2", "--num_processes", "2", "--machine_rank", str(number)]
    argv += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port), "--rdzv_backend", "c10d"]
    argv += ["--max_restarts", "100", "-m", "allranks.train", "--run-dir", str(run_dir)]
    variables = {
        LAUNCHER_FLAG: "1",
        LAUNCH_NUMBER: "1",
        "PET_LOCAL_ADDR": "127.0.0.1",
        "PET_RDZV_ID": f"nodes-{port}",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (folder / f"node{number}.log").open("wb") as log:
        return subprocess.Popen(argv, env=environment(**variables), cwd=folder, stdout=log, stderr=subprocess.STDOUT)
