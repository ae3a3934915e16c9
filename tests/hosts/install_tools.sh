#!/usr/bin/env bash
# Installs what tests/hosts needs, with apt, when this is root on Debian or its kin. Where it cannot, it says why, and
# the tests are skipped: this never fails.
set -euo pipefail

# The program to look for, and its package.
declare -A packages=(
    [ip]=iproute2
    [sshd]=openssh-server
    [ssh]=openssh-client
    [pdsh]=pdsh
    [mpirun.openmpi]=openmpi-bin
)

export PATH="$PATH:/usr/sbin:/sbin"
missing=()
for program in "${!packages[@]}"; do
    command -v "$program" >/dev/null || missing+=("${packages[$program]}")
done
[ ${#missing[@]} -gt 0 ] || exit 0

give_up() {
    echo "tests/hosts: not installed: ${missing[*]} ($1). Tests that need them will be skipped."
    exit 0
}

[ "$(id -u)" = 0 ] || give_up "only root can"
command -v apt-get >/dev/null || give_up "no apt-get here"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "tests/hosts: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 </dev/null ||
    give_up "apt-get: $(tail -1 "$log")"
