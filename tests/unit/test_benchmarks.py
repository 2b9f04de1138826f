"""The commands that benchmarks/README.md gives for its figures are commands that the scripts take."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from runs import ROOT

PAGE = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]

MADE_BY_TESTS = ("soak_cpu", "failure_matrix")
"""Their commands stand on the page: `pytest ... --keep-table`."""
RESULTS = [file for file in sorted((ROOT / "benchmarks/results").glob("*.json")) if file.stem not in MADE_BY_TESTS]


class Understood(Exception):
    """The script took its command line; nothing else of it is run."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_that_the_script_takes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, script, *words = shlex.split(command)
    if program == "pytest":
        assert all((ROOT / word).exists() for word in [script, *words] if word.startswith("tests/"))
        return
    assert program == "python"
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module(Path(script).stem)
    plain = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *rest: Any) -> argparse.Namespace:
        plain(parser, *rest)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(Understood):
        module.main()


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_kept_result_names_its_command_and_versions(file: Path) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["command"].startswith("python benchmarks/"), content["command"]
    assert {"torch", "transformers", "bitsandbytes"} <= content["versions"].keys()


@pytest.mark.parametrize("mix", ["t0", "chat", "bimodal", "heavy tail"])
def test_the_split_beats_that_of_transformers(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    compared = importlib.import_module("batch_split").compared
    for world, per_device in ((2, 8), (2, 32), (8, 16)):
        row = compared(mix, world, per_device, 3)
        theirs = row["transformers"]
        for cost in ("Llama-3-8B", "transformers"):
            flat, padded = row[f"flat_for_{cost}"], row[f"padded_for_{cost}"]
            assert flat["padding_percent"] == 0.0 < theirs["padding_percent"]
            for mine in (flat, padded):
                assert mine["largest_micro_batch_tokens"] <= theirs["largest_micro_batch_tokens"], row
                assert mine[f"time_{cost}"] < theirs[f"time_{cost}"], row
