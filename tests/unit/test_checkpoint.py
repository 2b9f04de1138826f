from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from allranks.caps import Caps
from allranks.checkpoints.adapter_files import by_peft_key, peft_key
from allranks.checkpoints.durable import FileRecord, tensor_file_bytes, tensor_file_chunks, write_file
from allranks.checkpoints.store import (
    CheckpointRef,
    CheckpointStore,
    StorageError,
    TrainState,
    check_optimizer,
    check_tensors,
    tied_names,
)
from allranks.config.schema import RunConfig
from allranks.errors import ExitCode, UserError
from allranks.plan.plan import PLAN_FILE, Plan

LORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.default.weight"
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")


def state_at(step: int) -> TrainState:
    return TrainState(
        step=step,
        epoch=step // 10,
        consumed=8 * (step % 10),
        global_batch_size=8,
        fingerprint="f00d",
        seed=42,
        window=1,
        caps=Caps(max_samples=4, max_tokens=None),
        eval_caps=Caps(max_samples=2, max_tokens=512),
        checkpointing=True,
        skipped=(),
        cost=(1.0, 0.25),
        scaler={"scale": 65536.0, "_growth_tracker": 3},
        optimizer="adamw_torch_fused",
        world_size=2,
        profile_kind="zero2",
        versions={"allranks": "0.1.0", "torch": "2.13.0"},
        wall_s=12.5,
    )


def adapter_at(step: int, rows: int = 64) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return {
        LORA.format("A"): torch.randn(4, rows, generator=random),
        LORA.format("B"): torch.randn(rows, 4, generator=random).t().contiguous().t(),  # not contiguous
    }


def optimizer_at(step: int, rows: int = 64) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {"exp_avg": tensor * 0.1, "exp_avg_sq": tensor**2, "step": torch.tensor(float(step))}
        for name, tensor in adapter_at(step, rows).items()
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return prepared(tmp_path / "run")


def prepared(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    plan = Plan(
        name="run",
        run_dir=str(folder),
        config=RunConfig.model_validate({"model": {"name_or_path": "tiny"}, "data": {"train": "train.jsonl"}}),
        profile_kind="zero2",
        profile_file="zero2.yaml",
        profile={},
        world_size=2,
        device="cpu",
        mixed_precision="no",
        global_batch_size=8,
    )
    (folder / PLAN_FILE).write_text(plan.to_json())
    return folder


def write(store: CheckpointStore, step: int, rows: int = 64) -> CheckpointRef:
    return store.write(state_at(step), adapter_at(step, rows), optimizer_at(step, rows), {"r": 4})


def save(store: CheckpointStore, *steps: int) -> list[CheckpointRef]:
    refs = []
    for step in steps:
        refs.append(write(store, step))
        store.publish(refs[-1])
        assert store.prune() == ()
    return refs


def folders(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").glob("step-*")}


def assert_usable(run_dir: Path, step: int) -> CheckpointRef:
    """A fresh reader finds the checkpoint of `step`, and all of it."""
    store = CheckpointStore(run_dir, keep=2)
    ref = store.latest()
    assert ref is not None and ref.step == step
    state, adapter, optimizer = store.load(ref)
    assert state == state_at(step)
    rows = adapter[LORA.format("A")].shape[1]
    for name, tensor in adapter_at(step, rows).items():
        assert torch.equal(adapter[name], tensor)
        assert all(torch.equal(optimizer[name][field], t) for field, t in optimizer_at(step, rows)[name].items())
    return ref


# --- what is written -------------------------------------------------------------------------------------------------


def test_what_was_written_is_loaded(run_dir: Path) -> None:
    save(CheckpointStore(run_dir, keep=2), 50)
    ref = assert_usable(run_dir, 50)
    assert ref.notes == ()
    assert set(ref.files) == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "optimizer.safetensors",
        "plan.json",
        "state.json",
    }
    assert CheckpointStore(run_dir, keep=2).saved_plan(ref) == Plan.read(run_dir)
    assert ref.folder.startswith("step-00000050-") and len(ref.folder) == len("step-00000050-") + 8
    assert ref.bytes == sum(path.stat().st_size for path in (run_dir / "checkpoints" / ref.folder).iterdir())


def test_raw_8_bit_state_with_shared_and_scalar_tensors_survives(run_dir: Path) -> None:
    codes = torch.linspace(-1, 1, 256)
    optimizer = {
        name: {
            "state1": torch.arange(tensor.numel(), dtype=torch.int64).to(torch.uint8),
            "qmap1": codes,  # one tensor for all parameters, as in bitsandbytes
            "absmax1": torch.rand(tensor.numel() // 256 + 1),
            "step": torch.tensor(7),
            "half": torch.rand(3).to(torch.bfloat16),
        }
        for name, tensor in adapter_at(1).items()
    }
    store = CheckpointStore(run_dir, keep=1)
    ref = store.write(state_at(1), adapter_at(1), optimizer, None)
    assert "adapter_config.json" not in ref.files
    loaded = store.load(ref)[2]
    assert loaded.keys() == optimizer.keys()
    for name, fields in optimizer.items():
        assert loaded[name].keys() == fields.keys()
        for field, tensor in fields.items():
            assert loaded[name][field].dtype == tensor.dtype
            assert torch.equal(loaded[name][field], tensor)


def test_loaded_tensors_outlive_their_folder(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=1)
    [ref] = save(store, 3)
    _, adapter, _ = store.load(ref)
    shutil.rmtree(store.path(ref))
    adapter[LORA.format("A")].add_(0.0)
    assert torch.equal(adapter[LORA.format("A")], adapter_at(3)[LORA.format("A")])


def test_file_is_the_one_that_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.arange(7, dtype=torch.uint8),
        "c": torch.tensor(2, dtype=torch.int64),
        "d": torch.empty(0, 4),
        "e": torch.randn(2, 2).to(torch.bfloat16),
    }
    write_file(tmp_path / "ours", tensor_file_chunks(tensors))
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").stat().st_size == tensor_file_bytes(tensors)
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


def test_tensor_outside_host_memory_is_our_fault(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=1)
    with pytest.raises(ValueError, match=r"x is on meta, not in host memory"):
        store.write(state_at(1), {"x": torch.empty(2, device="meta")}, {}, None)
    assert folders(run_dir) == set()


def test_ranks_read_the_reference_from_json(run_dir: Path) -> None:
    [ref] = save(CheckpointStore(run_dir, keep=1), 5)
    told = CheckpointRef.from_json(replace(ref, notes=("a word",)).to_json())
    assert told == replace(ref, notes=("a word",))
    assert CheckpointStore(run_dir, keep=1).load(told)[0] == state_at(5)


@given(
    step=st.integers(0, 2**40),
    consumed=st.integers(0, 2**40),
    caps=st.builds(Caps, max_samples=st.integers(1, 2**20), max_tokens=st.none() | st.integers(1, 2**30)),
    cost=st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
    scaler=st.none() | st.dictionaries(st.text(), st.floats(allow_nan=False) | st.integers()),
    versions=st.dictionaries(st.text(), st.text()),
)
def test_state_survives_json(step: int, consumed: int, caps: Caps, cost: Any, scaler: Any, versions: Any) -> None:
    state = replace(state_at(0), step=step, consumed=consumed, caps=caps, cost=cost, scaler=scaler, versions=versions)
    assert TrainState.from_dict(json.loads(json.dumps(asdict(state)))) == state


def test_state_of_another_version_is_refused() -> None:
    values = asdict(state_at(1))
    values["mood"] = values.pop("epoch")
    with pytest.raises(UserError, match=r"missing \['epoch'\], unknown \['mood'\]\n.*fix: resume with the version"):
        TrainState.from_dict(values)


def test_files_of_another_version_are_refused(run_dir: Path) -> None:
    (run_dir / PLAN_FILE).write_text('{"plan_version": 99}')
    store = CheckpointStore(run_dir, keep=1)
    ref = write(store, 1)
    with pytest.raises(UserError, match=r"plan version 99 is not 1.*\n.*fix:"):
        store.saved_plan(ref)
    state_file = store.path(ref) / "state.json"
    state_file.write_text(state_file.read_text().replace('"state_version": 1', '"state_version": 7'))
    changed = {name: record for name, record in ref.files.items() if name != "state.json"}
    with pytest.raises(UserError, match=r"has state version 7, not 1\n.*fix:"):
        store.load(replace(ref, files=changed))


def test_launcher_reads_checkpoints_without_torch(run_dir: Path) -> None:
    save(CheckpointStore(run_dir, keep=1), 5)
    code = (
        "import sys; from pathlib import Path; from allranks.checkpoints.store import CheckpointStore; "
        "store = CheckpointStore(Path(sys.argv[1]), keep=1); ref = store.latest(); store.saved_plan(ref); "
        "print(ref.step, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run_dir)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "False"]


# --- PEFT's own names ------------------------------------------------------------------------------------------------


def tiny(cls: Any = LlamaForCausalLM, **changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return cls(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape, **changes)).eval()


PEFT_CASES = {
    "lora": (LlamaForCausalLM, {}, {}),
    "modules-to-save": (LlamaForCausalLM, {}, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied": (LlamaForCausalLM, {"tie_word_embeddings": True}, {"modules_to_save": ["embed_tokens"]}),
    "classification": (LlamaForSequenceClassification, {"num_labels": 3}, {"task_type": "SEQ_CLS"}),
}


@pytest.mark.parametrize("case", PEFT_CASES)
def test_plain_peft_loads_a_checkpoint(run_dir: Path, case: str) -> None:
    cls, model_changes, lora_changes = PEFT_CASES[case]
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], ensure_weight_tying="tie_word_embeddings" in model_changes,
        **{"task_type": "CAUSAL_LM", **lora_changes},
    )  # fmt: skip
    model = get_peft_model(tiny(cls, **model_changes, pad_token_id=0), config)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    assert by_peft_key(trained, tied_names(model)).keys() == get_peft_model_state_dict(model).keys()

    store = CheckpointStore(run_dir, keep=1)
    config_dict = model.peft_config["default"].to_dict()
    ref = store.write(state_at(1), trained, {}, config_dict, tied=tied_names(model))
    loaded = PeftModel.from_pretrained(tiny(cls, **model_changes, pad_token_id=0), store.path(ref)).eval()
    ids = torch.arange(10).reshape(1, -1)
    assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)

    _, adapter, _ = store.load(ref)
    check_tensors({name: tuple(p.shape) for name, p in trained.items()}, adapter)


def test_module_that_is_called_like_the_adapter_keeps_its_name() -> None:
    assert peft_key("base_model.model.default.q.lora_A.default.weight") == "base_model.model.default.q.lora_A.weight"
    assert peft_key("m.embed.token_adapter.trainable_tokens_delta.default") == (
        "m.embed.token_adapter.trainable_tokens_delta"
    )
    assert peft_key("m.score.modules_to_save.default.dense.weight") == "m.score.dense.weight"


def test_two_parameters_with_one_key_are_our_fault() -> None:
    with pytest.raises(ValueError, match="2 parameters have only 1 PEFT keys"):
        by_peft_key({"a.lora_A.default.weight": torch.zeros(1), "a.lora_A.weight": torch.zeros(1)}, {})


# --- what fits the model ---------------------------------------------------------------------------------------------


def test_every_tensor_that_does_not_fit_is_named() -> None:
    expected = {"a": (2, 3), "b": (4,), "c": (1,), "d": (5, 5)}
    found = {"a": torch.zeros(2, 3), "b": torch.zeros(5), "x": torch.zeros(7, 1), "d": torch.zeros(25)}
    with pytest.raises(UserError) as caught:
        check_tensors(expected, found)
    assert str(caught.value).splitlines() == [
        "the checkpoint's adapter does not fit the model: 4 of its tensors",
        "    missing: c [1]",
        "    extra: x [7, 1]",
        "    other shape: b is [5] in the checkpoint, [4] in the model",
        "    other shape: d is [25] in the checkpoint, [5, 5] in the model",
        "    fix: resume with the model and LoRA keys of the first launch, or start anew with --resume never",
    ]
    check_tensors({"a": (2, 3)}, {"a": torch.zeros(2, 3)})


def test_every_moment_that_does_not_fit_is_named() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter_at(1).items()}
    good = optimizer_at(1)
    check_optimizer(shapes, good)
    del good[LORA.format("A")]["exp_avg_sq"]
    good[LORA.format("B")]["exp_avg"] = torch.zeros(1)
    good["stranger"] = {"exp_avg": torch.zeros(2)}
    with pytest.raises(UserError) as caught:
        check_optimizer(shapes, good)
    text = str(caught.value)
    assert text.startswith("the checkpoint's optimizer state does not fit the model: 3 of its tensors")
    assert f"missing: exp_avg_sq of {LORA.format('A')} [4, 64]" in text
    assert "extra: exp_avg of stranger [2]" in text
    assert f"other shape: exp_avg of {LORA.format('B')} is [1] in the checkpoint, [64, 4] in the model" in text


# --- what counts -----------------------------------------------------------------------------------------------------


def test_no_checkpoint_is_none(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=2)
    assert store.latest() is None
    assert store.prune() == ()


def test_newest_are_kept_and_the_pointed_one_always(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=2)
    refs = save(store, 10, 20, 30, 40)
    assert folders(run_dir) == {refs[2].folder, refs[3].folder}
    [last] = save(CheckpointStore(run_dir, keep=1), 50)
    assert folders(run_dir) == {last.folder}
    assert_usable(run_dir, 50)


def test_a_replayed_step_is_newer_than_the_abandoned_one(run_dir: Path) -> None:
    save(CheckpointStore(run_dir, keep=3), 10, 30)
    save(CheckpointStore(run_dir, keep=3), 20)
    assert_usable(run_dir, 20)


def test_unpublished_checkpoint_does_not_count(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=2)
    [published] = save(store, 10)
    written = write(store, 20)
    assert_usable(run_dir, 10)
    assert store.prune() == ()
    assert store.path(written).name in folders(run_dir), "the running writer's own folder must stay"
    assert CheckpointStore(run_dir, keep=2).prune() == ()
    assert folders(run_dir) == {published.folder}, "the next launch removes what a dead writer left"
    assert_usable(run_dir, 10)


def test_first_checkpoint_of_a_writer_killed_before_it_published(run_dir: Path) -> None:
    written = write(CheckpointStore(run_dir, keep=2), 10)
    (run_dir / "checkpoints" / "step-00000010-deadbeef.unfinished").mkdir()
    store = CheckpointStore(run_dir, keep=2)
    ref = store.latest()
    assert ref is not None and ref.folder == f"{written.folder}.unfinished"
    assert ref.notes[0].endswith("latest.json is missing")
    assert "taking the newest usable checkpoint instead: step 10" in ref.notes[1]
    assert store.load(ref)[0] == state_at(10)
    store.prune()
    assert folders(run_dir) == {ref.folder}
    [next_one] = save(store, 20)
    assert folders(run_dir) == {ref.folder, next_one.folder}
    save(store, 30, 40)
    assert ref.folder not in folders(run_dir)


@pytest.mark.parametrize("files_left", range(6))
def test_first_save_cut_short_at_any_file_starts_at_step_0(run_dir: Path, files_left: int) -> None:
    """What a kill leaves of a first save: its folder with the first few files, the last one maybe cut."""
    writer = CheckpointStore(run_dir, keep=2)
    ref = write(writer, 10)
    cut = writer.path(ref)
    for name in list(ref.files)[files_left:]:
        (cut / name).unlink()
    if files_left:
        os.truncate(cut / list(ref.files)[files_left - 1], 3)
    store = CheckpointStore(run_dir, keep=2)
    assert store.latest() is None
    assert store.prune() == (f"{cut} was of a save that never ended, and is removed; there is no checkpoint yet",)
    assert folders(run_dir) == set()


def test_a_first_save_that_was_whole_and_changed_since_is_damage_and_no_kill(run_dir: Path) -> None:
    writer = CheckpointStore(run_dir, keep=2)
    folder = writer.path(write(writer, 10))
    damage_by(folder / "optimizer.safetensors", "changed")
    store = CheckpointStore(run_dir, keep=2)
    with pytest.raises(StorageError, match=f"checkpoint {folder.name} is damaged: the content of optimizer"):
        store.latest()
    assert store.prune() == (f"{folder} is of a save that never ended; it stays until there is a checkpoint",)
    assert folders(run_dir) == {folder.name}


def test_a_removal_cut_short_leaves_nothing_that_looks_damaged(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(run_dir, keep=1)
    save(store, 10)
    store.publish(write(store, 20))

    def killed_after_one_file(folder: Path, ignore_errors: bool) -> None:
        next(folder.iterdir()).unlink()

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed_after_one_file)
        store.prune()
    assert len(folders(run_dir)) == 2
    assert_usable(run_dir, 20)
    assert CheckpointStore(run_dir, keep=1).prune() == ()
    assert len(folders(run_dir)) == 1


def test_checkpoints_that_a_killed_writer_dropped_are_removed_by_the_next(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=1)
    save(store, 10)
    store.publish(write(store, 20))  # and killed before it pruned
    assert len(folders(run_dir)) == 2
    assert CheckpointStore(run_dir, keep=1).prune() == ()
    assert len(folders(run_dir)) == 1
    assert_usable(run_dir, 20)


def test_publishing_twice_changes_nothing(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=2)
    [first, second] = save(store, 10, 20)
    store.publish(second)  # as after a vote in which another rank failed
    store.prune()
    assert folders(run_dir) == {first.folder, second.folder}
    pointer = json.loads((run_dir / "checkpoints" / "latest.json").read_text())
    assert (pointer["folder"], [older["folder"] for older in pointer["older"]]) == (second.folder, [first.folder])


def test_checkpoints_are_set_aside_for_a_fresh_start(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=2)
    assert store.set_aside() is None
    [old] = save(store, 10)
    aside = store.set_aside()
    assert aside is not None and (aside / old.folder / "state.json").exists()
    assert store.latest() is None
    save(store, 5)
    assert_usable(run_dir, 5)


def damage_by(path: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "changed":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    elif how == "file gone":
        path.unlink()
    else:
        shutil.rmtree(path.parent)


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("truncated", r"optimizer.safetensors has \d+ bytes, not \d+"),
        ("changed", "the content of optimizer.safetensors changed since it was written"),
        ("file gone", "optimizer.safetensors can't be read: No such file or directory"),
        ("folder gone", "adapter_model.safetensors can't be read: No such file or directory"),
    ],
)
def test_damage_falls_back_with_a_word(run_dir: Path, how: str, word: str) -> None:
    older, newer = save(CheckpointStore(run_dir, keep=2), 10, 20)
    damage_by(run_dir / "checkpoints" / newer.folder / "optimizer.safetensors", how)
    ref = assert_usable(run_dir, 10)
    assert ref.folder == older.folder
    assert len(ref.notes) == 2
    with pytest.raises(StorageError, match=f"damaged: {word}\n.*fix: run again"):
        CheckpointStore(run_dir, keep=2).load(newer)
    assert re.fullmatch(f"checkpoint {newer.folder} is damaged: {word}", ref.notes[0])
    assert ref.notes[1].startswith("taking the newest usable checkpoint instead: step 10, ")


def test_damaged_checkpoint_takes_no_place_among_the_kept(run_dir: Path) -> None:
    older, newer = save(CheckpointStore(run_dir, keep=2), 10, 20)
    damage_by(run_dir / "checkpoints" / newer.folder / "optimizer.safetensors", "changed")
    store = CheckpointStore(run_dir, keep=2)
    assert store.latest() is not None
    [replayed] = save(store, 20)
    assert folders(run_dir) == {older.folder, replayed.folder}


def garbage_behind(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"garbage")


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "longer": ("optimizer.safetensors", garbage_behind, r"optimizer.safetensors has \d+ bytes, not \d+"),
    "changed": (
        "adapter_model.safetensors",
        lambda path: damage_by(path, "changed"),
        "the content of adapter_model.safetensors changed since it was written",
    ),
    "no state": ("state.json", Path.unlink, "state.json can't be read: No such file or directory"),
    "cut state": ("state.json", lambda path: os.truncate(path, 40), "state.json (is not what was written|has 40 .*)"),
    "empty state": ("state.json", lambda path: os.truncate(path, 0), "state.json (is not what was written|has 0 .*)"),
    "empty folder": ("state.json", lambda path: [f.unlink() for f in path.parent.iterdir()], ".* can't be read: .*"),
}


@pytest.mark.parametrize("pointer", ["there", "missing", "damaged"])
@pytest.mark.parametrize("how", DAMAGES)
def test_nothing_usable_is_an_error_and_nothing_is_removed(run_dir: Path, how: str, pointer: str) -> None:
    name, damaged, word = DAMAGES[how]
    refs = save(CheckpointStore(run_dir, keep=2), 10, 20)
    for ref in refs:
        damaged(run_dir / "checkpoints" / ref.folder / name)
    if pointer == "missing":
        (run_dir / "checkpoints" / "latest.json").unlink()
    elif pointer == "damaged":
        (run_dir / "checkpoints" / "latest.json").write_bytes(b"{")
    before = {path: path.stat().st_size for path in run_dir.rglob("*")}
    store = CheckpointStore(run_dir, keep=2)
    with pytest.raises(StorageError) as caught:
        store.latest()
    head, *lines, fix = str(caught.value).splitlines()
    assert head == f"no usable checkpoint in {run_dir / 'checkpoints'}"
    if pointer != "there":
        assert "latest.json is " in lines.pop(0)
    for ref, line in zip(reversed(refs), lines, strict=True):
        assert re.fullmatch(f"    checkpoint {ref.folder} is damaged: {word}", line), line
    assert fix.startswith(f"    fix: bring back the content of {run_dir / 'checkpoints'}; or start anew with --resume")
    store.prune()
    assert {path: path.stat().st_size for path in run_dir.rglob("*")} == before


def test_with_all_that_is_listed_damaged_a_whole_one_beside_it_is_taken(run_dir: Path) -> None:
    [kept] = save(CheckpointStore(run_dir, keep=1), 10)
    backup = shutil.copytree(run_dir / "checkpoints" / kept.folder, run_dir / "step-00000010-bac0bac0")
    [listed] = save(CheckpointStore(run_dir, keep=1), 20)
    backup.rename(run_dir / "checkpoints" / backup.name)
    garbage_behind(run_dir / "checkpoints" / listed.folder / "optimizer.safetensors")
    ref = assert_usable(run_dir, 10)
    assert ref.notes[0].startswith(f"checkpoint {listed.folder} is damaged: ")
    assert ref.notes[1].startswith("taking the newest usable checkpoint instead: step 10, ")


def test_a_folder_that_is_not_ours_to_remove_stays_and_is_named_once(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=1)
    [ref] = save(store, 10)
    stranger = run_dir / "checkpoints" / "step-00000005-by-hand"
    shutil.copytree(run_dir / "checkpoints" / ref.folder, stranger)
    store = CheckpointStore(run_dir, keep=1)
    assert store.prune() == (f"{stranger} is not in latest.json and is left alone",)
    save(store, 20, 30)
    assert stranger.name in folders(run_dir) and len(folders(run_dir)) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pointer_version": 9}', b"\xff\xfe"])
def test_unreadable_pointer_falls_back_with_a_word(run_dir: Path, content: bytes) -> None:
    older, newer = save(CheckpointStore(run_dir, keep=2), 10, 20)
    (run_dir / "checkpoints" / "latest.json").write_bytes(content)
    ref = assert_usable(run_dir, 20)
    assert "latest.json is not readable" in ref.notes[0]
    store = CheckpointStore(run_dir, keep=2)
    store.prune()
    assert folders(run_dir) == {older.folder, newer.folder}
    [last] = save(store, 30)
    assert folders(run_dir) == {newer.folder, last.folder}
    shutil.rmtree(run_dir / "checkpoints" / last.folder)
    shutil.rmtree(run_dir / "checkpoints" / newer.folder)
    (run_dir / "checkpoints" / "latest.json").write_bytes(content)
    with pytest.raises(StorageError, match="no usable checkpoint"):
        store.latest()


# --- order on the disk -----------------------------------------------------------------------------------------------


def test_pointer_is_replaced_only_when_everything_is_on_the_disk(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        calls.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def recorded_replace(source: Any, target: Any) -> None:
        calls.append(f"replace {Path(target).name}")
        rename(source, target)

    store = CheckpointStore(run_dir, keep=1)
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    ref = write(store, 1)
    folder = f"{ref.folder}.unfinished"
    assert set(calls) == {*(f"fsync {name}" for name in ref.files), f"fsync {folder}", "fsync checkpoints"}
    assert calls[-2:] == [f"fsync {folder}", "fsync checkpoints"]
    calls.clear()
    store.publish(ref)
    assert calls == ["fsync checkpoints", "fsync .latest.json.new", "replace latest.json", "fsync checkpoints"]


# --- storage that fails ----------------------------------------------------------------------------------------------


def assert_refused(run_dir: Path, store: CheckpointStore, step: int, *words: str, rows: int = 64) -> str:
    """Writing `step` fails with all of `words`, leaves nothing behind, and the checkpoint of step 10 is usable."""
    before = folders(run_dir)
    with pytest.raises(StorageError) as caught:
        store.publish(write(store, step, rows))
    text = str(caught.value)
    assert caught.value.exit_code == ExitCode.STORAGE
    for word in (f"the checkpoint of step {step} was not written to {run_dir}", "fix: ", *words):
        assert word in text, text
    assert folders(run_dir) == before
    assert_usable(run_dir, 10)
    return text


@contextmanager
def largest_file(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_size_limit(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=2)
    save(store, 10)
    with largest_file(200_000):
        assert_refused(
            run_dir, store, 20, "File too large", "needs 12 MiB", "still usable: the checkpoint of step 10",
            "raise the limit on the size of a file (ulimit -f)", rows=131072,
        )  # fmt: skip
    save(store, 30)
    assert_usable(run_dir, 30)


def test_pointer_that_cannot_be_written(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=2)
    save(store, 10)
    written = write(store, 20)
    with largest_file(100), pytest.raises(StorageError, match=r"step 20 was not written to .*latest.json: File too"):
        store.publish(written)
    assert written.folder not in folders(run_dir)
    assert_usable(run_dir, 10)


def test_pointer_that_was_replaced_but_not_synced_keeps_its_folder(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(run_dir, keep=2)
    save(store, 10)
    written = write(store, 20)
    fsync = os.fsync

    pointer = run_dir / "checkpoints" / "latest.json"

    def failing_on_folders(descriptor: int) -> None:
        replaced = written.folder in pointer.read_text()
        if replaced and Path(f"/proc/self/fd/{descriptor}").resolve().is_dir():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing_on_folders)
    with pytest.raises(StorageError, match="Input/output error"):
        store.publish(written)
    assert_usable(run_dir, 20)
    assert store.path(written).is_dir()


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@ROOT_ONLY
def test_too_little_space_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=2m") as small:
        run_dir = prepared(small / "run")
        store = CheckpointStore(run_dir, keep=2)
        save(store, 10)
        usage = shutil.disk_usage(small).used
        text = assert_refused(
            run_dir, store, 20, "No space left on device", "needs 12 MiB, free 1.9",
            "fix: free space or file entries there, 12 MiB or more, or move the run directory", rows=131072,
        )  # fmt: skip
        assert "still usable: the checkpoint of step 10" in text
        assert shutil.disk_usage(small).used == usage
        save(store, 30)
        assert_usable(run_dir, 30)


@ROOT_ONLY
def test_disk_that_fills_up_during_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tmpfs(tmp_path / "small", "size=2m") as small:
        run_dir = prepared(small / "run")
        store = CheckpointStore(run_dir, keep=2)
        save(store, 10)
        with monkeypatch.context() as patched:
            # A network file system that reports no figures: only the write itself finds the disk full.
            patched.setattr(os, "statvfs", lambda path: (_ for _ in ()).throw(OSError(errno.ENOSYS, "no figures")))
            assert_refused(run_dir, store, 20, "No space left on device", "needs 12 MiB, free unknown", rows=131072)
        save(store, 30)
        assert_usable(run_dir, 30)


@ROOT_ONLY
def test_disk_without_file_entries(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=2m,nr_inodes=13") as small:
        run_dir = prepared(small / "run")
        store = CheckpointStore(run_dir, keep=2)
        save(store, 10)
        assert_refused(run_dir, store, 20, "No space left on device", "free space or file entries there")


def test_quota_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(run_dir, keep=2)
    save(store, 10)

    def over_quota(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))  # as NFS reports it: not before the data travels

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", over_quota)
        assert_refused(run_dir, store, 20, "Disk quota exceeded", "free some of your quota")


@contextmanager
def as_another_user(folder: Path) -> Iterator[None]:
    """Whatever happens in `folder` is forbidden."""
    user = os.geteuid()
    folder.chmod(0o000)
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_folder_that_may_not_be_written(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=2)
    save(store, 10)
    with as_another_user(run_dir / "checkpoints"), pytest.raises(StorageError) as caught:
        write(store, 20)
    assert "Permission denied" in str(caught.value)
    assert f"fix: make {run_dir / 'checkpoints'} writable for this user; then run again" in str(caught.value)
    assert "still usable: unknown, " in str(caught.value)
    assert_usable(run_dir, 10)


def test_folder_that_may_not_be_read_is_no_fresh_start(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=2)
    save(store, 10)
    with as_another_user(run_dir / "checkpoints"):
        with pytest.raises(StorageError, match=r"no usable checkpoint in .*\n.*Permission denied"):
            store.latest()
        (refusal,) = store.prune()
    assert refusal.endswith("can't be listed: Permission denied")
    assert_usable(run_dir, 10)


def test_first_checkpoint_that_cannot_be_written_says_that_there_is_none(run_dir: Path) -> None:
    with largest_file(1000), pytest.raises(StorageError, match="still usable: no checkpoint yet\n"):
        write(CheckpointStore(run_dir, keep=2), 10)
    assert folders(run_dir) == set()


def test_file_in_the_place_of_the_folder(run_dir: Path) -> None:
    (run_dir / "checkpoints").write_text("in the way")
    with pytest.raises(StorageError, match=r"fix: make sure that .*checkpoints is a healthy folder"):
        write(CheckpointStore(run_dir, keep=2), 10)


def test_memory_failure_during_a_save_leaves_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(run_dir, keep=2)
    save(store, 10)

    class Starved(torch.Tensor):
        def detach(self) -> Any:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(RuntimeError, match="can't allocate"):
        store.write(state_at(20), {"x": torch.zeros(3).as_subclass(Starved)}, {}, None)
    assert len(folders(run_dir)) == 1
    assert_usable(run_dir, 10)


def test_damaged_state_file_in_an_unlisted_folder_is_named_and_left_alone(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=2)
    save(store, 10)
    (run_dir / "checkpoints" / "latest.json").unlink()
    for number, content in enumerate([b"", b"[]", b'{"files": {"x": {"bytes": 1, "sha256": ""}}}', b'{"files": {}}']):
        folder = run_dir / "checkpoints" / f"step-0000009{number}-00000000"
        folder.mkdir()
        (folder / "state.json").write_bytes(content)
    ref = assert_usable(run_dir, 10)
    assert ref.notes[0].endswith("latest.json is missing")
    assert [note.partition(":")[0] for note in ref.notes[1:5]] == [
        f"checkpoint step-0000009{number}-00000000 is damaged" for number in (3, 2, 1, 0)
    ]
    CheckpointStore(run_dir, keep=2).prune()
    assert len(folders(run_dir)) == 5


def test_file_record_is_what_lies_on_the_disk(tmp_path: Path) -> None:
    record = write_file(tmp_path / "x", [b"ab", memoryview(b"c")])
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert record == FileRecord(bytes=3, sha256=digest)
