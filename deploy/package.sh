#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the Debian packages of a commit.
#
#   deploy/package.sh [--tree DIR] [--cuda] [--commit REF] OUTPUT
#
#   --tree DIR     build in this tree (clean-tree.sh, purposes build and package), which needs root;
#                  without it on this machine
#   --cuda         also moed-cuda; it needs the CUDA Toolkit and NCCL
#   --commit REF   the commit [HEAD]
#
# The version is that of deploy/debian/changelog, with the distribution: 0.2.0+deb12.
set -eu

tree= profiles= commit=HEAD
while [ $# -gt 1 ]; do
    case $1 in
        --tree) tree=$(cd "$2" && pwd); shift 2 ;;
        --cuda) profiles=-Ppkg.moed.cuda; shift ;;
        --commit) commit=$2; shift 2 ;;
        *) break ;;
    esac
done
case $#,${1-} in
    1,-h|1,--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    1,-*|0,*|[2-9],*) echo "$0: wrong arguments; see --help" >&2; exit 2 ;;
esac
mkdir -p "$1"
output=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."

umask 022
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
source=$stage/moed
mkdir "$source"
git archive "$commit" | tar -x -C "$source"
cp -r "$source/deploy/debian" "$source/debian"
git rev-parse --short=12 "$commit" >"$source/debian/commit"
# shellcheck disable=SC1091 # a file of the distribution
suffix=$(. "$tree/etc/os-release"; echo "$ID$VERSION_ID" | sed 's/^debian/deb/')
sed -i "1s/)/+$suffix)/" "$source/debian/changelog"

set -- dpkg-buildpackage --no-sign --jobs=auto $profiles
if [ -n "$tree" ]; then
    deploy/clean-tree.sh run "$tree" "$stage" env -C "$source" "$@"
else
    (cd "$source" && "$@")
fi
rm -rf "$source"
mv "$stage"/* "$output"
