#!/usr/bin/env bash
# Sets up, then checks the code and runs all tests that this machine can run; --quick leaves out the slow ones.
#   launch/test.sh [--quick]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "$*" in
  "") quick=() ;;
  --quick) quick=(--quick) ;;
  *) echo "launch/test.sh: unknown arguments: $*; valid: --quick" >&2 && exit 2 ;;
esac
venv=${ALLRANKS_VENV:-.venv}
launch/setup.sh
PATH=$(cd "$venv/bin" && pwd):$PATH
export PATH HF_HUB_OFFLINE=1 # nothing is fetched from a model hub: a test that needs to would hang

timed() {
  local start=$SECONDS
  echo "=== $*"
  "$@"
  echo "=== $((SECONDS - start)) s: $*"
}

timed ruff check .
timed ruff format --check .
timed mypy
timed lint-imports
# Two tests at a time with one thread per process: half of a multi-process test is start-up that uses one core.
export OMP_NUM_THREADS=1
timed pytest tests/unit -n 2 --dist loadfile --durations 10 ${quick[@]+"${quick[@]}"}
timed pytest tests --ignore tests/unit -n 2 --dist loadfile --durations 10 ${quick[@]+"${quick[@]}"}
echo "=== all passed in $SECONDS s"
