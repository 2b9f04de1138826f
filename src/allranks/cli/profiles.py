"""`allranks profiles`: list the shipped profiles, show one, copy one."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from allranks.errors import UserError
from allranks.profiles import Profile, list_profiles, load_profile

_WIDTH = 80

ProfileName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a shipped profile.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add `profiles` and its commands."""
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, help="The ways to spread a model: accelerate config files."
    )
    group.command(epilog="Example: allranks profiles ls")(ls)
    group.command(epilog="Example: allranks profiles show zero2")(show)
    group.command(epilog="Example: allranks profiles cp zero2 my-zero2.yaml")(cp)
    app.add_typer(group, name="profiles")


def ls() -> None:
    """List the shipped profiles."""
    profiles = list_profiles()
    column = max(len(profile.name) for profile in profiles) + 2
    for profile in profiles:
        typer.echo(
            textwrap.fill(f"{profile.name:{column}}{_headline(profile)}", _WIDTH, subsequent_indent=" " * column)
        )


def _headline(profile: Profile) -> str:
    """The comment in the first line of the file."""
    return profile.path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def show(name: ProfileName) -> None:
    """Print a profile's file."""
    typer.echo(load_profile(name).path.read_text(encoding="utf-8"), nl=False)


def cp(
    name: ProfileName,
    destination: Annotated[
        Path, typer.Argument(metavar="DEST", help="File or folder to copy it to.", show_default=False)
    ],
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Copy a profile, to change it; run with the copy by --profile DEST."""
    profile = load_profile(name)
    target = destination / profile.path.name if destination.is_dir() else destination
    try:
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(profile.path.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{target} exists\n    fix: give another name, or --force to overwrite it") from None
    except OSError as error:
        raise UserError(f"{target} can't be written: {error.strerror}") from None
    typer.echo(str(target))
