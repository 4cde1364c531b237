#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the programs, and makes a folder with them, their libraries, and what else an image needs.
#
#   deploy/image-files.sh ROOT [argument of cmake ...]
#
# It runs as root on a system of the packages build and run, such as a stage of deploy/Containerfile.
set -eu

[ $# -ge 1 ] || { sed -n '3,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 2; }
root=$1 user=65532
shift
cd "$(dirname "$0")/.."
# Always the same folder: its name becomes part of the programs.
stage=$root.build
trap 'rm -rf "$stage"' EXIT
rm -rf "$stage"
mkdir -p "$stage"

cmake -S . -B "$stage/build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_INSTALL_PREFIX=/usr \
    -DMOE_TESTS=OFF "$@"
cmake --build "$stage/build" --parallel "$(nproc)"
DESTDIR=$stage/all cmake --install "$stage/build" --strip

umask 022
rm -rf "$root"
mkdir -p "$root/usr/bin" "$root/usr/lib" "$root/usr/lib64" "$root/usr/share/doc/moed" \
    "$root/etc/moed" "$root/run/moed" "$root/tmp"
ln -s usr/lib "$root/lib"
ln -s usr/lib64 "$root/lib64"
cp "$stage"/all/usr/bin/* "$root/usr/bin"
cp LICENSE "$stage"/all/usr/share/doc/moed/*.conf "$root/usr/share/doc/moed"
libraries=$(cd "$stage/all/usr" && find lib -name libmoeclient.so -printf '%h\n')
mkdir -p "$root/usr/$libraries"
for module in "$stage/all/usr/$libraries"/moed/*; do
    [ -e "$module" ] || continue
    mkdir -p "$root/usr/$libraries/moed"
    cp "$module" "$root/usr/$libraries/moed"
done

# All libraries go to the one folder in which the loader looks. The driver's are not of the image.
# UCX, for groups on several hosts, is opened at run time.
ucx=$(ldconfig -p | awk '$1 == "libucp.so.0" { print $NF; exit }')
needed=$(for file in "$root"/usr/bin/* "$root/usr/$libraries"/moed/* $ucx; do
    [ ! -e "$file" ] || ldd "$file"
done)
if echo "$needed" | grep 'not found' | grep -v 'libcuda\.so\|libnvidia-ml\.so'; then
    exit 1
fi
loader=$(echo "$needed" | awk '$1 ~ /^\/lib.*\/ld-linux/ { print $1; exit }')
copied=$(echo "$ucx" "$(echo "$needed" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }')" |
    tr ' ' '\n' | sort -u | grep -v 'libcuda\.so\|libnvidia-ml\.so')
for library in $copied; do
    cp -L "$library" "$root/usr/$libraries"
done
cp -L "$loader" "$root/usr/lib64"

# The licences of the libraries, and a list for release.sh: package, version, package of its source,
# its version. dpkg knows a file of a merged /usr by one of two names.
for library in $copied $loader; do
    file=$(readlink -f "$library")
    { dpkg-query -S "$file" "${file#/usr}" 2>/dev/null || true; } | sed 's/: .*//'
done | sort -u | while read -r package; do
    name=${package%:*}
    mkdir -p "$root/usr/share/doc/$name"
    cp -L "/usr/share/doc/$name/copyright" "$root/usr/share/doc/$name"
    dpkg-query -W -f '${Package} ${Version} ${source:Package} ${source:Version}\n' "$package"
done >"$root/usr/share/doc/moed/libraries"

echo "moed:x:$user:$user:moed daemons:/run/moed:/usr/sbin/nologin" >"$root/etc/passwd"
echo "moed:x:$user:" >"$root/etc/group"
echo 'hosts: files dns' >"$root/etc/nsswitch.conf"
chmod 1777 "$root/tmp"
chmod 700 "$root/run/moed"
chown "$user:$user" "$root/run/moed"
