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
# Two runs in one tree should give the same bytes; that was not seen yet. Needs root, as it isolates builds by chroot.
set -eu

tree= target=cpu commit=HEAD
while [ $# -gt 1 ]; do
    case $1 in
        --tree) tree=$(cd "$2" && pwd); shift 2 ;;
        --cuda) target=cuda; shift ;;
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

stage=$(mktemp -d)
# Builds leave files of other users, and mounts end with their commands.
trap 'rm -rf "$stage"' EXIT
mkdir "$stage/source"
git archive "$commit" | tar -x -C "$stage/source"
time=$(git show --no-patch --format=%ct "$commit")
version=$(sed -n 's/^project(moed VERSION \([0-9.]*\).*/\1/p' "$stage/source/CMakeLists.txt")
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
    --file "$stage/source/deploy/Containerfile" "$stage/source"
buildah push --quiet "moed:$target" "oci:$stage/image:$version-$target"
tar -c --sort=name --mtime="@$time" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
    -C "$stage/image" . >"$output/moed-$version-$target.oci.tar"
