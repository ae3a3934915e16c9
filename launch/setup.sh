#!/usr/bin/env bash
# Makes .venv and installs ds_hybrid into it with the tested versions. Does nothing when that is already done.
#
#   launch/setup.sh                      the package, its extras hf, mpi, nvml, report and dev
#   launch/setup.sh --old-transformers   also .transformers/5.8.0: put it on PYTHONPATH to run on what stock AutoEP accepts
#
# PYTHON names the interpreter to make .venv from (python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "launch/setup.sh: $1" >&2
    exit 2
}

# Whether the stamp file $1 was written for the present contents of the other files.
is_done() {
    [ "$(cat "$1" 2>/dev/null)" = "$(cat "${@:2}" | sha256sum)" ]
}

mark_done() {
    cat "${@:2}" | sha256sum >"$1"
}

make_venv() {
    local python="${PYTHON:-python3}"
    command -v "$python" >/dev/null || fail "no '$python' on PATH: install Python 3.11 or newer, or name it in PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$python" --version) is too old: install Python 3.11 or newer, or name it in PYTHON"
    "$python" -m venv .venv || fail "'$python -m venv' failed: install the venv module (Debian: python3-venv)"
}

install_package() {
    local compiler
    for compiler in gcc g++; do
        command -v "$compiler" >/dev/null || fail "no $compiler on PATH: DeepSpeed compiles its communication op (Debian: g++)"
    done
    [ -x .venv/bin/pip ] || make_venv
    # DeepSpeed's own set-up looks at the torch that is already there.
    .venv/bin/pip install "$(grep '^torch==' constraints.txt)"
    .venv/bin/pip install -c constraints.txt -e ".[hf,mpi,nvml,report,dev]"
}

# Beside the venv, not in it: the newest transformers stays the one that everything else uses.
install_old_transformers() {
    rm -rf .transformers/5.8.0
    .venv/bin/pip install --no-deps --target .transformers/5.8.0 -r launch/transformers-5.8.0.txt
}

package_inputs=(pyproject.toml constraints.txt)
if ! is_done .venv/.setup-stamp "${package_inputs[@]}"; then
    install_package
    mark_done .venv/.setup-stamp "${package_inputs[@]}"
fi

case "${1:-}" in
    "") ;;
    --old-transformers)
        if ! is_done .transformers/5.8.0/.setup-stamp launch/transformers-5.8.0.txt; then
            install_old_transformers
            mark_done .transformers/5.8.0/.setup-stamp launch/transformers-5.8.0.txt
        fi
        ;;
    *) fail "unknown argument '$1': the only one is --old-transformers" ;;
esac
