# SPDX-License-Identifier: Apache-2.0
"""A local group of real daemons for tests, and the golden data.

Every test program here gets the build directory and the golden models as its first two arguments
(see CMakeLists.txt) and then behaves as a unittest program.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import numpy as np

BUILD = sys.argv.pop(1)
MODELS = sys.argv.pop(1)
BACKEND = os.environ.get("MOE_TEST_BACKEND", "cpu")  # tests/gpu/run.sh sets cuda
# Number of devices; each worker needs one. Tests of larger groups are skipped.
DEVICES = int(os.environ.get("MOE_TEST_DEVICES", "64"))
TRANSPORT = os.environ.get("MOE_TEST_TRANSPORT", "auto")  # "network" with GPUs
MOECTL = os.path.join(BUILD, "client", "moectl", "moectl")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
sys.path.insert(0, os.path.join(BUILD, "python"))
import moed  # noqa: E402 (from the build directory)

FAMILIES = sorted(
    name for name in os.listdir(MODELS) if os.path.isdir(os.path.join(MODELS, name))
)


@functools.lru_cache(None)
def _fork_returns(endpoint):
    program = """
import os, sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
grpc.channel_ready_future(channel).result(30)
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
"""
    try:
        subprocess.run([sys.executable, "-c", program, endpoint], timeout=45, check=True,
                       stderr=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return False
    return True


def is_sanitized():
    with open(os.path.join(BUILD, "CMakeCache.txt"), encoding="utf-8") as file:
        text = file.read()
    return "MOE_SANITIZE:BOOL=ON" in text or "MOE_TSAN:BOOL=ON" in text


def skip_without_fork(case, endpoint):
    """Skips where a process with open connections cannot fork.

    gRPC itself may not return from fork, as on Debian 13: judged by grpcio without moed. In a child
    of a process with threads, a sanitizer's malloc may wait for ever for a lock that no thread of
    the child holds."""
    if is_sanitized():
        case.skipTest("a sanitizer's malloc does not survive a fork of a process with threads")
    if not _fork_returns(endpoint):
        case.skipTest("this gRPC does not let a process with connections fork")


def run_in_child(case, function):
    """Runs function() in a fork. The test fails unless it returns True within 30 s."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        code = 1
        try:
            code = 0 if function() is True else 2
        finally:
            os._exit(code)
    case.assertEqual(os.waitpid(pid, 0)[1], 0)


def names_in(root):
    """What is in a training directory, without the fences of groups."""
    return sorted(name for name in os.listdir(root) if not name.endswith(".fence"))


def model_directory(family):
    return os.path.join(MODELS, family)


def golden_cases(family):
    """(layer, tokens, x, y) of a family's recorded passes, F32."""
    golden = moed.read_safetensors(os.path.join(model_directory(family), "golden.safetensors"))
    for name in sorted(golden):
        if name.endswith(".x"):
            layer, tokens, _ = name.split(".")
            yield int(layer[len("layer") :]), int(tokens[1:]), golden[name], golden[name[:-1] + "y"]


def to_bf16(x):
    """F32 -> BF16 bits (uint16), rounded to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def relative_error(got, want):
    """Relative error in the Frobenius norm."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


class Group:
    """`moectl up` in the foreground, with its daemons."""

    def __init__(self, model, workers, *extra):
        if workers > DEVICES:
            raise unittest.SkipTest("%d workers need as many devices" % workers)
        self.state = tempfile.mkdtemp(prefix="moed-test-")
        self.process = subprocess.Popen(
            [MOECTL, "up", "--model", model, "--workers", str(workers), "--backend", BACKEND,
             "--transport", TRANSPORT,
             "--port", "0", "--state-dir", self.state, *extra],
            stdout=subprocess.PIPE, text=True)
        self.endpoint = self.process.stdout.readline().strip()
        if not self.endpoint:
            self.process.wait()
            self.process.stdout.close()
            shutil.rmtree(self.state, ignore_errors=True)
            raise RuntimeError("moectl up failed with exit code %d" % self.process.returncode)

    def description(self):
        with open(os.path.join(self.state, "group.json")) as file:
            return json.load(file)

    def worker_pids(self):
        found = []
        for entry in self.description()["processes"]:
            with open("/proc/%d/comm" % entry["pid"]) as file:
                if file.read().strip() == "moe-worker":
                    found.append(entry["pid"])
        return found

    def stop(self):
        """Sends Ctrl-C. Returns the exit code of moectl up."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = None
        self.process.stdout.close()
        shutil.rmtree(self.state, ignore_errors=True)
        return code


@contextlib.contextmanager
def group(family, workers, *extra):
    g = Group(model_directory(family), workers, *extra)
    try:
        yield g
    finally:
        code = g.stop()
    if code != 0:
        raise RuntimeError("moectl up ended with exit code %s after Ctrl-C" % code)


def moectl(*arguments, check=True):
    """Runs moectl. Returns the finished process with text output."""
    done = subprocess.run([MOECTL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=120)
    if check and done.returncode != 0:
        raise RuntimeError("moectl %s: exit %d: %s" % (
            " ".join(arguments), done.returncode, done.stderr))
    return done


def open_files(pid):
    """Paths in /proc of a process' open descriptors, with targets. Some may close meanwhile."""
    found = {}
    for name in os.listdir("/proc/%d/fd" % pid):
        path = "/proc/%d/fd/%s" % (pid, name)
        try:
            found[path] = os.readlink(path)
        except FileNotFoundError:
            pass
    return found


def freeze(pid):
    """Stops a process and returns when all its threads stand. SIGSTOP does not wait: a thread
    on another processor may still serve a request."""
    def stands(task):
        with open("/proc/%d/task/%s/stat" % (pid, task)) as file:
            return file.read().rsplit(")", 1)[1].split()[0] in "TZX"

    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(map(stands, os.listdir("/proc/%d/task" % pid))))


def wait_until(condition, seconds=60):
    """Returns when condition() is true. Fails the test after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("the condition did not become true in %g s" % seconds)
        time.sleep(0.01)


def main():
    unittest.main(module="__main__", verbosity=2)
