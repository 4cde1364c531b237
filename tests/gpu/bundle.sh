#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Copies the programs of a build for tests/gpu/run.sh and tests/bench/layer.sh into one folder,
# stripped, with the libraries that a GPU machine may lack, in the layout of a build.
#
#   tests/gpu/bundle.sh BUILD_DIRECTORY TARGET_DIRECTORY
#
# On the other machine, set LD_LIBRARY_PATH=TARGET/lib (plus NCCL's folder), and use TARGET as the
# build directory. Libraries of the driver, CUDA, NCCL and the C library are not included.
set -eu

case ${1-} in -h|--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
build=$1
target=$2
rm -rf "$target"
mkdir -p "$target/lib"

for program in tests/conformance/conformance tests/conformance/large tests/conformance/faults \
    tests/conformance/faults_one_gpu tests/conformance/golden tests/conformance/test_uncommon \
    tests/conformance/golden_training tests/conformance/curve \
    tests/bench/libmoe_ggemm.so tests/bench/moe_bench tests/bench/load_bench \
    tests/bench/train_bench tests/bench/ep_bench \
    tests/unit/test_ggemm tests/unit/test_packed tests/unit/test_placing tests/unit/test_quantise \
    tests/unit/test_wgrad tests/unit/test_steady \
    tests/unit/test_device_progress tests/unit/test_foreign tests/unit/stream_client \
    tests/integration/regions_schedules client/examples/attention/attention_example \
    daemon/coordinator/moe-coordinator daemon/worker/moe-worker client/moectl/moectl; do
    [ -e "$build/$program" ] || continue
    mkdir -p "$target/$(dirname $program)"
    strip -o "$target/$program" "$build/$program"
    ldd "$build/$program" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' |
        grep -Ev '/(libc|libm|libpthread|librt|libdl|libstdc\+\+|libgcc_s|libnccl|libcu[a-z]*|libnv[a-z]*)[.-]' |
        while read -r library; do
            name=$(basename "$library")
            [ -e "$target/lib/$name" ] || strip -o "$target/lib/$name" "$library" ||
                cp -L "$library" "$target/lib/$name"
        done
done
# Modules, where each program looks for them.
(cd "$build" && find daemon tests -type l -name moed) | while read -r modules; do
    mkdir -p "$target/$modules"
    for module in "$build/$modules"/*.so; do
        [ ! -e "$module" ] || strip -o "$target/$modules/$(basename "$module")" "$module"
    done
done
same=tests/gpu/one_gpu/backend_cuda.so # for --same-gpu
[ ! -e "$build/$same" ] || { mkdir -p "$target/tests/gpu/one_gpu" && strip -o "$target/$same" "$build/$same"; }
gate=tests/integration/libgated_fsync.so # preloaded into workers
[ ! -e "$build/$gate" ] || { mkdir -p "$target/tests/integration" && strip -o "$target/$gate" "$build/$gate"; }
grep MOE_SANITIZE "$build/CMakeCache.txt" >"$target/CMakeCache.txt" # tests ask for it
[ ! -d "$build/python" ] || cp -R "$build/python" "$target/python"
du -sh "$target"
