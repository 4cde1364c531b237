#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes all artefacts of a release from its tag, with checksums and lists of their parts (SBOM).
#
#   deploy/release.sh [--trees DIR] TAG OUTPUT
#
#   --trees DIR   where clean trees of Debian are kept [/var/cache/moed]
#
# TAG is v and the release of CMakeLists.txt (v0.2.0). OUTPUT gets the sources, the Debian packages of
# Debian 12 and 13, the wheel, the CPU image, moed-VERSION.spdx.json and SHA256SUMS. Two runs with the same
# trees give the same bytes. Needs root, debootstrap and buildah (purpose nightly). Packages and
# images with CUDA: package.sh --cuda, image.sh --cuda.
set -eu

trees=/var/cache/moed
while [ $# -gt 2 ]; do
    case $1 in
        --trees) trees=$2; shift 2 ;;
        *) break ;;
    esac
done
case $#,${1-} in
    2,v*) ;;
    1,-h|1,--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "$0: wrong arguments; see --help" >&2; exit 2 ;;
esac
tag=$1
mkdir -p "$2" "$trees"
output=$(cd "$2" && pwd)
trees=$(cd "$trees" && pwd)
[ -z "$(ls -A "$output")" ] || { echo "$0: $2 is not empty" >&2; exit 2; }
cd "$(dirname "$0")/.."

version=${tag#v}
git show "$tag:CMakeLists.txt" | grep -q "^project(moed VERSION $version " ||
    { echo "$0: CMakeLists.txt of $tag does not have release $version" >&2; exit 2; }
time=$(git show --no-patch --format=%ct "$tag^{commit}")
umask 022
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT

git archive --prefix="moed-$version/" "$tag^{commit}" | gzip --no-name -9 >"$output/moed-$version.tar.gz"

for suite in bookworm trixie; do
    tree=$trees/$suite-build-package
    deploy/clean-tree.sh make "$tree" "$suite" build package
    deploy/package.sh --tree "$tree" --commit "$tag^{commit}" "$stage/$suite"
    # The other files of a build tell when and where it ran.
    mv "$stage/$suite"/*.deb "$stage/$suite"/*.dsc "$stage/$suite"/*.tar.xz "$output"
done

tree=$trees/bookworm-build-package
mkdir "$stage/source"
git archive "$tag^{commit}" | tar -x -C "$stage/source"
deploy/clean-tree.sh run "$tree" "$stage/source" sh -euc '
    cmake -S . -B build -DMOE_TESTS=OFF -DMOE_CUDA=OFF
    cmake --build build --parallel "$(nproc)" --target python_package
    SOURCE_DATE_EPOCH=$1 deploy/wheel.sh build out' sh "$time"
mv "$stage"/source/out/*.whl "$output"

deploy/clean-tree.sh make "$trees/bookworm-build-run" bookworm build run
deploy/image.sh --tree "$trees/bookworm-build-run" --commit "$tag^{commit}" "$output"

python3 -B deploy/sbom.py "$version" "$time" "$output"
cd "$output"
# shellcheck disable=SC2035 # no name begins with a dash
sha256sum * >"$stage/SHA256SUMS"
mv "$stage/SHA256SUMS" .
