#!/usr/bin/env bash
# Trains on the hosts of a hostfile, with the deepspeed launcher.
#
#   HOSTFILE=hosts launch/run_hostfile.sh [--dry_run] [--help] [OPTIONS OF launch/train.py]
#
# --dry_run prints the command and the environment of the ranks, and runs nothing. Python, this repository, the
# ds_config and the current folder must have the same paths on all hosts. The exit code is the launcher's; 130 after
# Ctrl-C.
# Set in the environment what should differ from:
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
HOSTFILE="${HOSTFILE:-/job/hostfile}"       # one "NAME slots=NUMBER" a line: the hosts, and how many ranks each runs
LAUNCHER="${LAUNCHER:-pdsh}"                # pdsh, openmpi: from one host, over ssh. no_ssh: start this on every host
NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-}}" # no_ssh: which host of HOSTFILE this one is, from 0
MASTER_ADDR="${MASTER_ADDR:-}"              # of the first host. Empty: its first `hostname -I`; no_ssh: its name
MASTER_PORT="${MASTER_PORT:-}"              # empty: one that is free here; no_ssh: 29500, the same on every host
INTERFACE="${INTERFACE:-}"                  # the network interface that joins the hosts, such as eth0
OMP_NUM_THREADS="${OMP_NUM_THREADS:-}"      # threads of a rank. Empty: cores here over the ranks of a host
DS_ACCELERATOR="${DS_ACCELERATOR:-}"        # cpu or cuda. Empty: what DeepSpeed finds on each host
LAUNCHER_ARGS="${LAUNCHER_ARGS:-}"          # more options for pdsh or mpirun
EXPORT_VARS="${EXPORT_VARS:-}"              # names of more variables for the ranks, besides NCCL_*, GLOO_*, TORCH_*, ...
VENV="${VENV:-$root/.venv}"                 # the Python environment that has ds_hybrid
SCRIPT="${SCRIPT:-$root/launch/train.py}"   # what each rank runs
TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$root/.torch_ext}" # for compiled ops

set -euo pipefail
# shellcheck source=launch/nodes.sh
source "$root/launch/nodes.sh"
# shellcheck source=launch/session.sh
source "$root/launch/session.sh"

# The user's own environment files, of two lines for a name the last one. DeepSpeed reads one file name only, so these
# lines go into ours, less the comments and blank lines at which it would stop.
user_environment() {
    "$VENV/bin/python" -c '
import os, sys
from ds_hybrid.doctor.env_files import read_env_files
files = read_env_files(os.environ, severity="error")
if wrong := [finding.message for finding in files.findings if finding.severity == "error"]:
    sys.exit("\n".join(wrong))
for name, value in files.variables.items():
    print(f"{name}={value}")' || exit 2
}

# What DeepSpeed hands on by itself: EXPORT_ENVS in its launcher/runner.py.
deepspeeds_environment() {
    local name names
    names=$(compgen -e | grep -E '^(MLFLOW|PYTHON|MV2|UCX)' || true)
    for name in $names; do
        printf '%s=%s\n' "$name" "${!name}"
    done
}

# DeepSpeed hands some values on changed: an error here instead of a riddle there.
check_environment() {
    local line name value
    while IFS= read -r line; do
        name=${line%%=*} value=${line#*=}
        if [ "$LAUNCHER" = pdsh ] && [[ $value =~ [\"\$\`\\] ]]; then
            fail "$name = $value: the shells of the hosts would change it. Leave out \", \$, \` and \\."
        elif [ "$LAUNCHER" = pdsh ] && [[ $value =~ %[hnu%] ]]; then
            fail "$name = $value: pdsh would change it, as it rewrites %h, %n, %u and %%. Leave them out," \
                "or use LAUNCHER=openmpi."
        elif [ "$LAUNCHER" = openmpi ] && [[ $value =~ [^[:alnum:]_@%+=:,./-] ]]; then
            fail "$name = $value: would arrive with quotes around it. Use letters, digits and _@%+=:,./- alone," \
                "or LAUNCHER=pdsh."
        fi
    done <<<"$1"
}

# pdsh hands over one line, which the shells of the hosts split again; DeepSpeed quotes blanks, in arguments alone.
check_words() {
    local word
    for word in "$PWD" "$VENV" "$SCRIPT" "${arguments[@]}"; do
        if [ -z "$word" ] || [[ $word =~ [][*?{}\(\)\<\>\|\&\;#~!\'\"\$\`\\$'\n\t'] ]]; then
            fail "'$word': the shells of the hosts would change it. Use plain characters, or LAUNCHER=openmpi."
        fi
        [[ ! $word =~ %[hnu%] ]] ||
            fail "'$word': pdsh would change it, as it rewrites %h, %n, %u and %%. Leave them out," \
                "or use LAUNCHER=openmpi."
    done
    for word in "$PWD" "$VENV" "$SCRIPT"; do
        [[ $word != *" "* ]] || fail "'$word': pdsh takes no path with blanks. Move it, or use LAUNCHER=openmpi."
    done
}

check_tools() {
    local tool interfaces=(/sys/class/net/*)
    local -A needed=([pdsh]="pdsh ssh" [openmpi]="ompi_info mpirun ssh" [no_ssh]="")
    for tool in ${needed[$LAUNCHER]}; do
        command -v "$tool" >/dev/null ||
            fail "LAUNCHER = $LAUNCHER: no $tool on PATH. Install it (Debian: pdsh, openmpi-bin, openssh-client)," \
                "or use another of pdsh, openmpi, no_ssh."
    done
    if [ "$LAUNCHER" = openmpi ] && [ ! -e /sys/class/net/eth0 ] && [[ $LAUNCHER_ARGS != *btl_tcp_if_include* ]]; then
        fail "INTERFACE is empty: DeepSpeed then tells Open MPI to use eth0, which this host lacks." \
            "Give the one that joins the hosts: ${interfaces[*]##*/}"
    fi
}

# What runs on the hosts outlives its connection. DeepSpeed, at a signal, would end every run there that has the same
# python; this one is known by its port.
end_on_hosts() {
    local pattern="[d]eepspeed.launcher.launch .*--master_port=$MASTER_PORT "
    # shellcheck disable=SC2086
    PDSH_RCMD_TYPE=ssh timeout 30 pdsh -S -w "$(IFS=, && echo "${hosts[*]}")" $LAUNCHER_ARGS "pkill -f '$pattern'" \
        2>/dev/null || true
}

clean_up() {
    local code=$1
    if [ "$LAUNCHER" = pdsh ] && [ -n "$is_launched" ] && [ "$code" != 0 ]; then
        kill_leader
        end_session
        end_on_hosts
    fi
    end_session
    remove_leftovers "$MASTER_PORT"
    rm -rf "$folder"
}

is_launched=""
parse_arguments "$@"
[[ $LAUNCHER =~ ^(pdsh|openmpi|no_ssh)$ ]] || fail "LAUNCHER = $LAUNCHER: must be pdsh, openmpi or no_ssh."
use_venv
read_hostfile
[ "$LAUNCHER" != no_ssh ] || MASTER_PORT="${MASTER_PORT:-29500}"
export_settings "$(printf '%s\n' "${slots[@]}" | sort -n | tail -1)"

settings=() # of the launcher alone
options=(--hostfile "$HOSTFILE" --master_port "$MASTER_PORT" --quiet)
program=("$SCRIPT")
case $LAUNCHER in
    pdsh)
        check_words
        # Without --force_multi a hostfile of one host would run here, whatever its name.
        options+=(--launcher pdsh --force_multi)
        # pdsh's ssh would wait for ever for a host that has fallen silent.
        export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND--o ServerAliveInterval=15 -o ServerAliveCountMax=4}"
        ;;
    openmpi)
        options+=(--launcher openmpi --force_multi)
        if [ -n "$INTERFACE" ]; then
            LAUNCHER_ARGS="$(interface_options)${LAUNCHER_ARGS:+ $LAUNCHER_ARGS}"
        fi
        # The venv may hold MPICH: Open MPI's mpirun and library must be found before it.
        open_mpi=$(dirname "$(command -v ompi_info || echo /usr/bin/ompi_info)")
        settings+=("PATH=$open_mpi:$PATH")
        export MPI4PY_LIBMPI="${MPI4PY_LIBMPI:-$(dirname "$open_mpi")/lib:libmpi.so.40}"
        # mpi4py ends all ranks when one fails; they would wait for it for ever.
        program=(--module mpi4py "$SCRIPT")
        ;;
    no_ssh)
        [[ $NODE_RANK =~ ^[0-9]+$ ]] && [ "$NODE_RANK" -lt ${#hosts[@]} ] ||
            fail "NODE_RANK = $NODE_RANK: must be this host's place in $HOSTFILE, 0 to $((${#hosts[@]} - 1))." \
                "Start this script on every host, each with its own."
        options+=(--no_ssh --node_rank "$NODE_RANK")
        MASTER_ADDR="${MASTER_ADDR:-${hosts[0]##*@}}"
        ;;
esac
[ -z "$MASTER_ADDR" ] || options+=(--master_addr "$MASTER_ADDR")
[ -z "$LAUNCHER_ARGS" ] || options+=("--launcher_args=$LAUNCHER_ARGS")

environment=$(node_environment)
folder=FOLDER
if [ -z "$dry_run" ]; then
    check_tools
    folder=$(mktemp -d)
    at_exit clean_up
fi
if [ "$LAUNCHER" != no_ssh ]; then
    user_lines=$(user_environment)
    environment+=${user_lines:+$'\n'$user_lines}
    check_environment "$(deepspeeds_environment)"$'\n'"$environment"
    settings+=("DS_ENV_FILE=$folder/deepspeed_env")
fi
command=(env "${settings[@]}" "$VENV/bin/deepspeed" "${options[@]}" "${program[@]}" "${arguments[@]}")
if [ -n "$dry_run" ]; then
    show_command "${command[@]}"
    show_environment "$environment"
    exit
fi

printf '%s\n' "$environment" >"$folder/deepspeed_env"
if [ "$DS_ACCELERATOR" = cpu ]; then
    in_session "$root/launch/cpu_op.sh" build
fi
is_launched=yes
in_session "${command[@]}"
