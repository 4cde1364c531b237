#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs missing packages that deploy/packages.txt lists for the given purposes.
#
#   deploy/install-packages.sh [--yes] [--log FILE] build|run|test|format|clang|nightly|package ...
#
# Prints the packages that it will install. On a terminal it asks first, unless --yes is given. With
# --log the output of the package manager goes to FILE. It names packages that this distribution lacks,
# and goes on: what needs one of them says so.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
yes=no
log=
purposes=
while [ $# -gt 0 ]; do
    case $1 in
        --yes) yes=yes; shift ;;
        --log) log=$2; shift 2 ;;
        -h|--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        build|run|test|format|clang|nightly|package) purposes="$purposes $1"; shift ;;
        *) echo "usage: $0 [--yes] [--log FILE] build|run|test|format|clang|nightly|package ..." >&2; exit 2 ;;
    esac
done

missing=
for purpose in $purposes; do
    of_purpose=$(awk -v p="$purpose" '$1 !~ /^#/ && $2 == p { print $1 }' "$here/packages.txt")
    for package in $of_purpose; do
        dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed ||
            missing="$missing $package"
    done
done
[ -n "$missing" ] || exit 0

# Leaves out what this distribution lacks. Says so on 3, which no log takes.
exec 3>&2
drop_unknown() {
    known=
    for package in $missing; do
        if apt-cache show "$package" >/dev/null 2>&1; then
            known="$known $package"
        else
            echo "This distribution has no package $package." >&3
        fi
    done
    missing=$known
}
# Before the first `apt-get update` all are unknown.
if ls /var/lib/apt/lists/*_Packages* >/dev/null 2>&1; then
    drop_unknown
    [ -n "$missing" ] || exit 0
fi

echo "Packages to install:$missing" >&2
if [ "$yes" = no ] && [ -t 0 ]; then
    printf 'Install them now? [y/N] ' >&2
    read -r answer
    case $answer in y|Y|yes) ;; *) echo "No package was installed." >&2; exit 1 ;; esac
fi

sudo=
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "Installing needs root, and sudo is missing." >&2; exit 1; }
    sudo=sudo
fi
export DEBIAN_FRONTEND=noninteractive
install_missing() {
    $sudo apt-get update -qq || return 1
    drop_unknown
    # shellcheck disable=SC2086 # intended: one argument per package
    [ -z "$missing" ] || $sudo apt-get install -y -qq --no-install-recommends $missing
}
if [ -z "$log" ]; then
    install_missing >&2
elif ! install_missing >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "apt-get failed; the complete log is in $log." >&2
    exit 1
fi
