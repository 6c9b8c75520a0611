#!/usr/bin/env bash
# Submits a command to a running Ray cluster, shows its log and ends with its exit status:
#
#   RAY_ADDRESS=http://head:8265 bash scripts/launch_ray.sh [--no-wait] [NAME=value ...] COMMAND [ARGUMENT ...]
#   RAY_ADDRESS=http://head:8265 bash scripts/launch_ray.sh NNODES=4 MODEL_PATH=/models/Qwen3-8B \
#       recipe/offpolicy/run_dense_fsdp.sh 'correction=[tis_token,gsm]'
#
# A COMMAND that ends in .sh is run by bash. The command and all of its workers receive the variables NAME=value and, if
# they are set, VERL_PLATFORM, VERL_USE_EXTERNAL_MODULES and OFFPOLICY_*. Arguments are passed unchanged, whatever
# characters they contain. With verl 0.7.1's legacy actors, if you set VERL_USE_EXTERNAL_MODULES yourself, add
# verl_patches.legacy to it.
#
#   RAY_ADDRESS    the dashboard of the cluster (default http://127.0.0.1:8265); if it requires a token, Ray reads
#                  RAY_AUTH_MODE=token and RAY_AUTH_TOKEN
#   WORKING_DIR    folder that is sent to all nodes and used as the working directory (default: this checkout),
#                  a URI that Ray accepts, or none if the nodes have everything installed
#   EXCLUDES       further files that are not sent (version control, environments and outputs never are): patterns as in
#                  .gitignore, separated by commas
#   RUNTIME_ENV    further fields of Ray's runtime environment: a JSON or YAML file, or JSON itself
#   SUBMISSION_ID  name of the job (default: Ray's choice)
#   PYTHON         interpreter with ray[default] to submit with (default python3)
set -euo pipefail
for word; do
    case $word in
        --help | -h) # the comment above
            sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
            exit
            ;;
        --no-wait | *=*) ;;
        *) break ;; # of the command
    esac
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} WORKING_DIR=${WORKING_DIR:-$root} \
    exec "${PYTHON:-python3}" "$root/scripts/launch_ray.py" "$@"
