# SPDX-License-Identifier: Apache-2.0
"""How daemons end, as clients, peers and operators see it."""

import os
import queue
import resource
import shutil
import signal
import tempfile
import threading
import time
import unittest

import grpc

from group import golden_cases, main, names_in, wait_until
from training import Trainer, TrainingGroup, refusal, training_group
import wire
from wire import expert, training

FAMILY = "qwen3_moe"


def request():
    layer, tokens, x, _ = next(each for each in golden_cases(FAMILY) if each[1] == 37)
    return expert.ForwardRequest(layer=layer, tokens=tokens, hidden=x.shape[1], dtype=1,
                                 x_data=x.tobytes())


class Client:
    """Makes calls in a loop, also after refusals, and records the time of each answer."""

    def __init__(self, endpoint):
        self.endpoint, self.seen = endpoint, []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        raw = request().SerializeToString()
        with wire.open_channel(self.endpoint) as channel:
            while not self.stop.wait(0.001):
                try:
                    wire.forward(channel, raw, timeout=10)
                    what = ("OK", "")
                except grpc.RpcError as error:
                    what = (error.code().name, wire.error_reason(error)[0])
                self.seen.append((time.monotonic(), what))

    def times(self, *what):
        return [at for at, seen in list(self.seen) if seen == what]

    def end(self):
        self.stop.set()
        self.thread.join()


class Signals(unittest.TestCase):
    def test_a_repeated_signal_does_not_shorten_the_notice_to_clients(self):
        """The end of a group reaches its workers twice: from the coordinator, and as a signal."""
        g = TrainingGroup(FAMILY, 1)
        client = Client(g.endpoints[0])
        try:
            wait_until(lambda: len(client.times("OK", "")) >= 5)
            worker = g.workers[0]
            worker.send_signal(signal.SIGTERM)
            wait_until(lambda: client.times("UNAVAILABLE", "DRAINING"))
            for _ in range(3):
                time.sleep(0.02)
                worker.send_signal(signal.SIGTERM)
            code = worker.wait(timeout=30)
            client.end()
        finally:
            client.end()
            g.stop()
        refusals = client.times("UNAVAILABLE", "DRAINING")
        # A client that gets little CPU time sees a part of the refusals. So measure from the answer
        # before the first refusal to the one after the last: an upper bound.
        before = max(at for at, _ in client.seen if at < refusals[0])
        after = min((at for at, _ in client.seen if at > refusals[-1]), default=time.monotonic())
        print("%d typed refusals over %.0f of %.0f ms" % (
            len(refusals), 1000 * (refusals[-1] - refusals[0]), 1000 * (after - before)))
        self.assertEqual(code, 0)
        self.assertGreater(after - before, 0.15)

    def test_later_calls_are_never_answered_with_cancelled(self):
        """Most clients do not retry after CANCELLED, so a server that shuts down must send
        UNAVAILABLE."""
        g = TrainingGroup(FAMILY, 2)
        clients = [Client(endpoint) for endpoint in g.endpoints * 2]
        try:
            for client in clients:
                wait_until(lambda: len(client.times("OK", "")) >= 5)
            g.coordinator.send_signal(signal.SIGTERM)
            codes = [process.wait(timeout=30) for process in [g.coordinator, *g.workers]]
        finally:
            for client in clients:
                client.end()
            g.stop()
        seen = {}
        for client in clients:
            for _, what in client.seen:
                seen[what] = seen.get(what, 0) + 1
        print(seen)
        self.assertEqual(codes, [0, 0, 0])
        self.assertLessEqual({code for code, _ in seen}, {"OK", "UNAVAILABLE"})
        self.assertIn(("UNAVAILABLE", "DRAINING"), seen)

    def test_open_streams_end_with_a_reason_and_delay_no_shutdown(self):
        layer, tokens, x, _ = next(each for each in golden_cases(FAMILY) if each[1] == 37)
        item = expert.ForwardStreamRequest(layer=layer, tokens=tokens, hidden=x.shape[1], dtype=1,
                                           x_data=x.tobytes(), request_id=7)
        g = TrainingGroup(FAMILY, 2)
        requests = queue.Queue()
        try:
            with wire.open_channel(g.endpoints[1]) as channel:
                call = channel.stream_stream(
                    "/moe.v1.ExpertService/ForwardStream",
                    request_serializer=expert.ForwardStreamRequest.SerializeToString,
                    response_deserializer=expert.ForwardStreamResponse.FromString)(
                        iter(requests.get, None))
                requests.put(item)
                self.assertEqual(next(call).request_id, 7)
                for process in [g.coordinator, *g.workers]:
                    process.send_signal(signal.SIGTERM)
                answer, error = refusal(next, call)
                codes = [process.wait(timeout=30) for process in [g.coordinator, *g.workers]]
                print(answer, error.details())
                self.assertEqual(answer, ("UNAVAILABLE", "DRAINING"))
                self.assertEqual(codes, [0, 0, 0])
                requests.put(None)
        finally:
            requests.put(None)
            g.stop()


def limit_files(process, size):
    """Limits the size of files that `process` writes, in bytes."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class FullDisks(unittest.TestCase):
    """Simulates a full disk by a limit on the size of files. It needs no extra disk, and also
    raises a signal."""

    def test_a_save_on_a_full_disk_is_refused_and_leaves_nothing(self):
        root = tempfile.mkdtemp(prefix="moed-endings-")
        self.addCleanup(shutil.rmtree, root, ignore_errors=True)
        with training_group("deepseek_v3", 2, "--training-dir", root) as g:
            client = Trainer(g.endpoints[1])
            epoch = g.info().epoch

            def save(step):
                return client.call("SaveCheckpoint", training.SaveCheckpointRequest(
                    step_id=step, name="tight"))

            for slot, size in ((0, 4096), (1, 4096), (0, 60000), (1, 1)):
                limit_files(g.workers[slot], size)
                answer, error = refusal(save, 1)
                print(answer, error.details())
                self.assertEqual(answer, ("RESOURCE_EXHAUSTED", "IO"))
                self.assertEqual(names_in(root), [])
                limit_files(g.workers[slot], resource.RLIM_INFINITY)
            self.assertFalse(save(1).repeated)
            self.assertEqual(names_in(root), ["tight"])
            # The directory disappears (as after umount) and comes back.
            os.rename(root, root + ".away")
            self.addCleanup(shutil.rmtree, root + ".away", ignore_errors=True)
            answer, error = refusal(save, 2)
            print(answer, error.details())
            self.assertEqual(answer[1], "IO")
            self.assertIn("checkpoint tight", error.details())
            os.rename(root + ".away", root)
            self.assertEqual(refusal(save, 2)[0], ("ALREADY_EXISTS", "CHECKPOINT_EXISTS"))
            self.assertEqual(g.info().epoch, epoch)
            client.close()

    def test_a_coordinator_goes_on_when_a_full_disk_has_room_again(self):
        g = TrainingGroup(FAMILY, 2)
        try:
            epoch = g.info().epoch
            limit_files(g.coordinator, 1)
            g.kill_worker(1)
            g.start_worker(1)
            with wire.open_channel(g.address) as channel:
                wait_until(lambda: "cannot save" in wire.get_status(channel).reason)
                self.assertEqual(g.info().epoch, 0)
                limit_files(g.coordinator, resource.RLIM_INFINITY)
                g.wait_serving(epoch)
        finally:
            codes = g.stop()
        self.assertEqual(codes, [0, 0, 0])


if __name__ == "__main__":
    main()
