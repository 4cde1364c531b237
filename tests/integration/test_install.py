# SPDX-License-Identifier: Apache-2.0
"""`cmake --install` into a separate root: all of it works there, and nothing names the build."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import numpy as np

from group import BUILD, golden_cases, main, model_directory, relative_error

FAMILY = "qwen3_moe"
MODEL = os.path.abspath(model_directory(FAMILY))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAMS = ("moe-coordinator", "moe-worker", "moectl")

CLIENT = r"""
#include <moe/client.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    struct moe_client *c;
    struct moe_client_config config = {.size = sizeof config, .endpoint = argv[argc - 1]};
    struct moe_status st = moe_client_connect(&config, &c);
    if (moe_failed(&st)) {
        fprintf(stderr, "%s\n", st.text);
        return 1;
    }
    moe_client_close(c);
    return 0;
}
"""


def cache(name):
    """A value of the build's CMakeCache.txt."""
    with open(os.path.join(BUILD, "CMakeCache.txt")) as file:
        return re.search(r"(?m)^%s:\w+=(.*)$" % name, file.read()).group(1)


def run(*command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=60, **options)
    if done.returncode != 0:
        raise AssertionError("%s: exit %d: %s" % (command, done.returncode, done.stderr))
    return done.stdout


class Installation(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="moed-install-")
        run("cmake", "--install", BUILD, "--strip", env={**os.environ, "DESTDIR": cls.root})
        cls.prefix = cls.root + cache("CMAKE_INSTALL_PREFIX")
        cls.files = sorted(os.path.join(where, name)
                           for where, _, names in os.walk(cls.root) for name in names)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.root, ignore_errors=True)

    def program(self, name):
        return os.path.join(self.prefix, "bin", name)

    def the(self, name):
        """The installed file of this name."""
        found = [path for path in self.files if os.path.basename(path) == name]
        self.assertEqual(len(found), 1, (name, found))
        return found[0]

    def folder(self, name):
        return os.path.dirname(self.the(name))

    def test_what_is_installed(self):
        for name in PROGRAMS:
            self.assertIn(self.program(name), self.files)
            self.the(name + ".1")
        for path in self.files:
            self.assertTrue(path.startswith(self.prefix + "/"), path)
        module = os.path.join(self.folder("libmoeclient.so"), "moed", "backend_cuda.so")
        self.assertEqual(os.path.exists(module),
                         os.path.exists(os.path.join(BUILD, "modules", "backend_cuda.so")))
        for name in ("moed.target", "moe-coordinator.service", "moe-worker@.service"):
            self.assertTrue(self.the(name).endswith("/lib/systemd/system/" + name))
        self.assertTrue(self.the("client.h").endswith("/include/moed/moe/client.h"))

    def test_no_file_names_the_build_or_the_sources(self):
        """Except the CUDA module: line tables of its device code name the sources."""
        if cache("MOE_SANITIZE") == "ON":
            self.skipTest("sanitizers keep the names of sources for their reports")
        wrong = []
        for path in self.files:
            if os.path.basename(path) == "backend_cuda.so":
                continue
            with open(path, "rb") as file:
                data = file.read()
            wrong += [(path, folder) for folder in (os.path.abspath(BUILD), ROOT)
                      if folder.encode() + b"/" in data]
        self.assertEqual(wrong, [])

    def test_no_program_has_a_path_of_libraries(self):
        """The loader finds libraries as the distribution says."""
        for path in self.files:
            with open(path, "rb") as file:
                if file.read(4) != b"\x7fELF":
                    continue
            self.assertNotRegex(run("readelf", "-d", path), r"RPATH|RUNPATH")

    def test_a_group_runs_from_there(self):
        """Daemons, moectl, a C client by pkg-config and the Python package, all installed."""
        state = os.path.join(self.root, "state")
        endpoint = run(self.program("moectl"), "up", "--model", MODEL,
                       "--workers", "2", "--threads", "1", "--port", "0", "--detach",
                       "--backend", "cpu", "--state-dir", state, cwd="/").split()[0]
        try:
            with open(os.path.join(state, "group.json")) as file:
                for entry in json.load(file)["processes"]:
                    self.assertEqual(os.path.dirname(os.readlink("/proc/%d/exe" % entry["pid"])),
                                     os.path.realpath(os.path.dirname(self.program("moectl"))))
            run(self.program("moectl"), "status", "--state-dir", state, cwd="/")
            layer, _, x, want = next(case for case in golden_cases(FAMILY) if case[1] == 37)
            golden = os.path.join(MODEL, "golden.safetensors")
            run(self.program("moectl"), "forward", "--endpoint", endpoint, "--layer", str(layer),
                "--input", golden, "--tensor", "layer%d.T37.x" % layer, "--output",
                os.path.join(self.root, "y.safetensors"), cwd="/")
            self.check_python(endpoint, layer, x, want)
            self.check_c(endpoint)
        finally:
            run(self.program("moectl"), "down", "--state-dir", state, cwd="/")

    def check_python(self, endpoint, layer, x, want):
        np.save(os.path.join(self.root, "x.npy"), x)
        script = ("import moed, numpy, sys; print(moed.__file__); "
                  "numpy.save(sys.argv[3], moed.Client(sys.argv[1]).forward(int(sys.argv[2]), "
                  "numpy.load(sys.argv[4])))")
        package = os.path.dirname(os.path.dirname(self.the("_safetensors.py")))
        y = os.path.join(self.root, "y.npy")
        where = run(sys.executable, "-B", "-c", script, endpoint, str(layer), y,
                    os.path.join(self.root, "x.npy"), cwd="/",
                    env={**os.environ, "PYTHONPATH": package})
        self.assertTrue(where.startswith(package + "/moed/"), where)
        self.assertLessEqual(relative_error(np.load(y), want), 1e-5)
        if any(os.path.basename(path) == "_native.abi3.so" for path in self.files):
            native = script.replace("argv[1])", "argv[1], transport='native')")
            run(sys.executable, "-B", "-c", native, endpoint, str(layer), y + ".native.npy",
                os.path.join(self.root, "x.npy"), cwd="/",
                env={**os.environ, "PYTHONPATH": package,
                     "LD_LIBRARY_PATH": self.folder("libmoeclient.so")})
            np.testing.assert_array_equal(np.load(y + ".native.npy"), np.load(y))
        else:
            self.assertTrue(cache("MOE_HAVE_PYTHON_NATIVE") == "OFF" or
                            "ON" in (cache("MOE_SANITIZE"), cache("MOE_TSAN")))

    def check_c(self, endpoint):
        source, app = os.path.join(self.root, "app.c"), os.path.join(self.root, "app")
        with open(source, "w") as file:
            file.write(CLIENT)
        flags = run("pkg-config", "--cflags", "--libs", "moeclient",
                    env={**os.environ, "PKG_CONFIG_PATH": self.folder("moeclient.pc")}).split()
        sanitizer = ["-fsanitize=address,undefined"] if cache("MOE_SANITIZE") == "ON" else []
        run("cc", "-std=c11", "-Wall", "-Werror", source, "-o", app, *sanitizer, *flags)
        run(app, endpoint, env={**os.environ, "LD_LIBRARY_PATH": self.folder("libmoeclient.so")})

    def test_man_pages_have_every_option(self):
        for name in PROGRAMS:
            with open(self.the(name + ".1")) as file:
                page = file.read().replace("\\", "")
            helps = [run(self.program(name), "--help")]
            if name == "moectl":
                helps = [run(self.program(name), command, "--help")
                         for command in re.findall(r"(?m)^  (\w+) ", helps[0]) if command != "help"]
            options = {option for text in helps
                       for option in re.findall(r"(?m)^  .{4}(--[\w-]+)", text)}
            self.assertGreater(len(options), 5)
            for option in options:
                self.assertIn("fB" + option + "fR", page)
            if shutil.which("groff"):
                done = subprocess.run(["groff", "-man", "-ww", "-z", "-Tutf8",
                                       self.the(name + ".1")], stderr=subprocess.PIPE, text=True,
                                      timeout=60)
                self.assertEqual(done.stderr, "")

    def complete(self, *words):
        """What bash offers for the last word."""
        script = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); ' \
            '$(complete -p "$1" | sed "s/.*-F \\([^ ]*\\).*/\\1/"); ' \
            'printf "%s\\n" "${COMPREPLY[@]}"'
        file = os.path.join(self.prefix, "share", "bash-completion", "completions", words[0])
        return run("bash", "--norc", "-c", script, "bash", file, *words).split()

    def test_zsh_and_fish_know_the_commands_and_their_options(self):
        for file in "zsh/site-functions/_%s", "fish/vendor_completions.d/%s.fish":
            for program, words in (("moectl", ["uncordon", "tls-server-name", "bf16"]),
                                   ("moe-worker", ["backend", "cuda"]),
                                   ("moe-coordinator", ["workers"])):
                path = os.path.join(self.prefix, "share", file % program)
                with open(path, encoding="utf-8") as text:
                    content = text.read()
                for word in words:
                    self.assertIn(word, content, path)

    def test_bash_completes(self):
        self.assertEqual(self.complete("moe-worker", "--back"), ["--backend"])
        self.assertEqual(self.complete("moe-worker", "--backend", "cu"), ["cuda"])
        self.assertEqual(self.complete("moe-worker", "--listen", ""), [])
        self.assertEqual(self.complete("moe-worker", "--model", self.prefix + "/bi"),
                         [self.prefix + "/bin"])
        self.assertEqual(self.complete("moe-coordinator", "--work"), ["--workers"])
        self.assertEqual(self.complete("moectl", "stat"), ["status"])
        self.assertEqual(self.complete("moectl", "help", "stat"), ["status"])
        self.assertEqual(self.complete("moectl", "training", "save"), ["save"])
        self.assertEqual(self.complete("moectl", "context", "us"), ["use"])
        self.assertEqual(self.complete("moectl", "model", "a"), ["accept"])
        self.assertEqual(self.complete("moectl", "bench", "--dtype", "b"), ["bf16"])


if __name__ == "__main__":
    main()
