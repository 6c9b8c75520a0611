#!/usr/bin/env bash
# Copies the recipe, its patches and its configuration into a verl checkout, and tests them there.
#
#   bash scripts/copy_into_fork.sh PATH              copy, or update an earlier copy; then run a smoke test
#   bash scripts/copy_into_fork.sh PATH --dry-run    print what would be done, and do nothing
#   bash scripts/copy_into_fork.sh PATH --undo       remove what was copied
#
# A copy is a commit on top of what is checked out at PATH, and so is its removal; nothing else is committed.
#
#   --no-smoke   copy only
#   --force      replace copied files with committed edits, which git's history keeps; files that were never copied
#                are never overwritten
#   VENV=path    the environment that runs the fork, for the smoke test; by default the `python` in PATH
#   OFFPOLICY_ALLOW_UNTESTED_VERL=1   try a release of verl that the recipe was not tested with
#
# Exit codes: 0 done, 1 the smoke test failed (the copy stays), 2 refused, and nothing was written, 3 stopped (git
# status shows whether the commit was made; the same command finishes it, --undo reverts it).
set -euo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment above
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
    exit
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [[ -n ${VENV:-} ]]; then
    python=$VENV/bin/python
    if [[ ! -x $python ]]; then
        echo "copy_into_fork: VENV=$VENV: there is no bin/python in it" >&2
        exit 2
    fi
else
    python=$(command -v python || command -v python3) || {
        echo "copy_into_fork: there is no python in PATH. Fix: VENV=path of the fork's environment" >&2
        exit 2
    }
fi
# -B: this run leaves no bytecode, here or in the fork.
exec "$python" -B -c 'import sys
sys.path.insert(0, sys.argv.pop(1))
from scripts.fork.command import main
sys.exit(main(sys.argv[1:]))' "$root" "$@"
