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

# shellcheck source=deploy/source.sh
. "$(dirname "$0")/source.sh"

cp -r "$source/deploy/debian" "$source/debian"
git rev-parse --short=12 "$commit" >"$source/debian/commit"
# shellcheck disable=SC1091 # a file of the distribution
suffix=$(. "$tree/etc/os-release"; echo "$ID$VERSION_ID" | sed 's/^debian/deb/')
sed -i "1s/)/+$suffix)/" "$source/debian/changelog"

set -- dpkg-buildpackage --no-sign --jobs=auto ${cuda:+-Ppkg.moed.cuda}
if [ -n "$tree" ]; then
    deploy/clean-tree.sh run "$tree" "$stage" env -C "$source" "$@"
else
    (cd "$source" && "$@")
fi
rm -rf "$source"
mv "$stage"/* "$output"
