# To be sourced: what the launch scripts for several hosts share: their arguments, the hostfile, and the environment
# that must reach every node. Uses the variables at the head of these scripts.
# shellcheck shell=bash disable=SC2034

# Else a failure inside $(...) would go unseen.
shopt -s inherit_errexit

fail() {
    echo "${script_name:-launch/${0##*/}}: $*" >&2
    exit 2
}

# The script's first lines, up to the first empty one: what it does, and its variables.
show_head() {
    sed '1d; /^$/q; /^#SBATCH/d; /^root=/d; s/^# \{0,1\}//' "$0"
}

# Sets dry_run, and arguments: those for the training script.
parse_arguments() {
    local argument
    dry_run=""
    arguments=()
    for argument; do
        case $argument in
            --dry_run) dry_run=yes ;;
            --help | -h) show_head && exit ;;
            *) arguments+=("$argument") ;;
        esac
    done
}

use_venv() {
    [ -x "$VENV/bin/deepspeed" ] ||
        fail "VENV = $VENV: no bin/deepspeed there. Run launch/setup.sh, or name the environment that has ds_hybrid."
    [ -f "$SCRIPT" ] || fail "SCRIPT = $SCRIPT: no such file. Give the Python script that each rank runs."
    export VENV PATH="$VENV/bin:$PATH"
}

free_port() {
    "$VENV/bin/python" -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])'
}

# Sets hosts and slots, in the order of the ranks. What is wrong with the file ends the script, what is odd is told.
read_hostfile() {
    local lines host num_slots
    # DeepSpeed would go on, on this host alone.
    [ -e "$HOSTFILE" ] ||
        fail "HOSTFILE = $HOSTFILE: no such file. Write one line for each host, such as: worker-0 slots=8"
    lines=$("$VENV/bin/python" -c '
import sys
from ds_hybrid.errors import TopologyError
from ds_hybrid.topology.hostfile import read_hostfile
try:
    hostfile = read_hostfile(sys.argv[1])
except TopologyError as error:
    sys.exit(str(error))
for warning in hostfile.warnings:
    print("warning:", warning, file=sys.stderr)
for host in hostfile.hosts:
    print(host.name, host.num_slots)' "$HOSTFILE") || exit 2
    hosts=()
    slots=()
    while read -r host num_slots; do
        hosts+=("$host")
        slots+=("$num_slots")
    done <<<"$lines"
}

# Sets and exports what the ranks of every node need; $1 is the largest number of ranks of a host.
export_settings() {
    local threads=$(($(nproc) / $1))
    # Of another launcher around this one: with all of them set DeepSpeed would not look for its own.
    unset RANK WORLD_SIZE LOCAL_RANK
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
    export MASTER_PORT="${MASTER_PORT:-$(free_port)}" TORCH_EXTENSIONS_DIR
    # It becomes a part of names of files and of a pattern for pkill.
    [[ $MASTER_PORT =~ ^[1-9][0-9]{0,4}$ ]] && [ "$MASTER_PORT" -le 65535 ] ||
        fail "MASTER_PORT = $MASTER_PORT: must be a whole number from 1 to 65535. Leave it empty for one that is free."
    if [ -n "$DS_ACCELERATOR" ]; then export DS_ACCELERATOR; else export -n DS_ACCELERATOR; fi
    if [ -n "$INTERFACE" ]; then
        export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$INTERFACE}"
        export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$INTERFACE}"
    fi
}

# The names of the variables that must reach every node, one a line.
node_variables() {
    local usual='PATH|LD_LIBRARY_PATH|OMP_NUM_THREADS|MASTER_PORT|DS_ACCELERATOR|DEEPSPEED_TIMEOUT|HF_HOME'
    local name more
    read -ra more <<<"$EXPORT_VARS"
    for name in "${more[@]}"; do
        [ -n "${!name+set}" ] || fail "EXPORT_VARS names $name, which is not set. Set it, or leave it out."
    done
    {
        compgen -e | grep -xE "$usual|(TORCH|NCCL|GLOO|MPI4PY)_\w+"
        [ ${#more[@]} -eq 0 ] || printf '%s\n' "${more[@]}"
    } | LC_ALL=C sort -u
}

# KEY=VALUE lines as a .deepspeed_env takes them: no comments and no blank lines, at which DeepSpeed stops.
node_environment() {
    local name names
    names=$(node_variables)
    for name in $names; do
        [[ ${!name} != *$'\n'* ]] || fail "$name holds a line break, which cannot be handed on. Unset it."
        printf '%s=%s\n' "$name" "${!name}"
    done
}

# Keeps Open MPI's own connections on INTERFACE.
interface_options() {
    echo "--mca btl_tcp_if_include $INTERFACE --mca oob_tcp_if_include $INTERFACE"
}

show_command() {
    echo "# the command"
    printf '%q ' "$@" | sed 's/ $/\n/'
}

show_environment() {
    printf '%s\n' "# the environment of the ranks" "$1"
}
