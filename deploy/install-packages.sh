#!/bin/sh
# Installs what deploy/packages.txt lists for the given purposes and this machine lacks.
#
#   deploy/install-packages.sh [--yes] build|run|test ...
#
# Says which packages it will install. Asks first, unless --yes is given or nobody is at a terminal.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
yes=no
purposes=
for argument in "$@"; do
    case $argument in
        --yes) yes=yes ;;
        build|run|test) purposes="$purposes $argument" ;;
        *) echo "usage: $0 [--yes] build|run|test ..." >&2; exit 2 ;;
    esac
done

missing=
for purpose in $purposes; do
    for package in $(awk -v p="$purpose" '$1 !~ /^#/ && $2 == p { print $1 }' "$here/packages.txt"); do
        dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed ||
            missing="$missing $package"
    done
done
[ -n "$missing" ] || exit 0

echo "Packages to install:$missing" >&2
if [ "$yes" = no ] && [ -t 0 ]; then
    printf 'Install them now? [y/N] ' >&2
    read -r answer
    case $answer in y|Y|yes) ;; *) echo "Nothing was installed." >&2; exit 1 ;; esac
fi

sudo=
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "Not root, and there is no sudo." >&2; exit 1; }
    sudo=sudo
fi
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq >&2
# shellcheck disable=SC2086 # a list of words on purpose
$sudo apt-get install -y -qq --no-install-recommends $missing >&2
