#!/usr/bin/env bash
# Runs a script on ranks of this machine with the deepspeed launcher, and leaves nothing behind.
#
#   launch/run_local.sh NUM_RANKS SCRIPT [ARGS...]
#
# On GPUs when there is one for each rank, else on the CPU; DS_ACCELERATOR=cpu or cuda decides otherwise. OMP_NUM_THREADS,
# TORCH_EXTENSIONS_DIR, MASTER_PORT and VENV (.venv) are kept when set. TIME_LIMIT=SECONDS ends the run, with exit code
# 124. Else the exit code is the launcher's; 130 after Ctrl-C.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ $# -lt 2 ] || ! [[ $1 =~ ^[1-9][0-9]*$ ]] || [ ! -f "$2" ]; then
    echo "launch/run_local.sh: expected NUM_RANKS SCRIPT [ARGS...], a number and a file, got: $*" >&2
    exit 2
fi
num_ranks=$1
shift

# shellcheck source=launch/session.sh
source "$root/launch/session.sh"

clean_up() {
    end_session
    remove_leftovers "$port"
}

export VENV="${VENV:-$root/.venv}"
export PATH="$VENV/bin:$PATH"
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$root/.torch_ext}"
if [ -z "${DS_ACCELERATOR:-}" ]; then
    num_gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
    DS_ACCELERATOR=$([ "$num_gpus" -ge "$num_ranks" ] && echo cuda || echo cpu)
fi
export DS_ACCELERATOR
port=${MASTER_PORT:-$(python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')}

if ! [[ $port =~ ^[1-9][0-9]{0,4}$ ]] || [ "$port" -gt 65535 ]; then
    echo "launch/run_local.sh: MASTER_PORT = $port: must be a whole number from 1 to 65535." >&2
    exit 2
fi

at_exit clean_up

placing=(--num_gpus "$num_ranks")
if [ "$DS_ACCELERATOR" = cpu ]; then
    threads=$(($(nproc) / num_ranks))
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
    in_session "$root/launch/cpu_op.sh" build
elif [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    # With --num_gpus the launcher would take GPUs 0, 1, ... whatever this variable says.
    placing=(--include "localhost:$(cut -d, -f "1-$num_ranks" <<<"$CUDA_VISIBLE_DEVICES")")
fi
# A machine may have a /job/hostfile, which the launcher would follow to other hosts: /dev/null is no such file.
in_session ${TIME_LIMIT:+timeout --foreground "$TIME_LIMIT"} \
    deepspeed --hostfile /dev/null --master_port "$port" --quiet "${placing[@]}" "$@"
