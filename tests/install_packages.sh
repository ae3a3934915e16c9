#!/usr/bin/env bash
# Installs Debian's packages that some tests need, with apt, when this is root. Where it cannot, it says why and what is
# lost by it, and the tests are skipped: this never fails.
#
#     tests/install_packages.sh tests/hosts "Tests that need them will be skipped." pdsh openssh-server
set -euo pipefail

room=$1 loss=$2
shift 2

give_up() {
    echo "$room: not installed: $packages ($1). $loss"
    exit 0
}

packages="$*"
[ "$(id -u)" = 0 ] || give_up "only root can"
command -v apt-get >/dev/null || give_up "no apt-get here"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "$room: installing $packages"
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install -y --no-install-recommends "$@"; } >"$log" 2>&1 </dev/null ||
    give_up "apt-get: $(tail -1 "$log")"
