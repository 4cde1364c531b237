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
mirror=http://deb.debian.org/debian
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

# Makes the tree of Debian 13 if it is not there, with the packages that building and unit tests
# need. A tree that is half made has another name.
make_tree() {
    [ ! -e "$tree/.complete" ] || return 0
    command -v debootstrap >/dev/null || { echo "debootstrap is not installed" >&2; return 1; }
    rm -rf "$tree"
    debootstrap --variant=minbase trixie "$tree" $mirror || return 1
    # Debian 13 has no grpc-proto, which only an integration test needs.
    packages=$(awk '$1 !~ /^#/ && NF && $2 !~ /^(format|clang)$/ && $1 != "grpc-proto" { print $1 }' \
        deploy/packages.txt)
    # shellcheck disable=SC2086 # a list of words on purpose
    DEBIAN_FRONTEND=noninteractive chroot "$tree" \
        apt-get install -y -qq --no-install-recommends $packages || return 1
    chroot "$tree" apt-get clean
    touch "$tree/.complete"
}

# Runs `build` inside the tree. The mounts are this process's own and go with it.
build_in_tree() {
    make_tree || return 1
    mkdir -p "$tree$source"
    unshare --mount sh -eu -c '
        mount --bind "$2" "$1$2"
        mount -t proc proc "$1/proc"
        mount --rbind /dev "$1/dev"
        exec chroot "$1" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 \
            MOE_JOBS="$3" CTEST_ARGS="$4" sh "$2/tests/compilers.sh" --build "$5"
    ' sh "$tree" "$source" "$jobs" "${CTEST_ARGS-}" "$1"
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
