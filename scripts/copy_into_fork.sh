#!/usr/bin/env bash
# Copies the recipe, its patches and its configuration into a verl checkout, and tests them there.
#
#   bash scripts/copy_into_fork.sh PATH              copy, or update an earlier copy; then run a smoke test
#   bash scripts/copy_into_fork.sh PATH --dry-run    print the actions without running them
#   bash scripts/copy_into_fork.sh PATH --undo       remove the copy
#
# The copy is one commit on top of the commit that is checked out at PATH, and its removal is another.
#
#   --no-smoke   copy only
#   --force      replace copied files that have committed edits, which git's history keeps; your own files are
#                never overwritten
#   VENV=path    environment in which the smoke test runs the fork; by default that of `python` on PATH
#   OFFPOLICY_ALLOW_UNTESTED_VERL=1   allow a release of verl with which the recipe was not tested
#
# Exit codes: 0 done; 1 the smoke test failed (the copy stays); 2 rejected, and nothing was written; 3 interrupted (git
# status shows whether the commit was made; run the same command again to finish it, or --undo to revert it).
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
