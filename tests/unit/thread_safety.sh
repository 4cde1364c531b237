#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Calls without their lock do not compile: compiles thread_safety.c as it is, and then with each of
# its violations, with the flags that the build uses. Skipped (77) where clang 19 is missing.
#
#   thread_safety.sh DIR-OF-base FLAG ...
set -u

base=$1
shift
source=$(dirname "$0")/thread_safety.c
clang=
for name in "${MOE_CLANG:-clang-19}" clang; do
    major=$("$name" -dumpversion 2>/dev/null | cut -d. -f1)
    [ -z "$clang" ] && [ "${major:-0}" -ge 19 ] && clang=$name
done
[ -n "$clang" ] || { echo "skipped: clang 19 is not installed"; exit 77; }

compile() {
    plant=$1
    shift
    "$clang" -std=gnu17 -D_GNU_SOURCE -I "$base" -fsyntax-only -DPLANT="$plant" "$@" "$source" 2>&1
}

failed=0
if ! compile 0 "$@"; then
    echo "FAILED: code without a violation is refused"
    failed=1
fi
plants=$(grep -c '^#\(if\|elif\) PLANT == ' "$source")
plant=1
while [ "$plant" -le "$plants" ]; do
    if output=$(compile "$plant" "$@"); then
        echo "FAILED: violation $plant compiles"
        failed=1
    elif ! echo "$output" | grep -q 'thread-safety'; then
        echo "FAILED: violation $plant is refused for another reason:"
        echo "$output"
        failed=1
    fi
    plant=$((plant + 1))
done
[ "$plants" -ge 10 ] || { echo "FAILED: only $plants violations"; failed=1; }
[ "$failed" -eq 0 ] && echo "$clang refuses $plants violations"
exit "$failed"
