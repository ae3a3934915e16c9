#!/usr/bin/env bash
# Trains with mpirun, of Open MPI or MPICH: each rank learns its number and the address of rank 0 through mpi4py.
#
#   NUM_RANKS=4 launch/run_mpi.sh [--dry_run] [--help] [OPTIONS OF launch/train.py]                  on this host
#   HOSTFILE=hosts launch/run_mpi.sh [--dry_run] [--help] [OPTIONS OF launch/train.py]               on several
#
# --dry_run prints the command and the environment of the ranks, and runs nothing. Python, this repository, the
# ds_config and the current folder must have the same paths on all hosts. The exit code is mpirun's; 130 after Ctrl-C.
# Set in the environment what should differ from:
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
HOSTFILE="${HOSTFILE:-}"                  # one "NAME slots=NUMBER" a line: the hosts, and how many ranks each runs
NUM_RANKS="${NUM_RANKS:-}"                # in all. Empty: all slots of HOSTFILE
MPIRUN="${MPIRUN:-}"                      # empty: the mpirun of VENV, else the first on PATH
INTERFACE="${INTERFACE:-}"                # the network interface that joins the hosts, such as eth0
MASTER_PORT="${MASTER_PORT:-}"            # empty: one that is free here
OMP_NUM_THREADS="${OMP_NUM_THREADS:-}"    # threads of a rank. Empty: cores here over the ranks of a host
DS_ACCELERATOR="${DS_ACCELERATOR:-}"      # cpu or cuda. Empty: what DeepSpeed finds on each host
MPIRUN_ARGS="${MPIRUN_ARGS:-}"            # more options for mpirun
EXPORT_VARS="${EXPORT_VARS:-}"            # names of more variables for the ranks, besides NCCL_*, GLOO_*, TORCH_*, ...
VENV="${VENV:-$root/.venv}"               # the Python environment that has ds_hybrid and mpi4py
SCRIPT="${SCRIPT:-$root/launch/train.py}" # what each rank runs
TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$root/.torch_ext}" # for compiled ops

set -euo pipefail
# shellcheck source=launch/nodes.sh
source "$root/launch/nodes.sh"
# shellcheck source=launch/session.sh
source "$root/launch/session.sh"

# Sets mpi, and the absolute path in MPIRUN, by which Open MPI also finds itself on the other hosts.
find_mpirun() {
    local name=${MPIRUN:-mpirun} version
    MPIRUN=$(command -v "$name") ||
        fail "MPIRUN = $name: not found. Install Open MPI or MPICH (pip install mpich), or give its path."
    version=$("$MPIRUN" --version 2>&1) || true
    case $version in
        *"Open MPI"*) mpi="Open MPI" ;;
        *HYDRA*) mpi=MPICH ;;
        *) fail "MPIRUN = $MPIRUN: not Open MPI's, not MPICH's, it says '${version%%$'\n'*}'. Give one of them." ;;
    esac
}

# MPICH's form of the hostfile.
colon_hostfile() {
    local place
    for place in "${!hosts[@]}"; do
        echo "${hosts[place]}:${slots[place]}"
    done
}

# Sets placing: options that say where the ranks run and which variables reach them. $1: path of MPICH's hostfile.
set_placing() {
    local name names options
    names=$(node_variables)
    if [ "$mpi" = MPICH ]; then
        placing=(-n "$NUM_RANKS" -genvlist "${names//$'\n'/,}")
        [ -z "$HOSTFILE" ] || placing+=(-f "$1")
        [ -z "$INTERFACE" ] || placing+=(-iface "$INTERFACE")
        return
    fi
    # Open MPI would bind each rank, with all its threads, to one core.
    placing=(-np "$NUM_RANKS" --bind-to none --map-by slot)
    # Slots, one way or the other: it refuses more ranks than cores otherwise.
    if [ -n "$HOSTFILE" ]; then placing+=(--hostfile "$HOSTFILE"); else placing+=(--host "localhost:$NUM_RANKS"); fi
    if [ -n "$INTERFACE" ]; then
        read -ra options <<<"$(interface_options)"
        placing+=("${options[@]}")
    fi
    for name in $names; do
        placing+=(-x "$name")
    done
}

clean_up() {
    end_session
    remove_leftovers "$MASTER_PORT"
    rm -rf "$folder"
}

parse_arguments "$@"
use_venv
find_mpirun
if [ -n "$HOSTFILE" ]; then
    read_hostfile
    num_slots=$(IFS=+ && echo "$((${slots[*]}))")
    NUM_RANKS="${NUM_RANKS:-$num_slots}"
    most_slots=$(printf '%s\n' "${slots[@]}" | sort -n | tail -1)
else
    num_slots=$NUM_RANKS
    most_slots=$NUM_RANKS
fi
[[ $NUM_RANKS =~ ^[1-9][0-9]*$ ]] ||
    fail "NUM_RANKS = $NUM_RANKS: must be a whole number of at least 1, unless there is a HOSTFILE."
[ "$NUM_RANKS" -le "$num_slots" ] ||
    fail "NUM_RANKS = $NUM_RANKS: $HOSTFILE has $num_slots slots. Give it more, or run fewer ranks."
export_settings "$most_slots"
# mpi4py would take the library of the venv, whichever mpirun this is.
libraries="$(dirname "$(dirname "$MPIRUN")")/lib"
export MPI4PY_LIBMPI="${MPI4PY_LIBMPI:-$libraries:libmpi.so.$([ "$mpi" = MPICH ] && echo 12 || echo 40)}"
[ -z "${PYTHONPATH:-}" ] || EXPORT_VARS+=" PYTHONPATH"

folder=FOLDER
if [ -z "$dry_run" ]; then
    folder=$(mktemp -d)
    at_exit clean_up
fi
set_placing "$folder/hosts"
read -ra more <<<"$MPIRUN_ARGS"
# mpi4py ends all ranks when one fails; they would wait for it for ever.
program=("$VENV/bin/python" -u -m mpi4py "$SCRIPT" "${arguments[@]}")
command=("$MPIRUN" "${placing[@]}" "${more[@]}" "${program[@]}")
if [ -n "$dry_run" ]; then
    show_command "${command[@]}"
    show_environment "$(node_environment)"
    [ "$mpi" != MPICH ] || [ -z "$HOSTFILE" ] || printf '%s\n' "# FOLDER/hosts" "$(colon_hostfile)"
    exit
fi

[ -z "$HOSTFILE" ] || colon_hostfile >"$folder/hosts"
if [ "$DS_ACCELERATOR" = cpu ]; then
    in_session "$root/launch/cpu_op.sh" build
fi
in_session "${command[@]}"
