#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the wheel of the Python package (py3-none-any) from a build folder.
#
#   deploy/wheel.sh BUILD OUTPUT
#
# Needs Python's build, setuptools and wheel (purpose package). With SOURCE_DATE_EPOCH set, two runs
# give the same bytes.
set -eu

case ${1-} in -h|--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
[ $# -eq 2 ] || { sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 2; }
build=$(cd "$1" && pwd)
mkdir -p "$2"
output=$(cd "$2" && pwd)
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT

# Without what earlier builds and imports left there.
umask 022
mkdir "$stage/python"
(cd "$build/python" && find moed pyproject.toml -name '*.py' -o -name pyproject.toml) |
    tar -c --mode=u=rwX,go=rX --mtime=@0 -C "$build/python" -T - | tar -x -C "$stage/python"
cp "$(dirname "$0")/../LICENSE" "$stage/python"
/usr/bin/python3 -m build --wheel --no-isolation --outdir "$stage/out" "$stage/python" >"$stage/log" 2>&1 ||
    { cat "$stage/log" >&2; exit 1; }
mv "$stage"/out/*.whl "$output"
