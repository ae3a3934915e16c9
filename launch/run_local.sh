#!/usr/bin/env bash
# Runs a script on ranks of this machine with the deepspeed launcher, and leaves nothing behind.
#
#   launch/run_local.sh NUM_RANKS SCRIPT [ARGS...]
#
# On GPUs when there is one for each rank, else on the CPU; DS_ACCELERATOR=cpu or cuda decides otherwise. OMP_NUM_THREADS,
# TORCH_EXTENSIONS_DIR and MASTER_PORT are kept when set. TIME_LIMIT=SECONDS ends the run, with exit code 124. Else the
# exit code is the launcher's; 130 after Ctrl-C.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ $# -lt 2 ] || ! [[ $1 =~ ^[1-9][0-9]*$ ]] || [ ! -f "$2" ]; then
    echo "launch/run_local.sh: expected NUM_RANKS SCRIPT [ARGS...], a number and a file, got: $*" >&2
    exit 2
fi
num_ranks=$1
shift

# The processes of the session that $session leads, zombies apart.
session_members() {
    local pid line fields
    for pid in /proc/[0-9]*; do
        { read -r line <"$pid/stat"; } 2>/dev/null || continue
        read -ra fields <<<"${line##*) }" # state, parent, group, session
        if [ "${fields[0]}" != Z ] && { [ "${fields[3]}" = "$session" ] || [ "${pid#/proc/}" = "$session" ]; }; then
            echo "${pid#/proc/}"
        fi
    done
}

signal_session() {
    local members
    mapfile -t members < <(session_members)
    if [ ${#members[@]} -gt 0 ]; then
        kill -s "$1" "${members[@]}" 2>/dev/null || true
    fi
}

# The launcher and its ranks outlive a signal to any single one of them: all are ended, as members of the session.
end_session() {
    local tenths
    signal_session TERM
    for ((tenths = 0; tenths < 50; tenths++)); do
        [ -n "$(session_members)" ] || return 0
        sleep 0.1
    done
    signal_session KILL
}

clean_up() {
    trap '' INT TERM HUP
    if [ -n "$session" ]; then
        end_session
        wait "$session" 2>/dev/null || true
    fi
    if [ "$DS_ACCELERATOR" = cpu ]; then
        # DeepSpeed leaves 66 MiB of memory a rank here, also after a good run.
        rm -f /dev/shm/deepspeed_allreduce_buffer_*_"$port"_*
        timeout 10 "$root/launch/cpu_op.sh" unlock || true
    fi
}

# Runs a command as leader of a session of its own, where a Ctrl-C in this terminal reaches this script only.
in_session() {
    setsid "$@" &
    session=$!
    wait "$session"
}

export PATH="$root/.venv/bin:$PATH"
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$root/.torch_ext}"
if [ -z "${DS_ACCELERATOR:-}" ]; then
    num_gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
    DS_ACCELERATOR=$([ "$num_gpus" -ge "$num_ranks" ] && echo cuda || echo cpu)
fi
export DS_ACCELERATOR
port=${MASTER_PORT:-$(python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')}

session=""
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

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
