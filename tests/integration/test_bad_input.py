# SPDX-License-Identifier: Apache-2.0
"""Each bad input gives a clear typed error, and the daemon still serves right numbers."""

import os
import random
import unittest

import grpc
import numpy as np

from group import golden_cases, group, main, relative_error
import wire
from wire import expert

FAMILY = "qwen3_moe"  # E 16, K 4, H 64, layers 0 and 1
F32, BF16, U8, U16, I32 = 1, 2, 3, 4, 5
CLIENT_IDS, CLIENT_IDS_AND_WEIGHTS = 2, 3
FUZZED_MESSAGES = 10000


def part(number, payload):
    """Tag, length and bytes of a length-delimited field."""
    length, head = len(payload), bytes([number << 3 | 2])
    while length >= 0x80:
        head += bytes([length & 0x7F | 0x80])
        length >>= 7
    return head + bytes([length]) + payload


class BadInput(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = group(FAMILY, 2)
        cls.group = cls.context.__enter__()
        cls.channel = wire.open_channel(cls.group.endpoint)
        cls.layer, cls.tokens, cls.x, cls.want = next(
            case for case in golden_cases(FAMILY) if case[1] == 37)

    @classmethod
    def tearDownClass(cls):
        cls.channel.close()
        cls.context.__exit__(None, None, None)

    def request(self, **changes):
        fields = dict(layer=self.layer, tokens=self.tokens, hidden=self.x.shape[1], dtype=F32,
                      x_data=self.x.tobytes())
        fields.update(changes)
        return expert.ForwardRequest(**{k: v for k, v in fields.items() if v is not None})

    def tearDown(self):
        """The daemon still serves the right numbers after each test."""
        answer = wire.forward(self.channel, self.request())
        got = np.frombuffer(answer.y_data, np.float32).reshape(self.want.shape)
        self.assertLessEqual(relative_error(got, self.want), 1e-5)

    def refused(self, request, code, reason):
        with self.assertRaises(grpc.RpcError) as failure:
            wire.forward(self.channel, request)
        error = failure.exception
        print(error.code().name, wire.error_reason(error)[0], "-", error.details())
        self.assertEqual(error.code(), code)
        self.assertEqual(wire.error_reason(error)[0], reason)
        self.assertTrue(error.details())

    def invalid(self, reason, **changes):
        self.refused(self.request(**changes), grpc.StatusCode.INVALID_ARGUMENT, reason)

    def test_wrong_hidden_width(self):
        self.invalid("SHAPE_MISMATCH", hidden=63)

    def test_unknown_layer(self):
        self.refused(self.request(layer=77), grpc.StatusCode.NOT_FOUND, "LAYER_NOT_FOUND")

    def test_unknown_model(self):
        self.refused(self.request(model="other"), grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")

    def test_dtype_that_does_not_fit_the_bytes(self):
        self.invalid("SHAPE_MISMATCH", dtype=BF16)

    def test_dtype_that_is_not_served(self):
        self.invalid("DTYPE_UNSUPPORTED", dtype=U8)

    def test_dtype_missing(self):
        self.invalid("DTYPE_UNSUPPORTED", dtype=0)

    def test_no_tokens(self):
        self.invalid("SHAPE_MISMATCH", tokens=0, x_data=b"")

    def test_more_tokens_than_allowed(self):
        self.invalid("TOKEN_LIMIT", tokens=2**31)

    def test_tensor_missing(self):
        self.invalid("SHAPE_MISMATCH", x_data=None)

    def test_truncated_payload(self):
        self.invalid("SHAPE_MISMATCH", x_data=self.x.tobytes()[:-4])

    def test_oversized_payload(self):
        self.invalid("SHAPE_MISMATCH", x_data=self.x.tobytes() + b"\0\0\0\0")

    def test_message_over_the_limit(self):
        with self.assertRaises(grpc.RpcError) as failure:
            wire.forward(self.channel, self.request(x_data=bytes(160 << 20)))
        self.assertEqual(failure.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)

    def test_expert_id_too_large(self):
        ids = np.zeros((self.tokens, 4), np.uint8)
        ids[5] = [0, 1, 2, 16]
        self.invalid("EXPERT_INDEX_RANGE", routing_mode=CLIENT_IDS, topk_ids_dtype=U8,
                     topk_ids=ids.tobytes())

    def test_expert_id_below_minus_one(self):
        ids = np.zeros((self.tokens, 4), np.int32)
        ids[0, 0] = -2
        self.invalid("EXPERT_INDEX_RANGE", routing_mode=CLIENT_IDS, topk_ids_dtype=I32,
                     topk_ids=ids.tobytes())

    def test_ids_of_the_wrong_length(self):
        self.invalid("SHAPE_MISMATCH", routing_mode=CLIENT_IDS, topk_ids_dtype=U8, topk_ids=b"\0")

    def test_ids_without_a_dtype(self):
        self.invalid("DTYPE_UNSUPPORTED", routing_mode=CLIENT_IDS, topk_ids=bytes(self.tokens * 4))

    def test_ids_in_server_mode(self):
        self.invalid("ROUTING_INVALID", topk_ids_dtype=U8, topk_ids=bytes(self.tokens * 4))

    def test_ids_missing_in_client_mode(self):
        self.invalid("ROUTING_INVALID", routing_mode=CLIENT_IDS)

    def test_weights_missing_in_client_mode(self):
        self.invalid("ROUTING_INVALID", routing_mode=CLIENT_IDS_AND_WEIGHTS, topk_ids_dtype=U8,
                     topk_ids=bytes(self.tokens * 4))

    def test_weights_that_are_not_finite(self):
        weights = np.full((self.tokens, 4), 0.25, np.float32)
        weights[3, 1] = np.nan
        self.invalid("ROUTING_INVALID", routing_mode=CLIENT_IDS_AND_WEIGHTS, topk_ids_dtype=U8,
                     topk_ids=bytes(self.tokens * 4), topk_weights=weights.tobytes())

    def test_token_ids_where_the_layer_does_not_route_by_them(self):
        self.invalid("ROUTING_INVALID", token_ids=bytes(8 * self.tokens))

    def test_nan_hidden_states_give_nan_logits(self):
        x = self.x.copy()
        x[7, 3] = np.nan
        self.invalid("NONFINITE_LOGITS", x_data=x.tobytes())

    def test_stale_epoch_and_wrong_version(self):
        failed = grpc.StatusCode.FAILED_PRECONDITION
        self.refused(self.request(epoch=10**6), failed, "STALE_EPOCH")
        self.refused(self.request(weights_version=99), failed, "VERSION_MISMATCH")

    def test_duplicate_tensor_field(self):
        raw = self.request().SerializeToString() + part(15, self.x.tobytes())
        self.refused(raw, grpc.StatusCode.INVALID_ARGUMENT, "DUPLICATE_TENSOR")

    def test_tensor_field_given_in_any_order(self):
        head = self.request(x_data=None).SerializeToString()
        answer = wire.forward(self.channel, part(15, self.x.tobytes()) + head)
        self.assertEqual(len(answer.y_data), self.x.nbytes)

    def test_malformed_protobuf(self):
        refusals = {
            "MALFORMED": [b"\x07", b"\x00\x01", b"\x0b", b"\xff" * 20, b"\x78\x01"],
            "TRUNCATED": [part(15, self.x.tobytes())[:-1], b"\x10", b"\x0a\x05ab"],
            "TOO_LARGE": [part(1, b"a" * 5000)],
        }
        for reason, messages in refusals.items():
            for raw in messages:
                self.refused(raw, grpc.StatusCode.INVALID_ARGUMENT, reason)

    def test_strings_that_hold_a_zero_byte(self):
        """Otherwise the daemon would look up another name than the one sent."""
        with wire.open_channel(self.group.description()["processes"][0]["endpoint"]) as control:
            for channel, method in [
                (self.channel, "moe.v1.ExpertService/Forward"),
                (self.channel, "moe.v1.ExpertService/GetModel"),
                (self.channel, "grpc.health.v1.Health/Check"),
                (control, "grpc.health.v1.Health/Check"),
                (control, "moe.v1.AdminService/Shutdown"),
            ]:
                with self.assertRaises(grpc.RpcError) as failure:
                    channel.unary_unary("/" + method)(part(1, b"moe.v1.A\0b"), timeout=30)
                error = failure.exception
                self.assertEqual(error.code(), grpc.StatusCode.INVALID_ARGUMENT, method)
                self.assertEqual(wire.error_reason(error)[0], "MALFORMED", method)
                self.assertIn("holds a zero byte", error.details())
            listing = self.channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
            with self.assertRaises(grpc.RpcError) as failure:
                list(listing(iter([part(3, b"a\0b")]), timeout=30))
            self.assertEqual(failure.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)

    def test_x_by_reference_is_no_x(self):
        """Fields 20 and 21 were references once. They are unknown fields now."""
        for field in (20, 21):
            reference = bytes([field << 3 & 0x7f | 0x82, field >> 4, 3, 10, 1, ord("a")])
            with self.assertRaises(grpc.RpcError) as failure:
                self.channel.unary_unary("/moe.v1.ExpertService/Forward")(
                    self.request(x_data=b"").SerializeToString() + reference, timeout=30)
            self.assertEqual(failure.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
            self.assertEqual(wire.error_reason(failure.exception)[0], "SHAPE_MISMATCH")

    def test_ten_thousand_fuzzed_messages(self):
        seed = int(os.environ.get("MOE_SEED", random.randrange(2**32)))
        print("MOE_SEED=%d" % seed)
        dice = random.Random(seed)
        ids = bytes(dice.randrange(16) for _ in range(2 * 4))
        valid = [
            self.request(tokens=2, x_data=self.x[:2].tobytes()).SerializeToString(),
            self.request(tokens=2, x_data=self.x[:2].tobytes(), routing_mode=CLIENT_IDS,
                         topk_ids_dtype=U8, topk_ids=ids, return_routing=True).SerializeToString(),
        ]
        call = self.channel.unary_unary("/moe.v1.ExpertService/Forward")
        outcomes = {}
        pending = []
        for _ in range(FUZZED_MESSAGES):
            raw = bytearray(dice.choice(valid))
            for _ in range(dice.randrange(1, 6)):
                at = dice.randrange(len(raw)) if dice.random() < 0.3 else dice.randrange(24)
                kind = dice.randrange(4)
                if kind == 0:
                    raw[at] = dice.randrange(256)
                elif kind == 1:
                    raw[at:at] = bytes(dice.randrange(256) for _ in range(dice.randrange(1, 9)))
                elif kind == 2:
                    del raw[at : at + dice.randrange(1, 9)]
                else:
                    raw += raw[at : at + dice.randrange(1, 600)]
                raw = raw or bytearray(b"\0")
                raw = raw + bytes(max(0, 24 - len(raw)))
            pending.append(call.future(bytes(raw), timeout=60))
            if len(pending) == 64:
                self.collect(pending, outcomes)
        self.collect(pending, outcomes)
        print(outcomes)
        self.assertEqual(sum(outcomes.values()), FUZZED_MESSAGES)
        allowed = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED",
                   "RESOURCE_EXHAUSTED"}
        self.assertLessEqual(set(outcomes), allowed)

    def collect(self, pending, outcomes):
        for each in pending:
            name = "OK" if each.exception() is None else each.exception().code().name
            outcomes[name] = outcomes.get(name, 0) + 1
        pending.clear()


if __name__ == "__main__":
    main()
