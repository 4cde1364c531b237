# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/debian agree with the tree; man pages, completions and references of
settings agree with the programs; the list of a release's parts (SBOM) is whole.

    test_packaging.py BUILD
"""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEBIAN = os.path.join(ROOT, "deploy", "debian")
BUILD = os.path.abspath(sys.argv.pop(1))
# Options of the command line alone.
ACTIONS = {"config", "check-config", "version", "help"}
# What Debian's tools need besides packages of the list, and what every build there has.
TOOLS = {"debhelper-compat", "dh-sequence-installsysusers", "dh-sequence-python3", "python3"}
ESSENTIAL = {"build-essential"}


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def packages(purpose):
    """The names that deploy/packages.txt has for it."""
    lines = [line.split() for line in read(ROOT, "deploy", "packages.txt").splitlines()
             if not line.startswith("#")]
    return {line[0] for line in lines if line[1:] == [purpose]}


def paragraphs():
    """deploy/debian/control: for each package, its fields. The source has the name ''."""
    found = {}
    for paragraph in read(DEBIAN, "control").split("\n\n"):
        fields = dict(re.findall(r"(?ms)^([\w-]+): *(.*?)(?=^\S|\Z)", paragraph))
        found[fields.get("Package", "").strip()] = fields
    return found


def names(dependencies):
    """Names of packages in a field, without versions and variables."""
    words = [d.strip().split(" ")[0] for d in dependencies.split(",")]
    return {w for w in words if w and not w.startswith("${")}


class Guide(unittest.TestCase):
    """The pages for operators name what exists."""

    def setUp(self):
        folder = os.path.join(ROOT, "deploy", "guide")
        self.pages = {name: read(folder, name) for name in os.listdir(folder)}

    def test_each_command_is_one_of_moectl(self):
        moectl = os.path.join(BUILD, "client", "moectl", "moectl")
        text = subprocess.run([moectl, "help"], stdout=subprocess.PIPE, text=True).stdout
        known = set(re.findall(r"(?m)^  ([a-z-]+) +[A-Z]", text))
        used = {each for page in self.pages.values()
                for each in re.findall(r"(?:`|^    )moectl ([a-z-]+)", page, re.MULTILINE)}
        self.assertGreater(len(used), 8)
        self.assertLessEqual(used, known)

    def test_each_option_is_one_of_a_program(self):
        text = "".join(subprocess.run([os.path.join(BUILD, *place), *words], text=True,
                                      stdout=subprocess.PIPE).stdout
                       for place, words in ((("daemon", "worker", "moe-worker"), ["--help"]),
                                            (("daemon", "coordinator", "moe-coordinator"),
                                             ["--help"]),
                                            (("client", "moectl", "moectl"), ["help", "up"]),
                                            (("client", "moectl", "moectl"), ["help", "bench"]),
                                            (("client", "moectl", "moectl"), ["help", "forward"]),
                                            (("client", "moectl", "moectl"), ["help", "load"]),
                                            (("client", "moectl", "moectl"), ["help", "unload"]),
                                            (("client", "moectl", "moectl"), ["help", "log-level"]),
                                            (("client", "moectl", "moectl"), ["help", "health"])))
        known = set(re.findall(r"--([a-z][a-z-]+)", text))
        for name, page in self.pages.items():
            used = {each for each in re.findall(r"`[^`]*`|^    .*$", page, re.MULTILINE)
                    if not each.strip(" `").startswith(("hub/bin/", "python3"))}
            options = {o for each in used for o in re.findall(r"--([a-z][a-z-]+[a-z])", each)}
            self.assertLessEqual(options - {"tls"}, known, name)

    def test_each_reason_is_one_of_the_table(self):
        table = read(ROOT, "daemon", "rpc", "README.md") + \
            read(ROOT, "kernels", "public", "status.h")
        page = self.pages["troubleshooting.md"]
        rows = re.findall(r"(?m)^\| ([A-Z_, ]+?)(?: for long)? \|", page)
        reasons = {each for row in rows for each in row.split(", ")}
        self.assertGreater(len(reasons), 15)
        for each in reasons - {"WAITING", "LOADING", "FORMING", "DEGRADED"}:
            self.assertIn(each, table)


class Control(unittest.TestCase):
    def test_packages_have_the_dependencies_of_the_list(self):
        control = paragraphs()
        self.assertEqual(names(control[""]["Build-Depends"]) - TOOLS, packages("build") - ESSENTIAL)
        runs = names(control["python3-moed"]["Depends"]) | {"python3"}
        self.assertLessEqual(packages("run"), runs | names(control["moed"]["Recommends"]))

    def test_no_package_depends_on_nvidia(self):
        for name, fields in paragraphs().items():
            text = " ".join(value for field, value in fields.items() if field.endswith("ends"))
            self.assertNotRegex(text, "nvidia|cuda-|libcu|nccl", name)

    def test_the_changelog_names_the_release(self):
        top = read(ROOT, "CMakeLists.txt")
        release = re.search(r"project\(moed VERSION ([\d.]+)", top).group(1)
        self.assertTrue(read(DEBIAN, "changelog").startswith("moed (%s) " % release))

    def test_each_file_belongs_to_a_package(self):
        """`dh_missing` sees the others; here: each pattern of a list has a package."""
        binary = set(paragraphs()) - {""}
        lists = {os.path.splitext(name)[0] for name in os.listdir(DEBIAN)
                 if name.endswith(".install")}
        self.assertEqual(lists, binary)


class Manual(unittest.TestCase):
    def test_every_command_has_its_place(self):
        """Each command of moectl stands in its man page and its completions."""
        moectl = os.path.join(BUILD, "client", "moectl", "moectl")
        text = subprocess.run([moectl, "help"], stdout=subprocess.PIPE, text=True).stdout
        commands = re.findall(r"(?m)^  (\S+) +[A-Z]", text)
        self.assertIn("log-level", commands)
        places = (("moectl.1", ".SS moectl %s"), ("completions/moectl", "        %s)"),
                  ("completions/_moectl", "%s)"),
                  ("completions/moectl.fish", "complete -c moectl -n __fish_use_subcommand -a %s"))
        for name, line in places:
            lines = read(BUILD, "deploy", name).replace("\\-", "-")
            for command in set(commands) - ({"help"} if name == "moectl.1" else set()):
                self.assertRegex(lines, "(?m)^%s( |$)" % re.escape(line % command), name)


class Parts(unittest.TestCase):
    """deploy/sbom.py, with artefacts that hold what it reads of real ones."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="moed-parts-")
        self.addCleanup(folder.cleanup)
        self.folder = os.path.join(folder.name, "out")
        root = os.path.join(folder.name, "root")
        os.makedirs(self.folder)
        os.makedirs(os.path.join(root, "DEBIAN"))
        with open(os.path.join(root, "DEBIAN", "control"), "w", encoding="utf-8") as file:
            file.write("Package: moed\nVersion: 0\nArchitecture: all\nMaintainer: m <m@m.example>\n"
                       "Depends: libc6 (>= 2.36), python3 | python3-minimal\nDescription: test\n")
        subprocess.run(["dpkg-deb", "--build", root, os.path.join(self.folder, "moed.deb")],
                       check=True, stdout=subprocess.PIPE)
        with zipfile.ZipFile(os.path.join(self.folder, "moed.whl"), "w") as wheel:
            wheel.writestr("moed.dist-info/METADATA", "Requires-Dist: numpy>=1.21\n"
                           "Requires-Dist: torch; extra == 'torch'\n")
        layer = self.archive("usr/share/doc/moed/libraries",
                             b"libssl3 3.0+b1 openssl 3.0\n")
        with open(os.path.join(self.folder, "moed.oci.tar"), "wb") as file:
            file.write(self.archive("./blobs/sha256/1", layer))

    def archive(self, name, data):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        return buffer.getvalue()

    def test_each_artefact_has_its_parts(self):
        subprocess.run([sys.executable, "-B", os.path.join(ROOT, "deploy", "sbom.py"), "9.9", "0",
                        self.folder], check=True)
        document = json.loads(read(self.folder, "moed-9.9.spdx.json"))
        names = {each["SPDXID"]: each["name"] for each in document["packages"]}
        found = {(names.get(r["spdxElementId"]), r["relationshipType"],
                  names[r["relatedSpdxElement"]]) for r in document["relationships"]}
        artefacts = ("moed.deb", "moed.whl", "moed.oci.tar")
        self.assertEqual(found, {*((None, "DESCRIBES", name) for name in artefacts),
                                 ("moed.deb", "DEPENDS_ON", "libc6"),
                                 ("moed.deb", "DEPENDS_ON", "python3"),
                                 ("moed.whl", "DEPENDS_ON", "numpy"),
                                 ("moed.oci.tar", "CONTAINS", "libssl3")})
        self.assertEqual(len(names), len(document["packages"]), "two parts have one SPDXID")
        text = json.dumps(document)
        self.assertIn("pkg:deb/debian/libssl3@3.0%2Bb1", text)
        self.assertIn("pkg:pypi/numpy", text)


class Settings(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="moed-settings-")
        self.addCleanup(self.folder.cleanup)

    def daemon(self, role, *arguments):
        program = os.path.join(BUILD, "daemon", role, "moe-" + role)
        return subprocess.run([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, timeout=60)

    def reference(self, role):
        return read(BUILD, "deploy", role + ".conf")

    def check(self, role, text):
        path = os.path.join(self.folder.name, role + ".conf")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return self.daemon(role, "--config", path, "--check-config")

    def test_every_option_stands_in_the_reference(self):
        for role in ("coordinator", "worker"):
            options = set(re.findall(r"(?m)^  .{4}--([\w-]+)", self.daemon(role, "--help").stdout))
            settings = re.findall(r"(?m)^#([\w-]+) =", self.reference(role))
            self.assertEqual(sorted(settings), sorted(options - ACTIONS))
            self.assertGreater(len(settings), 10)

    def test_the_references_are_valid_with_all_defaults(self):
        """Each line with a default, once it counts, is a setting that the daemon accepts."""
        more = {"coordinator": "", "worker": "model = /m\ncoordinator = 127.0.0.1:1\n"
                                             "training = sgd\nlora-rank = 4\n"}
        for role, last in more.items():
            text = re.sub(r"(?m)^#([\w-]+ =)(?! [A-Z][A-Z:|,.]*$)", r"\1", self.reference(role))
            done = self.check(role, text + last)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(done.stdout, "moe-%s: the settings are valid\n" % role)

    def test_what_is_wrong_is_named(self):
        for text, code, say in (("workers = 0\n", 2, "workers"),
                                ("wrokers = 1\n", 2, "unknown setting 'wrokers'"),
                                ("access-file = /no/such/file\n", 1, "/no/such/file"),
                                ("tls-key = /k\n", 2, "come together"),
                                ("listen = 0.0.0.0:7700\n", 2, "not a loopback address")):
            done = self.check("coordinator", text)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(say, done.stderr)
            self.assertEqual(done.stdout, "")

    def test_addresses_are_checked_as_at_the_start(self):
        worker = "model = /m\ncoordinator = 127.0.0.1:1\nlisten = 0.0.0.0:7701\n"
        for more, say in (("", "not a loopback address"),
                          ("insecure = true\n", "set --advertise"),
                          ("insecure = true\nadvertise = 0.0.0.0:1\n", "wildcard address"),
                          ("insecure = true\nadvertise = 10.0.0.1:1\n", "")):
            path = os.path.join(self.folder.name, "worker.conf")
            done = self.check("worker", worker + more)
            self.assertEqual(done.returncode, 2 if say else 0)
            self.assertIn(say, done.stderr)
            if say:
                self.assertEqual(self.daemon("worker", "--config", path).stderr, done.stderr)

    def test_the_packages_files_are_valid(self):
        self.assertEqual(self.check("coordinator", read(DEBIAN, "coordinator.conf")).returncode, 0)
        text = read(DEBIAN, "worker.conf")
        self.assertIn("--model is required", self.check("worker", text).stderr)
        done = self.check("worker", text.replace("#model = DIR", "model = /srv/model"))
        self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
