#!/usr/bin/env bash
# Serves a teacher for on-policy distillation (opd.teacher.url) with vLLM's OpenAI-compatible server.
#
#   bash scripts/teacher.sh MODEL [--host 127.0.0.1] [--port 8100] [arguments of vllm serve]
#
#   --host          address to listen on; by default, only this machine can connect; with 0.0.0.0, any machine can
#   MODEL           folder or hub name of a model with the student's tokenizer and chat template
#   PLATFORM=cpu    serve on the CPU in float32; by default, on GPUs as the arguments specify
#   VENV=path       environment that contains vLLM (default: the active environment)
#
# A teacher scores prompts but does not sample, so add front ends (--api-server-count N) before you add GPUs.
set -euo pipefail
if [[ $# -eq 0 || " $* " == *" --help "* || " $* " == *" -h "* ]]; then # the comment above
    sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "${BASH_SOURCE[0]}"
    exit $(($# == 0 ? 2 : 0))
fi

model=$1
shift
arguments=(--model "$model" --served-model-name teacher --host 127.0.0.1 --port 8100 --generation-config vllm)
if [[ ${PLATFORM:-cuda} == cpu ]]; then
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
    export TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    arguments+=(--dtype float32 --enforce-eager)
fi
export VLLM_NO_USAGE_STATS=1
exec "${VENV:+$VENV/bin/}python" -m vllm.entrypoints.openai.api_server "${arguments[@]}" "$@"
