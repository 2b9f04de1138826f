#!/usr/bin/env bash
# Sets up, then fine-tunes a small model on two ranks and loses memory on one of them on purpose.
#   launch/demo.sh [--profile zero2] [--ranks 2] [--steps 16] [--workdir runs]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh
venv=${ALLRANKS_VENV:-.venv}
PATH=$(cd "$venv/bin" && pwd):$PATH
export PATH HF_HUB_OFFLINE=1 # everything is here
exec python -m allranks.demo "$@"
