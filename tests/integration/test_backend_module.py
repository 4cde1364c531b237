# SPDX-License-Identifier: Apache-2.0
"""The module of the CUDA backend where it is missing, broken or of another build: one clear error,
or the CPU."""

import json
import os
import shutil
import subprocess
import tempfile
import unittest

from group import BUILD, main, model_directory, moectl, wait_until
from held import MODULES

MODEL = os.path.abspath(model_directory("qwen3_moe"))
WORKER = os.path.join(BUILD, "daemon", "worker", "moe-worker")
COORDINATOR = os.path.join(BUILD, "daemon", "coordinator", "moe-coordinator")


class Module(unittest.TestCase):
    """A worker in a separate folder, with the module that the test puts there."""

    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="moed-module-")
        self.addCleanup(shutil.rmtree, self.root, True)
        self.worker = os.path.join(self.root, "programs", "bin", "moe-worker")
        os.makedirs(os.path.dirname(self.worker))
        shutil.copy(WORKER, self.worker)
        modules = os.path.join(os.path.dirname(self.worker), MODULES)
        os.makedirs(modules)
        self.module = os.path.join(modules, "backend_cuda.so")

    def run_worker(self, backend, **environment):
        """The line of the error, or "serves". `reason` keeps what auto says."""
        command = [self.worker, "--backend", backend, "--model", MODEL, "--coordinator",
                   "127.0.0.1:1", "--threads", "1"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=self.root,
                              env={**os.environ, **environment}) as process:
            for line in process.stderr:
                if "listening" in line or "ERROR" in line:
                    process.terminate()
                    return line if "ERROR" in line else "serves"
                if "--backend auto" in line:
                    self.reason = line
        return "ended"

    def health(self, backend):
        """What `moectl health` says of the backend of a group of one such worker."""
        def listens(program, *options):
            reader, writer = os.pipe()
            process = subprocess.Popen([program, "--ready-fd", str(writer), *options],
                                       pass_fds=[writer], stderr=subprocess.DEVNULL)
            self.addCleanup(process.wait)
            self.addCleanup(process.kill)
            os.close(writer)
            with os.fdopen(reader) as pipe:
                return pipe.readline().strip()

        coordinator = listens(COORDINATOR, "--workers", "1", "--listen", "127.0.0.1:0")
        listens(self.worker, "--backend", backend, "--model", MODEL, "--coordinator", coordinator,
                "--threads", "1")
        wait_until(lambda: moectl("wait", "--endpoint", coordinator, check=False).returncode == 0)
        done = moectl("health", "-o", "json", "--endpoint", coordinator, check=False)
        check, = [c for c in json.loads(done.stdout)["checks"] if c["code"] == "BACKEND"]
        return done.returncode, check["result"], check["text"]

    def test_health_names_the_missing_library(self):
        self.assertEqual(self.health("auto"), (0, "OK", "cpu, by --backend auto"))
        shutil.copy(os.path.join(BUILD, "tests", "integration", "libneeding_backend.so"),
                    self.module)
        code, result, text = self.health("auto")
        self.assertEqual((code, result), (8, "WARNING"))
        self.assertIn("cpu, by --backend auto: the installed CUDA module cannot be used: ", text)
        self.assertIn("libabsent_library.so: cannot open shared object file", text)
        self.assertEqual(self.health("cpu"), (0, "OK", "cpu, by --backend cpu"))

    def refuses(self, *words):
        """--backend cuda ends with one error, --backend auto serves and logs the same reason."""
        error = self.run_worker("cuda")
        self.reason = "no reason"
        self.assertEqual(self.run_worker("auto"), "serves")
        for word in words:
            self.assertIn(word, error)
            self.assertIn(word, self.reason)
        self.assertIn("--backend cuda: ", error)
        self.assertIn("--backend auto takes the CPU: ", self.reason)

    def test_no_module(self):
        self.refuses("the module backend_cuda.so is not installed")

    def test_a_module_of_another_build_is_refused_by_name(self):
        shutil.copy(os.path.join(BUILD, "tests", "integration", "libforeign_backend.so"),
                    self.module)
        self.refuses("backend_cuda.so is of release 9.8.7 (commit feedfacefeed), this program of ")

    def test_a_missing_library_is_named(self):
        shutil.copy(os.path.join(BUILD, "tests", "integration", "libneeding_backend.so"),
                    self.module)
        self.refuses("libabsent_library.so: cannot open shared object file")

    def test_a_file_that_is_no_module(self):
        with open(self.module, "w") as file:
            file.write("not a shared object")
        self.refuses("backend_cuda.so")

    def test_no_setting_of_the_user_names_the_place(self):
        """Neither the working directory nor the loader's path is searched."""
        for folder in (self.root, os.path.dirname(self.worker)):
            shutil.copy(os.path.join(BUILD, "tests", "integration", "libforeign_backend.so"),
                        os.path.join(folder, "backend_cuda.so"))
        self.assertIn("is not installed",
                      self.run_worker("cuda", LD_LIBRARY_PATH=self.root))

    def test_no_driver(self):
        """With the build's own module, on a host without a GPU."""
        built = os.path.join(BUILD, "modules", "backend_cuda.so")
        if not os.path.exists(built):
            self.skipTest("this build has no CUDA backend")
        if os.path.exists("/dev/nvidiactl"):
            self.skipTest("this host has a GPU")
        shutil.copy(built, self.module)
        self.refuses("the NVIDIA driver")


if __name__ == "__main__":
    main()
