# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2034,SC2164 # for files that read this one; they have set -eu
# package.sh and image.sh read this file: both have the command line
#
#   [--tree DIR] [--cuda] [--commit REF] OUTPUT
#
# It sets tree, cuda (yes or nothing), commit and output, and makes the folder of output. It makes the folder
# $stage, which is removed when the script ends, with the files of the commit in $source. The current
# folder becomes the root of the repository.

tree='' cuda='' commit=HEAD
while [ $# -gt 1 ]; do
    case $1 in
        --tree) tree=$(cd "$2" && pwd); shift 2 ;;
        --cuda) cuda=yes; shift ;;
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
