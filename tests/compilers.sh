#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds with every supported compiler and optimisation level, warnings as errors, and runs the unit
# tests of each build; exits non-zero if one of them fails.
#
#   tests/compilers.sh [--list] [NAME ...]
#
# A NAME is COMPILER-LEVEL; without names all of them run, one after the other:
#   COMPILER   gcc       the machine's cc
#              clang     clang-19
#              debian13  gcc 14 in a tree of Debian 13, which is made on the first run
#   LEVEL      O2, O3, or O3-lto (link-time optimisation)
#
# The builds lie in build/compilers/NAME, their output in build/compilers/NAME.log. Environment:
#   MOE_DEBIAN13   the tree of Debian 13 [/var/cache/moed-debian13]; it needs root and some 1.5 GB
#   MOE_JOBS       processes of one build [number of cores]
#   CTEST_ARGS     more arguments of ctest
set -eu

cd "$(dirname "$0")/.."
source=$PWD
tree=${MOE_DEBIAN13:-/var/cache/moed-debian13}
jobs=${MOE_JOBS:-$(nproc)}
all=
for compiler in gcc clang debian13; do
    for level in O2 O3 O3-lto; do
        all="$all $compiler-$level"
    done
done

# Configures, builds and tests $1 = NAME. Runs on the machine or inside the tree.
build() {
    dir=build/compilers/$1
    set -- "$1" -DMOE_WERROR=ON -DMOE_CUDA=OFF
    case $1 in
        *-O2) set -- "$@" -DCMAKE_BUILD_TYPE=RelWithDebInfo ;;
        *-O3) set -- "$@" -DCMAKE_BUILD_TYPE=Release ;;
        *-O3-lto)
            set -- "$@" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INTERPROCEDURAL_OPTIMIZATION=ON ;;
    esac
    case $1 in
        clang-*) set -- "$@" -DCMAKE_C_COMPILER=clang-19 ;;
    esac
    shift
    cmake -S . -B "$dir" "$@" || return 1
    cmake --build "$dir" --parallel "$jobs" || return 1
    # shellcheck disable=SC2086 # a list of words on purpose
    ctest --test-dir "$dir/tests/unit" --output-on-failure -j "$jobs" ${CTEST_ARGS-}
}

build_in_tree() {
    deploy/clean-tree.sh make "$tree" trixie build run test || return 1
    deploy/clean-tree.sh run "$tree" "$source" \
        env MOE_JOBS="$jobs" CTEST_ARGS="${CTEST_ARGS-}" tests/compilers.sh --build "$1"
}

case ${1-} in
    --list) for name in $all; do echo "$name"; done; exit 0 ;;
    --build) build "$2"; exit ;;
    -h|--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac

mkdir -p build/compilers
failed=
for name in ${*:-$all}; do
    case " $all " in
        *" $name "*) ;;
        *) echo "$0: there is no $name; see --list" >&2; exit 2 ;;
    esac
    log=build/compilers/$name.log
    status=passed
    case $name in
        debian13-*) build_in_tree "$name" >"$log" 2>&1 || status=FAILED ;;
        *) build "$name" >"$log" 2>&1 || status=FAILED ;;
    esac
    # The linker's own passes warn without -Werror.
    if grep -q 'warning:' "$log"; then
        status=FAILED
    fi
    echo "$name: $status ($(grep -E 'tests passed|tests failed' "$log" || echo 'no tests ran'))"
    if [ $status = FAILED ]; then
        failed="$failed $name"
        grep -E 'warning:|error:|\*\*\*' "$log" | head -n 20 || tail -n 20 "$log"
    fi
done
[ -z "$failed" ] || { echo "Failed:$failed; the logs are in build/compilers/" >&2; exit 1; }
