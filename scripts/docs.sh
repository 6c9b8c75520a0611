#!/usr/bin/env bash
# Builds the documentation site from docs/ into outputs/site.
#
#   bash scripts/docs.sh          # build, and fail on a broken link or anchor; open outputs/site/index.html
#   bash scripts/docs.sh serve    # serve it at http://127.0.0.1:8000, with search; rebuild when a page changes
#
# Other arguments are passed to mkdocs.
#
#   DOCS_VENV=path   an environment with mkdocs-material; by default outputs/docs_venv, made on the first call
#   PYTHON=path      the Python that creates this environment; default python3
set -euo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment above
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
    exit
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${DOCS_VENV:-outputs/docs_venv}
if [[ -z ${DOCS_VENV:-} ]] && ! cmp -s requirements/docs.txt "$venv/docs.txt"; then
    mkdir -p outputs
    "${PYTHON:-python3}" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install -qq --no-deps --no-input --disable-pip-version-check -r requirements/docs.txt
    cp requirements/docs.txt "$venv/docs.txt" # written last, so that an interrupted install starts over
fi
(($#)) || set -- build --strict --quiet
export NO_MKDOCS_2_WARNING=1
exec "$venv/bin/python" -m mkdocs "$@"
