#!/bin/sh
# Builds everything and runs all tests through ctest; exits non-zero if anything fails.
#
#   tests/run.sh [--yes] [--preset release|debug|asan] [ctest arguments ...]
#
# Installs the packages it needs (deploy/packages.txt) where they are missing.
set -eu

cd "$(dirname "$0")/.."
yes=
preset=release
while [ $# -gt 0 ]; do
    case $1 in
        --yes) yes=--yes; shift ;;
        --preset) preset=$2; shift 2 ;;
        -h|--help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) break ;;
    esac
done

deploy/install-packages.sh $yes build run test
cmake --preset "$preset"
cmake --build --preset "$preset" --parallel "$(nproc)"
exec ctest --preset "$preset" "$@"
