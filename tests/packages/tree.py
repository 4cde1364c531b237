# SPDX-License-Identifier: Apache-2.0
"""Clean trees of Debian for tests: one is made once (deploy/clean-tree.sh), copied, and booted.

Trees lie in MOE_TREES, or ~/.cache/moed/trees. They need root, debootstrap and a mirror."""

import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TREES = os.environ.get("MOE_TREES") or os.path.expanduser("~/.cache/moed/trees")
CLEAN_TREE = os.path.join(ROOT, "deploy", "clean-tree.sh")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
# In the tree: packages of the test, as an archive of apt.
ARCHIVE = "srv/archive"


def skip(reason):
    print("skipped: " + reason)
    sys.exit(77)


def run(*command, check=True, **options):
    """The text that the command printed. Ends the test if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          stdin=subprocess.DEVNULL, **options)
    if check and done.returncode != 0:
        sys.exit("%s: exit %d\n%s" % (" ".join(command), done.returncode, done.stdout[-8000:]))
    return done.stdout


def require(*programs):
    if os.geteuid() != 0:
        skip("only root can make a tree")
    for program in programs:
        if shutil.which(program) is None:
            skip("%s is not here" % program)


def base(suite, *purposes):
    """A tree with these packages, made if it does not exist."""
    path = os.path.join(TREES, "-".join((suite, *purposes)))
    os.makedirs(TREES, exist_ok=True)
    done = subprocess.run([CLEAN_TREE, "make", path, suite, *purposes], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        skip("cannot make %s: %s" % (path, done.stdout[-600:]))
    return path


def inside(tree, folder, *command):
    return run(CLEAN_TREE, "run", tree, folder, *command)


class Booted:
    """A copy of a tree, and later its systemd, in a separate network."""

    def __init__(self, base_tree, folder):
        self.tree = os.path.join(folder, "tree")
        run("cp", "-a", "--reflink=auto", base_tree, self.tree)
        os.makedirs(os.path.join(self.tree, ARCHIVE))
        self.process = None

    def path(self, name):
        return os.path.join(self.tree, name)

    def write(self, name, text):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)

    def read(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    def publish(self, packages):
        """The archive has these files, and apt knows."""
        for package in packages:
            shutil.copy(package, self.path(ARCHIVE))
        listing = run("dpkg-scanpackages", "--multiversion", ".", cwd=self.path(ARCHIVE))
        self.write(ARCHIVE + "/Packages", "\n".join(
            line for line in listing.splitlines() if not line.startswith("dpkg-scanpackages")))
        self.write("etc/apt/sources.list.d/test.list",
                   "deb [trusted=yes] file:/%s ./\n" % ARCHIVE)
        update = ("apt-get", "update", "-qq", "-o", "Dir::Etc::sourcelist=/dev/null", "-o",
                  "APT::Get::List-Cleanup=0")
        if self.process is None:
            run("chroot", self.tree, *update)
        else:
            self.shell(" ".join(update))

    def install_dependencies(self, *names):
        """All packages that these need, without the archive's own. Before booting."""
        apt = ("chroot", self.tree, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-y",
               "--no-install-recommends")
        run("chroot", self.tree, "apt-get", "update", "-qq")
        own = {name.split("_")[0] for name in os.listdir(self.path(ARCHIVE))}
        said = run(*apt, "--simulate", "install", *names)
        planned = {line.split()[1] for line in said.splitlines() if line.startswith("Inst ")}
        run(*apt, "install", *sorted(planned - own))

    def boot(self):
        self.process = subprocess.Popen(
            ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network",
             "--directory=" + self.tree, "--boot"], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        os.set_blocking(self.process.stdout.fileno(), False)
        limit = time.monotonic() + 300
        while time.monotonic() < limit:
            state = self.shell("systemctl is-system-running", check=False).strip()
            if state in ("running", "degraded"):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        console = (self.process.stdout.read() or b"").decode(errors="replace")
        self.end()
        skip("systemd-nspawn boots no tree here: " + console[-600:])

    def leader(self):
        """The first process of the tree, by its number here; None until it runs."""
        children = "/proc/%d/task/%d/children" % (self.process.pid, self.process.pid)
        try:
            with open(children, encoding="utf-8") as file:
                return (file.read().split() or [None])[0]
        except OSError:
            return None

    def command(self, text):
        """To run a text of shell inside the booted tree."""
        return ["nsenter", "--target", self.leader() or "0", "--all", "env", "-i", "PATH=" + PATH,
                "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive", "sh", "-euc", text]

    def shell(self, text, check=True):
        return run(*self.command(text), check=check)

    def end(self):
        if self.process is None:
            return
        if self.process.poll() is None and self.leader():
            self.shell("systemctl poweroff --no-block", check=False)
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
