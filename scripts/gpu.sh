#!/usr/bin/env bash
# Checks this project on a machine with one or more GPUs, in your own verl environment. The checks take about ten
# minutes; the script writes a page and a file to send.
#
#   bash scripts/gpu.sh [--dry-run] [--only PART ...] [--out FILE]
#
#   --dry-run    run the same checks on a CPU, with smaller sizes
#   --only PART  parts to run: environment, parity, ranks, training, loss, step
#   --out FILE   the .json file; the page is written next to it as .txt (default outputs/gpu/TIME.json)
#   VENV=path    environment to use (default: the python3 on PATH, as in an activated environment or a container)
#
# The script installs nothing. If a part fails, its error is reported, and the other parts still run.
# Exit status: 0 all parts passed or were skipped, 1 a part failed, 2 nothing could start, 128 + n ended by signal n.
set -euo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment above
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
    exit
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${VENV:+$VENV/bin/python}
python=${python:-$(command -v python3 || true)}
if [[ -z $python || ! -x $python ]]; then
    reason="no python3 on PATH"
    [[ -z ${VENV:-} ]] || reason="VENV=$VENV: there is no bin/python in it"
    echo "gpu: $reason. Fix: activate the environment of verl, or name it by VENV=path." >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))'; then
    echo "gpu: $python is $("$python" --version 2>&1). Fix: use Python 3.11 or 3.12, by VENV=path or an activated environment." >&2
    exit 2
fi
# This checkout comes before an installed copy, and before verl's own package `tests`.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m scripts.gpu.kit "$@"
