#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# same_bits.sh CONFORMANCE 'OPTIONS' 'OTHER OPTIONS': both runs of the suite give y the same bits on
# every slot.
set -u

bits() {
    # shellcheck disable=SC2086 # options are words
    "$@" >out.$$ || { cat out.$$; rm -f out.$$; return 1; }
    sed -n 's/^[a-z]*, \(slot [0-9]*\) of .* bits of y \([0-9a-f]*\)$/\1 \2/p' out.$$ | sort
    rm -f out.$$
}

program=$1
one=$(bits "$program" $2) || { echo "$one"; exit 1; }
other=$(bits "$program" $3) || { echo "$other"; exit 1; }
echo "$2: $one"
echo "$3: $other"
[ -n "$one" ] && [ "$one" = "$other" ]
