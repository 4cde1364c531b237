#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs all tests of the CUDA backend that this machine's GPUs allow: the conformance suite (plain,
# skewed, training) and cases of real sizes, on 1, 2 and 4 GPUs; sessions under fault; golden outputs
# and gradients through the backend and through real daemons; daemons that train: repeated calls,
# workers killed between them, checkpoints, concurrent forward clients; lost workers of groups with
# copies, which only serve or train; torch's AdamW curves; the grouped GEMM against double precision;
# the calls of a steady step; its progress; cuBLAS instead of Hopper's kernels, and NCCL's network
# transport instead of windows.
#
#   tests/gpu/run.sh BUILD_DIRECTORY [--cases N] [--jobs N] [--logs DIR] [--sanitizer] [--only TEXT]
#
#   --cases N     random cases per group size (default 300)
#   --jobs N      concurrent steps (default 4); steps about time run alone, after the others
#   --logs DIR    keeps one log per step there
#   --sanitizer   also memcheck and racecheck of a few cases, on 1 and 2 GPUs: minutes
#   --only TEXT   only steps with names that contain this
#   --list GPUS   prints the steps of a machine with so many Hopper GPUs, and runs nothing
#   --same-gpu N  runs the steps of N GPUs with 2 or more slots on fewer GPUs: all kernels, daemons and
#                 faults, but with one_gpu.c in the place of NCCL. Waits take milliseconds there. With
#                 N = 64, also groups of 64 slots: minutes, some 80 GB of GPU memory
#
# Runs all steps, prints one line each, the last log lines of failed steps, and a summary. Exits 0
# only if no step failed; a step that the backend cannot do counts as skipped. BUILD_DIRECTORY may be
# a folder from bundle.sh. A python3 with numpy, grpc and protobuf drives the daemons (MOE_PYTHON
# names another).
set -eu

usage() {
    echo "$0: $1" >&2
    sed -n '11,20s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

case ${1-} in -h|--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
[ $# -ge 1 ] || usage "a build directory is needed"
build=$(cd "$1" && pwd) || usage "there is no directory $1"
shift
cases=300
jobs=4
logs=
sanitizer=no
only=
list=
same=
while [ $# -gt 0 ]; do
    case $1 in
        --sanitizer) sanitizer=yes; shift; continue ;;
        --cases|--jobs|--logs|--only|--list|--same-gpu) [ $# -ge 2 ] || usage "$1 needs a value" ;;
        *) usage "unknown argument $1" ;;
    esac
    case $1 in
        --cases) cases=$2 ;;
        --jobs) jobs=$2 ;;
        --logs) logs=$2 ;;
        --only) only=$2 ;;
        --list) list=$2 ;;
        --same-gpu) same=$2 ;;
    esac
    shift 2
done

here=$(cd "$(dirname "$0")" && pwd)
models=$here/../golden/models
suite=$build/tests/conformance
faults=$suite/faults
if [ -n "$list" ]; then
    gpus=$list
    hopper=yes
else
    gpus=$(nvidia-smi -L | wc -l)
    hopper=no
    [ "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sort -u)" != 9.0 ] || hopper=yes
fi
# A copy of the build, in which programs find the other module.
if [ -n "$same" ]; then
    twin=$(mktemp -d "$build/../same_gpu.XXXXXX")
    trap 'rm -rf "$twin"' EXIT
    for part in tests/lib tests/conformance tests/integration daemon client python; do
        mkdir -p "$twin/$part"
        cp -al "$build/$part/." "$twin/$part" 2>/dev/null || cp -a "$build/$part/." "$twin/$part"
    done
    find "$twin/tests" "$twin/daemon" -name moed | while read -r modules; do
        rm -rf "$modules"
        ln -s "$build/tests/gpu/one_gpu" "$modules"
    done
    build=$twin
    suite=$build/tests/conformance
    faults=$suite/faults_one_gpu
    gpus=$same
fi
keep=$logs
# Programs must set NCCL's variables themselves.
unset NCCL_NVLS_ENABLE
export MOE_TEST_BACKEND=cuda MOE_TEST_DEVICES="$gpus"
export PYTHONUNBUFFERED=1
PATH=$PATH:/usr/local/cuda/bin

# One step: a name, a limit in seconds and a command, in one line. Its result is a file, so that
# steps can run concurrently.
run_step='
name=${1%% *}; rest=${1#* }; limit=${rest%% *}; command=${rest#* }
begin=$(date +%s)
rc=0
timeout -s KILL "$limit" sh -c "$command" >"$LOGS/$name.log" 2>&1 || rc=$?
case $rc in 0) word=ok ;; 77) word=skip ;; *) word=FAILED ;; esac
printf "%-6s %4d s  %s\n" "$word" $(($(date +%s) - begin)) "$name" | tee "$LOGS/$name.result"
'

# Steps on one slot are those of a machine without --same-gpu. Others need NCCL, link the backend
# without the module, or look at times.
suits() {
    if [ -z "$same" ]; then
        cat
    else
        trained='repeats|versions|one_version|kills|retained |checkpoints|copies|losses'
        grep -E "^[a-z0-9_]*([24](_| )|trained_($trained))" |
            grep -Ev '^(part_of_device|steady|trained_retained_pair|multicast_refused|[a-z]*_1_)'
    fi
}

# Reads steps from standard input and runs $1 of them concurrently.
run_steps() {
    suits | grep -F -- "$only" | xargs -r -d '\n' -n 1 -P "$1" sh -c "$run_step" step || true
}

group_sizes() {
    for n in 1 2 4; do
        [ "$n" -gt "$gpus" ] || echo "$n"
    done
}

# A program of tests/integration, and the tests to run.
integration() {
    program=$1
    shift
    echo "${MOE_PYTHON:-python3} -B $here/../integration/$program.py $build $models $*"
}

# Groups of daemons that train, through repeats, faults and restarts. Tests with more workers than
# GPUs skip themselves.
trained_groups() {
    if [ "$gpus" -lt 2 ]; then
        echo "trained_ids 120 $(integration test_training Repeats.test_an_id_below_a_forgotten_one_is_refused)"
        return 0
    fi
    echo "trained_repeats 300 $(integration test_training Repeats)"
    echo "trained_versions 120 $(integration test_training Versions)"
    echo "trained_one_version 120 $(integration test_training_faults \
        MixedLoad.test_a_request_of_many_steps_sees_one_version)"
    echo "trained_kills 300 $(integration test_training_faults Faults)"
    echo "network_trained_kills 300 MOE_TEST_TRANSPORT=network $(integration test_training_faults Faults)"
    echo "trained_retained 300 $(integration test_retained_activations \
        "SameBits.test_deepseek_v3_2_workers OwnStep DroppedInTime Faults Reported")"
    resumed=
    for test in the_step_after_a_restart_equals_the_undisturbed_one \
        the_step_after_a_restart_of_four_workers the_same_with_adapters \
        one_worker_loads_a_checkpoint_of_two four_workers_load_a_checkpoint_of_two \
        a_group_that_loses_a_worker_goes_back_to_the_checkpoint; do
        resumed="$resumed Checkpoints.test_$test"
    done
    echo "trained_checkpoints 300 $(integration test_checkpoints "$resumed")"
    echo "trained_copies 300 $(integration test_saving \
        "Saving.test_forward_and_backward_go_on_while_the_state_is_copied \
        Saving.test_the_same_with_adapters_while_their_state_is_copied")"
    # A worker is lost while the others have copies of its experts, and train on.
    lost=
    for test in forward_goes_on_without_a_lost_worker gradients_of_a_lost_worker_are_named_and_sent_again \
        the_sequencer_may_be_the_one_that_is_lost a_worker_that_returns_joins_with_the_next_save \
        copies_have_the_same_bits; do
        lost="$lost Losses.test_$test"
    done
    echo "trained_losses 300 $(integration test_training_copies "$lost")"
    echo "trained_losses_in_calls 300 $(integration test_training_copies \
        Losses.test_a_worker_lost_in_any_call_costs_no_answered_step)"
}

jobs_at_once() {
    trained_groups
    echo "one_gpu_twice 120 $suite/faults --backend cuda --slots 2 --only two_slots_on_one_gpu"
    echo "refuse_alone 120 $suite/faults --backend cuda --slots 2 --only a_slot_alone"
    for n in $(group_sizes); do
        echo "conformance_$n 300 $suite/conformance --backend cuda --slots $n --cases $cases --seed $n"
        echo "skewed_$n 300 $suite/conformance --backend cuda --slots $n --cases 80 --seed $n --skewed"
        echo "training_$n 300 $suite/conformance --backend cuda --slots $n --cases $cases --seed $n --training"
        # Hidden sizes up to 16384, 1024 experts, some hundred tokens; the oracle checks sampled tokens.
        echo "large_$n 600 $suite/large --backend cuda --slots $n --cases 20 --seed $n"
        echo "large_training_$n 600 $suite/large --backend cuda --slots $n --cases 8 --seed $n --training" \
            "--weights-mib 1024"
        echo "golden_training_$n 120 $suite/golden_training --backend cuda --slots $n --models $models"
        echo "curve_$n 120 $suite/curve --backend cuda --slots $n --data $models/../training"
        echo "uncommon_$n 300 $suite/test_uncommon --backend cuda --slots $n"
        echo "steady_$n 120 $build/tests/unit/test_steady $n"
        # Only Hopper's tensor cores retain activations: checks that they are used, with the same bits.
        [ "$hopper" = no ] || echo "trained_retained_pair_$n 120 ${MOE_PYTHON:-python3} -B" \
            "$here/../bench/retained_pair.py $build 3 1024 $n"
        [ "$n" -gt 1 ] || continue
        over="--transport network --slots $n --seed $n"
        # Dispatch and combine on a part of the device, different on every slot; checks y and its bits.
        echo "part_of_device_$n 120 $build/tests/bench/ep_bench $n nvlink 24,1,0,64"
        [ "$hopper" = no ] ||
            echo "part_of_device_fp8_$n 120 $build/tests/bench/ep_bench $n nvlink 24,1,0,64 fp8"
        echo "network_uncommon_$n 300 $suite/test_uncommon --backend cuda --transport network --slots $n"
        echo "network_$n 300 $suite/conformance --backend cuda $over --cases $cases"
        echo "domains_$n 300 $suite/conformance --backend cuda --domain-size 1 --slots $n --seed $n --cases 40"
        if [ "$n" -ge 4 ]; then
            over2="--backend cuda --domain-size 2 --slots $n --seed $n"
            echo "pairs_$n 300 $suite/conformance $over2 --cases $cases"
            echo "pairs_skewed_$n 300 $suite/conformance $over2 --cases 40 --skewed"
            echo "pairs_training_$n 300 $suite/conformance $over2 --cases 60 --training"
        fi
        echo "network_skewed_$n 300 $suite/conformance --backend cuda $over --cases 40 --skewed"
        echo "network_large_$n 600 $suite/large --backend cuda $over --cases 8 --training --weights-mib 1024"
        echo "network_training_$n 300 $suite/conformance --backend cuda $over --cases $cases --training"
        echo "network_golden_training_$n 120 $suite/golden_training --backend cuda --slots $n" \
            "--transport network --models $models"
        echo "network_curve_$n 120 $suite/curve --backend cuda --slots $n --transport network" \
            "--data $models/../training"
        for family in mixtral deepseek_v3; do
            echo "network_daemons_${n}_$family 120 MOE_TEST_TRANSPORT=network" \
                "$(integration test_golden "GoldenModels.test_${family}_${n}_workers")"
            echo "network_trained_${n}_$family 120 MOE_TEST_TRANSPORT=network" \
                "$(integration test_training "Gradients.test_${family}_${n}_workers")"
        done
    done
    echo "conformance_cublas 300 $suite/conformance --backend cuda --slots 1 --cases $cases --seed 1 --gemm cublas"
    # Weights of one kind beyond 2^31 elements and 2^32 bytes.
    echo "large_buffers 300 $suite/large --backend cuda --slots 1 --first 1 --cases 1 --weights-mib 9216"
    echo "golden_backend 120 $suite/golden --backend cuda --models $models"
    echo "golden_quantised 120 $suite/golden --backend cuda --models $models/../quantised"
    echo "golden_uncommon 120 $suite/golden --backend cuda --models $models/../uncommon"
    echo "golden_numpy 120 $suite/golden --backend cuda --models $models/../numpy"
    echo "golden_uncommon_cublas 120 $suite/golden --backend cuda --models $models/../uncommon --gemm cublas"
    echo "golden_numpy_cublas 120 $suite/golden --backend cuda --models $models/../numpy --gemm cublas"
    # Quantised checkpoints through daemons: as they are, decoded, and with adapters.
    echo "quantised_fp8 300 $(integration test_quantised Fp8)"
    echo "quantised_mx 300 $(integration test_quantised Mx)"
    echo "quantised_4_bits 300 $(integration test_quantised FourBits)"
    echo "quantised_decoded 300 $(integration test_quantised Decoded)"
    echo "quantised_training 300 $(integration test_quantised Training)"
    # Layers that only serve, through daemons: Kimi-K3, Nemotron-3, Phi-3.5-MoE.
    echo "latent_daemons 600 $(integration test_latent)"
    echo "uncommon_daemons 600 $(integration test_uncommon)"
    [ "$hopper" = no ] || {
        echo "golden_w8a8 120 $suite/golden --backend cuda --models $models/../quantised --fp8-compute w8a8"
        echo "fp8_compute 300 $(integration test_fp8_compute Serving Refusing)"
    }
    # cuBLAS multiplies bf16 only: the same models, decoded.
    echo "golden_quantised_cublas 120 $suite/golden --backend cuda --models $models/../quantised --gemm cublas"
    echo "golden_cublas 120 $suite/golden --backend cuda --models $models --gemm cublas"
    echo "ggemm 120 $build/tests/unit/test_ggemm"
    echo "packed 120 $build/tests/unit/test_packed"
    echo "placing 120 $build/tests/unit/test_placing"
    echo "quantise 120 $build/tests/unit/test_quantise"
    echo "wgrad 120 $build/tests/unit/test_wgrad"
    echo "device_progress 120 $build/tests/unit/test_device_progress"
    echo "foreign 60 $build/tests/unit/test_foreign"
    for n in $(group_sizes); do
        for model in "$models"/*/; do
            family=$(basename "$model")
            echo "daemons_${n}_$family 120 $(integration test_golden "GoldenModels.test_${family}_${n}_workers")"
            echo "trained_${n}_$family 120 $(integration test_training "Gradients.test_${family}_${n}_workers")"
        done
    done
}

alone() {
    # Masks of 64 slots, two turns of sending, more than 32 copies of an expert: two cases that have
    # them, with and without the quick regions. Each wait lasts a round of all slots.
    if [ "$gpus" -ge 64 ]; then
        many="$suite/conformance --backend cuda --slots 64 --seed 1"
        echo "conformance_64 600 $many --first 4 --cases 2"
        echo "network_64 600 $many --first 4 --cases 2 --transport network"
        echo "domains_64 600 $many --first 4 --cases 2 --domain-size 8"
        echo "training_64 600 $many --first 5 --cases 1 --training"
    fi
    for n in $(group_sizes); do
        [ "$n" -gt 1 ] || continue
        # The backend refuses a setting that windows do not support, and names it.
        [ "$n" -ne 2 ] || echo "multicast_refused 60 NCCL_NVLS_ENABLE=1" \
            "$suite/faults --backend cuda --slots 2 --only joining_and_leaving 2>&1" \
            "| grep -F 'NCCL_NVLS_ENABLE = 1: a group of GPUs needs it to be 0'"
        echo "faults_$n 300 $faults --backend cuda --slots $n"
        echo "network_faults_$n 300 $faults --backend cuda --slots $n --transport network"
        # A worker is killed, stopped or drained while others have copies of its experts.
        echo "replicas_$n 300 MOE_TEST_DEVICES=$n ${MOE_PYTHON:-python3} -B $here/../chaos/test_replicas.py" \
            "$build $models Replicas"
    done
    # Requests of CUDA streams; alone, because other work on the GPU delays the waits.
    [ -n "$same" ] || echo "streams 600 ${MOE_PYTHON:-python3} -B $here/streams.py $build $models Streams"
    [ "$gpus" -lt 2 ] || [ -n "$same" ] ||
        echo "peer_streams 600 ${MOE_PYTHON:-python3} -B $here/streams.py $build $models PeerStreams"
    [ "$gpus" -lt 2 ] || echo "trained_mixed_load 120 $(integration test_training_faults \
        MixedLoad.test_forward_clients_go_on_during_training)"
    [ "$sanitizer" = yes ] || return 0
    # Errors that calls return are not findings: the backend and NCCL probe the device's features.
    sanitizer="compute-sanitizer --target-processes all --report-api-errors no --error-exitcode 9 --tool"
    for tool in memcheck racecheck; do
        echo "$tool 600 $sanitizer $tool $suite/conformance --backend cuda --slots 1 --cases 25 --seed 9"
    done
    # A refused pass in a session of several slots, one of them live.
    echo "memcheck_alone 600 $sanitizer memcheck $suite/faults --backend cuda --slots 2 --only a_slot_alone"
    small="--weights-mib 64 --mega-products 4 --tokens 200 --samples 4 --training"
    echo "memcheck_large 600 $sanitizer memcheck $suite/large --backend cuda --slots 1 --cases 2 $small"
    [ "$gpus" -ge 2 ] || return 0
    echo "memcheck_2 600 $sanitizer memcheck $suite/conformance --backend cuda --slots 2 --cases 15 --seed 9"
    echo "memcheck_training_2 600 $sanitizer memcheck $suite/conformance --backend cuda --slots 2 --cases 5" \
        "--seed 9 --training"
    echo "memcheck_large_2 600 $sanitizer memcheck $suite/large --backend cuda --slots 2 --cases 2 $small"
    echo "racecheck_2 600 $sanitizer racecheck $suite/conformance --backend cuda --slots 2 --cases 5 --seed 9"
}

if [ -n "$list" ]; then
    { jobs_at_once; alone; } | grep -F -- "$only"
    exit
fi
[ -n "$logs" ] || logs=$(mktemp -d)
mkdir -p "$logs"
rm -f "$logs"/*.log "$logs"/*.result
export LOGS="$logs"
echo "${same:+one GPU as }$gpus GPUs: $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)"
jobs_at_once | run_steps "$jobs"
alone | run_steps 1

passed=$(cat "$logs"/*.result 2>/dev/null | grep -c '^ok' || true)
skipped=$(cat "$logs"/*.result 2>/dev/null | grep -c '^skip' || true)
failed=$(cat "$logs"/*.result 2>/dev/null | grep -c '^FAILED' || true)
grep -l '^FAILED' "$logs"/*.result 2>/dev/null | while read -r result; do
    log=${result%.result}.log
    echo "==== $(basename "$log")"
    tail -n 25 "$log"
done
[ -n "$keep" ] || rm -rf "$logs"
echo "on $(group_sizes | tr '\n' ' ')of $gpus GPUs: $passed steps passed, $skipped skipped, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
