#!/usr/bin/env bash
# Retakes the screenshots in docs/ with a headless Chromium.
#
#   bash scripts/screenshots.sh              # docs/report.png, from a recording in tests/data
#   bash scripts/screenshots.sh DIRECTORY    # into another directory
#
#   BROWSER_PROGRAM=path   default: chromium, chromium-browser or google-chrome on PATH
#   VENV=path              the environment with the extra `tools`; default: python on PATH
#
# Debian, Ubuntu: apt-get install chromium fonts-dejavu-core. Exit status: 0, or 2 if there is no browser.
set -euo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment above
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
    exit
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$(realpath -m "${1:-docs}")
python=${VENV:+$VENV/bin/}python
browser=${BROWSER_PROGRAM:-$(command -v chromium chromium-browser google-chrome | head -n 1 || true)}
if [[ -z $browser ]]; then
    echo "screenshots: no browser on PATH. Install Chromium, or set BROWSER_PROGRAM." >&2
    exit 2
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$target"

"$python" -m recipe.offpolicy.report tests/data/faults/held_out/colocate_async-14 --out "$scratch/report.html"
timeout 120 "$browser" --headless=new --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$scratch/profile" \
    --window-size=1120,1540 --virtual-time-budget=10000 --screenshot="$scratch/report.png" \
    "file://$scratch/report.html" 2>"$scratch/log" || {
    cat "$scratch/log" >&2
    exit 1
}
mv "$scratch/report.png" "$target/report.png"
echo "$target/report.png"
