"""The coordinator in loops that are not ours, on two real ranks: both examples, and what they don't show.

Run as a script, this file is the worker: with the path of an example, that one is run and its committed samples are
written down; with a scenario, that function below.
"""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import ROOT, environment, free_port

EXAMPLES = {"accelerate_loop": (4, 8, 2), "transformers_trainer": (6, 4, 1)}
"""Steps, first cap, and the samples that fit on rank 1 in the step that runs out of memory."""
DISTURBED = ("--oom-at", "3")
TIMEOUT_S = 150
TIGHT = 1e-5
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


# The examples


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What an example printed and did.

    Attributes:
        losses: by step.
        committed: by rank and step, the samples whose gradients were in the update, as sorted token lists.
    """

    status: int
    output: str
    losses: list[float]
    committed: list[list[list[list[int]]]]

    @property
    def cap(self) -> int:
        return int(re.findall(r"final cap (\d+)", self.output)[0])


def launched(script: Path, folder: Path, *words: str, watch: dict[str, Any]) -> Ran:
    """`accelerate launch --config_file profiles/ddp.yaml SCRIPT` in fp32, watched as `watch` says."""
    folder.mkdir()
    argv = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "profiles" / "ddp.yaml")]
    argv += ["--mixed_precision", "no", "--main_process_port", str(free_port())]
    argv += [__file__, str(script), json.dumps({"folder": str(folder), **watch})]
    done = subprocess.run(
        [*argv, *words],
        env=environment(PYTHONPATH=str(ROOT / "tests")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        cwd=folder,
        check=False,
    )
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    return Ran(
        status=done.returncode,
        output=done.stdout,
        losses=[float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, flags=re.MULTILINE)],
        committed=[json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()],
    )


@pytest.fixture(scope="module", params=EXAMPLES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(name: str, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    ran = launched(example(name), tmp_path_factory.mktemp(name) / "undisturbed", watch={})
    assert ran.status == 0, ran.output
    return ran


def example(name: str) -> Path:
    return ROOT / "examples" / f"{name}.py"


def test_an_out_of_memory_changes_the_cap_and_neither_samples_nor_losses(
    name: str, undisturbed: Ran, tmp_path: Path
) -> None:
    steps, first_cap, fits = EXAMPLES[name]
    disturbed = launched(example(name), tmp_path / "run", *DISTURBED, watch={})
    assert disturbed.status == 0, disturbed.output
    assert (undisturbed.cap, disturbed.cap) == (first_cap, fits)
    assert disturbed.output.count("rank 1 ran out of GPU memory (cuda_oom) in step 3") == 2, disturbed.output
    assert "rank 1 ran out" not in undisturbed.output

    assert [len(rank) for rank in disturbed.committed] == [steps, steps]
    assert disturbed.committed == undisturbed.committed
    every = [tuple(sample) for rank in undisturbed.committed for step in rank for sample in step]
    assert len(every) == len(set(every)) == steps * 16
    assert len(disturbed.losses) == steps
    assert disturbed.losses == pytest.approx(undisturbed.losses, rel=TIGHT)


def test_without_vote_one_the_second_vote_misses_the_samples(name: str, tmp_path: Path) -> None:
    ran = launched(example(name), tmp_path / "run", *DISTURBED, watch={"off": ["one"]})
    assert ran.status != 0
    assert "a sample was lost or taken twice" in ran.output, ran.output


def test_without_any_vote_losses_and_samples_are_others(name: str, undisturbed: Ran, tmp_path: Path) -> None:
    """So the comparison above would notice a coordinator that does nothing."""
    ran = launched(example(name), tmp_path / "run", *DISTURBED, watch={"off": ["one", "two"]})
    # Where the ranks go without votes is a matter of timing; they may even stop. But never as if undisturbed.
    assert ran.committed != undisturbed.committed
    assert ran.losses != pytest.approx(undisturbed.losses, rel=TIGHT)


def test_the_plain_example_runs_and_the_plain_trainer_has_the_same_losses(
    name: str, undisturbed: Ran, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text(without_marked_lines(example(name).read_text(encoding="utf-8")), encoding="utf-8")
    ran = launched(plain, tmp_path / "run", watch={})
    assert (ran.status, len(ran.losses)) == (0, EXAMPLES[name][0]), ran.output
    if name == "transformers_trainer":  # a loop by hand weighs ranks, not targets, alike
        assert ran.losses == pytest.approx(undisturbed.losses, rel=TIGHT)


def without_marked_lines(text: str) -> str:
    kept = [line for line in text.splitlines() if not line.endswith("# +")]
    return "\n".join(line.replace("# -  ", "") for line in kept) + "\n"


# What the examples don't show


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, what each scenario below returned or raised; all in one launch."""
    folder = tmp_path_factory.mktemp("scenarios")
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    argv += ["--master_port", str(free_port()), __file__, "scenarios", str(folder)]
    done = subprocess.run(
        argv,
        env=environment(PYTHONPATH=str(ROOT / "tests")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def agreed(told: list[dict[str, Any]], scenario: str) -> Any:
    """What both ranks said, which must be the same."""
    assert told[0][scenario] == told[1][scenario]
    return told[0][scenario]


def test_unequal_parts_give_the_loss_and_the_weights_of_one_process(told: list[dict[str, Any]]) -> None:
    x, y = regression(11)
    model = torch.nn.Linear(3, 1)
    start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for expected in agreed(told, "unequal")["losses"]:
        loss = torch.nn.functional.mse_loss(model(x), y)
        assert expected == pytest.approx(loss.item(), rel=TIGHT)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert agreed(told, "unequal")["weight"] == pytest.approx(model.weight.flatten().tolist(), rel=TIGHT)


def test_a_rank_without_samples_takes_part(told: list[dict[str, Any]]) -> None:
    assert agreed(told, "one rank has none") == {"samples": 4, "targets": 4}


def test_the_floor_stops_both_ranks_with_one_message(told: list[dict[str, Any]]) -> None:
    kind, reason, message = agreed(told, "never fits")
    assert (kind, reason) == ("StopTraining", "out_of_memory")
    assert message.startswith("rank 1 ran out of GPU memory (cuda_oom) in step 1 on a micro-batch of 1 sample")


def test_an_error_of_one_rank_stops_both_with_its_words(told: list[dict[str, Any]]) -> None:
    fix = "return (loss, targets): the loss summed over the targets of the micro-batch and their number; "
    fix += "a mean times its number of targets is a sum"
    kind, reason, message = agreed(told, "mean instead of sum")
    assert (kind, reason) == ("StopTraining", "failure")
    assert message.splitlines()[1:] == [
        "UserError: forward returned a Tensor",
        f"    fix: {fix}",
    ]
    assert "KeyError: 'no such column'" in agreed(told, "always an error")[2]


def test_a_loss_that_is_not_finite_stops_both(told: list[dict[str, Any]]) -> None:
    kind, reason, message = agreed(told, "nan")
    assert (kind, reason) == ("StopTraining", "not_finite")
    assert "on ranks [1]" in message


def test_an_optimizer_step_that_fails_on_one_rank_stops_both(told: list[dict[str, Any]]) -> None:
    kind, reason, message = agreed(told, "optimizer")
    assert (kind, reason) == ("StopTraining", "failure")
    verdict, words = message.splitlines()
    assert verdict.startswith("step 1: the optimizer step failed on ranks [1], so the ranks hold different weights now")
    assert words == "OutOfMemoryError: CUDA out of memory (optimizer state)"


def test_a_global_batch_without_targets_stops_both(told: list[dict[str, Any]]) -> None:
    assert agreed(told, "no target")[2].splitlines()[0] == "step 1: the global batch has 0 samples and no target"


def test_bf16_parameters_travel_in_fp32(told: list[dict[str, Any]]) -> None:
    """1,000 on rank 0 and 1 on rank 1 add up in fp32, not in bf16."""
    assert agreed(told, "bf16") == 1001.0


def test_the_peer_of_a_rank_that_dies_is_told(told: list[dict[str, Any]]) -> None:
    kind, message, seconds = told[0]["a rank dies"]
    assert kind == "ControlPlaneLost"
    assert message.startswith("step 1: rank 0 lost its peers: ")
    assert "all ranks must make as many steps" in message
    assert seconds < 30


# The worker


def regression(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, generator=generator), torch.randn(n, 1, generator=generator)


def start(model: torch.nn.Linear) -> None:
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.1)


def _scenarios(folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    told: dict[str, Any] = {}
    for scenario, result in _each(accelerator, rank):
        told[scenario] = result
        (folder / f"rank{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    os._exit(0)  # without its peer, the process group can't be taken down


def _each(accelerator: Any, rank: int) -> Iterator[tuple[str, Any]]:
    from allranks.library import ControlPlaneLost, Coordinator, StopTraining

    def made(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any, Any]:
        model = torch.nn.Linear(3, 1)
        start(model)
        prepared, optimizer = accelerator.prepare(model.to(dtype), torch.optim.SGD(model.parameters(), lr=0.1))
        return prepared, optimizer, Coordinator(accelerator, prepared, optimizer, **{"max_samples": 4, **options})

    def squares(model: Any) -> Any:
        def forward(batch: Any) -> tuple[torch.Tensor, int]:
            return ((model(batch["x"]) - batch["y"]) ** 2).sum(), len(batch["x"])

        return forward

    def stopped(coordinator: Any, samples: Any, forward: Any) -> tuple[str, str, str]:
        try:
            coordinator.step(samples, forward)
        except StopTraining as stop:
            return type(stop).__name__, stop.reason, str(stop)
        raise AssertionError("the step went through")

    def rows(first: int, stop: int) -> dict[str, torch.Tensor]:
        x, y = regression(11)
        return {"x": x[first:stop], "y": y[first:stop]}

    mine = rows(0, 8) if rank == 0 else rows(8, 11)

    model, _, coordinator = made()
    losses = [coordinator.step(mine, squares(model)).loss for _ in range(3)]
    yield "unequal", {"losses": losses, "weight": model.module.weight.flatten().tolist()}

    model, _, coordinator = made()
    done = coordinator.step(rows(0, 4 if rank == 0 else 0), squares(model))
    yield "one rank has none", {"samples": done.samples, "targets": done.targets}

    def never_fits(batch: Any) -> Any:
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return squares(model)(batch)

    model, _, coordinator = made()
    yield "never fits", stopped(coordinator, mine, never_fits)

    def mean(batch: Any) -> torch.Tensor:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    model, _, coordinator = made()
    yield "mean instead of sum", stopped(coordinator, mine, mean if rank else squares(model))

    def always_an_error(batch: Any) -> Any:
        return squares(model)(batch) if rank == 0 else {}["no such column"]

    model, _, coordinator = made()
    yield "always an error", stopped(coordinator, mine, always_an_error)

    def not_finite(batch: Any) -> Any:
        loss, targets = squares(model)(batch)
        return loss * float("nan") if rank else loss, targets

    model, _, coordinator = made()
    yield "nan", stopped(coordinator, mine, not_finite)

    model, optimizer, coordinator = made()
    if rank == 1:

        def no_room(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory (optimizer state)")

        optimizer.optimizer.register_step_pre_hook(no_room)
    yield "optimizer", stopped(coordinator, mine, squares(model))

    model, _, coordinator = made()
    yield "no target", stopped(coordinator, [], squares(model))

    model, _, coordinator = made(torch.bfloat16)
    done = coordinator.step([1000.0 if rank == 0 else 1.0], lambda batch: (model.module.bias.sum() * batch[0], 1))
    yield "bf16", done.grad_norm * 2

    def die(batch: Any) -> Any:
        if rank == 1:
            os._exit(0)
        return squares(model)(batch)

    model, _, coordinator = made()
    began = time.monotonic()
    try:
        coordinator.step(mine, die)
    except ControlPlaneLost as lost:
        yield "a rank dies", (type(lost).__name__, str(lost), time.monotonic() - began)


def _model_goes_first() -> None:
    """Refuse to take the process group down while a DDP model lives.

    If the model is the last to hold a gloo group, its end waits for the group's threads with the GIL in hand, which
    such a thread needs to let go of its last reduction: on a busy machine, about one run in six stood still there.
    """
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    destroy = distributed.destroy_process_group

    def destroyed(group: Any = None) -> None:
        if group is None:
            alive = sum(type(thing) is DistributedDataParallel for thing in gc.get_objects())
            assert alive == 0, "a DDP model outlives its process group"
        destroy(group)

    distributed.destroy_process_group = destroyed


def _watched(script: str, watch: dict[str, Any], words: list[str]) -> None:
    """Run an example; write down what was in each update, with votes taken out as `watch["off"]` says."""
    from allranks.coordinator.ballots import StepTally
    from allranks.coordinator.policy import Go
    from allranks.library import together

    steps: list[list[list[int]]] = []
    pending: list[list[int]] = []
    plain_add, plain_part, plain_committed = together._Share.add, together.Together._part, together.Together.committed

    def rows(data: Any) -> list[list[int]]:
        if isinstance(data, list):
            return data
        inputs, _ = data
        pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        return [ids[mask.bool()].tolist() for ids, mask in pairs]

    def part(self: Any, *arguments: Any) -> None:
        pending.clear()
        plain_part(self, *arguments)

    def add(self: Any, micro_batch: Any, *arguments: Any) -> None:
        plain_add(self, micro_batch, *arguments)
        pending.extend(rows(micro_batch.data))

    def committed(self: Any) -> None:
        plain_committed(self)
        steps.append(sorted(pending))

    together._Share.add, together.Together._part, together.Together.committed = add, part, committed
    if "one" in watch.get("off", ()):
        together.decide = lambda state, *_: Go(state=state)
    if "two" in watch.get("off", ()):
        together.vote_two = lambda _, ballot: StepTally(ballots=(ballot,))
    _model_goes_first()
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
    Path(watch["folder"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(steps), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "scenarios":
        _scenarios(Path(sys.argv[2]))
    else:
        _watched(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:])
