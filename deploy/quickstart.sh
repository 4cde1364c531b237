#!/bin/sh
# From a fresh machine to a serving group with the right numbers.
#
#   deploy/quickstart.sh [--yes] [--keep] [--model DIR] [--workers N]
#
#   --yes        install missing packages without asking
#   --keep       leave the group running and say what to try next
#   --model DIR  a golden model (default: tests/golden/models/qwen3_moe)
#   --workers N  size of the group (default: 4)
#
# Installs the packages it needs, builds, starts a group of CPU workers on a golden checkpoint, sends
# the checkpoint's recorded inputs through gRPC, and compares with the recorded outputs. Exits 0 only
# if every number is right.
set -eu

cd "$(dirname "$0")/.."
yes=
keep=no
model=tests/golden/models/qwen3_moe
workers=4
while [ $# -gt 0 ]; do
    case $1 in
        --yes) yes=--yes; shift ;;
        --keep) keep=yes; shift ;;
        --model) model=$2; shift 2 ;;
        --workers) workers=$2; shift 2 ;;
        -h|--help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "unknown argument $1; see --help" >&2; exit 2 ;;
    esac
done

deploy/install-packages.sh $yes build run

echo "Building (build/release) ..." >&2
mkdir -p build
log=build/quickstart.log
if ! { cmake --preset release -DMOE_TESTS=OFF && cmake --build --preset release --parallel "$(nproc)"; } \
        >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    echo "The build failed; the whole log is in $log." >&2
    exit 1
fi

moectl=build/release/client/moectl/moectl
state=$(mktemp -d)
stop() {
    "$moectl" down --state-dir "$state" >&2 || true
    rm -rf "$state"
}
trap stop EXIT
trap 'exit 130' INT TERM

echo "Starting $workers CPU workers on $model ..." >&2
"$moectl" up --model "$model" --workers "$workers" --backend cpu --port 0 --state-dir "$state" \
    --detach >"$state/endpoints"
endpoint=$(head -n 1 "$state/endpoints")

PYTHONPATH=build/release/python /usr/bin/python3 deploy/quickstart_check.py "$endpoint" "$model"

if [ "$keep" = yes ]; then
    trap - EXIT
    layer=$(PYTHONPATH=build/release/python /usr/bin/python3 -c \
        'import sys, moed; print(moed.Client(sys.argv[1]).layers[0].layer)' "$endpoint")
    cat <<END

The group is still running. Try:
  $moectl status --endpoint $endpoint
  $moectl bench --endpoint $endpoint --layer $layer --tokens 8 --concurrency 1,8 --duration 5
  $moectl down --state-dir $state
END
fi
