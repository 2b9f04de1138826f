"""The table of a failure matrix, kept in a folder from one run of the tests to the next."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from pathlib import Path

from failure_cells import Cell

JSON_FILE = "failure_matrix.json"
MARKDOWN_FILE = "failure_matrix.md"


def keep(folder: Path, results: Sequence[tuple[Cell, float | None, tuple[str, ...]]]) -> None:
    """Add what became of some cells, in the place of what an earlier run found of them.

    Args:
        folder: made if it is not there.
        results: of each cell the seconds until the run had got past it, and what was wrong.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{JSON_FILE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = folder / JSON_FILE
        rows = {row["cell"]: row for row in json.loads(file.read_text())} if file.exists() else {}
        for cell, seconds, wrong in results:
            rows[cell.name] = {
                "cell": cell.name,
                "profile": cell.profile,
                "place": cell.place,
                "who": cell.who,
                "kind": cell.kind,
                "ranks": cell.ranks,
                "tier": cell.tier,
                "seconds": None if seconds is None else round(seconds, 1),
                "result": "; ".join(wrong) or "as documented",
            }
        file.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows.values()) + "\n]\n")
        (folder / MARKDOWN_FILE).write_text(_markdown(list(rows.values())))


def _markdown(rows: Sequence[dict[str, object]]) -> str:
    names = ("profile", "ranks", "place", "who", "kind", "tier", "seconds", "result")
    lines = [names, ("---",) * len(names), *(tuple("" if row[n] is None else row[n] for n in names) for row in rows)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
