# SPDX-License-Identifier: Apache-2.0
"""The life of the Debian packages in clean trees of Debian: built, judged by lintian, installed
in a booted tree, started, checked with a golden model, upgraded from the version before under load,
purged with nothing left. If package.sh made those with CUDA, they are installed too, without any
package of NVIDIA.

    test_packages.py GOLDEN_MODELS SUITE [PACKAGES]

PACKAGES is a folder of packages that deploy/package.sh has made for SUITE; without it, the test
makes and judges them. Exits with 77 and the reason where root, debootstrap, systemd-nspawn or the
history is missing."""

import glob
import os
import re
import shutil
import sys
import tempfile
import time

import tree
from tree import ROOT, run

MODELS = os.path.abspath(sys.argv[1])
SUITE = sys.argv[2]
# The last commit of the release before. 0.1 had no packages, no sd_notify and no socket for
# operators: its daemons get the packages' files, with units that know neither.
BEFORE, BEFORE_RELEASE = "cfbd6dcd933cda84c1c14a83d0ebab62579f1d9a", "0.1.0"
NAMES = ("moed", "moectl", "libmoeclient-dev", "python3-moed")
# Those with CUDA are there if package.sh made them (--cuda).
CUDA_NAMES = ("moed-cuda", "libmoeclient-cuda1")
LIBRARIES = ("libmoeclient1", "libmoeclient-dev", "libmoeclient-cuda1", "libmoeclient-cuda-dev")
PROGRAM = """#include <stdio.h>
int main(void)
{
    struct moe_client_config config = {.size = sizeof config, .endpoint = "127.0.0.1:1"};
    struct moe_client *client = NULL;
    struct moe_status st = moe_client_connect(&config, &client);
    puts(moe_code_name(st.code));
    return st.code == MOE_UNAVAILABLE ? 0 : 1;
}
"""
WAIT_S = 120
SETTINGS = {
    "etc/moed/coordinator.conf": "workers = 2\n",
    "etc/moed/worker.conf": "model = /srv/model\ncoordinator = 127.0.0.1:7700\nthreads = 1\n",
    "etc/moed/worker-0.env": "MOED_WORKER_OPTIONS=--listen 127.0.0.1:7600\n",
    "etc/moed/worker-1.env": "MOED_WORKER_OPTIONS=--listen 127.0.0.1:7601\n",
}
# What a host changes by itself.
OWN = re.compile(r"^/(proc|sys|dev|run|tmp|root|srv|var/cache|var/log|var/lib/(apt|dpkg|systemd)|"
                 r"etc/(ld\.so\.cache|passwd-|group-|shadow-|gshadow-|\.pwd\.lock))")


def check(right, text):
    print(("ok      " if right else "FAILED  ") + text)
    if not right:
        sys.exit(1)


def packages_of(folder, name):
    return glob.glob(os.path.join(folder, name + "_*.deb"))


def build(builder, folder):
    """The packages of HEAD; lintian has no error and no warning."""
    run(os.path.join(ROOT, "deploy", "package.sh"), "--tree", builder, folder)
    changes = os.path.basename(glob.glob(os.path.join(folder, "*.changes"))[0])
    said = tree.inside(builder, folder, "lintian", "--allow-root", "--fail-on", "error,warning",
                       changes)
    check(not re.search("^[EW]:", said, re.M), "packages are built, lintian is silent")


def compile_client(builder, folder, output):
    """A program in C, compiled from the development packages that are there."""
    root = os.path.join(folder, "client")
    names = [name for name in LIBRARIES if packages_of(output, name)]
    for name in names:
        run("dpkg-deb", "--extract", packages_of(output, name)[0], root)
    included = glob.glob(os.path.join(root, "usr/include/moed/moe/*.h"))
    with open(os.path.join(root, "app.c"), "w", encoding="utf-8") as file:
        file.write("".join("#include <moe/%s>\n" % os.path.basename(each) for each in included))
        file.write(PROGRAM)
    libraries = os.path.dirname(glob.glob(os.path.join(root, "usr/lib/*/pkgconfig"))[0])
    modules = ["moeclient_cuda"] if "libmoeclient-cuda-dev" in names else ["moeclient"]
    said = tree.inside(builder, root, "sh", "-euc", """
        export PKG_CONFIG_PATH=$1/pkgconfig LD_LIBRARY_PATH=$1
        shift
        cc -Wall -Wextra -Werror app.c -Wl,--no-as-needed $(pkg-config --cflags --libs "$@") -o app
        ./app
        readelf --dynamic app""", "sh", libraries, *modules)
    needed = set(re.findall(r"\[(libmoeclient\w*\.so\.1)\]", said))
    check("UNAVAILABLE" in said and len(needed) == len(names) // 2,
          "a program compiles against %d headers of %s, and runs"
          % (len(included), " and ".join(sorted(needed))))


def build_before(builder, folder, package):
    """The package of the release before: its daemons in the files of `package`."""
    source, root = os.path.join(folder, "before"), os.path.join(folder, "root")
    os.mkdir(source)
    run("sh", "-euc", 'git -C "$1" archive "$2" | tar -x -C "$3"', "sh", ROOT, BEFORE, source)
    tree.inside(builder, source, "sh", "-euc",
                "cmake -S . -B b -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMOE_TESTS=OFF -DMOE_CUDA=OFF "
                "-DMOE_COMMIT=%s && cmake --build b --parallel $(nproc) "
                "--target moe-worker moe-coordinator" % BEFORE[:12])
    run("dpkg-deb", "--raw-extract", package, root)
    for role in ("worker", "coordinator"):
        shutil.copy(os.path.join(source, "b", "daemon", role, "moe-" + role),
                    os.path.join(root, "usr", "bin"))
    for unit in glob.glob(os.path.join(root, "**/systemd/system/*.service"), recursive=True):
        with open(unit, encoding="utf-8") as file:
            text = file.read()
        with open(unit, "w", encoding="utf-8") as file:
            file.write(re.sub("(?m)^WatchdogSec=.*\n|--admin-socket-dir \\S+", "",
                              text.replace("=notify", "=simple")))
    run("sed", "-i", "s/^Version: .*/Version: %s/; /^Breaks/d" % BEFORE_RELEASE,
        os.path.join(root, "DEBIAN", "control"))
    built = os.path.join(folder, "moed_%s_amd64.deb" % BEFORE_RELEASE)
    run("dpkg-deb", "--root-owner-group", "--build", root, built)
    return built


def wait_for(what, seconds=WAIT_S):
    limit = time.monotonic() + seconds
    while not what():
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True


def log_of(host, unit):
    return host.shell("journalctl --no-pager -o cat -u %s" % unit)


def views(host):
    """The epochs under which the coordinator has served."""
    return [int(e) for e in re.findall(r"coordinator: serving under epoch (\d+)",
                                       log_of(host, "moe-coordinator"))]


def files_of(host):
    """All files, users and groups, without what any system changes by itself."""
    listing = host.shell("find / -xdev -printf '%p\\n'; sed 's/:.*//; s/^/user /' /etc/passwd; "
                         "sed 's/:.*//; s/^/group /' /etc/group")
    return {line for line in listing.splitlines() if not OWN.match(line)}


def configure(host):
    for name, text in SETTINGS.items():
        host.write(name, text)
    shutil.copytree(os.path.join(MODELS, "qwen3_moe"), host.path("srv/model"), dirs_exist_ok=True)
    for name in ("deploy/quickstart_check.py", "tests/packages/watch.py"):
        shutil.copy(os.path.join(ROOT, name), host.path("srv"))
    run("chmod", "-R", "a+rX", host.path("srv"))


def start(host):
    host.shell("systemctl enable --now moed.target moe-coordinator moe-worker@0 moe-worker@1")
    formed = wait_for(lambda: views(host))
    if not formed:
        print(host.shell("journalctl --no-pager -o cat -n 20 -u 'moe-*'"))
    check(formed, "the units form a group")


def watch(host):
    """A client that calls until `end_watch`."""
    host.shell("systemd-run --quiet --unit=watch python3 -B /srv/watch.py 127.0.0.1:7600 "
               "/srv/model/golden.safetensors /srv/report")
    check(wait_for(lambda: os.path.exists(host.path("srv/report"))
                   and "answer" in host.read("srv/report")), "a client gets right answers")


def end_watch(host):
    host.write("srv/report.end", "")
    check(wait_for(lambda: "right answers" in host.read("srv/report")), "it got no wrong one")
    return host.read("srv/report").splitlines()[1:]


def upgrade(host):
    """From the release before, while a client calls."""
    start(host)
    check(views(host) == [1], "release %s serves under epoch 1" % BEFORE_RELEASE)
    host.shell("cp /usr/bin/moe-worker /srv/moe-worker-before")
    watch(host)
    host.shell("apt-get install -y -qq --no-install-recommends moed")
    check(wait_for(lambda: len(views(host)) > 1), "the group serves again after the upgrade")
    time.sleep(5)
    lines = end_watch(host)
    print("\n".join("        " + line for line in lines))
    check(views(host) == [1, 2], "one interruption: the state was read, and epoch 2 follows 1")
    check(len(lines) == 2, "the client saw one interruption")
    check(host.shell("cat /etc/moed/*") == "".join(SETTINGS[n] for n in sorted(SETTINGS)),
          "the settings stay")


def refuse_before(host):
    """A worker of the release before, and a coordinator of this one that trusts everybody."""
    host.shell("systemd-run --quiet --unit=open moe-coordinator --listen 127.0.0.1:7790 --insecure")
    said = host.shell("timeout 60 /srv/moe-worker-before --coordinator 127.0.0.1:7790 "
                      "--model /srv/model --backend cpu --threads 1 2>&1", check=False)
    host.shell("systemctl stop open")
    print("        " + said.strip().splitlines()[-1])
    check("worker release %s does not go with coordinator release" % BEFORE_RELEASE in said,
          "a worker of the release before is refused by the names of both")


def moectl(host, arguments):
    """As the daemons' user; also what it prints when it fails."""
    return host.shell("runuser -u moed -- env MOED_RUNTIME_DIR=/run/moed moectl %s --endpoint "
                      "127.0.0.1:7700" % arguments, check=False)


def use(host):
    """What a user does with the packages."""
    for way in ("native", "grpc"):
        said = host.shell("MOED_TRANSPORT=%s python3 -B /srv/quickstart_check.py 127.0.0.1:7600 "
                          "/srv/model" % way)
        check("at most 1e-05: yes" in said,
              "quickstart's check passes against the installed group, by the transport " + way)
    check("SERVING" in moectl(host, "status"), "moectl shows the group")
    check("backend_cuda.so is not installed" in log_of(host, "moe-worker@0"),
          "the log says that moed-cuda is missing")


def use_cuda(host, names):
    """A host that lacks NVIDIA's libraries serves by its CPUs, and says what it lacks."""
    host.shell("apt-get install -y -qq --no-install-recommends " + " ".join(names))
    before = len(views(host))
    host.shell("systemctl restart moe-worker@0 moe-worker@1")
    check(wait_for(lambda: len(views(host)) > before and "SERVING" in moectl(host, "status")),
          "with moed-cuda the group serves by its CPUs")
    lacks = re.compile(r"lib\w+\.so\.\d+: cannot open shared object file")
    said = lacks.search(log_of(host, "moe-worker@0"))
    check(said, "the log says what is missing: %s" % (said and said.group()))
    said = moectl(host, "health")
    check("BACKEND" in said and lacks.search(said), "so does moectl health")
    said = host.shell("moe-worker --backend cuda --model /srv/model --coordinator 127.0.0.1:7700",
                      check=False)
    check("--backend cuda: " in said and lacks.search(said), "so does a start with --backend cuda")


def life(builder, folder):
    """All of it, in one booted tree."""
    output = (sys.argv[3:4] or [os.path.join(folder, "out")])[0]
    if not sys.argv[3:4]:
        build(builder, output)
    new = packages_of(output, "moed")
    cuda = [name for name in CUDA_NAMES if packages_of(output, name)]
    compile_client(builder, folder, output)
    old = build_before(builder, folder, new[0])
    host = tree.Booted(tree.base(SUITE), folder)
    try:
        run("chroot", host.tree, "apt-get", "update", "-qq")
        run("chroot", host.tree, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install",
            "-y", "-qq", "--no-install-recommends", "systemd", "systemd-sysv", "dbus")
        host.publish([p for name in (*NAMES, "libmoeclient1", *cuda)
                      for p in packages_of(output, name)])
        host.install_dependencies(*NAMES, *cuda)
        host.boot()
        clean = files_of(host)
        host.publish([old])
        host.shell("apt-get install -y -qq --no-install-recommends moed=%s moectl libmoeclient-dev "
                   "python3-moed" % BEFORE_RELEASE)
        check(host.shell("systemctl is-active moed.target moe-coordinator || true").split()
              == ["inactive", "inactive"], "the installation starts nothing")
        configure(host)
        upgrade(host)
        refuse_before(host)
        use(host)
        if cuda:
            use_cuda(host, cuda)
        host.shell("apt-get purge -y -qq " + " ".join((*NAMES, "libmoeclient1", *cuda)))
        left, gone = files_of(host) - clean, clean - files_of(host)
        check(not left and not gone, "a purge leaves nothing: %s" % (sorted(left) + sorted(gone)))
    finally:
        host.end()


def main():
    tree.require("debootstrap", "systemd-nspawn", "git", "dpkg-scanpackages")
    if "commit" not in run("git", "-C", ROOT, "cat-file", "-t", BEFORE, check=False):
        tree.skip("the history lacks the release before (%s)" % BEFORE[:12])
    builder = tree.base(SUITE, "build", "package")
    with tempfile.TemporaryDirectory(prefix="moed-packages-") as folder:
        os.chmod(folder, 0o755)
        life(builder, folder)


if __name__ == "__main__":
    main()
