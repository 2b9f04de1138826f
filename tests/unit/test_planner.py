"""The planner: number of ranks, compute dtype and global batch, from what was given and what was found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.config.load import parse_run_config
from allranks.config.schema import RunConfig
from allranks.errors import Problem, ProblemsError
from allranks.plan.hardware import Gpu, Hardware
from allranks.plan.plan import Injection, Plan
from allranks.plan.planner import make_plan, run_directory
from allranks.profiles import load_profile

CPU = Hardware(gpus=(), cpu_count=2)
H200 = Gpu(name="NVIDIA H200", total_bytes=150_000_000_000, compute_capability=(9, 0))
T4 = Gpu(name="Tesla T4", total_bytes=16_000_000_000, compute_capability=(7, 5))
RUN_DIR = Path("/runs/first")


def run_config(*overrides: str) -> RunConfig:
    text = "model: {name_or_path: org/model}\ndata: {train: org/data}\n"
    return parse_run_config(text, source="run.yaml", folder=Path(), overrides=overrides)


def cards(count: int, card: Gpu = H200) -> Hardware:
    return Hardware(gpus=(card,) * count, cpu_count=16)


def plan(*overrides: str, profile: str = "ddp", hardware: Hardware = CPU, **more: Any) -> Plan:
    return make_plan(run_config(*overrides), load_profile(profile), hardware, run_dir=RUN_DIR, **more)


def problem_of(*overrides: str, **more: Any) -> Problem:
    with pytest.raises(ProblemsError) as caught:
        plan(*overrides, **more)
    [problem] = caught.value.problems
    return problem


def test_a_plan_holds_what_was_decided_and_survives_json() -> None:
    injection = Injection(rank=1, step=2, phase="forward", kind="oom")
    made = plan("training.seed=7", profile="zero2", smoke=True, resume="must", injections=[injection])
    assert (made.name, made.run_dir) == ("first", "/runs/first")
    assert (made.profile_kind, made.profile) == ("zero2", load_profile("zero2").content)
    assert Path(made.profile_file).name == "zero2.yaml"
    assert (made.smoke, made.resume, made.injections) == (True, "must", (injection,))
    assert Plan.from_json(made.to_json()) == made


def test_the_run_directory_is_named_after_the_file_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_directory(run_config(), Path("/etc/first.yaml")) == tmp_path / "runs/first"
    assert run_directory(run_config("output.name=x", "output.dir=/elsewhere"), Path("a.yaml")) == Path("/elsewhere/x")


RANKS = [
    # profile, hardware, --gpus, ranks, note
    ("single", CPU, None, 1, "no GPU is visible: one process on the CPU"),
    ("single", cards(1), None, 1, None),
    ("single", cards(4), 1, 1, "profile single uses 1 of 4 visible GPUs; ddp would use all of them"),
    ("ddp", CPU, None, 2, "no GPU is visible: 2 ranks on 2 CPUs, over gloo"),
    ("zero3", CPU, 3, 3, "no GPU is visible: 3 ranks on 2 CPUs, over gloo"),
    ("ddp", cards(8), None, 8, None),
    ("fsdp", cards(8), 2, 2, "2 of 8 visible GPUs are used, as --gpus says"),
    ("zero2", cards(1), 2, 2, "2 ranks share 1 GPU: for tests only, slow, and each has only its share of the memory"),
]


@pytest.mark.parametrize(("profile", "hardware", "gpus", "ranks", "note"), RANKS)
def test_the_number_of_ranks(profile: str, hardware: Hardware, gpus: int | None, ranks: int, note: str | None) -> None:
    made = plan(profile=profile, hardware=hardware, gpus=gpus)
    assert made.world_size == ranks
    assert made.device == hardware.device
    assert [n for n in made.notes if "fp32" not in n] == ([] if note is None else [note])


def test_numbers_of_ranks_that_a_profile_cannot_have() -> None:
    problem = problem_of(profile="single", gpus=2)
    assert str(problem) == (
        "--gpus: 2 contradicts profile single, which is one process\n"
        "    valid: ddp, zero2, zero3, fsdp\n"
        "    fix: take one of these profiles, or leave out --gpus"
    )
    problem = problem_of(profile="zero2", hardware=cards(1))
    assert problem.message == "zero2 runs on several ranks, and there is one"
    assert problem.fix == "take --profile single, or --gpus 2 (two ranks that share the GPU, for a test)"
    assert problem_of(profile="ddp", gpus=1).fix == "take --profile single, or --gpus 2"
    assert problem_of(gpus=0).message == "0 is not a number of ranks"


def test_notes_of_the_hardware_reach_the_plan() -> None:
    assert plan(hardware=dataclasses.replace(CPU, notes=("2 GPU(s) not used",))).notes[0] == "2 GPU(s) not used"


PRECISIONS = [
    # asked, hardware, taken, note
    ("auto", CPU, "no", "CPU ranks compute in fp32; profile ddp asks for bf16"),
    ("bf16", CPU, "bf16", None),
    ("auto", cards(2), "bf16", None),
    ("auto", cards(2, T4), "fp16", "Tesla T4 has no bf16: fp16 is used, with a dynamic loss scale"),
    (
        "auto",
        Hardware(gpus=(H200, T4), cpu_count=2),
        "fp16",
        "Tesla T4 has no bf16: fp16 is used, with a dynamic loss scale",
    ),
]


@pytest.mark.parametrize(("asked", "hardware", "taken", "note"), PRECISIONS)
def test_the_compute_dtype(asked: str, hardware: Hardware, taken: str, note: str | None) -> None:
    made = plan(f"training.mixed_precision={asked}", hardware=hardware)
    assert made.mixed_precision == taken
    assert [n for n in made.notes if "fp" in n] == ([] if note is None else [note])


def test_bf16_that_was_asked_for_is_not_replaced_in_silence() -> None:
    problem = problem_of("training.mixed_precision=bf16", hardware=cards(2, T4))
    assert problem.message == "'bf16' is not what Tesla T4 computes in"
    problem = problem_of("quantization.bnb_4bit_compute_dtype=bfloat16", hardware=cards(2, T4))
    assert problem.path == "quantization.bnb_4bit_compute_dtype"


P, A, G = "training.per_device_train_batch_size", "training.gradient_accumulation_steps", "training.global_batch_size"

BATCHES = [
    # overrides, recorded, global batch on 2 ranks, start of a note
    ((), None, 8, None),
    ((f"{P}=3", f"{A}=5"), None, 30, None),
    ((f"{G}=7",), None, 7, None),
    ((f"{G}=7", f"{P}=4"), None, 7, None),
    ((f"{G}=24", f"{P}=3", f"{A}=4"), None, 24, None),
    ((f"{G}=24", f"{A}=5"), None, 24, "gradient_accumulation_steps: 5 has no effect beside global_batch_size: 24"),
    ((f"{G}=1",), None, 1, "global batch 1 is smaller than 2 ranks"),
    ((), 8, 8, None),
    ((), 32, 32, "global batch stays 32 as at the run's first launch; now per_device_train_batch_size × "),
    ((f"{G}=24", f"{P}=3", f"{A}=8"), 24, 24, None),
]


@pytest.mark.parametrize(("overrides", "recorded", "expected", "note"), BATCHES)
def test_the_global_batch(overrides: tuple[str, ...], recorded: int | None, expected: int, note: str | None) -> None:
    made = plan(*overrides, recorded_global_batch=recorded)
    assert made.global_batch_size == expected
    batch_notes = [n for n in made.notes if "batch" in n]
    assert len(batch_notes) == (0 if note is None else 1)
    assert note is None or batch_notes[0].startswith(note)


def test_a_contradictory_triple_is_an_error_and_a_resumed_one_is_not() -> None:
    triple = (f"{G}=24", f"{P}=3", f"{A}=5")
    problem = problem_of(*triple)
    assert problem.message == (
        "24 contradicts per_device_train_batch_size × gradient_accumulation_steps × ranks = 3 × 5 × 2 = 30"
    )
    assert problem.fix == "remove gradient_accumulation_steps: micro-steps follow from the other two"
    assert plan(*triple, recorded_global_batch=24).global_batch_size == 24


def test_a_run_keeps_its_global_batch_unless_it_begins_anew() -> None:
    problem = problem_of(f"{G}=16", recorded_global_batch=8)
    assert problem.message == "16 contradicts 8, with which this run began"
    assert plan(f"{G}=16", recorded_global_batch=8, resume="never").global_batch_size == 16


@given(
    samples=st.integers(1, 64),
    accumulation=st.none() | st.integers(1, 64),
    ranks=st.integers(2, 64),
    later_ranks=st.integers(2, 64),
)
def test_the_first_launch_fixes_the_global_batch_for_any_later_number_of_ranks(
    samples: int, accumulation: int | None, ranks: int, later_ranks: int
) -> None:
    overrides = (f"{P}={samples}", f"{A}={'null' if accumulation is None else accumulation}")
    first = plan(*overrides, gpus=ranks).global_batch_size
    assert first == samples * (accumulation or 1) * ranks
    later = plan(*overrides, gpus=later_ranks, recorded_global_batch=first)
    assert later.global_batch_size == first
    assert any("stays" in note for note in later.notes) == (later_ranks != ranks)


def test_a_smoke_run_says_what_it_leaves_out() -> None:
    assert "smoke run: 3 steps, one evaluation, one save" in plan("data.eval=org/data", smoke=True).notes
    assert "smoke run: 3 steps, no evaluation (data.eval is not set), one save" in plan(smoke=True).notes


INJECTIONS = [
    ({"rank": 2}, {}, "there is no rank 2 among 2; ranks count from 0"),
    ({"rank": -1}, {}, "there is no rank -1 among 2; ranks count from 0"),
    ({"step": 0}, {}, "there is no step 0; steps count from 1"),
    ({"step": 4}, {"smoke": True}, "step 4 is never reached: the run ends after 3"),
    ({"times": 0}, {}, "0 times is never"),
]


@pytest.mark.parametrize(("change", "more", "message"), INJECTIONS)
def test_injections_that_would_never_happen(change: dict[str, int], more: dict[str, Any], message: str) -> None:
    injection = dataclasses.replace(Injection(rank=0, step=1, phase="forward", kind="oom"), **change)
    assert problem_of(injections=[injection], **more).message == message


@pytest.mark.parametrize(
    ("phase", "step", "overrides", "words"),
    [
        ("eval", 2, ["data.eval=null"], "there is no evaluation, for data.eval is not set"),
        ("eval", 3, ["training.max_steps=6", "training.eval_steps=2"], "after every 2 steps and after step 6"),
        ("eval", 4, ["training.max_steps=6", "training.eval_steps=2"], None),
        ("eval", 6, ["training.max_steps=6", "training.eval_steps=4"], None),
        ("eval", 3, ["training.eval_steps=2"], None),  # it may be the last one
        ("save", 3, ["training.max_steps=6", "output.save_steps=null"], "does not come after step 3, but after step 6"),
        ("save", 3, ["training.max_steps=6", "output.save_steps=3"], None),
        ("final", 3, ["training.max_steps=6"], "phase final does not come after step 3, but after step 6"),
        ("final", 6, ["training.max_steps=6"], None),
        ("load", 3, ["training.max_steps=6"], None),
    ],
)
def test_a_fault_in_a_phase_that_the_step_has_not(
    phase: Any, step: int, overrides: list[str], words: str | None, tmp_path: Path
) -> None:
    (tmp_path / "eval.jsonl").write_text("{}")
    given = [f"data.eval={tmp_path / 'eval.jsonl'}", *overrides]
    injection = Injection(rank=0, step=step, phase=phase, kind="oom")
    if words is None:
        assert plan(*given, injections=[injection]).injections == (injection,)
    else:
        message = problem_of(*given, injections=[injection]).message
        assert message.endswith(words)


def test_an_injection_beyond_max_steps() -> None:
    injection = Injection(rank=0, step=6, phase="forward", kind="oom")
    assert problem_of("training.max_steps=5", injections=[injection]).message.endswith("the run ends after 5")


def test_all_problems_come_together_with_those_of_the_profile() -> None:
    with pytest.raises(ProblemsError, match="run first with profile fsdp: 3 problems") as caught:
        plan(
            "training.optim=adamw_8bit",
            profile="fsdp",
            gpus=1,
            injections=[Injection(rank=1, step=1, phase="save", kind="oom")],
        )
    assert [problem.path for problem in caught.value.problems] == ["training.optim", "--profile", "injection"]


def test_nan_spoils_a_loss_and_no_other_phase() -> None:
    fault = Injection(rank=0, step=1, phase="save", kind="nan")
    assert "valid: forward, backward" in str(problem_of(injections=[fault]))
