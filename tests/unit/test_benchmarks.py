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
