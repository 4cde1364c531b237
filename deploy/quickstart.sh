#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs packages, builds, starts a group of CPU workers and checks its numbers.
#
#   deploy/quickstart.sh [--yes] [--keep] [--model DIR] [--workers N]
#
#   --yes        install missing packages without asking
#   --keep       leave the group running and print commands to try
#   --model DIR  a golden model (default: tests/golden/models/qwen3_moe)
#   --workers N  size of the group, 1 to 16 (default: 4)
#
# The group serves a golden checkpoint. The check sends the checkpoint's recorded inputs through gRPC
# and compares the answers with the recorded outputs.
#
# Exit codes: 0 every number is right, 1 a step failed or a number is wrong, 2 wrong command line.
set -eu

usage() {
    echo "$0: $1; see --help" >&2
    exit 2
}

yes=
keep=no
model=
workers=4
while [ $# -gt 0 ]; do
    case $1 in
        --yes) yes=--yes; shift ;;
        --keep) keep=yes; shift ;;
        --model|--workers)
            [ $# -ge 2 ] || usage "$1 needs a value"
            if [ "$1" = --model ]; then model=$2; else workers=$2; fi
            shift 2 ;;
        -h|--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) usage "unknown argument $1" ;;
    esac
done
case $workers in
    [1-9]|1[0-6]) ;;
    *) usage "--workers must be 1 to 16, not '$workers'" ;;
esac
[ -z "$model" ] || model=$(cd "$model" 2>/dev/null && pwd) ||
    usage "--model: no such directory"
cd "$(dirname "$0")/.."
model=${model:-tests/golden/models/qwen3_moe}
[ -f "$model/golden.safetensors" ] || usage "--model: $model has no golden.safetensors"

# Runs a command with its output in a log. If it fails, shows the end of the log and exits.
quietly() {
    log=$1
    shift
    if ! "$@" >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        echo "This failed: $*" >&2
        echo "The complete log is in $log." >&2
        exit 1
    fi
}

mkdir -p build
deploy/install-packages.sh $yes --log build/packages.log build run
echo "Building (build/release) ..." >&2
quietly build/quickstart.log cmake --preset release -DMOE_TESTS=OFF -DMOE_WERROR=OFF
quietly build/quickstart.log cmake --build --preset release --parallel "$(nproc)"

moectl=build/release/client/moectl/moectl
scratch=$(mktemp -d)
state=
clean() { rm -rf "$scratch"; }
stop() {
    "$moectl" down $state >&2 || true
    clean
}
trap clean EXIT
trap 'exit 130' INT TERM

# With --keep the group uses the default state directory and ports, so that moectl finds it without
# options.
up() {
    "$moectl" up --model "$model" --workers "$workers" --backend cpu --detach "$@" \
        >"$scratch/endpoints"
}
if [ "$keep" = yes ]; then
    up || { echo "Trying again with --port 0 (any free ports) ..." >&2; up --port 0; }
else
    state="--state-dir $scratch/state"
    up --port 0 --state-dir "$scratch/state"
fi
trap stop EXIT
endpoint=$(head -n 1 "$scratch/endpoints")

export PYTHONPATH=build/release/python
/usr/bin/python3 deploy/quickstart_check.py "$endpoint" "$model"

if [ "$keep" = yes ]; then
    trap clean EXIT
    layer=$(/usr/bin/python3 -c \
        'import sys, moed; print(moed.Client(sys.argv[1]).layers[0].layer)' "$endpoint")
    cat <<END

The group is still running at $endpoint. Try:
  $moectl status
  $moectl bench --endpoint $endpoint --layer $layer --tokens 8 --concurrency 1,8 --duration 5
  PYTHONPATH=build/release/python /usr/bin/python3 -c 'import moed; print(moed.Client("$endpoint").layers)'
  $moectl down
END
fi
