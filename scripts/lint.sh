#!/usr/bin/env bash
# Lint of the whole checkout, in seconds: scripts/test.sh, the commit hook and CI all call it.
# The tools come from PATH, or from .venv if no virtual environment is active.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
[[ -n ${VIRTUAL_ENV:-} || ! -x .venv/bin/ruff ]] || PATH=$PWD/.venv/bin:$PATH
status=0
ruff check . || status=1
ruff format --check . || status=1
python -m tests.support.language || status=1
exit "$status"
