#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# All that runs device memory of clients on real GPUs, in one call of a few minutes:
#
#   tests/gpu/streams.sh BUILD_DIRECTORY [--logs DIRECTORY]
#
# Segments against the oracle, imports of memory, requests of CUDA streams, and their times. Every
# step has a limit and is killed then. One line for each; the whole output of all steps is in the
# logs. Exits 0 only if no step failed. BUILD_DIRECTORY may be a folder from bundle.sh.
set -u

case ${1-} in -h|--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
[ $# -ge 1 ] || { sed -n 3,9p "$0" >&2; exit 2; }
build=$(cd "$1" && pwd) || exit 2
[ "${2:-}" = --logs ] && logs=$3 || logs=$(mktemp -d)
here=$(cd "$(dirname "$0")" && pwd)
gpus=$(nvidia-smi -L | wc -l)
unset NCCL_NVLS_ENABLE
export MOE_TEST_BACKEND=cuda MOE_TEST_DEVICES="$gpus" PYTHONUNBUFFERED=1
mkdir -p "$logs"
failed=0

# step NAME SECONDS COMMAND ...
step() {
    name=$1
    limit=$2
    shift 2
    begin=$(date +%s)
    timeout -s KILL "$limit" "$@" >"$logs/$name.log" 2>&1
    rc=$?
    case $rc in 0) word=ok ;; 77) word=skip ;; *) word=FAILED failed=$((failed + 1)) ;; esac
    printf '%-6s %4d s  %s\n' "$word" $(($(date +%s) - begin)) "$name"
    [ "$word" != FAILED ] || tail -n 25 "$logs/$name.log"
}

streams() {
    step "$1" "$2" "${MOE_PYTHON:-python3}" -B "$here/streams.py" "$build" "$here/../golden/models" "$3"
}

step foreign 60 "$build/tests/unit/test_foreign"
step segments_1 120 "$build/tests/conformance/conformance" --backend cuda --slots 1 --cases 150 --seed 1
[ "$gpus" -lt 2 ] ||
    step segments_2 120 "$build/tests/conformance/conformance" --backend cuda --slots 2 --cases 100 --seed 2
step steady 60 "$build/tests/unit/test_steady" 1
MOE_RUNS=200 step schedules 240 "${MOE_PYTHON:-python3}" -B "$here/../integration/test_region_schedules.py" \
    "$build" "$here/../golden/models"
grep -h 'schedules:' "$logs/schedules.log"
for class in Streams PeerStreams; do
    [ "$class" = Streams ] || [ "$gpus" -ge 2 ] || continue
    streams "${class}_same" 150 $class.test_y_is_that_of_forward
    streams "${class}_graph" 200 $class.test_a_captured_graph_is_launched_again_and_again
    streams "${class}_frozen" 120 $class.test_requests_need_no_call_of_the_host
    grep -h 'requests ended' "$logs/${class}_frozen.log"
    streams "${class}_worker_killed" 120 $class.test_a_killed_worker_releases_the_graph
    streams "${class}_client_killed" 120 $class.test_nothing_of_a_killed_client_stays
    streams "${class}_times" 150 $class.test_times
    grep -hE '^ *[0-9]+ |^tokens|^client on' "$logs/${class}_times.log"
done
PYTHONPATH="$build/python${PYTHONPATH:+:$PYTHONPATH}" step python 200 "${MOE_PYTHON:-python3}" -B \
    "$here/python_streams.py" "$build" "$here/../golden/models"
echo "$failed steps failed; logs in $logs"
[ "$failed" -eq 0 ]
