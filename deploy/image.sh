#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the image of a commit with buildah, and writes it as an OCI archive.
#
#   deploy/image.sh [--tree DIR] [--cuda] [--commit REF] OUTPUT
#
#   --tree DIR     build in this tree (clean-tree.sh, purposes build and run) instead of in the image
#                  that deploy/Containerfile names, which needs a registry
#   --cuda         the target cuda
#   --commit REF   the commit [HEAD]
#
# Two runs in one tree give the same bytes. Needs root, as it isolates builds by chroot.
set -eu

# shellcheck source=deploy/source.sh
. "$(dirname "$0")/source.sh"

target=${cuda:+cuda}
target=${target:-cpu}
time=$(git show --no-patch --format=%ct "$commit")
version=$(sed -n 's/^project(moed VERSION \([0-9.]*\).*/\1/p' "$source/CMakeLists.txt")
buildah() {
    command buildah --root "$stage/storage" --runroot "$stage/run" --storage-driver vfs "$@"
}

set --
if [ -n "$tree" ]; then
    container=$(buildah from scratch)
    tar -c --one-file-system -C "$tree" . >"$stage/tree.tar"
    buildah add --quiet "$container" "$stage/tree.tar" /
    rm "$stage/tree.tar"
    buildah commit --quiet --rm "$container" moed-base
    set -- --pull-never --build-arg BASE=localhost/moed-base
fi
buildah bud "$@" --isolation chroot --target "$target" --timestamp "$time" --tag "moed:$target" \
    --build-arg COMMIT="$(git rev-parse --short=12 "$commit")" \
    --file "$source/deploy/Containerfile" "$source"
buildah push --quiet "moed:$target" "oci:$stage/image:$version-$target"
tar -c --sort=name --mtime="@$time" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
    -C "$stage/image" . >"$output/moed-$version-$target.oci.tar"
