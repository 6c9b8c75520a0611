#!/usr/bin/env bash
# Lints the whole checkout in seconds: scripts/lint.sh
#
#   ruff check               the rules in pyproject.toml
#   ruff format --check      formatting
#   tests/support/language   words that documents, comments and messages avoid
#
# scripts/test.sh, the commit hook and CI call it. The tools come from PATH, or from .venv if no virtual environment is
# active. Exit status: 0, or 1 if one of them finds something.
set -uo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment above
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
[[ -n ${VIRTUAL_ENV:-} || ! -x .venv/bin/ruff ]] || PATH=$PWD/.venv/bin:$PATH
status=0
ruff check . || status=1
ruff format --check . || status=1
python -m tests.support.language || status=1
exit "$status"
