"""`allranks config`: check a configuration, or show it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from allranks.config.load import load_run_config
from allranks.config.render import given_yaml, resolved_yaml
from allranks.profiles import check_profile_against_run, load_profile

ConfigFile = Annotated[Path, typer.Argument(metavar="RUN.YAML", help="Configuration of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add `config` and its commands."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check a configuration, or show it.")
    group.command(epilog="Example: allranks config check run.yaml --profile zero2")(check)
    group.command(epilog="Example: allranks config show --resolved run.yaml --set lora.r=8")(show)
    app.add_typer(group, name="config")


def check(
    config_file: ConfigFile,
    overrides: Overrides = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Look for contradictions with this profile too.", show_default=False),
    ] = None,
) -> None:
    """List everything that is wrong with a configuration.

    Data files, the hub and the model are not looked into: whether a path is there is checked, and nothing behind it.
    """
    contradictions = None if profile is None else partial(check_profile_against_run, load_profile(profile))
    load_run_config(config_file, overrides or (), contradictions=contradictions)
    typer.echo(f"{config_file}: valid" + (f", and it goes with profile {profile}" if profile is not None else ""))


def show(
    config_file: ConfigFile,
    overrides: Overrides = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print every key, with its meaning, defaults filled in.")
    ] = False,
) -> None:
    """Print a configuration as YAML; paths of files are absolute.

    Paths in RUN.YAML start at its folder, those of --set and output.dir at the working directory.
    """
    config = load_run_config(config_file, overrides or ())
    typer.echo(resolved_yaml(config) if resolved else given_yaml(config), nl=False)
