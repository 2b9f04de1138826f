"""The Slurm templates, run by a shell with fakes in place of srun, scontrol, accelerate and allranks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

TEMPLATES = Path(__file__).resolve().parents[2] / "slurm"

FAKES = {
    "scontrol": '#!/bin/sh\necho "$SLURM_JOB_NODELIST" | tr , "\\n"\n',
    "srun": "#!/bin/bash\n"
    'echo "$*" >"$OUT/srun"\n'
    'while [ "$1" != bash ]; do shift; done\n'
    'SLURM_NODEID=1 SLURMD_NODENAME=n2 "$@"\n',
    "accelerate": "#!/bin/bash\n"
    'printf "%s\\n" "$@" >"$OUT/accelerate"\n'
    'echo "$PET_LOCAL_ADDR $PET_RDZV_ID $TORCH_DISABLE_SHARE_RDZV_TCP_STORE" >"$OUT/env"\n'
    'mkdir -p "$RUN_DIR"; : >"$OUT/started"\n'
    'for _ in $(seq 300); do [ -e "$RUN_DIR/stop.request" ] && break; sleep 0.1; done\n'
    '[ -z "$VERDICT" ] || printf \'{\\n  "exit_code": %s,\\n  "step": 3\\n}\\n\' "$VERDICT" >"$RUN_DIR/verdict.json"\n'
    "exit 1\n",
    "allranks": '#!/bin/sh\nprintf "%s|" "$@"\nexit 3\n',
}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job whose commands are fakes."""
    (tmp_path / "bin").mkdir()
    for name, text in FAKES.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}/bin:{os.defpath}",
        "OUT": str(tmp_path),
        "RUN_DIR": str(tmp_path / "runs" / "tune"),
        "ALLRANKS_RUNS": str(tmp_path / "runs"),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NAME": "tune",
        "SLURM_JOB_NODELIST": "n1,n2",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "8",
    }


def stopped(job: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Exit code and output of the multi-node job, which gets Slurm's signal once its ranks run."""
    process = subprocess.Popen(
        ["bash", str(TEMPLATES / "multi-node.sbatch"), *arguments], env=job, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not (Path(job["OUT"]) / "started").exists():
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


@pytest.mark.timeout(90)
def test_several_nodes_run_one_launch_and_stop_on_request(job: dict[str, str], tmp_path: Path) -> None:
    job["VERDICT"] = "75"
    code, output = stopped(job, "run.yaml", "zero2.yaml", "--set", "lora.r=8")
    assert code == 75
    assert output == f"show|{tmp_path}/runs/tune|"
    assert (tmp_path / "runs" / "tune" / "stop.request").read_text() == '{"reason": "SIGTERM from Slurm"}\n'
    assert (tmp_path / "srun").read_text().startswith("--kill-on-bad-exit=1 --wait=60 --cpus-per-task=8 bash -c")
    assert (tmp_path / "env").read_text() == "n2 123456 1\n"
    assert (tmp_path / "accelerate").read_text().split() == [
        *("launch", "--machine_rank", "1"),
        *("--config_file", "zero2.yaml", "--num_machines", "2", "--num_processes", "8"),
        *("--main_process_ip", "n1", "--main_process_port", "23456"),
        *("--rdzv_backend", "c10d", "--max_restarts", "0", "--deepspeed_multinode_launcher", "standard"),
        *("-m", "allranks.train", "run.yaml", "--set", "lora.r=8"),
        *("--set", f"output.dir={tmp_path}/runs", "--set", "output.name=tune"),
    ]


@pytest.mark.timeout(90)
def test_without_a_verdict_the_job_fails_as_accelerate_did(job: dict[str, str]) -> None:
    job["VERDICT"] = ""
    run_dir = Path(job["RUN_DIR"])
    run_dir.mkdir(parents=True)
    (run_dir / "verdict.json").write_text('{\n  "exit_code": 0,\n  "step": 3\n}\n')
    assert stopped(job, "run.yaml", "zero2.yaml") == (1, "")


def test_one_node_becomes_the_launcher(job: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", str(TEMPLATES / "single-node.sbatch"), "run.yaml", "zero2", "--smoke"],
        env=job,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "run|run.yaml|--profile|zero2|--grace|240|--smoke|")


def test_every_template_says_how_it_is_used(job: dict[str, str]) -> None:
    templates = sorted(TEMPLATES.rglob("*.sbatch"))
    assert len(templates) == 2
    for template in templates:
        done = subprocess.run(["bash", str(template)], env=job, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode != 0
        assert f"usage: sbatch {template.name} run.yaml" in done.stderr
