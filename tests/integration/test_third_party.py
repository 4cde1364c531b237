# SPDX-License-Identifier: Apache-2.0
"""Third-party clients: stubs from reflection only, the public health protocol, and the health
checking of gRPC's client library. Ends with 77 without the public protos (package grpc-proto, which
Debian 13 lacks)."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, json_format

from group import golden_cases, group, main, relative_error

PUBLIC_PROTOS = "/usr/share/grpc-proto"
FAMILY = "mixtral"
CALLS_AT_ONCE = 3000  # above the limit of a connection
_folders = []  # of compiled protos; removed at exit


def compile_public(*names):
    """Python modules of the public protos, compiled to a temporary directory."""
    folder = tempfile.TemporaryDirectory(prefix="moed-protos-")
    _folders.append(folder)
    out = folder.name
    subprocess.run(["protoc", "-I", PUBLIC_PROTOS, "--python_out", out, *names], check=True)
    return out


def message_class(pool, name):
    from google.protobuf import message_factory

    descriptor = pool.FindMessageTypeByName(name)
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(pool).GetPrototype(descriptor)


class Reflected:
    """A client that knows only the reflection protocol."""

    def __init__(self, channel, version):
        import importlib

        self.channel = channel
        self.wire = importlib.import_module("grpc_reflection_%s_pb2" % version)
        self.path = "/grpc.reflection.%s.ServerReflection/ServerReflectionInfo" % version
        self.pool = descriptor_pool.DescriptorPool()

    def ask(self, **question):
        call = self.channel.stream_stream(
            self.path,
            request_serializer=self.wire.ServerReflectionRequest.SerializeToString,
            response_deserializer=self.wire.ServerReflectionResponse.FromString)
        return next(iter(call(iter([self.wire.ServerReflectionRequest(**question)]))))

    def services(self):
        answer = self.ask(list_services="")
        return {service.name for service in answer.list_services_response.service}

    def learn(self, symbol):
        files = {}
        for raw in self.ask(
                file_containing_symbol=symbol).file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            files[file.name] = file

        def add(name):
            file = files.pop(name, None)
            if file is None:
                return
            for dependency in file.dependency:
                add(dependency)
            self.pool.Add(file)

        while files:
            add(next(iter(files)))

    def method(self, service, name):
        descriptor = self.pool.FindServiceByName(service).FindMethodByName(name)
        request = message_class(self.pool, descriptor.input_type.full_name)
        response = message_class(self.pool, descriptor.output_type.full_name)
        stub = self.channel.unary_unary(
            "/%s/%s" % (service, name),
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString)
        return request, stub


class ThirdPartyClients(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # The two reflection versions have files with the same base name: compile each as a
        # separate package.
        for version in ("v1", "v1alpha"):
            out = compile_public("grpc/reflection/%s/reflection.proto" % version)
            source = os.path.join(out, "grpc", "reflection", version, "reflection_pb2.py")
            os.rename(source, os.path.join(out, "grpc_reflection_%s_pb2.py" % version))
            sys.path.insert(0, out)
        out = compile_public("grpc/health/v1/health.proto")
        os.rename(os.path.join(out, "grpc", "health", "v1", "health_pb2.py"),
                  os.path.join(out, "public_health_pb2.py"))
        sys.path.insert(0, out)
        cls.context = group(FAMILY, 2)
        cls.group = cls.context.__enter__()
        options = [("grpc.max_receive_message_length", 64 << 20)]
        cls.channel = grpc.insecure_channel(cls.group.endpoint, options=options)

    @classmethod
    def tearDownClass(cls):
        cls.channel.close()
        cls.context.__exit__(None, None, None)

    def forward_by_reflection(self, version):
        client = Reflected(self.channel, version)
        self.assertIn("moe.v1.ExpertService", client.services())
        self.assertIn("grpc.health.v1.Health", client.services())
        client.learn("moe.v1.ExpertService")
        request, forward = client.method("moe.v1.ExpertService", "Forward")
        for layer, tokens, x, want in golden_cases(FAMILY):
            answer = forward(request(layer=layer, tokens=tokens, hidden=x.shape[1], dtype=1,
                                     x_data=x.tobytes()), timeout=30)
            got = np.frombuffer(answer.y_data, np.float32).reshape(x.shape)
            self.assertLessEqual(relative_error(got, want), 1e-5)
            self.assertGreater(answer.epoch, 0)

    def test_stubs_made_from_reflection_v1_run_a_layer(self):
        self.forward_by_reflection("v1")

    def test_stubs_made_from_reflection_v1alpha_run_a_layer(self):
        self.forward_by_reflection("v1alpha")

    def test_the_json_of_the_readme_runs_a_layer(self):
        """As grpcurl: JSON in, JSON out, with the descriptors from reflection."""
        client = Reflected(self.channel, "v1")
        client.learn("moe.v1.ExpertService")
        request, forward = client.method("moe.v1.ExpertService", "Forward")
        readme = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "README.md")
        with open(readme) as file:
            fields = json.loads(re.search(r"-d '(\{\"layer.*\})'", file.read())[1].replace(
                "'$x'", "x"))
        self.assertEqual(fields.pop("xData"), "x")
        layer, tokens, x, want = next(golden_cases(FAMILY))
        fields.update(layer=layer, tokens=tokens, hidden=x.shape[1],
                      xData=base64.b64encode(x.tobytes()).decode())
        answer = forward(json_format.Parse(json.dumps(fields), request()), timeout=30)
        data = base64.b64decode(json.loads(json_format.MessageToJson(answer))["yData"])
        self.assertLessEqual(
            relative_error(np.frombuffer(data, np.float32).reshape(x.shape), want), 1e-5)

    def test_reflection_says_not_found_for_unknown_names(self):
        answer = Reflected(self.channel, "v1").ask(file_containing_symbol="no.such.Symbol")
        self.assertEqual(answer.error_response.error_code, grpc.StatusCode.NOT_FOUND.value[0])

    def health(self, name):
        import public_health_pb2 as wire

        check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=wire.HealthCheckRequest.SerializeToString,
            response_deserializer=wire.HealthCheckResponse.FromString)
        return check(wire.HealthCheckRequest(service=name), timeout=10).status

    def test_health_check_is_honest_per_service(self):
        self.assertEqual(self.health(""), 1)
        self.assertEqual(self.health("moe.v1.ExpertService"), 1)
        self.assertEqual(self.health("moed.live"), 1)
        with self.assertRaises(grpc.RpcError) as refused:
            self.health("no.such.Service")
        self.assertEqual(refused.exception.code(), grpc.StatusCode.NOT_FOUND)

    def test_health_list_names_all_services(self):
        call = self.channel.unary_unary(
            "/grpc.health.v1.Health/List", request_serializer=lambda _: b"",
            response_deserializer=lambda raw: raw)
        raw = call(None, timeout=10)
        self.assertIn(b"moe.v1.ExpertService", raw)

    def test_the_health_checking_of_the_grpc_library_lets_the_channel_become_ready(self):
        config = ('{"loadBalancingConfig":[{"round_robin":{}}],'
                  '"healthCheckConfig":{"serviceName":"moe.v1.ExpertService"}}')
        with grpc.insecure_channel(self.group.endpoint, options=[
                ("grpc.service_config", config)]) as channel:
            grpc.channel_ready_future(channel).result(timeout=20)

    def test_a_channel_that_waits_and_then_asks_much_at_once_is_answered(self):
        """Until its first call, the relay speaks for the server. It tells how many calls a
        connection may have, so that the client keeps the others back."""
        with grpc.insecure_channel(self.group.endpoint,
                                   options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            grpc.channel_ready_future(channel).result(timeout=20)
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            calls = [check.future(b"", timeout=60) for _ in range(CALLS_AT_ONCE)]
            self.assertEqual({call.result() for call in calls}, {b"\x08\x01"})

    @unittest.skipUnless(shutil.which("curl"), "curl is not installed")
    def test_curl_sends_its_request_with_the_preface(self):
        answer = subprocess.run(
            ["curl", "-sS", "--http2-prior-knowledge", "--max-time", "20", "--data-binary", "@-",
             "-H", "content-type: application/grpc", "-H", "te: trailers",
             "http://%s/grpc.health.v1.Health/Check" % self.group.endpoint],
            input=b"\0\0\0\0\0", stdout=subprocess.PIPE, check=True).stdout
        self.assertEqual(answer, b"\0\0\0\0\x02\x08\x01")

    def test_unknown_methods_are_unimplemented(self):
        call = self.channel.unary_unary("/moe.v1.ExpertService/NoSuchMethod")
        with self.assertRaises(grpc.RpcError) as refused:
            call(b"", timeout=10)
        self.assertEqual(refused.exception.code(), grpc.StatusCode.UNIMPLEMENTED)


if __name__ == "__main__":
    if not os.path.isdir(PUBLIC_PROTOS):
        print("skipped: %s is not here" % PUBLIC_PROTOS)
        sys.exit(77)
    main()
