#!/bin/sh
# Holds the CUDA backend to the conformance suite on 1, 2 and 4 of the GPUs that are here, to the
# golden models, and to compute-sanitizer. Exits non-zero at the first failure.
#
#   tests/gpu/run.sh BUILD_DIRECTORY [CASES]
set -eu

build=$1
cases=${2:-300}
suite=$build/tests/conformance/conformance
models=$(dirname "$0")/../golden/models
gpus=$(nvidia-smi -L | wc -l)

for slots in 1 2 4; do
    [ "$slots" -le "$gpus" ] || continue
    "$suite" --backend cuda --slots "$slots" --cases "$cases" --seed "$slots"
done
"$build/tests/conformance/golden" --backend cuda --models "$models"

PATH=$PATH:/usr/local/cuda/bin
for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 9 \
        "$suite" --backend cuda --slots 1 --cases 25 --seed 9
done
