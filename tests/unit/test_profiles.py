"""Profiles: each shipped one is accepted, and every value that would be ignored is refused with its reason."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from allranks.config.load import parse_run_config
from allranks.errors import Problem, ProblemsError
from allranks.profile_keys import DEEPSPEED, FSDP, TOP_LEVEL
from allranks.profiles import Profile, check_profile_against_run, list_profiles, load_profile, shipped_folder

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = ("ddp", "fsdp", "single", "zero2", "zero3")


def edited(tmp_path: Path, name: str, **changes: Any) -> Path:
    """A copy of a shipped profile with keys changed; ``section__key`` is a key of a section, ... removes it."""
    content = yaml.safe_load((REPOSITORY / "profiles" / f"{name}.yaml").read_text(encoding="utf-8"))
    for path, value in changes.items():
        section, _, key = path.rpartition("__")
        place = content.setdefault(section, {}) if section else content
        if value is ...:
            del place[key]
        else:
            place[key] = value
    file = tmp_path / f"my-{name}.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return file


def problems_of(file: Path) -> list[Problem]:
    with pytest.raises(ProblemsError) as caught:
        load_profile(str(file))
    assert caught.value.source == str(file)
    return list(caught.value.problems)


def contradictions(profile: Profile, *overrides: str) -> list[Problem]:
    text = "model: {name_or_path: org/model}\ndata: {train: org/data}\n"
    config = parse_run_config(text, source="run.yaml", folder=Path(), overrides=overrides)
    return check_profile_against_run(profile, config)


def test_the_shipped_profiles_are_those_of_the_repository() -> None:
    assert shipped_folder() == REPOSITORY / "profiles"
    profiles = list_profiles()
    assert tuple(profile.name for profile in profiles) == NAMES
    assert tuple(profile.kind for profile in profiles) == NAMES
    assert all(profile.mixed_precision == "bf16" and profile.path.is_absolute() for profile in profiles)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_has_a_headline_and_suits_the_default_run(name: str) -> None:
    profile = load_profile(name)
    assert profile.path.read_text(encoding="utf-8").startswith("# ")
    assert contradictions(profile) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_under_another_name_is_the_same_profile(tmp_path: Path, name: str) -> None:
    assert load_profile(str(edited(tmp_path, name))).kind == name


def test_a_name_that_is_no_profile() -> None:
    with pytest.raises(ProblemsError) as caught:
        load_profile("zer3")
    [problem] = caught.value.problems
    assert problem.message == "'zer3' is neither a shipped profile nor a file"
    assert problem.nearest == "zero3"
    assert problem.choices == NAMES


def test_every_key_of_accelerate_is_judged() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    sections = {"deepspeed_config", "fsdp_config"}
    legacy = {"fp16", "dynamo_backend"}
    assert set(TOP_LEVEL) | sections == set(ClusterConfig.__dataclass_fields__) | legacy

    options = {
        group.title: {action.dest for action in group._group_actions}
        for group in launch_command_parser()._action_groups
    }
    assert set(DEEPSPEED) == options["DeepSpeed Arguments"]
    # the one key that accelerate reads from a file only
    assert set(FSDP) == options["FSDP Arguments"] | {"fsdp_ignored_modules"}


REFUSED = [
    ("ddp", {"distributed_type": "MULTI_CPU"}, "distributed_type", "'MULTI_CPU'", "put 'NO' in quotes"),
    ("ddp", {"distributed_type": False}, "distributed_type", "false", "put 'NO' in quotes"),
    ("ddp", {"distributed_type": ...}, "distributed_type", "is missing", "say how the model is spread"),
    ("ddp", {"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment", "'AMAZON", "this machine only"),
    ("ddp", {"mixed_precision": "fp8"}, "mixed_precision", "'fp8'", "put 'no' in quotes"),
    ("ddp", {"mixed_precision": False}, "mixed_precision", "false", "put 'no' in quotes"),
    ("ddp", {"num_processes": 0}, "num_processes", "0 is not an integer ≥ 1", "number of ranks"),
    ("ddp", {"num_processes": 1}, "num_processes", "1 does not suit distributed_type: MULTI_GPU", "2 or more"),
    ("ddp", {"num_processes": ...}, "num_processes", "null does not suit", "2 or more"),
    ("single", {"num_processes": 2}, "num_processes", "2 does not suit distributed_type: NO", "write 1 for 'NO'"),
    ("ddp", {"num_machines": 2}, "num_machines", "2", "one machine for now"),
    ("ddp", {"main_process_port": 29500}, "main_process_port", "29500", "free port"),
    ("ddp", {"gpu_ids": "0,1"}, "gpu_ids", "'0,1'", "--gpus"),
    ("ddp", {"use_cpu": True}, "use_cpu", "true", "CUDA_VISIBLE_DEVICES="),
    ("ddp", {"downcast_bf16": True}, "downcast_bf16", "true", "TPUs"),
    ("ddp", {"enable_cpu_affinity": True}, "enable_cpu_affinity", "true", "accelerate ignores it"),
    ("ddp", {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_config", "{'dynamo", "not supported"),
    ("ddp", {"fp16": True}, "fp16", "true", "mixed_precision: fp16"),
    ("ddp", {"fsdp_config": {"fsdp_version": 2}}, "fsdp_config", "has no effect", "change distributed_type"),
    ("zero2", {"deepspeed_config": 3}, "deepspeed_config", "3 is not a section", "write keys below"),
    ("zero2", {"deepspeed_config__zero_stage": 1}, "deepspeed_config.zero_stage", "1", "use ddp"),
    ("zero2", {"deepspeed_config__zero_stage": ...}, "deepspeed_config.zero_stage", "is missing", "use ddp"),
    (
        "zero2",
        {"deepspeed_config__gradient_accumulation_steps": 4},
        "deepspeed_config.gradient_accumulation_steps",
        "4",
        "training.gradient_accumulation_steps",
    ),
    (
        "zero2",
        {"deepspeed_config__gradient_clipping": -1},
        "deepspeed_config.gradient_clipping",
        "-1 is not a number ≥ 0 or auto",
        "training.max_grad_norm",
    ),
    (
        "zero2",
        {"deepspeed_config__offload_optimizer_device": "cpu"},
        "deepspeed_config.offload_optimizer_device",
        "'cpu'",
        "write none",
    ),
    (
        "zero3",
        {"deepspeed_config__offload_param_device": "nvme"},
        "deepspeed_config.offload_param_device",
        "'nvme'",
        "write none",
    ),
    ("zero3", {"deepspeed_config__zero3_init_flag": True}, "deepspeed_config.zero3_init_flag", "true", "write false"),
    (
        "zero3",
        {"deepspeed_config__zero3_init_flag": ...},
        "deepspeed_config.zero3_init_flag",
        "is missing",
        "write false",
    ),
    (
        "zero3",
        {"deepspeed_config__zero3_save_16bit_model": True},
        "deepspeed_config.zero3_save_16bit_model",
        "true",
        "never the base model",
    ),
    (
        "zero2",
        {"deepspeed_config__deepspeed_config_file": "ds.json"},
        "deepspeed_config.deepspeed_config_file",
        "'ds.json'",
        "write the keys",
    ),
    ("fsdp", {"fsdp_config__fsdp_version": 1}, "fsdp_config.fsdp_version", "1", "write 2"),
    ("fsdp", {"fsdp_config__fsdp_version": ...}, "fsdp_config.fsdp_version", "is missing", "write 2"),
    (
        "fsdp",
        {"fsdp_config__fsdp_auto_wrap_policy": "NO_WRAP"},
        "fsdp_config.fsdp_auto_wrap_policy",
        "'NO_WRAP'",
        "gathered whole",
    ),
    (
        "fsdp",
        {"fsdp_config__fsdp_transformer_layer_cls_to_wrap": ...},
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "is missing",
        "LlamaDecoderLayer",
    ),
    (
        "fsdp",
        {"fsdp_config__fsdp_transformer_layer_cls_to_wrap": "A, B"},
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "'A, B' is not class names",
        "LlamaDecoderLayer",
    ),
    (
        "fsdp",
        {"fsdp_config__fsdp_reshard_after_forward": "FULL_SHARD"},
        "fsdp_config.fsdp_reshard_after_forward",
        "'FULL_SHARD'",
        "true or false",
    ),
    ("fsdp", {"fsdp_config__fsdp_offload_params": True}, "fsdp_config.fsdp_offload_params", "true", "write false"),
    (
        "fsdp",
        {"fsdp_config__fsdp_cpu_ram_efficient_loading": True},
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        "true",
        "write false",
    ),
    (
        "fsdp",
        {"fsdp_config__fsdp_cpu_ram_efficient_loading": ...},
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        "is missing",
        "write false",
    ),
    (
        "fsdp",
        {"fsdp_config__fsdp_activation_checkpointing": True},
        "fsdp_config.fsdp_activation_checkpointing",
        "true",
        "training.gradient_checkpointing: true",
    ),
    (
        "fsdp",
        {"fsdp_config__fsdp_state_dict_type": "SHARDED_STATE_DICT"},
        "fsdp_config.fsdp_state_dict_type",
        "'SHARDED",
        "its own checkpoints",
    ),
    (
        "fsdp",
        {"fsdp_config__fsdp_use_orig_params": False},
        "fsdp_config.fsdp_use_orig_params",
        "false",
        "FSDP2 has no such option",
    ),
]


@pytest.mark.parametrize(
    ("name", "changes", "path", "message", "fix"), REFUSED, ids=[f"{row[0]}-{row[2]}-{row[3][:8]}" for row in REFUSED]
)
def test_a_value_that_cannot_be_honoured_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], path: str, message: str, fix: str
) -> None:
    [problem] = problems_of(edited(tmp_path, name, **changes))
    assert problem.path == path
    assert problem.message.startswith(message)
    assert fix in str(problem.fix)


ACCEPTED = [
    ("ddp", {"mixed_precision": "no"}),
    ("ddp", {"mixed_precision": ...}),
    ("ddp", {"num_processes": 8}),
    ("single", {"num_processes": ...}),
    ("zero2", {"deepspeed_config__gradient_clipping": 0.5}),
    ("zero2", {"deepspeed_config__gradient_clipping": "auto"}),
    ("zero2", {"deepspeed_config__zero3_init_flag": ...}),
    ("fsdp", {"fsdp_config__fsdp_reshard_after_forward": False}),
    ("fsdp", {"fsdp_config__fsdp_transformer_layer_cls_to_wrap": "OlmoDecoderLayer"}),
    # what `accelerate config` writes beside the answers to its questions
    (
        "ddp",
        {
            "debug": False,
            "downcast_bf16": "no",
            "enable_cpu_affinity": False,
            "gpu_ids": "all",
            "machine_rank": 0,
            "main_training_function": "main",
            "rdzv_backend": "static",
            "same_network": True,
            "tpu_env": [],
            "tpu_use_cluster": False,
            "tpu_use_sudo": False,
            "use_cpu": False,
        },
    ),
]


@pytest.mark.parametrize(
    ("name", "changes"), ACCEPTED, ids=lambda part: "-".join(part) if isinstance(part, dict) else part
)
def test_values_that_are_honoured_or_change_nothing(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    profile = load_profile(str(edited(tmp_path, name, **changes)))
    assert profile.kind == name
    for path, value in changes.items():
        section, _, key = path.rpartition("__")
        place = profile.content[section] if section else profile.content
        assert place.get(key, ...) == value


def test_unknown_keys_come_with_their_line_and_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "fsdp.yaml"
    text = (REPOSITORY / "profiles/fsdp.yaml").read_text(encoding="utf-8")
    file.write_text(text.replace("fsdp_version", "version") + "main_proces_port: 3\n", encoding="utf-8")
    by_path = {problem.path: problem for problem in problems_of(file)}
    assert set(by_path) == {"fsdp_config.version", "fsdp_config.fsdp_version", "main_proces_port"}
    assert by_path["fsdp_config.version"].nearest == "fsdp_config.fsdp_version"
    assert by_path["fsdp_config.version"].message.endswith("(line 6)")
    assert by_path["main_proces_port"].nearest == "main_process_port"


@pytest.mark.parametrize("content", [b"a: [", b"- a", b"", b"a: \xff"])
def test_files_that_are_no_profile(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(content)
    assert problems_of(file)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 4) | st.floats() | st.sampled_from(["NO", "FSDP", "none", "2"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["zero_stage", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*TOP_LEVEL, "deepspeed_config", "fsdp_config", "x"]), _VALUES, max_size=4))
def test_no_content_makes_a_traceback(content: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "p.yaml"
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        try:
            assert load_profile(str(file)).kind == "single"
        except ProblemsError as error:
            assert error.problems


HONOURED = {
    "distributed_type": "this file: the kind",
    "num_processes": "test_planner: the number of CPU ranks",
    "mixed_precision": "test_planner: the compute dtype",
    "deepspeed_config.zero_stage": "this file: the kind",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "the tests of the fsdp strategy: the wrapped layers",
    "fsdp_config.fsdp_reshard_after_forward": "the tests of the fsdp strategy: the state after forward",
}
"""Keys of the shipped profiles that may say several things, and where a test sees the effect."""


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_shipped_profile_has_an_effect_or_is_the_only_one(tmp_path: Path, name: str) -> None:
    content = load_profile(name).content
    keys = [(key, value) for key, value in content.items() if not isinstance(value, dict)]
    keys += [
        (f"{section}.{key}", value)
        for section, keys_ in content.items()
        if isinstance(keys_, dict)
        for key, value in keys_.items()
    ]
    for path, value in keys:
        if path not in HONOURED:
            other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else "another"
            file = edited(tmp_path, name, **{path.replace(".", "__"): other})
            assert path in [problem.path for problem in problems_of(file)]


def test_a_words_meaning_is_that_of_accelerates_yaml_reader(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("distributed_type: NO\nnum_processes: 1\n", encoding="utf-8")
    [problem] = problems_of(file)
    assert str(problem).startswith("distributed_type: false is not supported (line 1)\n    valid: 'NO', 'MULTI_GPU'")


CONTRADICTIONS = [
    (
        "ddp",
        "training.mixed_precision=fp16",
        "training.mixed_precision",
        "'fp16' contradicts mixed_precision: bf16 of profile ddp",
    ),
    ("fsdp", "training.optim=adamw_8bit", "training.optim", "adamw_8bit fails at the first step under fsdp"),
    ("zero2", "training.optim=paged_adamw_8bit", "training.optim", "paged_adamw_8bit is not supported under zero2"),
    ("zero3", "training.optim=adamw_8bit", "training.optim", "adamw_8bit is not supported under zero3"),
    (
        "fsdp",
        "quantization.bnb_4bit_quant_storage=uint8",
        "quantization.bnb_4bit_quant_storage",
        "uint8 can't be sharded",
    ),
    (
        "zero3",
        "quantization.bnb_4bit_quant_storage=float32",
        "quantization.bnb_4bit_quant_storage",
        "float32 is not known to survive DeepSpeed",
    ),
]


@pytest.mark.parametrize(
    ("name", "override", "path", "message"), CONTRADICTIONS, ids=[f"{r[0]}-{r[1]}" for r in CONTRADICTIONS]
)
def test_contradictions_between_run_and_profile(name: str, override: str, path: str, message: str) -> None:
    [problem] = contradictions(load_profile(name), override)
    assert problem.path == path
    assert problem.message.startswith(message)
    assert problem.fix


def test_what_one_profile_refuses_another_may_take() -> None:
    for kind in ("single", "ddp"):
        assert not contradictions(load_profile(kind), "training.optim=paged_adamw_8bit")
        assert not contradictions(load_profile(kind), "quantization.bnb_4bit_quant_storage=uint8")
    assert not contradictions(load_profile("ddp"), "training.mixed_precision=bf16")
    storage = "quantization.bnb_4bit_quant_storage=bfloat16"
    assert not contradictions(load_profile("fsdp"), storage)
    [problem] = contradictions(load_profile("fsdp"), "quantization.bnb_4bit_quant_storage=uint8")
    assert problem.choices == ("auto", "bfloat16", "float32")


def test_the_clipping_of_the_profile_must_be_that_of_the_run(tmp_path: Path) -> None:
    profile = load_profile(str(edited(tmp_path, "zero2", deepspeed_config__gradient_clipping=0.5)))
    [problem] = contradictions(profile)
    assert problem.path == "training.max_grad_norm"
    assert problem.message.startswith("1.0 contradicts deepspeed_config.gradient_clipping: 0.5 of profile my-zero2")
    assert not contradictions(profile, "training.max_grad_norm=0.5")


def test_contradictions_come_all_together() -> None:
    problems = contradictions(
        load_profile("fsdp"),
        "training.optim=adamw_8bit",
        "training.mixed_precision=no",
        "quantization.bnb_4bit_quant_storage=uint8",
    )
    assert len(problems) == 3


@pytest.mark.slow
def test_the_wheel_holds_the_profiles(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, source)
        else:
            (source / name).touch()
    for name in ("src", "profiles"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    build = f"import setuptools.build_meta as backend; print(backend.build_wheel({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    ask = "import allranks.profiles as p; print(p.shipped_folder(), *[x.name for x in p.list_profiles()])"
    answer = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {ask}"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.stdout.split() == [str(tmp_path / "site/allranks/_profiles"), *NAMES]
