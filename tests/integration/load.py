# SPDX-License-Identifier: Apache-2.0
"""Clients that make calls in background threads while a test or benchmark runs."""

import threading
import time

from group import wait_until
from training import Trainer


class Load:
    """Makes calls until the `with` block ends. `times`: seconds of each call; `failures`: errors of
    calls; `falls`: pairs of weights versions that decreased; `pairs`: retained passes that went
    backward."""

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
        """Starts `clients` clients; each calls one worker after the other."""
        for number in range(clients):
            self._start(self._forward_client, number, endpoints, layer, x)

    def retained_pairs(self, clients, endpoints, layer, x, dy):
        """Starts `clients` clients of one worker; each retains a Forward and runs its Backward."""
        for number in range(clients):
            self._start(self._retaining_client, number, endpoints, layer, x, dy)

    def wait_for_more(self, calls=50):
        """Waits until `calls` more calls are answered, or one has failed."""
        enough = len(self.times) + calls
        wait_until(lambda: self.failures or len(self.times) >= enough)

    def _start(self, client, *arguments):
        def run():
            try:
                client(*arguments)
            except Exception as error:  # reported to the test
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

    def _retaining_client(self, number, endpoints, layer, x, dy):
        t = Trainer(endpoints[number % len(endpoints)], "retaining%d" % number)
        batch = 0
        while not self._stop.is_set():
            batch += 1
            if not t.forward(layer, x, retain=batch).retained:
                raise AssertionError("a pass was not retained")
            t.backward(layer, dy, batch=batch)
            self.pairs.append(batch)
        t.close()
