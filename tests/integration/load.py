# SPDX-License-Identifier: Apache-2.0
"""Clients that call again and again in threads of their own, beside what a test or benchmark
does."""

import threading
import time

from group import wait_until
from training import Trainer


class Load:
    """Calls until the `with` block ends. `times`: seconds of each call; `failures`: of those that
    failed; `falls`: versions of the weights that a client saw sink; `pairs`: saved
    passes that went backward."""

    def __init__(self):
        self.times, self.failures, self.falls = [], [], []
        self.pairs = []
        self._stop, self._threads = threading.Event(), []

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def forwards(self, clients, endpoints, layer, x):
        """`clients` clients, each asking one worker after the other."""
        for number in range(clients):
            self._start(self._forward_client, number, endpoints, layer, x)

    def saved_pairs(self, clients, endpoints, layer, x, dy):
        """`clients` clients, each saving a Forward and going backward from it, on one worker."""
        for number in range(clients):
            self._start(self._saving_client, number, endpoints, layer, x, dy)

    def wait_for_more(self, calls=50):
        """Until `calls` more calls have been answered, or one has failed."""
        enough = len(self.times) + calls
        wait_until(lambda: self.failures or len(self.times) >= enough)

    def _start(self, client, *arguments):
        def run():
            try:
                client(*arguments)
            except Exception as error:  # whatever it is, the test has to hear of it
                self.failures.append(error)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def _forward_client(self, number, endpoints, layer, x):
        trainers = [Trainer(endpoint, "plain") for endpoint in endpoints]
        version = 0
        while not self._stop.is_set():
            begin = time.monotonic()
            answer = trainers[number % len(trainers)].forward(layer, x)
            self.times.append(time.monotonic() - begin)
            if answer.weights_version < version:
                self.falls.append((version, answer.weights_version))
            version = answer.weights_version
            number += 1
        for trainer in trainers:
            trainer.close()

    def _saving_client(self, number, endpoints, layer, x, dy):
        t = Trainer(endpoints[number % len(endpoints)], "saving%d" % number)
        batch = 0
        while not self._stop.is_set():
            batch += 1
            if not t.forward(layer, x, retain=batch).retained:
                raise AssertionError("a pass was not saved")
            t.backward(layer, dy, batch=batch)
            self.pairs.append(batch)
        t.close()
