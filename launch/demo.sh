#!/usr/bin/env bash
# Sets up, then fine-tunes a small model on two ranks and loses memory on one of them on purpose.
#   launch/demo.sh [--profile zero2] [--ranks 2] [--steps 16] [--workdir runs]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${ALLRANKS_VENV:-$here/.venv}
ALLRANKS_VENV=$venv "$here/launch/setup.sh"
export PATH="$venv/bin:$PATH" HF_HUB_OFFLINE=1
exec python -m allranks.demo "$@"
