#!/usr/bin/env bash
# Lint, types and tests in the environment of each release of verl, with one summary:
# scripts/test.sh [--quick] [--release RELEASE|all] [pytest arguments]
#
#   (default)      lint, types, all tests of the newest release, and those tests of the oldest release that the newest
#                  does not run (its workers differ); without tests marked `extended`
#   --release R    all tests of one release, or of `all` releases, with all hypothesis examples instead of a quarter.
#                  Lint and types run with the newest release. `all` runs each folder, and each file of full programs,
#                  as a separate part, and does not repeat parts that passed at this commit. vllm-V, one of
#                  requirements/vllm-V.txt, tests contracts and verl's programs with the newest release and this vLLM;
#                  `all` omits it if no package index has its torch
#   --quick        lint, and at most three cases of each unit test of the newest release; no types, no slow tests, no
#                  tests of the tools (analysis, commands, doctor, scripts), and none that import vLLM (centering,
#                  support)
#   VENV=path      use this environment as it is, for the newest release or the one that --release names;
#                  by default .venv and .venv-RELEASE, which are made or updated first
#   TEST_LIMIT=s   hard limit for all tests together, in seconds (default 10800); with `all`, limit for each part (3600)
#
# Further arguments are passed to pytest; a path among them replaces the default test folders, and without
# --release it is tested only with the newest release.
set -uo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment above
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
    exit
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 2
usage() {
    printf '%s\n' "$@" >&2
    exit 2
}

mapfile -t releases < <(printf '%s\n' requirements/verl-*.txt | sed 's/.*verl-//; s/\.txt$//' | sort -V)
oldest=${releases[0]}
newest=${releases[-1]}
usual=$(sed -n 's/^-r \(vllm-.*\)\.txt$/\1/p' "requirements/verl-$newest.txt")
mapfile -t engines < <(find requirements -name 'vllm-*.txt' -printf '%f\n' | sed 's/\.txt$//' | grep -vx "${usual:-none}" | sort -V)
rows=("${releases[@]}" "${engines[@]}")

quick=false
asked=""
arguments=()
paths=()
while (($#)); do
    if [[ $1 == --quick ]]; then
        quick=true
    elif [[ $1 == --release ]]; then
        asked=${2:-}
        [[ " ${rows[*]} all " == *" ${asked:-none} "* ]] ||
            usage "--release ${asked:-(nothing)} is not a release that can be tested. Fix: one of ${rows[*]}, all."
        shift
    elif [[ $1 != -* && -e ${1%%::*} ]]; then
        paths+=("$1")
    else
        arguments+=("$1")
    fi
    shift
done

# --- what to run: one release after the other, the newest last
if [[ $asked == all ]]; then
    plan=("${engines[@]}" "${releases[@]}")
elif [[ -n $asked ]]; then
    plan=("$asked")
elif $quick || [[ -n ${VENV:-} || ${#paths[@]} -gt 0 ]]; then
    plan=("$newest")
else
    plan=("$oldest" "$newest")
fi
limit=${TEST_LIMIT:-$([[ $asked == all ]] && echo 3600 || echo 10800)}
passed="" # the folder of the parts that have passed at this commit
if [[ $asked == all && -z $(git status --porcelain 2>&1) && ${#arguments[@]} -eq 0 ]]; then
    passed=outputs/test-parts/$(git rev-parse HEAD)
    mkdir -p "$passed"
fi

if [[ -n ${VENV:-} ]]; then
    [[ $asked != all ]] || usage "VENV is one environment, --release all takes several. Fix: leave one of them out."
    [[ -x $VENV/bin/python ]] ||
        usage "VENV=$VENV holds no bin/python. Fix: name a virtual environment, or leave VENV unset."
fi
environment_of() {
    if [[ -n ${VENV:-} ]]; then
        echo "$VENV"
    elif [[ $1 == "$newest" ]]; then
        echo "$root/.venv"
    else
        echo "$root/.venv-$1"
    fi
}

# Use the environment's programs, also in tests that start processes, and none of the caller's Python settings.
# Tests and the programs that they start are compiled once instead of in each process.
unset PYTHONHOME PYTHONDONTWRITEBYTECODE
use() { export PATH="$(cd "$(environment_of "$1")/bin" && pwd):$PATH"; }

logs=$(mktemp -d)
stages=()
beside=""
installing=""
clean_up() {
    [[ -z $beside ]] || kill -INT -- "-$beside" 2>/dev/null
    [[ -z $installing ]] || kill -TERM -- "-$installing" 2>/dev/null
    rm -rf "$logs"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# Runs one stage in a subshell, shows its output, and stores its verdict and duration for the summary.
stage() {
    local name=$1 start=$SECONDS status=0 verdict=ok
    shift
    if [[ -n $passed && -f $passed/$name ]]; then
        cp "$passed/$name" "$logs/$name.verdict"
        return
    fi
    printf '\n--- %s\n' "$name"
    ("$@") 2>&1 | tee "$logs/$name" || status=${PIPESTATUS[0]}
    ((status == 0)) || verdict="FAILED (exit $status)"
    [[ $status -ne 3 || $name != install-vllm-* || $asked != all ]] || verdict="left out: no torch for it"
    printf '%-14s %-18s %4d s\n' "$name" "$verdict" $((SECONDS - start)) >"$logs/$name.verdict"
    # The environment may have been removed before the next call.
    [[ $status -ne 0 || -z $passed || $name == install-* ]] || cp "$logs/$name.verdict" "$passed/$name"
    return "$status"
}

lint() {
    use "$newest"
    VIRTUAL_ENV=$(environment_of "$newest") bash scripts/lint.sh
}

types() {
    local targets=() target
    use "$newest"
    for target in recipe/offpolicy verl_patches scripts/quickstart scripts/evidence scripts/fork scripts/gpu scripts/benchmark scripts/harness.py scripts/launch_ray.py scripts/export_recipe.py; do
        [[ -n $(find "$target" -name '*.py' -print -quit 2>/dev/null) ]] && targets+=("$target")
    done
    timeout 1200 mypy "${targets[@]}"
}

# The documentation site, in its own environment: every page is in the navigation, and every link has a target.
docs() {
    use "$newest"
    PYTHON=python bash scripts/docs.sh
}

# pytest's arguments for the environment of a release, or for only the paths that follow, one word per line. Tests
# that need other releases are deselected there by the marker `verl`.
tests_of() {
    local suites=(tests/releases tests/contract tests/integration/test_programs.py) suite
    if (($# > 1)); then
        suites=("${@:2}")
    elif [[ ${#paths[@]} -gt 0 ]]; then
        suites=("${paths[@]}")
    elif $quick; then
        suites=(tests/unit)
        printf '%s\n' --ignore=tests/unit/{analysis,centering,commands,doctor,scripts,support}
    elif [[ $1 == "$newest" ]]; then
        # The longest tests come first, so that the remaining tests are spread evenly over the processes.
        suites=(tests/releases tests/contract tests/integration tests/unit tests/gpu tests/conformance)
    elif [[ $1 == vllm-* ]]; then
        suites=(tests/contract tests/integration/test_programs.py)
    fi
    # For an older release, only the tests that no other environment of this run covers.
    [[ -n $asked || $1 == "$newest" || -n ${VENV:-} ]] || printf '%s\n' --not-in "$newest"
    ((${#arguments[@]} == 0)) || printf '%s\n' "${arguments[@]}"
    for suite in "${suites[@]}"; do
        [[ ${#paths[@]} -gt 0 || -e $suite ]] && printf '%s\n' "$suite"
    done
}
# The stages of a release, one line each with its name, its function and, with `--release all`, its path.
parts_of() {
    local suite file
    if [[ $asked != all ]]; then
        printf '%s\n' "programs-$1 programs" "tests-$1 others"
        return
    fi
    for suite in $(tests_of "$1"); do
        file=${suite%%::*}
        [[ -e $file ]] || continue
        for file in $(grep -lr run_program --include='test_*.py' "$file" | sort); do
            [[ $suite != *::* ]] || file=$suite
            echo "programs-$1-$(basename "$file" .py) programs $file"
        done
        echo "tests-$1-$(basename "$suite") others $suite"
    done
}
# The tests of one release: everything; whole programs; everything else. `selection` narrows them.
tests() {
    local words
    mapfile -t words < <(tests_of "$1")
    use "$1"
    bounded "${words[@]}"
}
programs() {
    local words status=0
    mapfile -t words < <(tests_of "$@")
    use "$1"
    bounded --durations=0 --durations-min=20 -m "program$selection" "${words[@]}" || status=$?
    # If a release has no such program, this is not a failure.
    ((status == 5)) || return "$status"
}
others() {
    local words status=0
    mapfile -t words < <(tests_of "$@")
    use "$1"
    # Each process uses one thread, because the threads of several processes would slow each other down.
    OMP_NUM_THREADS=1 bounded -n 2 --dist loadfile --no-loadscope-reorder -m "not program$selection" "${words[@]}" ||
        status=$?
    # A part may contain only whole programs, or only tests of another release.
    [[ $status -ne 5 || $asked != all ]] || return 0
    return "$status"
}

# Runs pytest until the deadline. An interrupt then lets it report and clean up; a minute later, it is killed.
# The signal is reset, because processes that bash runs in the background ignore an interrupt.
bounded() {
    local left=$((deadline - SECONDS))
    [[ $asked != all ]] || left=$limit
    timeout --foreground --signal=INT --kill-after=60 $((left > 0 ? left : 1)) \
        env --default-signal=INT python -m pytest "$@"
}

# The first release uses an environment that was given or is made now; the others' are made meanwhile.
order=()
for release in "${plan[@]}"; do
    order=("$release" "${order[@]}")
done
first=${order[0]}
install() { stage "install-$1" bash scripts/install_cpu.sh "$(environment_of "$1")" --release "$1"; }
if [[ -z ${VENV:-} ]]; then
    for release in "${order[@]}"; do
        stages+=("install-$release")
    done
    install "$first" || exit 2
    if ((${#order[@]} > 1)); then
        set -m # a separate process group, which is stopped with this script
        (
            renice -n 10 $BASHPID >/dev/null
            for release in "${order[@]:1}"; do
                install "$release"
            done
        ) >"$logs/installs" 2>&1 &
        installing=$!
        set +m
    fi
fi
# Waits for the environment of a release; false if there is none.
there_is() {
    [[ -z ${VENV:-} ]] || return 0
    until [[ -s $logs/install-$1.verdict || ! -d $logs ]]; do
        sleep 1
    done
    grep -q ' ok ' "$logs/install-$1.verdict"
}
# One stage of a release, which fails without its environment.
of_release() {
    local name=$1 release=$3
    if there_is "$release"; then
        stage "$@"
    elif grep -q 'left out' "$logs/install-$release.verdict"; then
        printf '%-14s %s\n' "$name" "left out (no environment)" >"$logs/$name.verdict"
    else
        printf '%-14s %s\n' "$name" "FAILED (no environment)" >"$logs/$name.verdict"
    fi
}

# tests/gpu alone runs in the user's environment, which may have neither ruff nor mypy.
linted=true
[[ ${plan[-1]} == "$newest" ]] || linted=false
[[ ${#paths[@]} -eq 0 || -n $(printf '%s\n' "${paths[@]}" | grep -v '^\(\./\)\?tests/gpu') ]] || linted=false
checks() {
    $linted || return 0
    stage lint lint
    $quick || stage types types
    $quick || stage docs docs
}
! $linted || stages+=(lint)
! $linted || $quick || stages+=(types docs)

deadline=$((SECONDS + limit))
selection=""
if $quick; then
    export OFFPOLICY_FEW_EXAMPLES=8 # see tests/support/examples.py
fi
if [[ -n $asked ]]; then
    export OFFPOLICY_ALL_EXAMPLES=1
else
    selection=" and not extended"
fi
$quick && selection=" and not extended and not slow and not gpu"
if [[ ${#paths[@]} -gt 0 && $asked != all ]]; then
    checks
    stages+=("tests-$first")
    stage "tests-$first" tests "$first"
elif $quick; then
    checks
    stages+=("tests-$first")
    stage "tests-$first" others "$first"
else
    # Full programs run one after the other. Their processes wait for each other, so half of the machine is idle, and
    # all other tests run at the same time. The other tests are shown afterwards, and have a lower priority than the
    # programs' Ray workers (which run at niceness 15).
    export RAY_worker_niceness=0
    run_parts() { # those of a release with this function, as long as this script runs
        local parts part name function path
        mapfile -t parts < <(parts_of "$1")
        for part in "${parts[@]}"; do
            read -r name function path <<<"$part"
            [[ $function != "$2" || ! -d $logs ]] || of_release "$name" "$function" "$1" ${path:+"$path"}
        done
    }
    for release in "${plan[@]}"; do
        mapfile -t -O "${#stages[@]}" stages < <(parts_of "$release" | cut -d' ' -f1)
    done
    set -m # a separate process group, which is interrupted with this script
    (
        renice -n 19 $BASHPID >/dev/null
        checks
        for release in "${order[@]}"; do
            run_parts "$release" others
        done
    ) >"$logs/others" 2>&1 &
    beside=$!
    set +m
    for release in "${order[@]}"; do
        run_parts "$release" programs
    done
    wait
    beside="" installing=""
    cat "$logs/installs" "$logs/others" 2>/dev/null
fi

printf '\n--- summary\n'
failed=0
for name in "${stages[@]}"; do
    cat "$logs/$name.verdict"
    grep -q FAILED "$logs/$name.verdict" && failed=1
done
# pytest's own summary lines come last, where people and programs expect them.
for name in "${stages[@]}"; do
    [[ ($name == tests-* || $name == programs-*) && -f $logs/$name ]] || continue
    grep -E '^=+ .*(passed|failed|error|no tests ran|skipped|deselected).* =+$' "$logs/$name" ||
        echo "$name: pytest did not come to its end"
done
exit "$failed"
