#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Measures a whole MoE layer with moed and torch on the same GPUs, and prints their ratios.
#
#   tests/bench/layer.sh BUILD_DIRECTORY [GPUS] [OUTPUT_DIRECTORY]
#
# SHAPES, TOKENS, ROUTINGS, REPEATS and WEIGHTS in the environment select the runs (moe_bench --help).
# LIKE=4 gives each GPU the experts that it would have in a group of four.
# Writes moed.json and torch.json (one object per line) to the output directory. Fails if a result is
# wrong. Needs a python3 with torch. Multicast is off because shared hosts forbid it.
set -eu

build=$1
gpus=${2:-$(nvidia-smi -L | wc -l)}
out=${3:-.}
here=$(dirname "$0")
shapes=${SHAPES:-deepseek-v3,qwen3-30b,mixtral-8x7b}
tokens=${TOKENS:-1,32,128,512,4096}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1

rm -f "$out/moed.json" "$out/torch.json"
"$build/tests/bench/moe_bench" --backend cuda --slots "$gpus" --shapes "$shapes" \
    --tokens "$tokens" --repeats "${REPEATS:-50}" --like-slots "${LIKE:-0}" \
    --routings "${ROUTINGS:-router}" --weights "${WEIGHTS:-bf16}" --json "$out/moed.json"
python3 "$here/torch_baseline.py" --gpus "$gpus" --shapes "$shapes" --tokens "$tokens" \
    --repeats "${REPEATS:-50}" --like-gpus "${LIKE:-0}" --json "$out/torch.json" \
    --moed "$out/moed.json"
