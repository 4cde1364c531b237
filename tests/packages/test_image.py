# SPDX-License-Identifier: Apache-2.0
"""The CPU image: built with buildah in a clean tree of Debian 12, small, and a group that runs from
it by chroot, as its user, on a read-only root.

    test_image.py BUILD GOLDEN_MODELS [ARCHIVE]

ARCHIVE is an image that deploy/image.sh has made; without it, the test makes one. Exits with 77 and
the reason where root, debootstrap or buildah is missing."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile

import tree
from tree import ROOT, run

sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
import etcd  # noqa: E402

BUILD, MODELS = (os.path.abspath(a) for a in sys.argv[1:3])
BYTES_MAX = 60 * 1000 * 1000


def check(right, text):
    print(("ok      " if right else "FAILED  ") + text)
    if not right:
        sys.exit(1)


def unpack(archive, folder):
    """The image's files in `folder`; returns its configuration."""
    with tarfile.open(archive) as outer:
        def blob(digest):
            return outer.extractfile("./blobs/" + digest.replace(":", "/"))
        manifest = json.load(outer.extractfile("./index.json"))["manifests"][0]["digest"]
        manifest = json.load(blob(manifest))
        for layer in manifest["layers"]:
            with tarfile.open(fileobj=blob(layer["digest"])) as inner:
                inner.extractall(folder)
        return json.load(blob(manifest["config"]["digest"]))["config"]


def size_of(folder):
    return sum(os.lstat(os.path.join(where, name)).st_size
               for where, _, names in os.walk(folder) for name in names)


# Mounts are of this process alone; the root is read-only but for /run/moed.
SERVE = """
mount --bind "$1" "$1"
mkdir "$1/model" "$1/proc" "$1/dev"
mount --bind "$2" "$1/model"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount -o remount,bind,ro "$1"
mount -t tmpfs -o mode=700,uid=65532,gid=65532 run "$1/run/moed"
tree=$1
inside() { chroot --userspec=65532:65532 "$tree" "$@"; }
export PATH=/usr/bin:/usr/sbin:/bin:/sbin MOED_RUNTIME_DIR=/run/moed
if touch "$tree/tmp/x" 2>/dev/null; then echo "the root can be written"; exit 1; fi
endpoint=$(inside /usr/bin/moectl up --model /model --workers 2 --threads 1 --backend cpu \\
    --port 0 --state-dir /run/moed/state --detach | head -n 1)
inside /usr/bin/moectl status --state-dir /run/moed/state
PYTHONPATH=$4 /usr/bin/python3 -B "$3" "$endpoint" "$2" || result=$?
inside /usr/bin/moectl down --state-dir /run/moed/state
exit ${result:-0}
"""

# A coordinator of the image, with its state in the etcd at $2; it listens on port $3.
LEAD = """
mount -t tmpfs -o mode=700,uid=65532,gid=65532 run "$1/run/moed"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
export PATH=/usr/bin:/usr/sbin:/bin:/sbin MOED_RUNTIME_DIR=/run/moed
chroot --userspec=65532:65532 "$1" /usr/bin/moe-coordinator --listen "127.0.0.1:$3" --store etcd \\
    --etcd "$2" --etcd-prefix /moed/image --leader-lease-s 3 --workers 2 --replicas 2 &
for _ in $(seq 300); do
    chroot --userspec=65532:65532 "$1" /usr/bin/moectl status \\
        --endpoint "127.0.0.1:$3" >"$4" 2>&1 || true
    grep '^store *etcd' "$4" && break
    sleep 0.1
done
kill $!
wait $!
cat "$4"
"""


def lead(files, folder):
    if etcd.missing() is not None:
        print("        not with etcd: " + etcd.missing())
        return
    port, = etcd.free_ports(1)
    with etcd.Etcd(folder) as store:
        said = run("unshare", "--mount", "sh", "-euc", LEAD, "sh", files, store.endpoints,
                   str(port), os.path.join(folder, "said"))
    check(re.search("(?m)^store +etcd", said), "a coordinator leads with its state in etcd")


def main():
    given = sys.argv[3:4]
    tree.require(*(() if given else ("debootstrap", "buildah")))
    with tempfile.TemporaryDirectory(prefix="moed-image-") as folder:
        os.chmod(folder, 0o755)
        if not given:
            run(os.path.join(ROOT, "deploy", "image.sh"), "--tree",
                tree.base("bookworm", "build", "run"), folder)
            given = [os.path.join(folder, n) for n in os.listdir(folder) if n.endswith(".oci.tar")]
        files = os.path.join(folder, "files")
        config = unpack(given[0], files)
        check(config["User"] == "65532:65532", "the image has a user")
        size = size_of(files)
        check(size <= BYTES_MAX, "it has %.1f MB" % (size / 1e6))
        missing = [p for p in ("moectl", "moe-worker", "moe-coordinator")
                   if run("chroot", "--userspec=65532:65532", files, "/usr/bin/" + p, "--version",
                          check=False).find("0.") < 0]
        check(not missing, "all programs start %s" % missing)
        done = subprocess.run(["unshare", "--mount", "sh", "-euc", SERVE, "sh", files,
                               os.path.join(MODELS, "qwen3_moe"),
                               os.path.join(ROOT, "deploy", "quickstart_check.py"),
                               os.path.join(BUILD, "python")], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        print(done.stdout)
        check(done.returncode == 0 and "at most 1e-05: yes" in done.stdout,
              "a group serves right numbers from a read-only root, as a user without rights")
        lead(files, folder)


if __name__ == "__main__":
    main()
