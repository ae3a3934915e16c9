# To be sourced: runs a command as leader of a session of its own, and ends all that the command started.
# The launchers and their ranks outlive a signal to any single one of them.
# shellcheck shell=bash

: "${root:?the folder of the repository}"
session=""       # the leader's process id
session_start="" # and when it was started, as a stranger may get this id later; empty until that is known
# Lock files of extension builds that it held when it was ended, and which files these are.
declare -A session_locks=()

# When process $1 was started, in ticks since boot; nothing when there is none.
start_of() {
    local line fields
    { read -r line <"/proc/$1/stat"; } 2>/dev/null || return 0
    read -ra fields <<<"${line##*) }" # from the third field on: state, parent, group, session, ...
    echo "${fields[19]}"
}

# The processes of the session, zombies apart.
session_members() {
    local pid line fields start
    # While one of its processes lives, no other one gets the session's id.
    start=$(start_of "$session")
    [ -z "$start" ] || [ -z "$session_start" ] || [ "$start" = "$session_start" ] || return 0
    for pid in /proc/[0-9]*; do
        { read -r line <"$pid/stat"; } 2>/dev/null || continue
        read -ra fields <<<"${line##*) }"
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

# Ends the leader alone, with no word to those that it has started.
kill_leader() {
    if [ -n "$session" ] && [ "$(start_of "$session")" = "$session_start" ]; then
        kill -KILL "$session" 2>/dev/null || true
    fi
}

identity_of() {
    stat -c '%i %y' "$1" 2>/dev/null || true
}

# A lock's maker alone has it open, and when it is killed leaves it.
note_locks() {
    local folders lock
    mapfile -t folders < <(session_members)
    folders=("${folders[@]/#//proc/}")
    folders=("${folders[@]/%//fd}")
    [ ${#folders[@]} -gt 0 ] || return 0
    for lock in "${TORCH_EXTENSIONS_DIR:-/nowhere}"/*/lock; do
        [ -e "$lock" ] || continue
        if [ -n "$(find -L "${folders[@]}" -maxdepth 1 -samefile "$lock" -print -quit 2>/dev/null)" ]; then
            session_locks[$lock]=$(identity_of "$lock")
        fi
    done
}

# Of those alone: another process, perhaps on another host, may hold what is there by now.
remove_locks() {
    local lock
    for lock in "${!session_locks[@]}"; do
        [ "$(identity_of "$lock")" != "${session_locks[$lock]}" ] || rm -f "$lock"
    done
}

end_session() {
    local tenths
    [ -n "$session" ] || return 0
    note_locks
    signal_session TERM
    for ((tenths = 0; tenths < 50; tenths++)); do
        [ -n "$(session_members)" ] || break
        sleep 0.1
    done
    signal_session KILL
    wait "$session" 2>/dev/null || true
    remove_locks
}

# A Ctrl-C in this terminal reaches this script only, not the command.
in_session() {
    session="" session_start=""
    setsid "$@" &
    session=$!
    session_start=$(start_of "$session")
    : "${session_start:=gone}"
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

# What a run with master port $1 may have left on this host, once its session has ended.
remove_leftovers() {
    # DeepSpeed leaves 66 MiB of memory for each rank of a run on one CPU host, also after a good run.
    rm -f /dev/shm/deepspeed_allreduce_buffer_*_"$1"_*
}
