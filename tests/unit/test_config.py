"""`run.yaml`: what is accepted, and what every kind of mistake is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from allranks.config.document import read_value
from allranks.config.fields import key_specs, section_models
from allranks.config.load import load_run_config, parse_run_config
from allranks.config.render import given_yaml, reference_markdown, resolved_yaml
from allranks.config.schema import OomConfig, RunConfig
from allranks.config.words import FOREIGN_WORDS
from allranks.errors import ExitCode, Problem, ProblemsError

REPOSITORY = Path(__file__).resolve().parents[2]
MINIMAL = "model: {name_or_path: org/model}\ndata: {train: org/data}\n"
TOKEN = "hf_" + "aB3" * 11


def parse(text: str, *overrides: str, folder: Path = Path()) -> RunConfig:
    return parse_run_config(text, source="run.yaml", folder=folder, overrides=overrides)


def problems_of(text: str, *overrides: str, folder: Path = Path()) -> list[Problem]:
    with pytest.raises(ProblemsError) as caught:
        parse(text, *overrides, folder=folder)
    assert caught.value.exit_code == ExitCode.USAGE
    return list(caught.value.problems)


def problem_of(text: str, *overrides: str, folder: Path = Path()) -> Problem:
    [problem] = problems_of(text, *overrides, folder=folder)
    return problem


def test_the_two_required_keys_make_a_run() -> None:
    config = parse(MINIMAL)
    assert config.model.name_or_path == "org/model"
    assert config.training.learning_rate == 2e-4
    assert config.training.model_fields_set == set()


def test_scalars_are_those_of_yaml_1_2() -> None:
    config = parse(MINIMAL + "training: {learning_rate: 1e-4, mixed_precision: no, adam_epsilon: 1.E-8}\n")
    assert config.training.learning_rate == 1e-4
    assert config.training.mixed_precision == "no"
    assert config.training.adam_epsilon == 1e-8


@pytest.mark.parametrize(("text", "value"), [("010", 10), ("-0", 0), ("+8", 8), ("0x1f", 31), ("0o17", 15)])
def test_whole_numbers_are_those_of_yaml_1_2(text: str, value: int) -> None:
    assert read_value(text) == (value, None)


@pytest.mark.parametrize("text", ["1:30", "1_000", "0b11", "0x", "yes", "2026-01-31"])
def test_what_only_yaml_1_1_takes_for_more_than_a_text_is_a_text(text: str) -> None:
    assert read_value(text) == (text, None)


def test_empty_sections_and_null_for_optional_keys_are_accepted() -> None:
    config = parse(MINIMAL + "training:\nlora: {lora_alpha: null}\n")
    assert config.lora.lora_alpha is None


def test_overrides_win_and_the_last_one_counts() -> None:
    config = parse(
        MINIMAL + "training: {seed: 1}\n", "training.seed=2", "training.seed=3", "lora.target_modules=[q_proj, v_proj]"
    )
    assert config.training.seed == 3
    assert config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.training.model_fields_set == {"seed"}


BAD_VALUES = [
    ("quantization: {bnb_4bit_quant_type: nf5}", "'nf5' is not valid", ("nf4", "fp4"), "nf4", None),
    ("quantization: {load_in_4bit: yes}", "'yes' is not valid", ("true", "false"), "true", None),
    ("quantization: {load_in_4bit: 1}", "1 is not valid", ("true", "false"), None, None),
    ("training: {optim: adamw_torch}", "'adamw_torch' is not valid", None, "adamw_torch_fused", None),
    ("training: {mixed_precision: fp32}", "'fp32' is not valid", ("auto", "bf16", "fp16", "no"), None, None),
    (
        "training: {max_steps: -1}",
        "-1 is not an integer ≥ 1 and ≤ 2147483647 or null",
        (),
        None,
        "write null, or leave the key out",
    ),
    ("training: {seed: 1.5}", "1.5 is not an integer ≥ 0 and < 4294967296", (), None, None),
    ("training: {seed: true}", "true is not an integer ≥ 0 and < 4294967296", (), None, None),
    (
        "training: {seed: null}",
        "null is not an integer ≥ 0 and < 4294967296",
        (),
        None,
        "leave the key out for its default",
    ),
    ("training: {learning_rate: .inf}", "inf is not a number > 0", (), None, None),
    ("training: {learning_rate: '1e-4'}", "'1e-4' is not a number > 0", (), None, "write it without quotes"),
    ("training: {learning_rate: {a: 1}}", "{'a': 1} is not a number > 0", (), None, None),
    ("lora: {lora_dropout: 1.0}", "1.0 is not a number ≥ 0 and < 1", (), None, None),
    (
        "lora: {target_modules: 'q_proj,v_proj'}",
        "'q_proj,v_proj' is not auto, all-linear or a list of texts",
        (),
        None,
        "write a list: [q_proj, v_proj]",
    ),
    (
        "lora: {target_modules: all_linear}",
        "'all_linear' is not auto, all-linear or a list of texts",
        (),
        "all-linear",
        None,
    ),
    (
        "lora: {target_modules: []}",
        "[] adapts no layer",
        ("auto", "all-linear"),
        None,
        "name layers, as in [q_proj, v_proj]",
    ),
    ("output: {name: 2026}", "2026 is not a text or null", (), None, "put it in quotes"),
    ("output: {dir: ''}", "'' is not a text that is not empty", (), None, None),
    (
        "output: {name: a/b}",
        "'a/b' is not the name of a run",
        (),
        None,
        "use letters, digits, dots, hyphens and underscores only; folders go into output.dir",
    ),
]


@pytest.mark.parametrize(("line", "message", "choices", "near", "fix"), BAD_VALUES, ids=[row[0] for row in BAD_VALUES])
def test_a_wrong_value(
    line: str, message: str, choices: tuple[str, ...] | None, near: str | None, fix: str | None
) -> None:
    problem = problem_of(MINIMAL + line)
    assert problem.path == line.replace(": {", ".", 1).partition(":")[0]
    assert problem.message == f"{message} (line 3)"
    assert choices is None or problem.choices == choices
    assert problem.nearest == near
    assert problem.fix == fix


BAD_TOGETHER = [
    (
        "training: {eval_steps: 5}",
        "training.eval_steps",
        "5 asks for evaluations, but there is no evaluation set",
        "set data.eval, or remove training.eval_steps",
    ),
    (
        "training: {eval_on_start: true}",
        "training.eval_on_start",
        "true asks for evaluations, but there is no evaluation set",
        "set data.eval, or remove training.eval_on_start",
    ),
    (
        "training: {gradient_checkpointing: false, gradient_checkpointing_layers: 4}",
        "training.gradient_checkpointing_layers",
        "4 has no meaning with training.gradient_checkpointing: false",
        "set training.gradient_checkpointing: true, or remove training.gradient_checkpointing_layers",
    ),
    (
        "model: {name_or_path: org/model, num_labels: 3}",
        "model.num_labels",
        "3 has no meaning for model.task: causal-lm",
        "set model.task: sequence-classification, or remove model.num_labels",
    ),
    (
        "model: {name_or_path: org/model, task: sequence-classification}\ndata: {train: org/data, format: chat}",
        "data.format",
        "'chat' does not suit model.task: sequence-classification",
        "set data.format to auto, classification; or change model.task",
    ),
    (
        "data: {train: org/data, format: classification}",
        "data.format",
        "'classification' does not suit model.task: causal-lm",
        "set data.format to auto, prompt-completion, chat or text; or change model.task",
    ),
    (
        "data: {train: org/data, max_length: 9000}",
        "data.max_length",
        "9000 is above data.max_length_cap, 4096",
        "raise data.max_length_cap, or lower data.max_length",
    ),
    (
        "quantization: {load_in_4bit: false, bnb_4bit_quant_type: fp4}",
        "quantization.bnb_4bit_quant_type",
        "'fp4' has no effect with quantization.load_in_4bit: false",
        "remove it, or set quantization.load_in_4bit: true",
    ),
]


@pytest.mark.parametrize(("lines", "path", "message", "fix"), BAD_TOGETHER, ids=[row[1] for row in BAD_TOGETHER])
def test_keys_that_contradict_each_other(lines: str, path: str, message: str, fix: str) -> None:
    given_sections = {line.partition(":")[0] for line in lines.splitlines()}
    rest = [line for line in MINIMAL.splitlines() if line.partition(":")[0] not in given_sections]
    problem = problem_of("\n".join([*lines.splitlines(), *rest]))
    assert (problem.path, problem.message.rpartition(" (")[0], problem.fix) == (path, message, fix)


def test_a_rule_is_silent_where_one_of_its_keys_is_wrong_by_itself() -> None:
    text = "model: {name_or_path: org/model}\ndata: {train: org/data, eval: 3}\ntraining: {eval_steps: 5}\n"
    assert [problem.path for problem in problems_of(text)] == ["data.eval"]


def test_everything_is_reported_at_once_in_the_order_of_the_file() -> None:
    text = """\
quantization:
  bnb_4bit_quant_type: nf5
learning_rate: 1e-4
training:
  eval_steps: 5
  enforce_eager: true
  max_steps: 0
  max_steps: 0
data: {}
"""
    problems = problems_of(text, "lora.r=0")
    assert [problem.path for problem in problems] == [
        "quantization.bnb_4bit_quant_type",
        "learning_rate",
        "training.eval_steps",
        "training.enforce_eager",
        "training.max_steps",
        "training.max_steps",
        "model.name_or_path",
        "lora.r",
        "data.train",
    ]
    with pytest.raises(ProblemsError, match=r"run\.yaml: 9 problems\n  quantization\.bnb_4bit_quant_type: 'nf5'"):
        parse(text, "lora.r=0")


def test_a_known_key_in_the_wrong_place() -> None:
    problem = problem_of(MINIMAL + "learning_rate: 1e-4")
    assert problem.message == "is in the wrong place, with the value 0.0001 (line 3)"
    assert problem.nearest == "training.learning_rate"
    assert problem.fix == "move it into the section `training`"
    problem = problem_of("model: {name_or_path: org/model, load_in_4bit: true}\ndata: {train: org/data}")
    assert problem.path == "model.load_in_4bit"
    assert problem.nearest == "quantization.load_in_4bit"


def test_an_unknown_key_is_answered_with_the_nearest_or_all() -> None:
    assert problem_of(MINIMAL + "trainin: {seed: 1}").nearest == "training"
    assert problem_of(MINIMAL + "lora: {targetmodules: auto}").nearest == "lora.target_modules"
    assert problem_of(MINIMAL + "lora: {learning_rat: 1}").nearest == "training.learning_rate"
    problem = problem_of(MINIMAL + "oom: {xyzzy: 1}")
    assert problem.nearest is None
    assert problem.choices == tuple(OomConfig.model_fields)
    assert problem_of(MINIMAL + "xyzzy: 1").choices == tuple(section_models())


@given(st.data())
def test_a_key_with_one_letter_missing_is_recognised(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from([spec for spec in key_specs().values() if len(spec.name) > 6]))
    cut = data.draw(st.integers(0, len(spec.name) - 1))
    typo = spec.name[:cut] + spec.name[cut + 1 :]
    problems = problems_of("{}", f"{spec.section}.{typo}=1")
    [problem] = [problem for problem in problems if problem.path == f"{spec.section}.{typo}"]
    assert problem.nearest is not None
    assert problem.nearest.partition(".")[2] in {s.name for s in key_specs().values()}


FOREIGN = [
    ("enforce_eager", "vLLM", None, "CUDA graphs"),
    ("gradient_clipping", "DeepSpeed", "training.max_grad_norm", "max_grad_norm"),
    ("deepspeed", "transformers", None, "--profile zero2"),
    ("fsdp", "transformers", None, "--profile fsdp"),
    ("device_map", "transformers", None, "refused on several ranks"),
    ("load_in_8bit", "transformers", "quantization.load_in_4bit", "8 bits are not supported"),
    ("torch_dtype", "transformers", "training.mixed_precision", "bf16"),
    ("dtype", "transformers", "training.mixed_precision", "bf16"),
    ("bf16", "transformers", "training.mixed_precision", "bf16"),
    ("fp16", "transformers", "training.mixed_precision", "bf16"),
    ("use_cache", "transformers", None, "always off"),
    ("max_seq_length", "TRL", "data.max_length", "data.max_length"),
    ("num_epochs", "other trainers", "training.num_train_epochs", "num_train_epochs"),
    ("batch_size", "other trainers", "training.per_device_train_batch_size", "per_device_train_batch_size"),
]


@pytest.mark.parametrize(("key", "tool", "near", "fix"), FOREIGN, ids=[row[0] for row in FOREIGN])
@pytest.mark.parametrize("section", [None, "training"])
def test_keys_of_other_tools_get_a_word_of_their_own(
    section: str | None, key: str, tool: str, near: str | None, fix: str
) -> None:
    line = f"{key}: 1" if section is None else f"{section}: {{{key}: 1}}"
    problem = problem_of(MINIMAL + line)
    assert problem.message == f"belongs to {tool}, not into this file, with the value 1 (line 3)"
    assert problem.nearest == near
    assert fix in str(problem.fix)


def test_foreign_words_point_at_keys_that_exist_and_hide_none() -> None:
    names = {spec.name for spec in key_specs().values()}
    for word, meaning in FOREIGN_WORDS.items():
        assert word not in names
        assert meaning.key is None or meaning.key in key_specs() or meaning.key in section_models()


@pytest.mark.parametrize("key", ["token", "hub_token"])
def test_the_value_of_a_secret_is_never_shown(key: str) -> None:
    problem = problem_of(MINIMAL + f"{key}: not-to-be-seen")
    assert "not-to-be-seen" not in str(problem)
    assert "hf auth login" in str(problem.fix)


@pytest.mark.parametrize(
    "line",
    [f"# {TOKEN}", f"output: {{name: {TOKEN}}}", f"training: {{seed: {TOKEN}}}", f"{TOKEN}: 1", f"hub_token: {TOKEN}"],
)
def test_hub_tokens_are_refused_anywhere_and_never_repeated(line: str) -> None:
    problems = problems_of(MINIMAL + line)
    assert "line 3: holds what looks like a hub token" in str(ProblemsError("run.yaml", problems))
    assert TOKEN not in str(ProblemsError("run.yaml", problems))


def test_hub_tokens_are_refused_on_the_command_line() -> None:
    problems = problems_of(MINIMAL, f"model.revision={TOKEN}")
    assert [problem.path for problem in problems] == ["--set model.revision"]
    assert TOKEN not in str(problems)


BAD_YAML = [
    ("model:\n\tname: x", "line 2, column 1", "is not valid YAML", "indent with spaces"),
    ("model: [1", "line 1, column 10", "is not valid YAML", None),
    ("a: 1\n---\nb: 2", "line 2, column 1", "is not valid YAML", None),
    ("a: !!python/name:os.system", "line 1, column 4", "is not valid YAML", None),
    ("a: \x01", "line 1", r"is not valid YAML: character '\x01' is not allowed", None),
    ("a: !!int x", "the file", "is not valid YAML", None),
    ("[" * 5000, "the file", "is not valid YAML: it is nested too deeply", None),
    ("- a", "line 1", "starts with ['a'], not with a key and a colon", None),
]


@pytest.mark.parametrize(("text", "path", "message", "fix"), BAD_YAML, ids=[row[0][:12] for row in BAD_YAML])
def test_broken_yaml_is_located_and_reported_alone(text: str, path: str, message: str, fix: str | None) -> None:
    problem = problem_of(text)
    assert problem.path == path
    assert problem.message.startswith(message)
    assert problem.fix == fix


def test_keys_given_twice_are_named_with_both_lines() -> None:
    problem = problem_of(MINIMAL + "training:\n  seed: 1\n  seed: 2\n")
    assert str(problem) == "training.seed: is given again on line 5 (line 4)\n    fix: keep one of them"


def test_a_section_that_is_no_mapping() -> None:
    problem = problem_of(MINIMAL + "training: 3\n", "training.seed=4")
    assert str(problem).startswith("training: 3 is not a section (line 3)")


BAD_OVERRIDES = [
    ("training.seed", "--set training.seed", "is not of the form section.key=value", None),
    ("=3", "--set =3", "is not of the form section.key=value", None),
    ("training=3", "--set training", "is a section; name a key in it", None),
    ("learning_rate=3", "--set learning_rate", "is in the wrong place, with the value 3", "training.learning_rate"),
    ("trainin.seed=3", "--set trainin.seed", "is not a key of allranks, with the value 3", "training.seed"),
    ("training.sed=3", "training.sed", "is not a key of allranks, with the value 3 (--set)", "training.seed"),
    ("training.seed=x", "training.seed", "'x' is not an integer ≥ 0 and < 4294967296 (--set)", None),
    ("lora.target_modules=[a", "--set lora.target_modules", "'[a' is not valid YAML: ", None),
]


@pytest.mark.parametrize(("override", "path", "message", "near"), BAD_OVERRIDES, ids=[row[0] for row in BAD_OVERRIDES])
def test_a_wrong_override(override: str, path: str, message: str, near: str | None) -> None:
    problem = problem_of(MINIMAL, override)
    assert problem.path == path
    assert problem.message.startswith(message)
    assert problem.nearest == near


def test_existing_files_start_at_the_folder_of_the_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets/train.jsonl").touch()
    (tmp_path / "here.csv").touch()
    config = parse(
        "model: {name_or_path: org/model}\ndata: {train: sets/../sets/train.jsonl, eval: org/data}", folder=tmp_path
    )
    assert config.data.train == str(tmp_path / "sets/train.jsonl")
    assert config.data.eval == "org/data"
    monkeypatch.chdir(tmp_path)
    config = parse(MINIMAL, "data.train=here.csv", folder=tmp_path / "sets")
    assert config.data.train == str(tmp_path / "here.csv")


def test_a_symbolic_link_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "blob").touch()
    (tmp_path / "train.jsonl").symlink_to("blob")
    config = parse("model: {name_or_path: org/model}\ndata: {train: train.jsonl}\n", folder=tmp_path)
    assert config.data.train == str(tmp_path / "train.jsonl")


@pytest.mark.parametrize("value", ["trian.jsonl", "./trian", "/nowhere/x", "~nobody-here/x", "a/b/c", "two words"])
def test_a_path_that_does_not_exist_is_no_hub_id(tmp_path: Path, value: str) -> None:
    (tmp_path / "train.jsonl").touch()
    problem = problem_of(f"model: {{name_or_path: org/model}}\ndata:\n  train: {value}\n", folder=tmp_path)
    assert problem.path == "data.train"
    assert problem.message.startswith(f"'{value}' does not exist: there is no /")
    assert problem.message.endswith("(line 3)")
    assert problem.nearest == ("train.jsonl" if "trian" in value else None)


def test_only_a_file_with_a_similar_stem_is_near(tmp_path: Path) -> None:
    for name in ("train.jsonl", "train.csv", "notes.txt"):
        (tmp_path / name).touch()
    for value, near in (("nope.jsonl", None), ("trains.csv", "train.csv"), ("note", "notes.txt"), ("x.txt", None)):
        problem = problem_of(f"model: {{name_or_path: org/model}}\ndata: {{train: ./{value}}}\n", folder=tmp_path)
        assert problem.nearest == near


def test_the_fix_of_a_path_says_where_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "model: {name_or_path: org/model}\ndata: {train: org/set}\n"
    from_file = problem_of(text.replace("org/set", "nope.jsonl"), folder=tmp_path / "elsewhere")
    from_shell = problem_of(text, "data.train=nope.jsonl", folder=tmp_path / "elsewhere")
    assert from_file.fix == "give a path from the folder of the configuration file, an absolute path, or a hub id"
    assert from_shell.fix == "give a path from the working directory, an absolute path, or a hub id"
    assert f"there is no {tmp_path / 'nope.jsonl'}" in from_shell.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ProblemsError, match="is not UTF-8 text"):
        load_run_config(tmp_path / "run.yaml")
    with pytest.raises(ProblemsError, match=r"No such file or directory\n      nearest: run\.yaml"):
        load_run_config(tmp_path / "runs.yaml")
    with pytest.raises(ProblemsError, match="Is a directory"):
        load_run_config(tmp_path)


@given(
    st.text(alphabet=st.characters(codec="utf-8"), max_size=60) | st.text(alphabet="a:-[]{}'\"&*!|># \n0", max_size=40)
)
def test_no_text_makes_a_traceback(text: str) -> None:
    with pytest.raises(ProblemsError):
        parse(text)


_YAML_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(path=st.sampled_from(sorted(key_specs())), value=_YAML_VALUES)
def test_no_value_makes_a_traceback_and_a_refusal_names_the_key(path: str, value: object) -> None:
    try:
        config = parse(MINIMAL, f"{path}={yaml.safe_dump(value)}")
    except ProblemsError as error:
        assert path in str(error)
    else:
        section, key = path.split(".")
        assert key in getattr(config, section).model_fields_set


def test_resolved_yaml_has_every_key_and_loads_to_the_same_run(tmp_path: Path) -> None:
    config = parse(
        MINIMAL, "training.mixed_precision=no", "lora.target_modules=[q_proj]", "training.learning_rate=1e-5"
    )
    text = resolved_yaml(config)
    assert parse(text) == config
    assert all(f"  {spec.name}: " in text or f"  {spec.name}:\n" in text for spec in key_specs().values())
    assert "  # Peak learning rate.\n  learning_rate: 1.0e-05\n" in text
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize("text", ["08", "1e5", "010", "0o17", "1_000", "1:30", "yes", "null", "2026-01-31", "<<"])
def test_texts_that_look_like_something_else_stay_texts(text: str) -> None:
    config = parse(MINIMAL + f"lora: {{target_modules: ['{text}']}}\n")
    assert parse(resolved_yaml(config)) == parse(given_yaml(config)) == config


def test_given_yaml_has_only_what_was_given() -> None:
    assert given_yaml(parse(MINIMAL, "lora.r=8")) == (
        "model:\n  name_or_path: org/model\nlora:\n  r: 8\ndata:\n  train: org/data\n"
    )


def test_the_reference_page_is_that_of_the_schema() -> None:
    page = (REPOSITORY / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == reference_markdown(), "run: python -m allranks.config.render > docs/configuration.md"


def test_every_key_has_a_meaning() -> None:
    assert all(spec.description.endswith(".") for spec in key_specs().values())
