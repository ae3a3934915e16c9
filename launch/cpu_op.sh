#!/usr/bin/env bash
# Looks after the C++ op that DeepSpeed compiles and loads in every rank on a CPU (deepspeed_shm_comm).
#
#   launch/cpu_op.sh build     compiles it unless that is done
#
# torch waits without end, and without a word, for whoever made the op's lock file; one that was killed leaves it. Other
# hosts may share the folder, so nobody can tell here whether a lock's maker lives: this waits for it, with a word, and
# removes the lock once it is older than a build may take. TORCH_EXTENSIONS_DIR says where all this lies, VENV which
# Python environment compiles (.venv), BUILD_TIME_LIMIT how many seconds a build may take (900).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$root/.venv}"
export PATH="$VENV/bin:$PATH" DS_ACCELERATOR=cpu
op="${TORCH_EXTENSIONS_DIR:?}/deepspeed_shm_comm"
time_limit="${BUILD_TIME_LIMIT:-900}"

# Its maker keeps the file open for as long as it holds the lock.
is_held_here() {
    [ -n "$(find -L /proc/[0-9]*/fd -maxdepth 1 -samefile "$op/lock" -print -quit 2>/dev/null)" ]
}

# By the clock of the file system, which may be another host's.
age_of_lock() {
    local made now
    touch "$TORCH_EXTENSIONS_DIR/cpu_op.flock"
    now=$(stat -c %Y "$TORCH_EXTENSIONS_DIR/cpu_op.flock")
    made=$(stat -c %Y "$op/lock" 2>/dev/null) || made=$now # released in this moment
    echo $((now - made))
}

await_lock() {
    local said=""
    while [ -e "$op/lock" ]; do
        if [ "$(age_of_lock)" -gt "$time_limit" ] && ! is_held_here; then
            rm -f "$op/lock"
            return
        fi
        [ -n "$said" ] ||
            echo "launch/cpu_op.sh: $op/lock: waits for its maker, until the file is $time_limit s old." \
                "If no process on any host compiles or loads this op, remove the file." >&2
        said=yes
        sleep 1
    done
}

# Whether what is there was compiled by this environment after its last set-up. If not, let torch have a look.
is_built() {
    [ "$op/deepspeed_shm_comm.so" -nt "$VENV/.setup-stamp" ] && [ "$(cat "$op/compiled_by" 2>/dev/null)" = "$VENV" ]
}

build() {
    is_built && return
    echo "compiling DeepSpeed's communication op, once (about a minute)"
    # At SIGTERM an exception, so that torch removes its lock.
    timeout --foreground "$time_limit" python -c '
import signal, sys
def leave(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)'
    touch "$op/deepspeed_shm_comm.so"
    echo "$VENV" >"$op/compiled_by"
}

fail() {
    echo "launch/cpu_op.sh: $1" >&2
    exit 2
}

[ "${1:-}" = build ] || fail "argument '${1:-}': the only one is build."
[ -x "$VENV/bin/python" ] || fail "VENV = $VENV: no bin/python there. Run launch/setup.sh, or name another environment."
mkdir -p "$op"
# One at a time: between the look at a lock and its removal nobody else may remove it and compile.
exec 9>"$TORCH_EXTENSIONS_DIR/cpu_op.flock"
flock 9
await_lock
build 9>&-
