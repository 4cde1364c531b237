"""A local group of real daemons for tests, and the golden data to hold it against.

Every test program here gets the build directory and the golden models as its first two arguments
(see CMakeLists.txt) and then behaves as a unittest program.
"""

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

import numpy as np

BUILD = sys.argv.pop(1)
MODELS = sys.argv.pop(1)
MOECTL = os.path.join(BUILD, "client", "moectl", "moectl")
sys.path.insert(0, os.path.join(BUILD, "python"))

FAMILIES = sorted(
    name for name in os.listdir(MODELS) if os.path.isdir(os.path.join(MODELS, name))
)


def model_directory(family):
    return os.path.join(MODELS, family)


def read_safetensors(path):
    """All F32 and BF16 tensors of a file; BF16 is widened to F32."""
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = data[8 + length + begin : 8 + length + end]
        if entry["dtype"] == "F32":
            flat = np.frombuffer(raw, np.float32)
        elif entry["dtype"] == "BF16":
            flat = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "I32":
            flat = np.frombuffer(raw, np.int32)
        else:
            continue
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def write_safetensors(path, tensors):
    """Writes F32 arrays."""
    header, blob = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array, np.float32).tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(blob), len(blob) + len(raw)],
        }
        blob += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + blob)


def golden_cases(family):
    """(layer, tokens, x, y) of a family's recorded passes, F32."""
    golden = read_safetensors(os.path.join(model_directory(family), "golden.safetensors"))
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
    """`moectl up` in the foreground, with everything it started."""

    def __init__(self, model, workers, *extra):
        self.state = tempfile.mkdtemp(prefix="moed-test-")
        self.process = subprocess.Popen(
            [MOECTL, "up", "--model", model, "--workers", str(workers), "--backend", "cpu",
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

    def stop(self):
        """Ctrl-C; returns the exit code of moectl up."""
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
    """Runs moectl; returns the finished process with text output."""
    done = subprocess.run([MOECTL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=120)
    if check and done.returncode != 0:
        raise RuntimeError("moectl %s: exit %d: %s" % (
            " ".join(arguments), done.returncode, done.stderr))
    return done


def main():
    unittest.main(module="__main__", verbosity=2)
