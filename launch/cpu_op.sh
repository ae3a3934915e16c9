#!/usr/bin/env bash
# Looks after the C++ op that DeepSpeed compiles and loads in every rank on a CPU (deepspeed_shm_comm).
#
#   launch/cpu_op.sh build     compiles it unless that is done
#   launch/cpu_op.sh unlock    removes the lock file of a process that was killed while it compiled or loaded
#
# torch waits without end, and without a word, for whoever made that lock file. TORCH_EXTENSIONS_DIR says where all this
# lies; BUILD_TIME_LIMIT is in seconds (900).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PATH="$root/.venv/bin:$PATH" DS_ACCELERATOR=cpu
op="${TORCH_EXTENSIONS_DIR:?}/deepspeed_shm_comm"

unlock() {
    # Its maker keeps the file open for as long as it holds the lock.
    if [ -e "$op/lock" ] && [ -z "$(find -L /proc/[0-9]*/fd -maxdepth 1 -samefile "$op/lock" -print -quit 2>/dev/null)" ]; then
        rm -f "$op/lock"
    fi
}

build() {
    # Compiled before the last set-up: perhaps for another torch, so let torch have a look.
    if [ ! "$op/deepspeed_shm_comm.so" -nt "$root/.venv/.setup-stamp" ]; then
        echo "compiling DeepSpeed's communication op, once (about a minute)"
        timeout --foreground "${BUILD_TIME_LIMIT:-900}" python -c '
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)'
        touch "$op/deepspeed_shm_comm.so"
    fi
}

mkdir -p "$op"
# One at a time: between the look at a lock file and its removal nobody else may remove it and compile.
exec 9>"$TORCH_EXTENSIONS_DIR/cpu_op.flock"
flock 9
unlock
case "${1:?build or unlock}" in
    build) build 9>&- ;;
    unlock) ;;
    *) echo "launch/cpu_op.sh: unknown argument '$1': build or unlock" >&2 && exit 2 ;;
esac
