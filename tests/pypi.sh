#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that need PyTorch, transformers and PEFT, with the newest releases on PyPI.
#
#   tests/pypi.sh BUILD [TEST ...]
#
# TEST is the name of a test in tests/integration, for example transformers_models; default: all
# that need these packages. They are in a virtual environment, BUILD/pypi (some GB), which sees the
# system's packages; a later run updates it. (Debian 12 has torch 1.13; transformers 5 needs 2.4.)
# Exit status 77 (skipped) without python3-venv or PyPI.
set -eu

case ${1-} in -h|--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
build=$(cd "${1:?BUILD}" && pwd)
shift
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- transformers transformers_models torch_compile resumed_training
skip() {
    echo "tests/pypi.sh: $1"
    exit 77
}

venv=$build/pypi
[ -x "$venv/bin/pip" ] || /usr/bin/python3 -m venv --system-site-packages "$venv" ||
    skip "no virtual environment: install python3-venv"
"$venv/bin/pip" install --quiet --upgrade torch transformers peft || skip "no packages from PyPI"
"$venv/bin/pip" list 2>/dev/null | grep -E '^(torch|transformers|peft|numpy|grpcio|protobuf) '

failed=0
for name in "$@"; do
    echo "== $name"
    log=$build/pypi-$name.log
    "$venv/bin/python" -B "tests/integration/test_$name.py" "$build" tests/golden/models \
        >"$log" 2>&1 || failed=1
    cat "$log"
    if grep -q 'skipped=' "$log"; then
        echo "tests/pypi.sh: $name was skipped"
        failed=1
    fi
done
exit $failed
