# SPDX-License-Identifier: Apache-2.0
"""The units of deploy/systemd in a booted Debian: an installation into a separate tree, which
systemd-nspawn boots. `booted.py` makes the checks inside, as a unit of that system.

Needs root, Debian 12, systemd-nspawn, and debootstrap for the first run: it fetches the system
(500 MB) into MOED_BOOT_TREE, or ~/.cache/moed/boot-tree, which later runs copy. Exits with 77 and
the reason where that is missing. Run it alone with the build directory and the golden models as
arguments.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile

BUILD, MODELS = (os.path.abspath(a) for a in sys.argv[1:3])
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
CACHE = os.environ.get("MOED_BOOT_TREE") or os.path.expanduser("~/.cache/moed/boot-tree")
MIRROR = os.environ.get("MOED_BOOT_MIRROR", "http://deb.debian.org/debian")
SUITE = "bookworm"
BOOTABLE = {"systemd", "systemd-sysv", "dbus", "etcd-server"}  # coordinators keep state in etcd
FAMILY = "mixtral"
UNITS = ("moed.target", "moe-coordinator.service", "moe-worker@0.service", "moe-worker@1.service")
EXPOSURE = 25  # in tenths
BOOT_LIMIT_S = 1200
REBOOT = 133  # exit status of systemd-nspawn

# Root makes the token and its services. The users are of the checks: alice may operate the group.
FILES = {
    "etc/moed/coordinator.conf": "workers = 2\n",
    "etc/moed/worker.conf": "model = /srv/model\ncoordinator = 127.0.0.1:7700\nbackend = cpu\n"
                            "threads = 1\n",
    "etc/moed/worker-0.env": "MOED_WORKER_OPTIONS=--listen 127.0.0.1:7600\n",
    "etc/moed/worker-1.env": "MOED_WORKER_OPTIONS=--listen 127.0.0.1:7601\n",
    "etc/credstore/moed.token-file": "a-token-in-the-credential-store\n",
    "etc/hostname": "moed-boot\n",
    "etc/hosts": "127.0.0.1 localhost\n",  # etcd looks its name up
    "usr/lib/sysusers.d/boot-check.conf": "u alice - \"operator\"\nu bob - \"user\"\n"
                                          "m alice moed-admin\n",
    # Not from a target: the reboot must find all units without help.
    "etc/systemd/system/boot-check.service": """[Unit]
After=multi-user.target
OnFailure=poweroff.target
[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/usr/bin/python3 -B /srv/booted.py
StandardOutput=append:/srv/report
StandardError=append:/srv/report
Environment=PYTHONUNBUFFERED=1
[Install]
WantedBy=default.target
""",
}


def skip(reason):
    print("skipped: " + reason)
    sys.exit(77)


def run(*command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          stdin=subprocess.DEVNULL, **options)


def must(*command, **options):
    done = run(*command, **options)
    if done.returncode != 0:
        sys.exit("%s: exit %d\n%s" % (" ".join(command), done.returncode, done.stdout))
    return done.stdout


def nspawn(tree, *arguments, **options):
    """In a separate network. The machine is not registered: this host may run no systemd."""
    return run("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network",
               "--directory=" + tree, *arguments, **options)


def package_of(path):
    """dpkg knows a file of a merged /usr by its old name."""
    for name in (path, path.removeprefix("/usr")):
        done = run("dpkg-query", "-S", name)
        if done.returncode == 0:
            return done.stdout.split(":")[0]
    sys.exit("no package has " + path)


def packages():
    """What the tree needs: what a host needs to run moed, and the libraries of the programs."""
    with open(os.path.join(ROOT, "deploy/packages.txt")) as file:
        rows = [line.split() for line in file if not line.startswith("#")]
    names = BOOTABLE | {row[0] for row in rows if row[1:] == ["run"]}
    for program in ("daemon/worker/moe-worker", "daemon/coordinator/moe-coordinator"):
        linked = must("ldd", os.path.join(BUILD, program))
        for path in re.findall(r"=> (/\S+)", linked):
            if not path.startswith(BUILD):
                names.add(package_of(os.path.realpath(path)))
    return sorted(names)


def base_tree():
    """The Debian that the checks copy; made again when it needs other packages."""
    wanted, record = "\n".join(packages()) + "\n", CACHE + ".packages"
    if os.path.isdir(CACHE) and os.path.exists(record):
        with open(record) as file:
            if file.read() == wanted:
                return CACHE
        shutil.rmtree(CACHE)
    if os.path.exists(CACHE):
        skip("%s is not a tree of this test" % CACHE)
    if shutil.which("debootstrap") is None:
        skip("debootstrap is not here, and %s does not exist" % CACHE)
    os.makedirs(os.path.dirname(CACHE), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=CACHE + "-") as fresh:
        tree = os.path.join(fresh, "tree")
        done = run("debootstrap", "--variant=minbase", "--include=" + ",".join(wanted.split()),
                   SUITE, tree, MIRROR)
        if done.returncode != 0:
            skip("debootstrap: " + done.stdout[-600:])
        os.rename(tree, CACHE)
    with open(record, "w") as file:
        file.write(wanted)
    return CACHE


def is_suite():
    with open("/etc/os-release") as file:
        return "VERSION_CODENAME=%s\n" % SUITE in file.read()


def install(tree):
    must("cmake", "--install", BUILD, "--strip", "--prefix", "/usr",
         env={**os.environ, "DESTDIR": tree})
    shutil.copytree(os.path.join(MODELS, FAMILY), os.path.join(tree, "srv/model"))
    shutil.copy(os.path.join(HERE, "booted.py"), os.path.join(tree, "srv/booted.py"))
    for name, text in FILES.items():
        path = os.path.join(tree, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
    os.chmod(os.path.join(tree, "etc/credstore/moed.token-file"), 0o400)
    os.makedirs(os.path.join(tree, "var/log/journal"), exist_ok=True)
    os.chmod(os.path.join(tree, "srv"), 0o755)
    must("systemd-sysusers", "--root=" + tree)
    must("systemctl", "--root=" + tree, "enable", "boot-check.service", *UNITS)


def analyze(tree, *arguments):
    """The exit status and text of systemd-analyze; systemd-nspawn itself may print, too."""
    done = nspawn(tree, "sh", "-c", 'SYSTEMD_COLORS=0 systemd-analyze "$@" > /srv/said 2>&1', "sh",
                  *arguments)
    with open(os.path.join(tree, "srv/said")) as file:
        return done.returncode, file.read()


def check_units(tree):
    """What systemd says about the units where they are installed. Returns the number of faults."""
    faults = 0
    said = analyze(tree, "verify", "--man=no", *UNITS)
    if said != (0, ""):
        print("systemd-analyze verify: exit %d\n%s" % said)
        faults += 1
    for unit in UNITS[1:3]:
        code, text = analyze(tree, "security", "--no-pager", "--offline=yes",
                             "--threshold=%d" % EXPOSURE, unit)
        print(text.strip().splitlines()[-1].strip())
        faults += code != 0
    return faults


def boot(tree):
    """Until it has powered itself off. Returns the number of faults."""
    code, console = REBOOT, ""
    try:
        while code == REBOOT:
            print("booting")
            done = nspawn(tree, "--boot", timeout=BOOT_LIMIT_S)
            code, console = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        console = "it did not end in %d s\n%s" % (BOOT_LIMIT_S, (late.stdout or b"")[-4000:])
    report, passed = os.path.join(tree, "srv/report"), os.path.join(tree, "srv/passed")
    if os.path.exists(report):
        with open(report) as file:
            print(file.read())
    if os.path.exists(passed):
        return 0
    print("the checks did not pass. The console:\n%s" % console[-6000:])
    print(run("journalctl", "--no-pager", "--directory=" + os.path.join(tree, "var/log/journal"),
              "--lines=200", "-o", "short-monotonic", "-u", "moe-*", "-u", "moed.target",
              "-u", "boot-check").stdout)
    return 1


def main():
    if os.geteuid() != 0:
        skip("only root can boot a tree")
    if not is_suite():
        skip("the programs were built on another system than Debian %s" % SUITE)
    if shutil.which("systemd-nspawn") is None:
        skip("systemd-nspawn is not here (package systemd-container)")
    with tempfile.TemporaryDirectory(prefix="moed-boot-") as folder:
        tree = os.path.join(folder, "tree")
        must("cp", "-a", "--reflink=auto", base_tree(), tree)
        done = nspawn(tree, "true")
        if done.returncode != 0:
            skip("systemd-nspawn does not work here: " + done.stdout.strip()[-300:])
        install(tree)
        faults = check_units(tree) + boot(tree)
    print("%d faults" % faults)
    sys.exit(1 if faults else 0)


main()
