#!/usr/bin/env bash
# GRPO of a dense model with on-policy distillation: run_dense_fsdp.sh with a teacher, which scores failed rollouts of
# prompts that the policy rarely solves. Arguments are Hydra overrides. Variables are those of run_dense_fsdp.sh, and:
#
#   TEACHER_URL     address of the teacher, started with bash scripts/teacher.sh MODEL --host 0.0.0.0 on another machine
#   OPD             advantage (default) or loss, docs/opd.md
#
# TEACHER_URL=http://host:8100 bash recipe/offpolicy/run_opd.sh opd.eligible.max_pass_rate=0.125
set -euo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment above
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
    exit
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ -z ${TEACHER_URL:-} ]]; then
    echo "run_opd.sh: TEACHER_URL is not set. Fix: TEACHER_URL=http://HOST:8100, where scripts/teacher.sh serves" >&2
    exit 2
fi
exec bash "$root/recipe/offpolicy/run_dense_fsdp.sh" "opd=${OPD:-advantage}" "opd.teacher.url=$TEACHER_URL" "$@"
