# SPDX-License-Identifier: Apache-2.0
"""Traces of requests: W3C traceparent in, spans out to an OTLP collector."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

import grpc
import numpy as np

from group import BUILD, main, moed, wait_until
from training import Trainer, TrainingGroup, refusal
import wire
from wire import expert

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from certificates import Certificates  # noqa: E402
from otlp import Collector  # noqa: E402

FAMILY = "deepseek_v3"
FORWARD = "moe.v1.ExpertService/Forward"
STREAM = "moe.v1.ExpertService/ForwardStream"
RING = "moe.v1.ExpertService/Ring"
PARENT = "00f067aa0ba902b7"
TOP = ["check", "queue", "step", "hand_out", "answer"]
INSIDE = ["copy_in", "start", "router", "prepare", "dispatch", "gemm1", "gemm2", "shared",
          "combine", "collect"]
SERVER, INTERNAL, ERROR = 2, 1, 2


def header(number, sampled=True, parent=PARENT):
    """(trace id, metadata) with a traceparent of trace `number`."""
    trace = "%032x" % number
    return trace, (("traceparent", "00-%s-%s-%02x" % (trace, parent, sampled)),)


class Served:
    """One worker that serves, and one client."""

    def __init__(self, *options):
        self.where = tempfile.TemporaryDirectory(prefix="moed-trace-")
        self.log = os.path.join(self.where.name, "worker.log")
        self.group = TrainingGroup(FAMILY, 1, "--log-level", "info", "--log-file", self.log,
                                   "--metrics-listen", "127.0.0.1:0", *options)
        self.channel = wire.open_channel(self.group.endpoints[0])
        self.model = wire.get_model(self.channel)
        self.layer = self.model.layers[0]
        with open(self.log) as file:
            self.metrics_port = int(re.search(r"metrics on port (\d+)", file.read())[1])

    def close(self):
        self.channel.close()
        codes = self.group.stop()
        if codes != [0, 0]:
            with open(self.log, errors="replace") as file:
                print(file.read())
        self.where.cleanup()
        if codes != [0, 0]:
            raise RuntimeError("daemons ended with %s" % codes)

    def request(self, kind=expert.ForwardRequest, tokens=1, **more):
        x = np.ones((tokens, self.layer.hidden), np.float32)
        return kind(layer=self.layer.layer, tokens=tokens, hidden=self.layer.hidden, dtype=1,
                    x_data=x.tobytes(), **more)

    def forward(self, metadata=(), tokens=1, **more):
        call = self.channel.unary_unary("/" + FORWARD,
                                        response_deserializer=expert.ForwardResponse.FromString)
        return call(self.request(tokens=tokens, **more).SerializeToString(), timeout=60,
                    metadata=metadata)

    def counted(self):
        """{result: spans} of moe_trace_spans_total."""
        with urllib.request.urlopen("http://127.0.0.1:%d/metrics" % self.metrics_port,
                                    timeout=30) as page:
            found = re.findall(r'moe_trace_spans_total\{result="(\w+)"\} (\d+)',
                               page.read().decode())
        return {result: int(value) for result, value in found}


@contextlib.contextmanager
def served(*options):
    s = Served(*options)
    try:
        yield s
    finally:
        s.close()


def roots(spans):
    return {s.trace: s for s in spans if s.kind == SERVER}


def children(spans, of):
    return sorted((s for s in spans if s.trace == of.trace and s.parent == of.id),
                  key=lambda s: s.start)


class Tree(unittest.TestCase):
    def contiguous(self, spans, parent):
        """Each begins where the one before ends; the first and the last touch the parent's ends."""
        self.assertEqual(spans[0].start, parent.start)
        self.assertEqual(spans[-1].end, parent.end)
        for one, next_ in zip(spans, spans[1:]):
            self.assertEqual(one.end, next_.start, (one, next_))

    def test_the_spans_of_a_request_add_up_to_its_server_time(self):
        calls = 40
        with Collector() as c, served("--otlp", c.address, "--trace-sample", "0") as s:
            answers = {}
            for number in range(1, calls + 1):
                trace, metadata = header(number)
                answers[trace] = s.forward(metadata, tokens=1 + number % 3)
            spans = c.wait(lambda spans: len(roots(spans)) == calls)
            found = roots(spans)
            self.assertEqual(set(found), set(answers))
            for trace, root in found.items():
                top = children(spans, root)
                self.assertEqual([t.name for t in top], TOP)
                self.contiguous(top, root)
                inside = children(spans, top[TOP.index("step")])
                names = [i.name for i in inside]
                self.assertEqual(names, [n for n in INSIDE if n in names])
                self.assertTrue({"router", "gemm1", "gemm2", "combine"} <= set(names), names)
                self.contiguous(inside, top[TOP.index("step")])
                stages = answers[trace].stages
                for name in ("router", "gemm1", "gemm2", "combine"):
                    self.assertEqual(inside[names.index(name)].ns,
                                     getattr(stages, name + "_ns"), name)
                leaves = sum(t.ns for t in top if t.name != "step") + sum(i.ns for i in inside)
                self.assertEqual(leaves, stages.server_ns)
                shares = {t.name: t.ns for t in top + inside}
                self.assertEqual(root.name, FORWARD)
                self.assertEqual(root.parent, PARENT)
                self.assertEqual(root.flags, 0x301)
                self.assertEqual({t.kind for t in top + inside}, {INTERNAL})
                a = root.attributes
                self.assertEqual((a["rpc.system"], a["rpc.service"], a["rpc.method"],
                                  a["rpc.grpc.status_code"], a["moe.layer"], a["moe.steps"]),
                                 ("grpc", "moe.v1.ExpertService", "Forward", 0, s.layer.layer, 1))
                self.assertEqual(a["moe.tokens"], answers[trace].tokens)
                self.assertFalse(root.message.HasField("status"))
            first = next(iter(found.values()))
            self.assertEqual((first.resource["service.name"],
                              first.resource["service.instance.id"], first.resource["moe.slot"]),
                             ("moe-worker", "w0", 0))
            now = time.time_ns()
            self.assertTrue(now - 600e9 < first.start <= first.end < now + 60e9)
        print("ns of the last request: %s" % shares)

    def test_requests_of_a_ring_have_spans(self):
        """With the parent in their entry; without one, by the worker's share."""
        client = os.path.join(BUILD, "tests", "integration", "regions_client")
        with Collector() as c, served("--otlp", c.address, "--trace-sample", "0",
                                      "--allow-client-memory", "16M") as s:
            done = subprocess.run([client, s.group.endpoints[0], "trace"], timeout=60,
                                  stdout=subprocess.PIPE, text=True, check=True)
            spans = c.wait(lambda spans: len(roots(spans)) == 2)
            found = roots(spans)
            good, bad = (found["%032x" % n] for n in (1, 3))
            top = children(spans, good)
            self.assertEqual([t.name for t in top], TOP)
            self.contiguous(top, good)
            inside = children(spans, top[TOP.index("step")])
            self.contiguous(inside, top[TOP.index("step")])
            self.assertEqual((good.name, good.parent), (RING, PARENT))
            self.assertGreaterEqual(good.ns, int(done.stdout))
            a = good.attributes
            self.assertEqual((a["rpc.system"], a["rpc.method"], a["rpc.grpc.status_code"],
                              a["moe.layer"], a["moe.tokens"], a["moe.steps"]),
                             ("moe_ring", "Ring", 0, s.layer.layer, 1, 1))
            self.assertEqual([t.name for t in children(spans, bad)], ["check"])
            self.assertEqual((bad.attributes["error.type"], bad.message.status.code),
                             ("REGION_RANGE", ERROR))
        with Collector() as c, served("--otlp", c.address, "--trace-sample", "1",
                                      "--allow-client-memory", "16M") as s:
            subprocess.run([client, s.group.endpoints[0], "same"], timeout=60, check=True,
                           stdout=subprocess.DEVNULL)
            spans = c.wait(lambda spans: sum(r.name == RING for r in roots(spans).values()) == 38)
            self.assertEqual({r.parent for r in roots(spans).values()}, {""})

    def test_each_item_of_a_stream_has_a_span(self):
        trace, metadata = header(7)
        with Collector() as c, served("--otlp", c.address, "--trace-sample", "0") as s:
            call = s.channel.stream_stream(
                "/" + STREAM, request_serializer=expert.ForwardStreamRequest.SerializeToString,
                response_deserializer=expert.ForwardStreamResponse.FromString)
            items = [s.request(expert.ForwardStreamRequest, request_id=i) for i in range(1, 6)]
            items[2].layer = 99
            self.assertEqual(len(list(call(iter(items), timeout=60, metadata=metadata))), 5)
            found = [x for x in c.wait(lambda spans: sum(x.kind == SERVER for x in spans) == 5)
                     if x.kind == SERVER]
        self.assertEqual({(f.name, f.trace, f.parent) for f in found}, {(STREAM, trace, PARENT)})
        self.assertEqual(len({f.id for f in found}), 5)
        self.assertEqual(sorted(f.attributes["rpc.grpc.status_code"] for f in found),
                         [0, 0, 0, 0, 5])

    def test_a_request_of_several_steps_has_a_span_for_each(self):
        trace, metadata = header(9)
        with Collector() as c, served("--otlp", c.address, "--max-tokens-per-step", "4") as s:
            for tokens, seen in ((11, 3), (80, 8)):
                answer = s.forward(metadata, tokens=tokens)
                self.assertEqual(answer.stages.steps, -(-tokens // 4))
                spans = c.wait(lambda spans: any(x.attributes.get("moe.tokens") == tokens
                                                 for x in spans))
                root = next(x for x in spans if x.attributes.get("moe.tokens") == tokens)
                top = children(spans, root)
                self.assertEqual(root.attributes["moe.steps"], answer.stages.steps)
                self.assertEqual(sum(t.name == "step" for t in top), seen)
                for t in top:
                    self.assertTrue(root.start <= t.start <= t.end <= root.end)
                    for i in children(spans, t):
                        self.assertTrue(t.start <= i.start <= i.end <= t.end)

    def test_a_failed_request_has_a_status(self):
        with Collector() as c, served("--otlp", c.address) as s:
            trace, metadata = header(5)
            with self.assertRaises(grpc.RpcError):
                s.forward(metadata, model="no such model")
            spans = c.wait(lambda spans: trace in roots(spans))
            root = roots(spans)[trace]
            self.assertEqual(root.message.status.code, ERROR)
            self.assertIn("the group has no model", root.message.status.message)
            self.assertEqual(root.attributes["error.type"], "MODEL_NOT_FOUND")
            self.assertEqual(root.attributes["rpc.grpc.status_code"], 5)
            self.assertEqual([x.name for x in children(spans, root)], ["check"])
            # Refused by the engine after all checks, and then a good one.
            trace, metadata = header(6)
            s.forward(metadata)
            self.assertFalse(roots(c.wait(lambda spans: trace in roots(spans)))[trace]
                             .message.HasField("status"))

    def test_training_calls_have_spans(self):
        with Collector() as c, served("--training", "adamw", "--otlp", c.address,
                                      "--trace-sample", "1") as s:
            t = Trainer(s.group.endpoints[0])
            x = np.ones((3, s.layer.hidden), np.float32)
            layer = s.layer.layer
            t.backward(layer, x, x, t.forward(layer, x))
            t.optimizer_step()
            self.assertEqual(refusal(t.backward, layer, x)[0],
                             ("FAILED_PRECONDITION", "RETAINED_PASS_GONE"))
            t.close()
            spans = c.wait(lambda spans: sum(x.kind == SERVER for x in spans) == 4)
        backward, step, refused = (
            [r for r in sorted((x for x in spans if x.kind == SERVER), key=lambda x: x.start)
             if r.name.startswith("moe.v1.TrainingService/")])
        self.assertEqual([r.attributes["rpc.method"] for r in (backward, step, refused)],
                         ["Backward", "OptimizerStep", "Backward"])
        self.assertEqual((backward.attributes["moe.layer"], backward.attributes["moe.tokens"]),
                         (layer, 3))
        for root in (backward, step):
            top = children(spans, root)
            self.assertEqual([x.name for x in top], TOP)
            self.contiguous(top, root)
            self.assertEqual(root.attributes["rpc.grpc.status_code"], 0)
        inside = children(spans, children(spans, backward)[TOP.index("step")])
        names = [x.name for x in inside]
        self.assertEqual((names[0], names[-1]), ("start", "collect"))
        self.assertTrue("pass" in names or {"dispatch", "dx", "combine"} <= set(names), names)
        self.contiguous(inside, children(spans, backward)[TOP.index("step")])
        self.assertGreater(max(inside, key=lambda x: x.ns).ns, 0)
        self.assertEqual([x.name for x in children(spans, refused)], ["check"])
        self.assertEqual(refused.attributes["error.type"], "RETAINED_PASS_GONE")


class Sampling(unittest.TestCase):
    def test_the_parents_flag_decides_for_its_request(self):
        with Collector() as c, served("--otlp", c.address, "--trace-sample", "1") as s:
            for number in range(1, 11):
                s.forward(header(number, sampled=False)[1])
            s.forward()  # a root
            last, metadata = header(99)
            s.forward(metadata)
            found = roots(c.wait(lambda spans: last in roots(spans)))
        self.assertEqual(len(found), 2)  # spans leave in order: the first ten have none
        root = next(f for f in found.values() if f.trace != last)
        self.assertEqual(root.parent, "")

    def test_a_bad_traceparent_counts_as_none(self):
        good = header(1)[1][0][1]
        bad = ["", "00", good.replace("00-", "01-", 1), good + "-", "00-" + "A" * 32 + good[35:],
               "00-" + "0" * 32 + good[35:], good[:36] + "0" * 16 + "-01", "x" * 4096,
               good + "0" * 4041, good[:-1]]
        with Collector() as c, served("--otlp", c.address, "--trace-sample", "1") as s:
            for value in bad:
                s.forward((("traceparent", value),))
            s.forward((("traceparent", good), ("traceparent", good)))  # two
            found = roots(c.wait(lambda spans: len(roots(spans)) == len(bad) + 1))
            self.assertEqual({f.parent for f in found.values()}, {""})
            self.assertNotIn(header(1)[0], found)
            # Without a sampled parent, none is traced at 0 %: tested by the order of spans.
        with Collector() as c, served("--otlp", c.address, "--trace-sample", "0") as s:
            for value in bad:
                s.forward((("traceparent", value),))
            last, metadata = header(2)
            s.forward(metadata)
            self.assertEqual(set(roots(c.wait(lambda spans: last in roots(spans)))), {last})

    def test_without_a_collector_there_is_no_tracing(self):
        with served() as s:
            s.forward(header(1)[1])
            self.assertEqual(s.counted(), {})


class Collectors(unittest.TestCase):
    def serve(self, s, seconds):
        """Requests for `seconds`, all sampled; their number."""
        end, calls = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            calls += 1
            s.forward(header(calls)[1])
        return calls

    def test_requests_go_on_while_the_collector_hangs(self):
        with Collector(hangs=True) as c, served("--otlp", c.address) as s:
            s.forward(header(1)[1])
            wait_until(lambda: c.requests > 0)
            calls = self.serve(s, 2)
            print("%d requests while it hangs; spans %s" % (calls, s.counted()))
            self.assertEqual(s.counted()["exported"], 0)
        # The daemon has ended in order, within the limits of the group.

    def test_spans_are_dropped_while_nothing_listens_and_sent_afterwards(self):
        """Also a listener that accepts and then says nothing."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            with served("--otlp", "127.0.0.1:%d" % port) as s:
                self.serve(s, 1)
                self.assertEqual(s.counted()["exported"], 0)
        with served("--otlp", "127.0.0.1:%d" % port) as s:
            self.serve(s, 1)
            wait_until(lambda: s.counted()["failed"] > 0)
            self.assertEqual(s.counted()["exported"], 0)
            with open(s.log) as file:
                self.assertEqual(file.read().count("the collector takes no spans"), 1)

    def test_spans_go_over_tls(self):
        with Certificates() as certificates:
            certificates.ca("ca")
            certificates.ca("other")
            certificates.pair("server", "ca", "DNS:localhost,IP:127.0.0.1")
            credentials = grpc.ssl_server_credentials([(
                certificates.read(certificates.key("server")),
                certificates.read(certificates.pem("server")))])
            with Collector(credentials=credentials) as c:
                trace, metadata = header(3)
                with served("--otlp", "https://127.0.0.1:%d" % c.port, "--tls-ca",
                            certificates.pem("ca")) as s:
                    s.forward(metadata)
                    c.wait(lambda spans: trace in roots(spans))
                with served("--otlp", "https://127.0.0.1:%d" % c.port, "--tls-ca",
                            certificates.pem("other")) as s:
                    s.forward(header(4)[1])
                    wait_until(lambda: s.counted()["failed"] > 0)
                self.assertEqual(set(roots(c.spans())), {trace})


if __name__ == "__main__":
    main()
