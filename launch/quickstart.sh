#!/usr/bin/env bash
# From a fresh clone to a trained model: sets up, then trains a small Qwen3-MoE on 2 ranks, on GPUs when there are two.
#
#   launch/quickstart.sh [--text FILE_OR_FOLDER] [any other option of launch/train.py]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/launch/setup.sh"

if [ -z "${DS_ACCELERATOR:-}" ]; then
    num_gpus=$("$root/.venv/bin/python" -c 'import torch; print(torch.cuda.device_count())')
    DS_ACCELERATOR=$([ "$num_gpus" -ge 2 ] && echo cuda || echo cpu)
fi
export DS_ACCELERATOR VENV="$root/.venv"
config=$([ "$DS_ACCELERATOR" = cpu ] && echo two_stage_zero1.json || echo two_stage_zero1_bf16.json)

# exec: Ctrl-C, TERM and the exit code are then run_local.sh's own.
exec "$root/launch/run_local.sh" 2 "$root/launch/train.py" \
    --deepspeed_config "$root/ds_configs/$config" --model tiny_qwen3_moe --steps 200 "$@"
