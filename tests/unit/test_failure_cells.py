"""The table of cells behind the failure matrix: the few of continuous integration stand for all."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from allranks.plan.plan import Phase, ProfileKind
from failure_cells import KINDS, PLACES, Cell, all_cells, pairwise, runs_of

CELLS = all_cells()


def test_every_phase_is_a_place() -> None:
    assert {phase for phase, _ in PLACES.values()} == set(get_args(Phase))


def test_every_pair_that_is_possible_occurs_in_the_few() -> None:
    values = {
        "profile": get_args(ProfileKind),
        "place": tuple(PLACES),
        "who": ("rank 0", "last rank", "two at once"),
        "kind": KINDS,
    }
    impossible = {("single", "last rank"), ("single", "two at once"), ("single", "sigstop")}
    few = pairwise(CELLS)
    for one, other in itertools.combinations(values, 2):
        wanted = set(itertools.product(values[one], values[other])) - impossible
        assert {(getattr(cell, one), getattr(cell, other)) for cell in few} == wanted
    # No fewer would do: each place has to meet each kind.
    assert len(few) == len(set(few)) == len(PLACES) * len(KINDS)


def test_pairwise_leaves_out_what_brings_no_new_pair() -> None:
    (first, *_), twice = CELLS, CELLS[:3] * 2
    assert pairwise([first, first]) == (first,)
    assert set(pairwise(twice)) == set(CELLS[:3])


@pytest.mark.parametrize("cells", [CELLS, pairwise(CELLS)], ids=["all", "few"])
def test_runs_hold_every_cell_once_and_no_more_than_they_can(cells: tuple[Cell, ...]) -> None:
    runs = runs_of(cells)
    assert sorted(cell.name for run in runs for cell in run) == sorted(cell.name for cell in cells)
    for run in runs:
        assert len({(cell.profile, cell.ranks) for cell in run}) == 1
        places = [list(PLACES).index(cell.place) for cell in run]
        assert places == sorted(set(places))
        assert sum(cell.shrinks for cell in run) <= 3
        assert len(run) == 1 or all(cell.tier != "stop" for cell in run)


def test_places_come_in_the_order_of_their_steps() -> None:
    steps = [step for _, step in PLACES.values()]
    assert steps == sorted(steps)
    assert len(set(steps[1:])) == len(steps) - 1, "load has none of its own"


@pytest.mark.parametrize(
    ("place", "resumed_steps"),
    [
        ("load", (0,)),
        ("first forward", (0,)),
        ("forward", (2, 0)),
        ("step", (4, 2)),
        ("eval", (6, 4)),
        ("save", (6,)),
        ("vote", (8, 6)),
        ("final", (11,)),
    ],
)
def test_the_checkpoints_that_a_restart_may_go_on_from(place: str, resumed_steps: tuple[int, ...]) -> None:
    assert Cell(profile="ddp", place=place, who="rank 0", kind="exit").resumed_steps == resumed_steps
