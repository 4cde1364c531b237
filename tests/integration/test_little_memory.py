# SPDX-License-Identifier: Apache-2.0
"""Daemons that may have little memory: they serve, or end with one clear error."""

import os
import signal
import subprocess
import tempfile
import time
import unittest

from group import BUILD, is_sanitized, main, model_directory

MIB = 1 << 20
LIMITS = [40 * MIB, 52 * MIB, 60 * MIB, 72 * MIB, 100 * MIB, 160 * MIB, 480 * MIB, 16384 * MIB]
LONGEST = 120  # seconds; a regular end takes less than one


class Daemon:
    """A daemon with a limit of its address space, in bytes."""

    def __init__(self, limit, command):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            ["prlimit", "--as=%d" % limit, *command], stdout=self.log, stderr=self.log)

    def text(self):
        self.log.seek(0)
        return self.log.read()

    def run(self, started):
        """Sends SIGTERM when the log has `started`. (exit status, log)"""
        end = time.monotonic() + LONGEST
        while self.process.poll() is None and started not in self.text():
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        try:
            self.process.send_signal(signal.SIGTERM)
            status = self.process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            status = "no end after SIGTERM"
        text = self.text()
        self.log.close()
        return status, text


@unittest.skipIf(is_sanitized(), "sanitizers need terabytes of addresses")
class AddressSpace(unittest.TestCase):
    def check(self, started, command):
        served = 0
        for limit in LIMITS:
            status, text = Daemon(limit, command).run(started)
            errors = [line for line in text.splitlines() if " ERROR " in line]
            print(f"{limit // MIB} MiB: status {status}, {errors or 'served'}")
            if status == 127 and "shared libraries" in text:
                continue  # the loader of the system has no room either
            if started in text:
                served += 1
                self.assertEqual(status, 0, text)
            else:
                self.assertEqual(status, 1, text)
                self.assertEqual(len(errors), 1, text)
        return served

    def test_a_coordinator_serves_or_says_why_not(self):
        daemon = os.path.join(BUILD, "daemon", "coordinator", "moe-coordinator")
        served = self.check("listening on port", [daemon, "--listen", "127.0.0.1:0"])
        self.assertTrue(0 < served < len(LIMITS))

    def test_a_worker_serves_or_says_why_not(self):
        daemon = os.path.join(BUILD, "daemon", "worker", "moe-worker")
        served = self.check("listening on 127", [
            daemon, "--backend", "cpu", "--model", model_directory("qwen3_moe"),
            "--listen", "127.0.0.1:0", "--coordinator", "127.0.0.1:1"])
        self.assertTrue(0 < served < len(LIMITS))


if __name__ == "__main__":
    main()
