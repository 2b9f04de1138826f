"""Options and fixtures shared by all tests."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from allranks.data.cache import default_cache_dir
from allranks.demo.model import ensure_smollm2
from allranks.demo.tiny import byte_tokenizer, write_tiny_llama


def pytest_configure() -> None:
    # How long one example takes is the machine's affair; a test that hangs has a time limit of its own.
    settings.register_profile("no-deadline", deadline=None)
    settings.load_profile("no-deadline")
    # A shell that starts the tests in the background has everything below it ignore Ctrl-C, which some tests send.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out slow tests, and multi-process ones but for smoke")
    parser.addoption(
        "--keep-table", metavar="FOLDER", type=Path, help="keep what nightly tests measured in files there"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    nightly_asked = "nightly" in str(config.getoption("-m"))
    quick = bool(config.getoption("--quick"))
    dist = Path(__file__).parent / "dist"

    def wanted(item: pytest.Item) -> bool:
        marks = {mark.name for mark in item.iter_markers()}
        if "nightly" in marks and not nightly_asked:
            return False
        return not quick or "smoke" in marks or not ("slow" in marks or dist in item.path.parents)

    left_out = [item for item in items if not wanted(item)]
    items[:] = [item for item in items if wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A tokenizer of the 256 bytes and three special tokens, with a chat template; pad differs from eos."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a seeded Llama (2 layers, width 64, 259 tokens) in fp32, with `tiny_tokenizer`."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def kept_tables(request: pytest.FixtureRequest) -> Path | None:
    """The folder for what was measured; None if nobody wants to keep it."""
    folder: Path | None = request.config.getoption("--keep-table")
    return None if folder is None else folder.resolve()


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The folder of SmolLM2-135M-Instruct, converted once per machine."""
    return ensure_smollm2(default_cache_dir())
