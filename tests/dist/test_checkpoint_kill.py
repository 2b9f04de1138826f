"""A writer killed at any instant leaves the previous checkpoint usable.

A server process imports torch once and forks a writer for every kill: at random moments, and once before every call
by which a save opens, makes, renames or removes something. After each kill a fresh process must find the newest
published checkpoint, whole.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

KILLS = 200
PUBLISHED = "published.txt"
READY_TIMEOUT_S = 120.0


# --- the server and the processes that it forks: `python test_checkpoint_kill.py RUN_DIR` -----------------------------


def tensors_at(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Adapter and optimizer as a function of the step, so that a mix of two steps is seen."""
    import torch

    adapter = {
        f"base_model.model.layers.{layer}.q_proj.lora_{side}.default.weight": torch.full((8, 512), step + layer / 8)
        for layer in range(4)
        for side in "AB"
    }
    optimizer = {
        name: {"exp_avg": tensor * 2, "exp_avg_sq": tensor**2, "step": torch.tensor(float(step))}
        for name, tensor in adapter.items()
    }
    return adapter, optimizer


def write_forever(run_dir: Path, dies_before_call: int) -> None:
    """What a launch does: resume from the newest checkpoint, clear up, then save step after step."""
    from allranks.caps import Caps
    from allranks.checkpoints.store import CheckpointStore, TrainState

    told = os.open(run_dir / PUBLISHED, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if dies_before_call:
        die_before_call(dies_before_call)
    store = CheckpointStore(run_dir, keep=2)
    latest = store.latest()
    store.prune()
    step = latest.step if latest is not None else 0
    while True:
        step += 1
        state = TrainState(
            step=step,
            epoch=0,
            consumed=8 * step,
            global_batch_size=8,
            fingerprint="f00d",
            seed=42,
            window=1,
            caps=Caps(max_samples=4, max_tokens=None),
            eval_caps=Caps(max_samples=4, max_tokens=None),
            checkpointing=True,
            skipped=(),
            cost=(1.0, 0.0),
            scaler=None,
            optimizer="adamw_torch_fused",
            world_size=2,
            profile_kind="zero2",
            versions={},
            wall_s=0.0,
        )
        ref = store.write(state, *tensors_at(step), {"r": 8})
        store.publish(ref)
        os.write(told, f"{step}\n".encode())
        store.prune()


def die_before_call(number: int) -> None:
    """Kill this process before its `number`-th call that opens, makes, renames or removes a file or folder."""
    left = number

    def watch(event: str, _: object) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def verify(run_dir: Path) -> dict[str, Any]:
    """What a fresh launch finds: step, whether it is all there, notes, and folders that do not count."""
    import torch

    from allranks.checkpoints.store import CheckpointStore

    store = CheckpointStore(run_dir, keep=2)
    ref = store.latest()
    if ref is None:
        return {"step": 0, "whole": True, "notes": [], "left_over": len(list(store.folder.glob("step-*")))}
    state, adapter, optimizer = store.load(ref)
    wanted_adapter, wanted_optimizer = tensors_at(ref.step)
    whole = (
        state.step == ref.step
        and state.consumed == 8 * ref.step
        and adapter.keys() == wanted_adapter.keys()
        and optimizer.keys() == wanted_optimizer.keys()
        and all(torch.equal(adapter[name], tensor) for name, tensor in wanted_adapter.items())
        and all(torch.equal(optimizer[name][f], t) for name, of in wanted_optimizer.items() for f, t in of.items())
    )
    listed = json.loads((store.folder / "latest.json").read_text()) if not ref.notes else {"older": []}
    left_over = len(list(store.folder.glob("step-*"))) - 1 - len(listed["older"])
    return {"step": ref.step, "whole": whole, "notes": list(ref.notes), "left_over": left_over}


def forked(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def serve(run_dir: Path) -> None:
    """Answer each request with one line of JSON.

    `write N` → pid of a writer that dies before call N (0: never); `reap PID` → how it ended; `verify` → what is found.
    """
    import safetensors.torch  # noqa: F401
    import torch

    import allranks.checkpoints.store  # noqa: F401

    torch.set_num_threads(1)
    answer = sys.stdout
    print(json.dumps("ready"), file=answer, flush=True)
    alive: set[int] = set()
    for line in sys.stdin:
        request, *arguments = line.split()
        if request == "write":
            reply: Any = forked(lambda call=int(arguments[0]): write_forever(run_dir, call))
            alive.add(reply)
        elif request == "reap":
            alive.discard(int(arguments[0]))
            reply = os.waitstatus_to_exitcode(os.waitpid(int(arguments[0]), 0)[1])
        else:
            reader, writer = os.pipe()
            child = forked(lambda writer=writer: os.write(writer, json.dumps(verify(run_dir)).encode()))
            os.close(writer)
            with os.fdopen(reader) as told:
                reply = json.loads(told.read() or '"the verifier died"')
            os.waitpid(child, 0)
        print(json.dumps(reply), file=answer, flush=True)
    for writer in alive:  # of a test that failed before it killed them
        os.kill(writer, signal.SIGKILL)


# --- the tests -------------------------------------------------------------------------------------------------------


class Server:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.found = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "ready"

    def ask(self, request: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server died"
        return json.loads(line)

    def published(self) -> int:
        """Step that a writer last reported as published."""
        path = self.run_dir / PUBLISHED
        return int(path.read_text().split()[-1]) if path.exists() and path.stat().st_size else 0

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        finally:
            self._process.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "plan.json").write_text("{}")
    running = Server(tmp_path)
    yield running
    running.close()


def check_after_kill(server: Server) -> dict[str, Any]:
    found = server.ask("verify")
    assert isinstance(found, dict), found
    assert found["whole"], found
    if server.published():
        known = max(server.found, server.published())
        # The kill may fall between the publication and the report of it.
        assert found["step"] in (known, known + 1), (found, known)
        assert found["notes"] == [], found
    server.found = found["step"]
    return found


@pytest.mark.timeout(180)
def test_kills_at_random_moments(server: Server) -> None:
    moments = random.Random(0)
    started = time.monotonic()
    writer = server.ask("write 0")
    while server.published() < 20:
        assert time.monotonic() - started < READY_TIMEOUT_S
        time.sleep(0.001)
    cycle_s = (time.monotonic() - started) / 20
    os.kill(writer, signal.SIGKILL)
    assert server.ask(f"reap {writer}") == -signal.SIGKILL

    ends = []
    for _ in range(KILLS):
        writer = server.ask("write 0")
        time.sleep(moments.uniform(0, 4 * cycle_s))
        os.kill(writer, signal.SIGKILL)
        assert server.ask(f"reap {writer}") == -signal.SIGKILL
        ends.append(check_after_kill(server))
    assert ends[-1]["step"] > 20
    cut_short = sum(end["left_over"] > 0 for end in ends)
    assert cut_short > KILLS // 10, f"only {cut_short} of {KILLS} kills fell inside a save"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("saves_before", [0, 3])
def test_kill_before_every_call_of_two_saves(server: Server, saves_before: int) -> None:
    while server.published() < saves_before:
        writer = server.ask("write 60")
        assert server.ask(f"reap {writer}") == -signal.SIGKILL
    goal = server.published() + 2
    call = 0
    while server.published() < goal:
        call += 1
        writer = server.ask(f"write {call}")
        assert server.ask(f"reap {writer}") == -signal.SIGKILL
        check_after_kill(server)
    assert call > 20, "two saves open more files than that"


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
