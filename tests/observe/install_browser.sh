#!/usr/bin/env bash
# Installs Chromium for tests/observe/test_report_in_browser.py, where there is none and it can.
set -euo pipefail

for program in chromium chromium-browser google-chrome; do
    ! command -v "$program" >/dev/null || exit 0
done

exec bash "$(dirname "${BASH_SOURCE[0]}")/../install_packages.sh" tests/observe \
    "The report is not looked at in a browser." chromium fonts-dejavu-core
