# SPDX-License-Identifier: Apache-2.0
"""Workers with faults that a test turns on and off (held_backend.c)."""

import os
import re
import shutil

from group import BUILD, wait_until
from training import WORKER

with open(os.path.join(BUILD, "CMakeCache.txt"), encoding="utf-8") as cache:
    # From the worker's folder to that of modules.
    MODULES = re.search(r"(?m)^MOE_MODULE_FOLDER:\w+=(.*)$", cache.read()).group(1)


class Held:
    """`worker` is a program that finds the module where it looks for that of GPUs: start it with
    --backend cuda and `environment`."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "held")
        self.worker = os.path.join(folder, "programs", "bin", "moe-worker")
        self.environment = {"MOE_TEST_HELD": self.path}
        os.makedirs(os.path.dirname(self.worker))
        shutil.copy(WORKER, self.worker)
        modules = os.path.join(os.path.dirname(self.worker), MODULES)
        os.makedirs(modules)
        shutil.copy(os.path.join(BUILD, "tests", "integration", "libheld_backend.so"),
                    os.path.join(modules, "backend_cuda.so"))
        self.hold("")

    def hold(self, what, process=None):
        """A word of held_backend.c, "" = nothing; for all workers, or for this one."""
        path = self.path if process is None else "%s.%d" % (self.path, process.pid)
        if os.path.exists(path + ".at"):
            os.remove(path + ".at")
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(what)
        os.rename(path + ".new", path)

    def wait_until_held(self, process):
        """A call of this worker is held by a word that says where."""
        wait_until(lambda: os.path.exists("%s.%d.at" % (self.path, process.pid)))
