#!/usr/bin/env bash
# Installs what tests/hosts needs and is missing, where it can.
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

exec bash "$(dirname "${BASH_SOURCE[0]}")/../install_packages.sh" tests/hosts \
    "Tests that need them will be skipped." "${missing[@]}"
