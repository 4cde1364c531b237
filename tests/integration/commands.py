# SPDX-License-Identifier: Apache-2.0
"""Runs moectl as a script does, apart from the groups of the user."""

import os
import socket
import subprocess
import tempfile

from group import MOECTL

FAMILY = "qwen3_moe"
OK, FAILED, USAGE, UNHEALTHY, NOT_FOUND, UNREACHABLE, PERMISSION, CONFLICT = range(8)

NOWHERE = tempfile.TemporaryDirectory(prefix="moed-test-")
# Some commands here run in another session (XDG_RUNTIME_DIR) than the daemons; sockets stay.
os.environ["MOED_RUNTIME_DIR"] = os.path.join(NOWHERE.name, "run")


def run(*arguments, cwd=None, **more):
    """Runs moectl with `more` in the environment. It does not find a group of the user."""
    environment = {key: value for key, value in os.environ.items() if key != "MOED_ENDPOINT"}
    environment.update(
        {"XDG_RUNTIME_DIR": NOWHERE.name, "XDG_CONFIG_HOME": NOWHERE.name, **more})
    return subprocess.run([MOECTL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=120, env=environment, cwd=cwd)


def folder():
    return tempfile.TemporaryDirectory(prefix="moed-test-", ignore_cleanup_errors=True)


def listens(endpoint):
    host, port = endpoint.rsplit(":", 1)
    with socket.socket() as s:
        return s.connect_ex((host, int(port))) == 0


def is_alive(pid):
    try:
        with open("/proc/%d/stat" % pid) as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_pending(pid, number):
    """True if the process has a signal that it has not taken."""
    with open("/proc/%d/status" % pid) as file:
        pending = next(line for line in file if line.startswith("ShdPnd:"))
    return bool(int(pending.split()[1], 16) >> (number - 1) & 1)
