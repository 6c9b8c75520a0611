#!/usr/bin/env bash
# Lint, types, unit, contract and integration tests, with one summary: scripts/test.sh [--quick] [pytest arguments]
#
#   --quick        lint, types and the unit tests that are not marked slow
#   VENV=path      use this environment as it is; by default .venv, made or brought up to date first
#   TEST_LIMIT=s   hard limit for all tests together, in seconds (default 2400)
#
# Further arguments go to pytest; a path among them replaces the default test folders.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 2

quick=false
arguments=()
paths=()
for argument in "$@"; do
    if [[ $argument == --quick ]]; then
        quick=true
    elif [[ $argument != -* && -e ${argument%%::*} ]]; then
        paths+=("$argument")
    else
        arguments+=("$argument")
    fi
done
suites=(tests/unit tests/contract tests/integration tests/gpu)
if $quick; then
    arguments=(-m "not slow and not gpu" ${arguments[@]+"${arguments[@]}"})
    suites=(tests/unit)
fi
if [[ ${#paths[@]} -eq 0 ]]; then
    for suite in "${suites[@]}"; do
        [[ -d $suite ]] && paths+=("$suite")
    done
fi

if [[ -z ${VENV:-} ]]; then
    VENV=$root/.venv
    bash scripts/install_cpu.sh "$VENV" || exit 2
elif [[ ! -x $VENV/bin/python ]]; then
    echo "VENV=$VENV holds no bin/python. Fix: name a virtual environment, or leave VENV unset." >&2
    exit 2
fi
# The environment's programs for tests that start others; no Python setting of the caller leaks in.
PATH=$(cd "$VENV/bin" && pwd):$PATH
export PATH
unset PYTHONHOME

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
summary=()
failed=0

# Runs one stage: its output is shown, its verdict and duration go into the summary.
stage() {
    local name=$1 start=$SECONDS status=0
    shift
    printf '\n--- %s\n' "$name"
    "$@" 2>&1 | tee "$logs/$name" || status=${PIPESTATUS[0]}
    local verdict=ok
    if ((status != 0)); then
        verdict="FAILED (exit $status)"
        failed=1
    fi
    summary+=("$(printf '%-8s %-18s %4d s' "$name" "$verdict" $((SECONDS - start)))")
}

lint() {
    local status=0
    ruff check . || status=1
    ruff format --check . || status=1
    return "$status"
}

types() {
    local targets=() target
    for target in recipe/offpolicy verl_patches scripts/quickstart scripts/evidence; do
        [[ -n $(find "$target" -name '*.py' -print -quit 2>/dev/null) ]] && targets+=("$target")
    done
    timeout 300 mypy "${targets[@]}"
}

tests() {
    # An interrupt first, so that pytest still reports and fixtures still clean up; a kill a minute later.
    timeout --foreground --signal=INT --kill-after=60 "${TEST_LIMIT:-2400}" \
        python -m pytest ${arguments[@]+"${arguments[@]}"} "${paths[@]}"
}

stage lint lint
stage types types
stage tests tests

printf '\n--- summary\n'
printf '%s\n' "${summary[@]}"
# pytest's own closing line comes last, for people and programs that look for it there.
grep -E '^=+ .*(passed|failed|error|no tests ran|skipped|deselected).* =+$' "$logs/tests" | tail -n 1
exit "$failed"
