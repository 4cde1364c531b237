#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds everything and runs all tests through ctest; exits non-zero if anything fails.
#
#   tests/run.sh [--yes] [--preset release|debug|asan|clang|tsan] [--quick | --nightly] [CTEST ...]
#
#   --yes       install packages without asking
#   --quick     only tests that take seconds (label quick)
#   --nightly   only the long matrices (label nightly), on the release build; their result is
#               written to tests/nightly.md
#   CTEST       arguments of ctest: they begin with one of a single dash (-R REGEX), or follow `--`
#
# Installs the packages it needs (deploy/packages.txt) where they are missing.
set -eu

cd "$(dirname "$0")/.."
refuse() {
    echo "tests/run.sh: unknown argument '$1'; see --help. Arguments of ctest follow --" >&2
    exit 2
}

yes=
preset=release
tests=
while [ $# -gt 0 ]; do
    case $1 in
        --yes) yes=--yes; shift ;;
        --preset) preset=${2:?a name follows --preset}; shift 2 ;;
        --quick) tests=quick; shift ;;
        --nightly) tests=nightly; shift ;;
        -h|--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --) shift; break ;;
        -[!-]*) break ;;
        *) refuse "$1" ;;
    esac
done
if [ -n "$tests" ] && [ "$preset" != release ]; then
    echo "tests/run.sh: --$tests runs on the preset release" >&2
    exit 2
fi

case $preset in
    clang|tsan) clang=clang ;;
    *) clang= ;;
esac
case $tests in
    nightly) nightly=nightly ;;
    *) nightly= ;;
esac
deploy/install-packages.sh $yes build run test $clang $nightly
cmake --preset "$preset"
cmake --build --preset "$preset" --parallel "$(nproc)"
[ "$tests" = nightly ] || exec ctest --preset "${tests:-$preset}" "$@"

log=$PWD/build/release/nightly.log
result=0
begin=$(date +%s)
ctest --preset nightly --output-log "$log" "$@" || result=$?
commit=$(git describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null || echo unknown)
failed=$(sed -n 's/^[[:space:]]*[0-9]* - \([a-z0-9_]*\) (\(Failed\|Timeout\|SEGFAULT\|.*Exception.*\)).*/\1/p' "$log" |
    tr '\n' ' ')
echo "| $(date +%F) | $commit | ${*:-all} | $(sed -n 's/% tests passed,.*out of/ % of/p' "$log") |" \
    "${failed:--} | $((($(date +%s) - begin + 59) / 60)) min |" >>tests/nightly.md
exit $result
