"""Versions of allranks and of the libraries whose numerics and formats a run depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from allranks import __version__

_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed", "datasets")


def versions() -> dict[str, str]:
    """Version by name; a library that is not installed is left out."""
    found = {"allranks": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
