#!/usr/bin/env bash
set -xeuo pipefail

torchrun --standalone --nproc_per_node=8 -m verl.trainer.sft_trainer \
    data.train_files="$HOME/data/train.parquet" \
    model.path=Qwen/Qwen3-8B \
    trainer.total_epochs=2 "$@"
