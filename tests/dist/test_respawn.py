"""All ranks start again when nothing can be retried in place, and the run ends as if nothing had happened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import Finished, config_of, launch, launch_bare

pytestmark = pytest.mark.timeout(300)

STEPS = 8
SAVED_EVERY = 3
HANG_TIMEOUT_S = 12.0
"""More than loading takes between two looks at the stack on a loaded machine."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One disturbed run.

    Attributes:
        profile: of the run.
        ranks: how many.
        faults: what is injected, and after which step all ranks go on again, in their order.
        kind: of the first death, as the event has it.
        failed_rank: whose failure the first death was.
        resumed: committed step of the checkpoint that each restart went on from. No fault is in the first step after a
            save: it could come before the checkpoint counts.
    """

    profile: str
    ranks: int
    faults: tuple[str, ...]
    kind: str
    failed_rank: int
    resumed: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.profile}-{self.faults[0].replace('=', '-').replace(',', '-')}"


_NIGHTLY = pytest.mark.nightly
"""Of cases beside which continuous integration has a cell of the failure matrix that asserts the same."""

CASES = [
    Case(
        profile="ddp",
        ranks=2,
        faults=("rank=1,step=5,phase=forward,kind=sigkill",),
        kind="killed",
        failed_rank=1,
        resumed=(3,),
    ),
    pytest.param(
        Case(
            profile="zero2",
            ranks=2,
            faults=("rank=1,step=2,phase=step,kind=oom",),
            kind="cuda_oom",
            failed_rank=1,
            resumed=(0,),
        ),
        marks=_NIGHTLY,
    ),
    Case(
        profile="zero3",
        ranks=2,
        faults=("rank=0,step=8,phase=backward,kind=exit", "rank=1,step=3,phase=save,kind=sigkill"),
        kind="killed",
        failed_rank=1,
        resumed=(0, 6),
    ),
    pytest.param(
        Case(
            profile="fsdp",
            ranks=2,
            faults=("rank=1,step=5,phase=backward,kind=alloc", "rank=0,step=5,phase=backward,kind=oom"),
            kind="",
            failed_rank=-1,
            resumed=(3,),
        ),
        marks=_NIGHTLY,
    ),
    pytest.param(
        Case(
            profile="single",
            ranks=1,
            faults=("rank=0,step=8,phase=backward,kind=exit",),
            kind="native_exit",
            failed_rank=0,
            resumed=(6,),
        ),
        marks=_NIGHTLY,
    ),
    pytest.param(
        Case(
            profile="ddp",
            ranks=2,
            faults=("rank=1,step=1,phase=load,kind=sigkill",),
            kind="killed",
            failed_rank=1,
            resumed=(0,),
        ),
        marks=_NIGHTLY,
    ),
    Case(
        profile="ddp",
        ranks=2,
        faults=("rank=0,step=5,phase=reduce,kind=error",),
        kind="size_mismatch",
        failed_rank=0,
        resumed=(3,),
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("respawn")


def _config(model: Path, folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    chosen = {"training__max_steps": STEPS, "output__save_steps": SAVED_EVERY, "output__name": name, **changes}
    return config_of(model, folder, **chosen)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama_dir: Path, folder: Path) -> Finished:
    run = launch(_config(tiny_llama_dir, folder, "whole"), folder, profile="ddp", ranks=2)
    assert run.status == 0, run.output
    return run


def _adapter(run: Finished) -> torch.Tensor:
    tensors = run.tensors("adapter/adapter_model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors) if "lora_B" in name])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_run_ends_as_if_nothing_had_happened(
    case: Case, undisturbed: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    config = _config(tiny_llama_dir, folder, case.name)
    run = launch(config, folder, profile=case.profile, ranks=case.ranks, inject=case.faults)
    assert run.status == 0, run.output
    assert run.verdict["reason"] == "finished"

    deaths = run.events("respawn")
    assert [event["resumed_step"] for event in deaths] == list(case.resumed), deaths
    assert [event["generation"] for event in deaths] == list(range(1, len(deaths) + 1))
    if case.profile == "fsdp":  # both ranks could still say what had happened to them
        assert "rank lost" not in run.output, run.output
    if case.kind:
        assert (deaths[0]["failure"], deaths[0]["failed_rank"]) == (case.kind, case.failed_rank), deaths
    for fault in case.faults:
        assert "did not happen" not in run.output.partition("drill: ")[2], fault

    # The committed lineage: each step's last life, with the samples of the undisturbed run, on every rank.
    assert run.committed() == undisturbed.committed()
    for step, ids in run.committed().items():
        taken = []
        for rank in range(case.ranks):
            last = [event for event in run.events("step", rank) if event["step"] == step][-1]
            taken += [sample for micro in last["micro_batches"] for sample in micro]
        assert sorted(taken) == sorted(ids)
    losses = {event["step"]: event["loss"] for event in run.events("step")}
    assert [losses[step] for step in sorted(losses)] == pytest.approx(undisturbed.losses(), rel=1e-4)
    difference = _adapter(run) - _adapter(undisturbed)
    assert float(difference.norm() / _adapter(undisturbed).norm()) < 2e-2


@pytest.mark.parametrize(
    ("profile", "fault", "culprit"),
    [
        ("ddp", "rank=1,step=5,phase=forward,kind=hang", 1),
        ("ddp", "rank=0,step=5,phase=backward,kind=sigstop", 0),
        ("fsdp", "rank=1,step=5,phase=forward,kind=hang", None),
        pytest.param("zero2", "rank=1,step=3,phase=save,kind=sigstop", 1, marks=_NIGHTLY),
    ],
)
def test_a_rank_that_hangs_is_found_and_all_start_again(
    profile: str, fault: str, culprit: int | None, undisturbed: Finished, tiny_llama_dir: Path, folder: Path
) -> None:
    name = f"hang-{profile}-{fault[:6].replace('=', '-')}"
    config = _config(tiny_llama_dir, folder, name, oom__hang_timeout_s=HANG_TIMEOUT_S)
    run = launch(config, folder, profile=profile, ranks=2, inject=(fault,))
    assert run.status == 0, run.output
    (death,) = run.events("respawn")
    assert (death["failure"], death["failed_rank"]) == ("hung", culprit), death
    assert death["message"].startswith(("no progress for", "nothing heard for")), death
    if culprit is not None:
        assert f"phase={death['phase']}" in fault
    assert "did not happen" not in run.output
    assert run.committed() == undisturbed.committed()
    losses = {event["step"]: event["loss"] for event in run.events("step")}
    assert [losses[step] for step in sorted(losses)] == pytest.approx(undisturbed.losses(), rel=1e-4)
    stacks = {path.name: path.read_text() for path in (run.run_dir / "stacks" / "L0001-g0").iterdir()}
    assert sorted(stacks) == ["rank0.txt", "rank1.txt"]
    if "kind=hang" in fault:
        assert "injection.py" in stacks["rank1.txt"]
    else:
        assert "T (stopped)" in stacks[f"rank{culprit}.txt"]
    # From the last sign of life of the hung generation to the first of the next: bounded by the time-out.
    last = max(event["time"] for rank in (0, 1) for event in run.events("step", rank) if event["generation"] == 0)
    assert run.events("launch")[1]["time"] - last < HANG_TIMEOUT_S + 60


def test_a_rank_slowed_twentyfold_is_left_alone(tiny_llama_dir: Path, folder: Path) -> None:
    timeout_s = 8.0
    config = _config(tiny_llama_dir, folder, "slow", oom__hang_timeout_s=timeout_s, training__max_steps=1)
    run = launch_bare(config, folder, profile="ddp", ranks=2, observe={"slow": {"rank": 1, "seconds": 0.08}})
    assert run.status == 0, run.output
    assert run.events("step")[0]["seconds"] > timeout_s
    assert not list(run.run_dir.glob("stacks/*"))


def test_what_was_abandoned_is_told(tiny_llama_dir: Path, folder: Path) -> None:
    """The story of the deaths from the events of rank 0 alone."""
    config = _config(tiny_llama_dir, folder, "told")
    faults = ("rank=1,step=6,phase=backward,kind=exit,times=2",)
    run = launch(config, folder, profile="zero2", ranks=2, inject=faults)
    assert run.status == 0, run.output
    first, second = run.events("respawn")
    for event in (first, second):
        assert (event["step"], event["phase"], event["failed_rank"]) == (6, "backward", 1)
        assert (event["resumed_step"], event["abandoned_steps"]) == (3, [4, 5])
        assert "rank 1 was ended by native code with exit status 1 in step 6 (backward)" in event["message"]
    # The second got no further than the first, and counts double.
    assert (first["used"], second["used"], first["max_respawns"]) == (1, 3, 10)
    lives = [(event["generation"], event["step"]) for event in run.events("step")]
    assert lives == [(0, s) for s in range(1, 6)] + [(1, 4), (1, 5)] + [(2, s) for s in range(4, STEPS + 1)]


def test_the_budget_ends_in_one_message(tiny_llama_dir: Path, folder: Path) -> None:
    config = _config(tiny_llama_dir, folder, "budget", oom__max_respawns=2)
    faults = ("rank=1,step=3,phase=forward,kind=sigkill,times=9",)
    run = launch(config, folder, profile="ddp", ranks=2, inject=faults)
    assert run.status == 5, run.output
    assert (run.verdict["reason"], run.verdict["step"]) == ("failure", 2)
    message = run.verdict["message"]
    assert message.startswith("rank 1 was killed by SIGKILL in step 3 (forward)"), message
    assert "restart 2 for this cause would use 3 of oom.max_respawns = 2" in message
    assert len(run.events("launch")) == 3
    assert "happened 2 times; all ranks were started again once; the run ended: failure at step 2" in run.output


@pytest.mark.parametrize(("profile", "ranks"), [("ddp", 2), ("single", 1)])
def test_without_restarts_the_message_says_where_the_dead_rank_was(
    profile: str, ranks: int, tiny_llama_dir: Path, folder: Path
) -> None:
    config = _config(tiny_llama_dir, folder, f"once-{profile}", oom__max_respawns=0)
    faults = (f"rank={ranks - 1},step=3,phase=forward,kind=sigkill",)
    run = launch(config, folder, profile=profile, ranks=ranks, inject=faults)
    assert run.status == 5, run.output
    assert (run.verdict["reason"], run.verdict["exit_code"], run.verdict["step"]) == ("failure", 5, 2)
    message = run.verdict["message"]
    assert message.startswith(f"rank {ranks - 1} was killed by SIGKILL in step 3 (forward) on a micro-batch of"), (
        message
    )
    assert "it was not started again, for oom.max_respawns is 0; somebody" in message
    assert f"exit code 5: {message}" in run.output


def test_ranks_that_die_before_they_have_joined_are_not_started_for_ever(tiny_llama_dir: Path, folder: Path) -> None:
    config = _config(tiny_llama_dir, folder, "stillborn")
    broken = folder / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'allranks.train' in sys.orig_argv and 'accelerate.commands.launch' not in sys.orig_argv:\n"
        "    os.write(2, b'a broken installation\\n')\n"
        "    os._exit(1)\n"
    )
    run = launch(config, folder, profile="zero2", ranks=2, more_env={"PYTHONPATH": str(broken)})
    assert run.status == 5, run.output
    assert "a broken installation" in run.output
    # They die faster than the launcher looks, so torchelastic may be one start ahead of it.
    assert run.output.count("all ranks are started again") <= 2
    assert len(list((run.run_dir / "logs").glob("*/torchrun/*/attempt_*"))) <= 3


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_rank_that_is_stopped_before_it_joins_ends_the_launch(tiny_llama_dir: Path, folder: Path) -> None:
    config = _config(tiny_llama_dir, folder, "absent", oom__hang_timeout_s=5)
    stopped = folder / "stopped"
    stopped.mkdir()
    (stopped / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'allranks.train' in sys.orig_argv and os.environ.get('RANK') == '1':\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    run = launch(config, folder, profile="ddp", ranks=2, more_env={"PYTHONPATH": str(stopped)})
    assert run.status == 5, run.output
    assert "rank 0 waited 1 min 00 s for the others to join: one of 2 is stopped, or still starting" in run.output
    assert "before all had joined, so none was started again" in run.output
    assert "fix: run the same command again" in run.output
