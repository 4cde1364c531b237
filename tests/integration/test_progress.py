# SPDX-License-Identifier: Apache-2.0
"""How far loading, Save and Load are, as moectl shows it: a bar on a terminal, lines elsewhere, and
figures that add up over the workers."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
import time
import tty
import unittest

from group import MOECTL, main, wait_until
from fake_group import FakeAdmin, FakeWorker, Ledger
from wire import admin

OK = 0


class Terminal:
    """moectl with a terminal of 120 columns as its stderr."""

    def __init__(self, *arguments):
        self.arguments, self.text, self.out = arguments, "", ""

    def __enter__(self):
        self.screen, theirs = pty.openpty()
        self.columns(120)
        tty.setraw(theirs)
        self.process = subprocess.Popen([MOECTL, *self.arguments], stderr=theirs,
                                        stdout=subprocess.PIPE, text=True)
        os.close(theirs)
        return self

    def columns(self, count):
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, count, 0, 0))

    def read(self):
        """False at the end."""
        try:
            more = os.read(self.screen, 4096)
        except OSError:  # all other ends are closed
            return False
        self.text += more.decode()
        return bool(more)

    def wait_for(self, text):
        while text not in self.text and self.read():
            pass
        if text not in self.text:
            raise AssertionError("%r is not in %r" % (text, self.text[-300:]))

    def end(self):
        while self.read():
            pass
        self.out = self.process.stdout.read()
        return self.process.wait(60)

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        os.close(self.screen)


class SlowWorker(FakeWorker):
    """A Save ends when the test says so; until then `progress` is (done, total)."""

    def __init__(self, ledger):
        self.go_on, self.progress, self.saves = threading.Event(), None, 0
        FakeWorker.__init__(self, ledger)

    def GetTrainState(self, request):
        answer = FakeWorker.GetTrainState(self, request)
        if self.progress is not None:
            answer.saving = "k5"
            answer.progress_bytes, answer.progress_bytes_total = self.progress
        return answer

    def SaveCheckpoint(self, request):
        self.saves += 1
        self.go_on.wait(60)
        return FakeWorker.SaveCheckpoint(self, request)


class Progress(unittest.TestCase):
    def loading(self, fake, state, *bytes_):
        """The workers of slots 0, 1, ... have loaded so much of 64 MiB each."""
        while len(fake.status.workers) < len(bytes_):
            fake.status.workers.add(slot=len(fake.status.workers), total_bytes=64 << 20,
                                    state=admin.WORKER_STATE_LOADING)
        for worker, loaded in zip(fake.status.workers, bytes_):
            worker.loaded_bytes = loaded
        fake.status.state = state

    def test_loading_has_a_bar_on_a_terminal(self):
        fake = FakeAdmin(version="0.2.0", slots=2)
        self.loading(fake, admin.GROUP_STATE_LOADING, 0, 0)
        try:
            with Terminal("wait", "--endpoint", fake.endpoint, "--timeout", "60") as terminal:
                terminal.wait_for("loading [........................] 0 %, 0.0 KiB of 128.0 MiB")
                # Two workers: the figures are of both.
                self.loading(fake, admin.GROUP_STATE_LOADING, 48 << 20, 16 << 20)
                terminal.wait_for("loading [############............] 50 %, 64.0 MiB of 128.0 MiB")
                self.loading(fake, admin.GROUP_STATE_LOADING, 64 << 20, 32 << 20)
                terminal.wait_for("loading [##################......] 75 %, 96.0 MiB of 128.0 MiB")
                terminal.columns(60)  # narrow: a shorter bar, or a shorter text
                self.loading(fake, admin.GROUP_STATE_LOADING, 64 << 20, 64 << 20)
                terminal.wait_for("100 %, 128.0 MiB of 128.0 MiB")
                fake.status.state = admin.GROUP_STATE_SERVING
                self.assertEqual(terminal.end(), OK)
            frames = terminal.text.split("\r")
            for frame in frames:
                figures = re.search(r" (\d+) %, ([0-9.]+) (\w+) of 128.0 MiB(.*)", frame)
                if figures is not None:
                    done = float(figures.group(2)) * (1 if figures.group(3) == "MiB" else 0)
                    self.assertEqual(int(figures.group(1)), int(100 * done / 128), frame)
            rated = [frame for frame in frames if "MiB/s" in frame and " left" in frame]
            self.assertTrue(rated, terminal.text)
            self.assertTrue(all(len(f.replace("\x1b[K", "").rstrip("\n")) < 120 for f in frames))
            self.assertTrue(terminal.text.endswith("\r\x1b[K"), terminal.text)  # it goes
        finally:
            fake.server.stop(None).wait()

    def test_loading_has_lines_elsewhere(self):
        fake = FakeAdmin(version="0.2.0", slots=2)
        self.loading(fake, admin.GROUP_STATE_LOADING, 0, 0)
        process = subprocess.Popen(
            [MOECTL, "wait", "--endpoint", fake.endpoint, "--timeout", "60"],
            stderr=subprocess.PIPE, text=True)
        try:
            self.assertEqual(process.stderr.readline(), "moectl: LOADING\n")
            self.assertEqual(process.stderr.readline(),
                             "moectl: loading: 0 %, 0.0 KiB of 128.0 MiB\n")
            begun = time.monotonic()
            said = []
            for percent in range(1, 100):
                self.loading(fake, admin.GROUP_STATE_LOADING, (percent * 128 << 20) // 100, 0)
                time.sleep(0.03)
            self.loading(fake, admin.GROUP_STATE_LOADING, 64 << 20, 64 << 20)
            while not said or "100 %" not in said[-1]:
                said.append(process.stderr.readline())
            fake.status.state = admin.GROUP_STATE_SERVING
            said.append(process.stderr.read())
            self.assertEqual(process.wait(60), OK)
            self.assertEqual(said.pop(), "")
            # One every 10 %, and one every 5 s.
            self.assertLessEqual(len(said), 10 + (time.monotonic() - begun) / 5, said)
            shown = [int(re.match(r"moectl: loading: (\d+) %, ", line).group(1)) for line in said]
            self.assertEqual(shown, sorted(shown))
            self.assertNotIn("\x1b", "".join(said))
        finally:
            process.kill()
            process.communicate()
            fake.server.stop(None).wait()

    def test_a_save_shows_the_bytes_of_all_workers(self):
        ledger = Ledger()
        workers = [SlowWorker(ledger) for _ in range(2)]
        for slot, worker in enumerate(workers):
            worker.slot, worker.workers = slot, [each.endpoint for each in workers]
        try:
            with Terminal("training", "save", "k5", "--endpoint",
                          workers[1].endpoint) as terminal:
                wait_until(lambda: workers[1].saves)
                workers[0].progress = (3 << 20, 16 << 20)
                workers[1].progress = (1 << 20, 16 << 20)
                terminal.wait_for("saving k5 [###.....................] 12 %, 4.0 MiB of 32.0 MiB")
                workers[0].progress = (16 << 20, 16 << 20)
                terminal.wait_for("53 %, 17.0 MiB of 32.0 MiB")
                workers[1].go_on.set()
                self.assertEqual(terminal.end(), OK)
            self.assertIn("saved k5: ", terminal.out)
            self.assertTrue(terminal.text.endswith("\r\x1b[K"), terminal.text)
        finally:
            for worker in workers:
                worker.go_on.set()
                worker.server.stop(None).wait()


if __name__ == "__main__":
    main()
