"""The `allranks` command as a user meets it: screens, exit codes, and how fast it answers."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from allranks import __version__
from allranks.cli import app as cli_app
from allranks.errors import ExitCode, UserError

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-c", "from allranks.cli.app import main; main()")


def allranks(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def commands(node: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its words, groups among them."""
    node = get_command(cli_app.build_app()) if node is None else node
    yield path, node
    for name, child in getattr(node, "commands", {}).items():
        yield from commands(child, (*path, name))


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").touch()
    file = tmp_path / "run.yaml"
    file.write_text("model: {name_or_path: org/model}\ndata: {train: train.jsonl}\n", encoding="utf-8")
    return file


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from allranks.cli.app import build_app; app = build_app()\n"
        "try: app(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'peft', 'bitsandbytes', 'deepspeed', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stderr.strip() == "[]"


def test_help_answers_at_once() -> None:
    # CPU time, not wall time: a busy machine must not fail it.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert allranks("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.5


def test_every_screen_fits_80_columns_and_every_command_has_an_example() -> None:
    screens = dict(commands())
    assert {("config", "check"), ("config", "show"), ("profiles", "ls"), ("profiles", "cp")} <= set(screens)
    for path, node in screens.items():
        answer = allranks(*path, "--help")
        assert answer.returncode == 0
        assert max(len(line) for line in answer.stdout.splitlines()) <= 80
        if not hasattr(node, "commands"):
            assert f"Example: allranks {' '.join(path)}" in answer.stdout
            assert node.help


def test_examples_of_the_help_are_commands_that_exist() -> None:
    known = {path for path, node in commands() if not hasattr(node, "commands")}
    for path, node in commands():
        for words in re.findall(r"Example: allranks ([^\n]+)", node.epilog or ""):
            assert path == () or tuple(words.split()[: len(path)]) in known


def test_version() -> None:
    assert allranks("--version").stdout == f"allranks {__version__}\n"


@pytest.mark.parametrize("words", [("frobnicate",), ("config", "chek"), ("config", "check"), ("profiles", "cp", "--f")])
def test_wrong_words_are_explained(words: tuple[str, ...]) -> None:
    answer = allranks(*words)
    assert answer.returncode == ExitCode.USAGE
    assert "Error: " in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("code", [ExitCode.USAGE, ExitCode.OUT_OF_MEMORY])
def test_an_error_of_ours_is_a_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: ExitCode
) -> None:
    class Refusal(UserError):
        exit_code = code

    def register(app: typer.Typer) -> None:
        @app.command()
        def fail() -> None:
            raise Refusal("no: try yes")

    monkeypatch.setattr(cli_app, "COMMANDS", (*cli_app.COMMANDS, register))
    monkeypatch.setattr(sys, "argv", ["allranks", "fail"])
    with pytest.raises(SystemExit) as end:
        cli_app.main()
    assert end.value.code == code
    assert capsys.readouterr() == ("", "no: try yes\n")


def test_ctrl_c_leaves_without_a_traceback(tmp_path: Path) -> None:
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)
    process = subprocess.Popen([*COMMAND, "config", "check", str(pipe)], stderr=subprocess.PIPE, text=True)
    with pipe.open("w"):  # returns when the command has opened the other end, and waits in it
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == ""


def test_a_closed_pipe_is_no_crash(run_yaml: Path) -> None:
    command = f"'{sys.executable}' -c 'from allranks.cli.app import main; main()' config show --resolved {run_yaml}"
    answer = subprocess.run(
        ["bash", "-c", f"{command} | true"], capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in answer.stderr


def test_config_check(run_yaml: Path) -> None:
    answer = allranks("config", "check", str(run_yaml), "--profile", "zero2")
    assert (answer.returncode, answer.stdout) == (0, f"{run_yaml}: valid, and it goes with profile zero2\n")
    answer = allranks("config", "check", str(run_yaml), "--set", "lora.r=0", "--set", "training.sed=1")
    assert answer.returncode == ExitCode.USAGE
    assert answer.stdout == ""
    assert answer.stderr == (
        f"{run_yaml}: 2 problems\n"
        "  lora.r: 0 is not an integer ≥ 1 and ≤ 2147483647 (--set)\n"
        "  training.sed: is not a key of allranks, with the value 1 (--set)\n"
        "      nearest: training.seed\n"
    )


def test_config_check_finds_contradictions_with_a_profile(run_yaml: Path) -> None:
    answer = allranks("config", "check", str(run_yaml), "--profile", "fsdp", "--set", "training.optim=adamw_8bit")
    assert answer.returncode == ExitCode.USAGE
    assert answer.stderr.startswith(f"{run_yaml}: 1 problem\n  training.optim: adamw_8bit fails")


def test_contradictions_with_a_profile_stand_beside_all_that_is_wrong(run_yaml: Path) -> None:
    words = ("training.optim=adamw_8bit", "lora.r=0", "training.mixed_precision=often", "lora.x=1")
    settings = [word for setting in words for word in ("--set", setting)]
    answer = allranks("config", "check", str(run_yaml), "--profile", "fsdp", *settings)
    assert answer.returncode == ExitCode.USAGE
    heads = [line.strip().partition(": ")[0] for line in answer.stderr.splitlines()[1:] if line[2] != " "]
    assert sorted(heads) == ["lora.r", "lora.x", "training.mixed_precision", "training.optim"]


@pytest.mark.parametrize("command", [("check",), ("show",)])
def test_a_file_whose_name_can_be_no_run_name_needs_another(run_yaml: Path, command: tuple[str, ...]) -> None:
    file = run_yaml.rename(run_yaml.with_name("my run (2).yaml"))
    answer = allranks("config", *command, str(file))
    assert answer.returncode == ExitCode.USAGE
    assert answer.stderr.splitlines()[1:] == [
        "  output.name: is not set, and the name of the file, 'my run (2)', is not the name of a run",
        (
            "      fix: set output.name, give --name my-run-2, or rename the file: letters, digits, dots, hyphens and "
            "underscores only"
        ),
    ]
    assert allranks("config", *command, str(file), "--set", "output.name=mine").returncode == 0


def test_config_show(run_yaml: Path) -> None:
    given = allranks("config", "show", str(run_yaml), "--set", "lora.r=8")
    train = str(run_yaml.with_name("train.jsonl"))
    assert yaml.safe_load(given.stdout) == {
        "model": {"name_or_path": "org/model"},
        "lora": {"r": 8},
        "data": {"train": train},
    }
    resolved = allranks("config", "show", "--resolved", str(run_yaml))
    content = yaml.safe_load(resolved.stdout)
    assert content["data"]["train"] == train
    assert content["training"]["max_grad_norm"] == 1.0
    copy = run_yaml.with_name("copy.yaml")
    copy.write_text(resolved.stdout, encoding="utf-8")
    assert allranks("config", "show", "--resolved", str(copy)).stdout == resolved.stdout


def test_profiles_ls_and_show() -> None:
    listed = allranks("profiles", "ls").stdout
    assert re.findall(r"^\w+", listed, re.MULTILINE) == ["ddp", "fsdp", "single", "zero2", "zero3"]
    assert max(len(line) for line in listed.splitlines()) <= 80
    file = REPOSITORY / "profiles/zero2.yaml"
    assert allranks("profiles", "show", "zero2").stdout == file.read_text(encoding="utf-8")


def test_profiles_cp_refuses_to_overwrite(tmp_path: Path) -> None:
    file = REPOSITORY / "profiles/zero2.yaml"
    answer = allranks("profiles", "cp", "zero2", "mine.yaml", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (0, "mine.yaml\n")
    assert (tmp_path / "mine.yaml").read_bytes() == file.read_bytes()
    (tmp_path / "mine.yaml").write_text("precious", encoding="utf-8")
    answer = allranks("profiles", "cp", "zero2", "mine.yaml", cwd=tmp_path)
    assert answer.returncode == ExitCode.USAGE
    assert answer.stderr == "mine.yaml exists\n    fix: give another name, or --force to overwrite it\n"
    assert (tmp_path / "mine.yaml").read_text(encoding="utf-8") == "precious"
    assert allranks("profiles", "cp", "zero2", "mine.yaml", "--force", cwd=tmp_path).returncode == 0
    assert (tmp_path / "mine.yaml").read_bytes() == file.read_bytes()
    assert allranks("profiles", "cp", "ddp", ".", cwd=tmp_path).stdout == "ddp.yaml\n"
    answer = allranks("profiles", "cp", "ddp", "no/such/folder", cwd=tmp_path)
    assert answer.returncode == ExitCode.USAGE
    assert answer.stderr == "no/such/folder can't be written: No such file or directory\n"


def test_long_messages_wrap_below_their_indent_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    wrapped = cli_app._fitted("run.yaml: 1 problem\n  a.b: " + "word " * 20)
    assert max(len(line) for line in wrapped.splitlines()) <= 40
    assert wrapped.splitlines()[:3] == [
        "run.yaml: 1 problem",
        "  a.b: word word word word word word",
        "      word word word word word word word",
    ]
