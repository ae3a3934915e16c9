#!/usr/bin/env bash
# Installs Chromium for tests/observe/test_report_in_browser.py, with apt, when this is root on Debian or its kin. Where
# it cannot, it says why, and the test is skipped: this never fails.
set -euo pipefail

for program in chromium chromium-browser google-chrome; do
    ! command -v "$program" >/dev/null || exit 0
done

give_up() {
    echo "tests/observe: no Chromium ($1). The report is not looked at in a browser."
    exit 0
}

[ "$(id -u)" = 0 ] || give_up "only root can install it"
command -v apt-get >/dev/null || give_up "no apt-get here"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "tests/observe: installing chromium"
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } >"$log" 2>&1 </dev/null ||
    give_up "apt-get: $(tail -1 "$log")"
