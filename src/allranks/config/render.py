"""A configuration as YAML, and the reference page of its keys.

``python -m allranks.config.render > docs/configuration.md`` writes the page anew.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from allranks.config.document import CoreSchemaDumper, shown
from allranks.config.fields import KeySpec, key_specs, section_models
from allranks.config.schema import RunConfig

_WIDTH = 80


def given_yaml(config: RunConfig) -> str:
    """The keys that were given, as YAML; paths of files are absolute."""
    return _yaml({section: keys for section, keys in config.model_dump(exclude_unset=True).items() if keys})


def resolved_yaml(config: RunConfig) -> str:
    """Every key, defaults filled in, each below a comment with its meaning, as YAML that loads to the same run."""
    specs, lines = key_specs(), []
    for section, keys in config.model_dump().items():
        lines.append(f"{section}:")
        for key, value in keys.items():
            comment = specs[f"{section}.{key}"].description
            lines += textwrap.wrap(comment, _WIDTH, initial_indent="  # ", subsequent_indent="  # ")
            lines += textwrap.indent(_yaml({key: value}), "  ").splitlines()
    return "\n".join(lines) + "\n"


def _yaml(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=CoreSchemaDumper, sort_keys=False, allow_unicode=True, width=10_000)


_INTRODUCTION = """\
# Configuration

A run is described by one YAML file. The names are those of transformers, PEFT and bitsandbytes.

```yaml
model:
  name_or_path: HuggingFaceTB/SmolLM2-135M-Instruct
data:
  train: train.jsonl
```

- `allranks config check run.yaml` lists everything that is wrong with it at once, and with `--profile` also what
  contradicts that profile. It does not look into data files, the hub or the model.
- `allranks config show --resolved run.yaml` prints every key with its value and meaning.
- `--set section.key=value` overrides a key on the command line; the value is YAML: `--set lora.r=8`,
  `--set 'lora.target_modules=[q_proj, v_proj]'`.
- Scalars are those of YAML 1.2: `1e-4` is a number, `no` is a text, and only `true` and `false` are switches.
- A value that names an existing file or folder is that file or folder; relative ones start at the folder of the YAML
  file, or at the working directory if they come from `--set`. Anything else is a hub id, unless it looks like a path
  (it begins with `.`, `/` or `~`, or ends like a data file): then it is an error that the file does not exist.
- `output.dir` alone starts at the working directory wherever it stands, so that runs land where the command is given.
- Without `output.name` and `--name` a run is called after its file, so `my-run.yaml` goes into `runs/my-run`. `--smoke`
  puts `-smoke` behind the name, and `allranks drill` puts `-drill`.
- Hub tokens are refused wherever they stand: log in once with `hf auth login`.
- How the model is spread over the ranks is not in this file: that is the profile's, see `allranks profiles ls`.
"""


def reference_markdown() -> str:
    """The page `docs/configuration.md`."""
    return "\n".join([_INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    for section, model in section_models().items():
        yield f"## `{section}`\n"
        yield f"{(model.__doc__ or '').strip()}\n"
        yield "| Key | Takes | Default | Meaning |"
        yield "|---|---|---|---|"
        yield from (_row(spec) for spec in key_specs().values() if spec.section == section)
        yield ""


def _row(spec: KeySpec) -> str:
    default = spec.default if isinstance(spec.default, str) else shown(spec.default)
    default = "required" if spec.required else f"`{default}`"
    return f"| `{spec.name}` | {spec.takes} | {default} | {spec.description} |"


if __name__ == "__main__":
    print(reference_markdown(), end="")
