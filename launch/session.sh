# To be sourced: runs a command as leader of a session of its own, and ends all that the command started.
# The launchers and their ranks outlive a signal to any single one of them.
# shellcheck shell=bash

: "${root:?the folder of the repository}"
session="" # the leader's process id

# The processes of the session, zombies apart.
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

end_session() {
    local tenths
    [ -n "$session" ] || return 0
    signal_session TERM
    for ((tenths = 0; tenths < 50; tenths++)); do
        [ -n "$(session_members)" ] || break
        sleep 0.1
    done
    signal_session KILL
    wait "$session" 2>/dev/null || true
}

# A Ctrl-C in this terminal reaches this script only, not the command.
in_session() {
    setsid "$@" &
    session=$!
    wait "$session"
}

# Calls the function $1 with the exit code when the script ends, by itself or by a signal.
at_exit() {
    last_call=$1
    trap leave EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

leave() {
    local code=$?
    trap '' INT TERM HUP
    "$last_call" "$code"
}

# What a run with master port $1 that ended with exit code $2 may have left on this host.
remove_leftovers() {
    # DeepSpeed leaves 66 MiB of memory for each rank of a run on one CPU host, also after a good run.
    rm -f /dev/shm/deepspeed_allreduce_buffer_*_"$1"_*
    if [ "${DS_ACCELERATOR:-}" = cpu ] && [ "$2" != 0 ]; then
        timeout 10 "$root/launch/cpu_op.sh" unlock || true
    fi
}
