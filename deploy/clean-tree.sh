#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes a clean tree of Debian or Ubuntu, and runs commands in it. It needs root, debootstrap and a
# mirror.
#
#   deploy/clean-tree.sh make DIR SUITE [PURPOSE ...]
#   deploy/clean-tree.sh run DIR FOLDER COMMAND ...
#
# `make` makes DIR unless it is complete: SUITE (bookworm, trixie, noble), with the packages that
# deploy/packages.txt lists for the purposes. It names packages that SUITE lacks, and goes on.
# Signatures of Ubuntu are checked if its keyring is installed.
# `run` shows FOLDER, and nothing else of this machine's files, at its own path in the tree and runs
# COMMAND there, with a clean environment. Its mounts end with it.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
mirror=${MOE_DEBIAN_MIRROR:-http://deb.debian.org/debian}
ubuntu_mirror=${MOE_UBUNTU_MIRROR:-http://archive.ubuntu.com/ubuntu}
ubuntu_keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg

# Runs a command without this machine's environment, such as a TMPDIR that no tree has.
clean() {
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 HOME=/root \
        DEBIAN_FRONTEND=noninteractive "$@"
}

# Packages of the purposes $2... that the tree $1 can install.
list_packages() {
    tree=$1
    shift
    for purpose in "$@"; do
        awk -v p="$purpose" '$1 !~ /^#/ && $2 == p { print $1 }' "$here/packages.txt"
    done | while read -r package; do
        if chroot "$tree" apt-cache show "$package" >/dev/null 2>&1; then
            echo "$package"
        else
            echo "$tree has no package $package" >&2
        fi
    done
}

bootstrap() {
    suite=$1 tree=$2
    case $suite in
        noble)
            check=--keyring=$ubuntu_keyring
            if [ ! -e "$ubuntu_keyring" ]; then
                echo "no $ubuntu_keyring: the signatures of $ubuntu_mirror are not checked" >&2
                check=--no-check-gpg
            fi
            # All releases of Ubuntu have one script of debootstrap, which older ones lack by name.
            debootstrap --variant=minbase "$check" --components=main,universe "$suite" "$tree" \
                "$ubuntu_mirror" gutsy ;;
        *) debootstrap --variant=minbase "$suite" "$tree" "$mirror" ;;
    esac
}

make_tree() {
    tree=$1 suite=$2
    shift 2
    [ ! -e "$tree/.complete" ] || return 0
    command -v debootstrap >/dev/null || { echo "debootstrap is not installed" >&2; return 1; }
    rm -rf "$tree"
    bootstrap "$suite" "$tree"
    [ -e "$tree/etc/hosts" ] || echo '127.0.0.1 localhost' >"$tree/etc/hosts"
    # shellcheck disable=SC2046 # one argument per package
    clean chroot "$tree" \
        apt-get install -y -qq --no-install-recommends $(list_packages "$tree" "$@")
    chroot "$tree" apt-get clean
    touch "$tree/.complete"
}

# The mounts are in a namespace of this process.
run_in_tree() {
    tree=$1 folder=$(cd "$2" && pwd)
    shift 2
    mkdir -p "$tree$folder"
    # shellcheck disable=SC2016 # expanded by the inner shell
    clean unshare --mount sh -eu -c '
        tree=$1 folder=$2
        shift 2
        mount --bind "$tree" "$tree" # else the root of commands there is no mount: ip netns needs one
        mount --bind "$folder" "$tree$folder"
        mount -t proc proc "$tree/proc"
        mount --rbind /dev "$tree/dev"
        mount -t sysfs -o ro sysfs "$tree/sys" # UCX finds network interfaces there
        exec chroot "$tree" sh -eu -c "cd \"\$1\"; shift; exec \"\$@\"" sh "$folder" "$@"
    ' sh "$tree" "$folder" "$@"
}

case ${1-} in
    make) [ $# -ge 3 ] || exit 2; shift; make_tree "$@" ;;
    run) [ $# -ge 4 ] || exit 2; shift; run_in_tree "$@" ;;
    -h|--help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0" ;;
    *) echo "$0: make or run; see --help" >&2; exit 2 ;;
esac
