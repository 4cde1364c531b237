#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Measures the grouped products and torch's on this GPU, for results/products.md: a dense product as
# the chip's reference, all shapes with all tiles and cuBLAS, some of them sustained, the gradients,
# and products with few tiles.
#
#   tests/bench/products.sh LIBRARY TARGET_DIRECTORY
#
# LIBRARY is libmoe_ggemm.so of the target `ggemm_shared`. Writes
# {forward,backward,widths}.{txt,md,json}.
# Takes about three minutes. MOE_PYTHON names another python3 with torch.
set -eu

library=$1
target=$2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$target"
for kind in forward backward widths; do
    case $kind in
        forward) flags="--all-tiles --cublas" ;;
        backward) flags=--backward ;;
        widths) flags="--widths --sustained 0" ;;
    esac
    # shellcheck disable=SC2086
    "${MOE_PYTHON:-python3}" -B "$here/ggemm_vs_torch.py" "$library" $flags \
        --json "$target/$kind.json" --markdown "$target/$kind.md" >"$target/$kind.txt" 2>&1 ||
        { tail -n 20 "$target/$kind.txt"; exit 1; }
    cat "$target/$kind.md"
done
