"""The only module that reads or writes `os.environ`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """What torchrun or accelerate told this process about its place.

    Attributes:
        rank: of all ranks, from 0.
        local_rank: on this node, from 0.
        world_size: ranks over all nodes.
        local_world_size: ranks on this node.
        restart_count: how often torchelastic restarted the ranks of this launch.
        under_launcher: `allranks run` started us, so a deliberate stop exits 0 and leaves a verdict.
        launch: number of the launch that `allranks run` gave, from 1; 0 without it.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    restart_count: int
    under_launcher: bool
    launch: int = 0


LAUNCHER_FLAG = "ALLRANKS_LAUNCHER"
LAUNCH_NUMBER = "ALLRANKS_LAUNCH"
LIVE_LINE_FLAG = "ALLRANKS_LIVE_LINE"
"""Set when the launcher writes to a terminal: a line that ends in ``\\r`` is then drawn in place."""


def rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Read this process's place from its environment; a process started alone is rank 0 of 1."""
    env = os.environ if environ is None else environ
    return RankEnvironment(
        rank=int(env.get("RANK", "0")),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        world_size=int(env.get("WORLD_SIZE", "1")),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
        restart_count=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        under_launcher=env.get(LAUNCHER_FLAG) == "1",
        launch=int(env.get(LAUNCH_NUMBER, "0")),
    )


def inherited() -> dict[str, str]:
    """A copy of this process's environment, for a child's."""
    return dict(os.environ)


def get(name: str) -> str | None:
    """One variable of this process's environment."""
    return os.environ.get(name)


def put(name: str, value: str) -> None:
    """Set a variable that a library beneath reads when it is imported."""
    os.environ[name] = value
