"""What is said where a model can't be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.config.schema import RunConfig
from allranks.errors import UserError
from allranks.train.model import load_tokenizer

ASK = """
import sys, time
from allranks.config.schema import RunConfig
from allranks.errors import UserError
from allranks.train import model
config = RunConfig.model_validate({"model": {"name_or_path": "org/modle"}, "data": {"train": "t.jsonl"}})
import transformers.models.auto
for ask in (model.load_tokenizer, model.model_max_length):
    began = time.monotonic()
    try:
        ask(config)
    except UserError as error:
        print(error)
    print(f"{time.monotonic() - began:.1f}", file=sys.stderr)
"""


def config_of(name: str, **model: str) -> RunConfig:
    return RunConfig.model_validate({"model": {"name_or_path": name, **model}, "data": {"train": "train.jsonl"}})


@pytest.mark.parametrize("offline", [True, False])
def test_an_unknown_id_without_the_hub_is_said_once_and_soon(offline: bool, tmp_path: Path) -> None:
    ours = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    # Port 9 of this machine refuses: no network, without the wait for a name server.
    network = {"HF_HUB_OFFLINE": "1"} if offline else {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**ours, **network, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = done.stdout.splitlines()
    head = "model.name_or_path: 'org/modle' is no folder here and not in the hub's cache, and the hub can't be asked: "
    assert len(lines) == 4
    for line in lines[::2]:
        assert line.startswith(head)
        assert ("HF_HUB_OFFLINE is set" in line) == offline
    for line in lines[1::2]:
        assert line.startswith("    fix: check the spelling of the id, and the network; or download it ")
    assert "Retrying" not in done.stderr
    assert all(float(seconds) < 20 for seconds in done.stderr.splitlines()[-2:])


def test_a_folder_without_a_model_is_said_in_a_whole_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_tokenizer(config_of(str(tmp_path)))
    assert str(caught.value).splitlines() == [
        f"model.name_or_path: the folder {tmp_path} holds no model: there is no config.json in it",
        "    fix: name the folder into which the model was saved or downloaded, or a hub id",
    ]


def test_a_folder_without_a_tokenizer_is_said_to_the_end(tiny_llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no usable tokenizer at '{tmp_path}': .*[^:,]\\n    fix: name a hub id"):
        load_tokenizer(config_of(str(tiny_llama_dir), tokenizer_name_or_path=str(tmp_path)))


def test_a_revision_of_a_folder_is_said_to_be_ignored(tiny_llama_dir: Path) -> None:
    _, notes = load_tokenizer(config_of(str(tiny_llama_dir), revision="v2"))
    assert notes == (f"model.revision 'v2' is ignored: {tiny_llama_dir} is a folder",)
    assert load_tokenizer(config_of(str(tiny_llama_dir)))[1] == ()
