#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A partition of a group that trains, with real daemons in two network namespaces: the coordinator
# in A, both workers in B. The link goes down, and two other workers start in A. The cut side has to
# refuse changes before the other side takes any; healed, the old workers end their view.
#
#   partition.sh BUILD MODEL     exits with 77 where namespaces cannot be made (needs root)
set -u
B=$1 M=$2 A=moeA$$ C=moeB$$ dir=$(mktemp -d)
pids=()
cleanup() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null
    wait
    ip netns del $A 2>/dev/null
    ip netns del $C 2>/dev/null
    rm -rf "$dir"
}
trap cleanup EXIT
fail() { echo "FAILED: $1"; tail -n 5 "$dir"/*.log; exit 1; }
ip netns add $A 2>/dev/null && ip netns add $C 2>/dev/null || { echo "no namespaces"; exit 77; }
ip link add va$$ netns $A type veth peer name vb$$ netns $C || exit 77
ip -n $A addr add 10.99.0.1/24 dev va$$
ip -n $C addr add 10.99.0.2/24 dev vb$$
for n in $A $C; do ip -n $n link set lo up; done
ip -n $A link set va$$ up
ip -n $C link set vb$$ up
mkdir -m 700 "$dir/run" "$dir/checkpoints"
export MOED_RUNTIME_DIR=$dir/run

# worker NAMESPACE NAME ADDRESS
worker() {
    ip netns exec "$1" "$B/daemon/worker/moe-worker" --coordinator 10.99.0.1:7701 --model "$M" \
        --listen "$3" --insecure --training adamw --training-dir "$dir/checkpoints" \
        --worker-id "$2" >"$dir/$2.log" 2>&1 &
    pids+=($!)
}
# change NAMESPACE ADDRESS: is a change of training answered?
change() {
    timeout 20 ip netns exec "$1" "$B/client/moectl/moectl" training zero-grad --timeout 1 \
        --endpoint "$2" >"$dir/change.txt" 2>&1
}
# await FILE PATTERN SECONDS
await() {
    for _ in $(seq $((10 * $3))); do
        grep -q "$2" "$dir/$1.log" && return
        sleep 0.1
    done
    fail "no \"$2\" in $1.log"
}

ip netns exec $A "$B/daemon/coordinator/moe-coordinator" --listen 10.99.0.1:7700 \
    --control-listen 10.99.0.1:7701 --insecure --workers 2 --state-dir "$dir/state" \
    >"$dir/coordinator.log" 2>&1 &
pids+=($!)
worker $C w0 10.99.0.2:7600
worker $C w1 10.99.0.2:7601
await coordinator "serving under epoch 1" 30
change $C 10.99.0.2:7600 || fail "the whole group changes nothing"

ip -n $A link set va$$ down
worker $A x0 10.99.0.1:7710
worker $A x1 10.99.0.1:7711
await coordinator "serving under epoch 2" 40
# Time stamps of the two sides are of one clock.
cut=$(grep -h "no lease" "$dir/w0.log" | head -n 1 | cut -c1-24)
gone=$(grep -h "lost: lease expired" "$dir/coordinator.log" | head -n 1 | cut -c1-24)
echo "cut side without a lease at $cut, slots given away at $gone"
[ -n "$cut" ] && [ -n "$gone" ] && [[ $cut < $gone ]] || fail "the lease outlived the slot"
change $C 10.99.0.2:7600 && fail "the cut side changes something"
change $A 10.99.0.1:7710 || fail "the other side changes nothing"
change $C 10.99.0.2:7601 && fail "the cut side changes something"

ip -n $A link set va$$ up
await w0 "epoch 1 is over" 30
await w1 "epoch 1 is over" 30
echo "healed: the old workers have left their view"
