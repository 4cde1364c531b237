/* SPDX-License-Identifier: Apache-2.0 */
/* Messages split and joined by hand have the meaning that protobuf-c reads: random messages, in
 * random pieces, compared with protobuf-c on the whole message. */
#include "moe/v1/expert.pb-c.h"
#include "rpc/msg.h"
#include "rpc_fixture.h"

#include <string.h>

enum { CASES = 100000, MESSAGE_MAX = 40960, PIECES_MAX = 64 };

static const uint32_t part_fields[] = {12, 13, 14, 15};
enum { PARTS = 4 };

/* The input of the sink in one split. */
struct sunk {
    uint8_t *data[PARTS];
    size_t length[PARTS];
    bool seen[PARTS];
    size_t refuse_above;
};

static struct moe_status sink(void *ctx, uint32_t field, size_t length, void **dst)
{
    struct sunk *s = ctx;
    size_t i = field - part_fields[0];
    assert_true(i < PARTS);
    assert_false(s->seen[i]);
    if (length > s->refuse_above)
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, 7, "no room");
    s->seen[i] = true;
    s->length[i] = length;
    s->data[i] = length > 0 ? malloc(length) : NULL;
    *dst = s->data[i];
    return moe_ok();
}

static void sunk_free(struct sunk *s)
{
    for (size_t i = 0; i < PARTS; i++)
        free(s->data[i]);
}

/* A message under construction. */
struct built {
    uint8_t bytes[MESSAGE_MAX];
    size_t length;
    size_t head; /* bytes that are not parts */
    bool duplicate;
    bool seen[PARTS];
};

static void put_varint(struct built *b, uint64_t v)
{
    for (; v >= 0x80; v >>= 7)
        b->bytes[b->length++] = (uint8_t)(v | 0x80);
    b->bytes[b->length++] = (uint8_t)v;
}

static void put_random_bytes(struct built *b, size_t n)
{
    put_varint(b, n);
    for (size_t i = 0; i < n; i++)
        b->bytes[b->length++] = (uint8_t)random_bits();
}

static void put_part(struct built *b)
{
    size_t i = random_below(PARTS);
    put_varint(b, part_fields[i] << 3 | 2);
    put_random_bytes(b, one_in(4) ? random_below(1500) : random_below(20));
    b->duplicate |= b->seen[i];
    b->seen[i] = true;
}

static void put_text(struct built *b, uint32_t field)
{
    size_t n = random_below(30);
    put_varint(b, field << 3 | 2);
    put_varint(b, n);
    for (size_t i = 0; i < n; i++)
        b->bytes[b->length++] = (uint8_t)('a' + random_below(26));
}

/* A known field of ForwardRequest, or an unknown one, of any wire type. */
static void put_head_field(struct built *b)
{
    static const uint8_t varints[] = {2, 3, 4, 5, 6, 7, 8, 9, 10};
    uint32_t unknown = 100 + random_below(1000);
    switch (random_below(8)) {
    case 0: put_text(b, 1); break;
    case 1: /* retain { micro_batch_id } */
        put_varint(b, 22 << 3 | 2);
        put_varint(b, 2);
        put_varint(b, 2 << 3);
        put_varint(b, random_below(128));
        break;
    case 2:
        put_varint(b, unknown << 3 | 1);
        for (int i = 0; i < 8; i++)
            b->bytes[b->length++] = (uint8_t)random_bits();
        break;
    case 3:
        put_varint(b, unknown << 3 | 5);
        for (int i = 0; i < 4; i++)
            b->bytes[b->length++] = (uint8_t)random_bits();
        break;
    case 4:
        put_varint(b, unknown << 3 | 2);
        put_random_bytes(b, random_below(one_in(20) && b->length < 8192 ? 8192 : 40));
        break;
    default:
        put_varint(b, (uint32_t)varints[random_below(sizeof varints)] << 3);
        put_varint(b, random_bits() >> random_below(64));
        break;
    }
}

static void build(struct built *b)
{
    size_t fields = random_below(14);
    *b = (struct built){.length = 0};
    for (size_t i = 0; i < fields; i++) {
        size_t before = b->length;
        if (one_in(3)) {
            put_part(b);
        } else {
            put_head_field(b);
            b->head += b->length - before;
        }
    }
}

static struct moe_rpc_msg *cut(const uint8_t *bytes, size_t length)
{
    struct moe_rpc_piece pieces[PIECES_MAX];
    size_t count = 0, at = 0;
    while (at < length && count < PIECES_MAX - 1) {
        size_t n = one_in(8) ? 0 : 1 + random_below(one_in(3) ? 4 : 300);
        n = n < length - at ? n : length - at;
        pieces[count++] = (struct moe_rpc_piece){bytes + at, n};
        at += n;
    }
    pieces[count++] = (struct moe_rpc_piece){bytes + at, length - at};
    struct moe_rpc_msg *m = moe_rpc_msg_from_pieces(pieces, count);
    assert_non_null(m);
    assert_int_equal(moe_rpc_msg_length(m), length);
    return m;
}

static void assert_part(const struct sunk *s, size_t i, const ProtobufCBinaryData *want)
{
    assert_int_equal(s->length[i], want->len);
    if (want->len > 0)
        assert_memory_equal(s->data[i], want->data, want->len);
}

/* Head and parts together are the whole message. */
static void assert_same(const uint8_t *head, size_t head_length, const struct sunk *s,
                        const Moe__V1__ForwardRequest *whole)
{
    Moe__V1__ForwardRequest *h = moe__v1__forward_request__unpack(NULL, head_length, head);
    assert_true((h == NULL) == (whole == NULL));
    if (h == NULL)
        return;
    assert_string_equal(h->model, whole->model);
    assert_int_equal(h->layer, whole->layer);
    assert_int_equal(h->tokens, whole->tokens);
    assert_int_equal(h->hidden, whole->hidden);
    assert_int_equal(h->dtype, whole->dtype);
    assert_int_equal(h->routing_mode, whole->routing_mode);
    assert_int_equal(h->return_routing, whole->return_routing);
    assert_true(h->epoch == whole->epoch);
    assert_true(h->weights_version == whole->weights_version);
    assert_int_equal(h->topk_ids_dtype, whole->topk_ids_dtype);
    assert_int_equal(h->base.n_unknown_fields, whole->base.n_unknown_fields);
    assert_int_equal(h->topk_ids.len + h->topk_weights.len + h->token_ids.len + h->x_data.len, 0);
    assert_part(s, 0, &whole->topk_ids);
    assert_part(s, 1, &whole->topk_weights);
    assert_part(s, 2, &whole->token_ids);
    assert_part(s, 3, &whole->x_data);
    moe__v1__forward_request__free_unpacked(h, NULL);
}

static struct moe_status split(const uint8_t *bytes, size_t length, uint8_t *head, size_t *n,
                               struct sunk *s)
{
    struct moe_rpc_msg *m = cut(bytes, length);
    struct moe_status st = moe_rpc_msg_split(m, part_fields, PARTS, head, n, sink, s);
    moe_rpc_msg_free(m);
    return st;
}

static void valid_messages_in_any_pieces_split_as_protobuf_says(void **state)
{
    (void)state;
    size_t good = 0, duplicates = 0, large = 0;
    static struct built b;
    uint8_t head[MOE_RPC_HEAD_MAX];
    for (int i = 0; i < CASES; i++) {
        struct sunk s = {.refuse_above = SIZE_MAX};
        size_t n = 0;
        build(&b);
        struct moe_status st = split(b.bytes, b.length, head, &n, &s);
        if (!moe_failed(&st)) {
            assert_int_equal(n, b.head);
            assert_false(b.duplicate);
            Moe__V1__ForwardRequest *whole =
                moe__v1__forward_request__unpack(NULL, b.length, b.bytes);
            assert_non_null(whole);
            assert_same(head, n, &s, whole);
            moe__v1__forward_request__free_unpacked(whole, NULL);
            good++;
        } else if (st.reason == MOE_REASON_DUPLICATE_TENSOR) {
            assert_true(b.duplicate);
            duplicates++;
        } else {
            assert_int_equal(st.reason, MOE_REASON_TOO_LARGE);
            assert_true(b.head > MOE_RPC_HEAD_MAX);
            large++;
        }
        sunk_free(&s);
    }
    print_message("  %d messages: %zu whole, %zu with a tensor twice, %zu with a large head\n",
                  CASES, good, duplicates, large);
    assert_true(good > CASES / 10 && duplicates > 0 && large > 0);
}

/* Flips, cuts and inserts bytes. */
static void damage(struct built *b)
{
    size_t edits = 1 + random_below(3);
    for (size_t i = 0; i < edits && b->length > 0; i++) {
        size_t at = random_below((uint32_t)b->length);
        if (one_in(4))
            b->length = at;
        else if (one_in(3))
            b->bytes[at] = (uint8_t)(0x80 | random_bits());
        else
            b->bytes[at] = (uint8_t)random_bits();
    }
}

static void damaged_messages_are_refused_or_read_as_protobuf_reads_them(void **state)
{
    (void)state;
    static struct built b;
    uint8_t head[MOE_RPC_HEAD_MAX];
    size_t accepted = 0, refused = 0, stricter = 0;
    for (int i = 0; i < CASES; i++) {
        struct sunk s = {.refuse_above = SIZE_MAX};
        size_t n = 0;
        build(&b);
        damage(&b);
        struct moe_status st = split(b.bytes, b.length, head, &n, &s);
        Moe__V1__ForwardRequest *whole = moe__v1__forward_request__unpack(NULL, b.length, b.bytes);
        if (!moe_failed(&st)) {
            assert_same(head, n, &s, whole);
            accepted++;
        } else {
            assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
            refused++;
            stricter += whole != NULL;
            /* protobuf-c takes the last of several tensors, heads of any size, and wraps what does
             * not fit into 32 or 64 bits. */
            if (whole != NULL && st.reason == MOE_REASON_MALFORMED)
                assert_true(strstr(st.text, "varint") != NULL || strstr(st.text, "number") != NULL);
            else if (whole != NULL)
                assert_true(st.reason == MOE_REASON_DUPLICATE_TENSOR ||
                            st.reason == MOE_REASON_TOO_LARGE);
        }
        if (whole != NULL)
            moe__v1__forward_request__free_unpacked(whole, NULL);
        sunk_free(&s);
    }
    print_message("  %d damaged: %zu accepted by both or refused by protobuf-c on the head alone, "
                  "%zu refused (%zu of them for a stricter rule)\n",
                  CASES, accepted, refused, stricter);
    assert_true(accepted > 1000 && refused > 1000);
}

/* One message by hand and the answer it must get. */
static void assert_split(const char *what, const void *bytes, size_t length, enum moe_reason reason)
{
    uint8_t head[MOE_RPC_HEAD_MAX];
    size_t n = 0;
    struct sunk s = {.refuse_above = 100};
    struct moe_status st = split(bytes, length, head, &n, &s);
    print_message("  %-28s %s: %s\n", what, moe_reason_name(st.reason),
                  moe_failed(&st) ? st.text : "accepted");
    assert_int_equal(st.reason, reason);
    sunk_free(&s);
}

static void each_fault_has_its_reason(void **state)
{
    (void)state;
    static uint8_t large[MOE_RPC_HEAD_MAX + 8] = {0xa2, 0x06, 0xff, 0x1f}; /* field 100, 4095 B */
#define CHECK(what, text, reason) assert_split(what, text, sizeof text - 1, reason)
    CHECK("empty", "", MOE_REASON_NONE);
    CHECK("empty tensor", "\x7a\x00", MOE_REASON_NONE);
    CHECK("tensor", "\x7a\x03xyz", MOE_REASON_NONE);
    CHECK("field number 0", "\x02\x00", MOE_REASON_MALFORMED);
    CHECK("start group", "\x0b\x0c", MOE_REASON_MALFORMED);
    CHECK("wire type 6", "\x0e\x00", MOE_REASON_MALFORMED);
    CHECK("field number 2^29", "\x82\x80\x80\x80\x10\x00", MOE_REASON_MALFORMED);
    CHECK("tag of 6 bytes", "\x88\x80\x80\x80\x80\x00\x00", MOE_REASON_MALFORMED);
    CHECK("varint of 11 bytes", "\x10\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
          MOE_REASON_MALFORMED);
    CHECK("varint over 64 bits", "\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02",
          MOE_REASON_MALFORMED);
    CHECK("tensor as a varint", "\x78\x01", MOE_REASON_MALFORMED);
    CHECK("ends in a tag", "\x7a\x01x\x80", MOE_REASON_TRUNCATED);
    CHECK("ends before the length", "\x7a", MOE_REASON_TRUNCATED);
    CHECK("ends in a tensor", "\x7a\x05xyz", MOE_REASON_TRUNCATED);
    CHECK("ends in a string", "\x0a\x05xyz", MOE_REASON_TRUNCATED);
    CHECK("ends in a fixed64", "\x09\x05xyz", MOE_REASON_TRUNCATED);
    CHECK("length of 4 GiB", "\x7a\xff\xff\xff\xff\x0f", MOE_REASON_TRUNCATED);
    CHECK("tensor twice", "\x7a\x01x\x7a\x01y", MOE_REASON_DUPLICATE_TENSOR);
    CHECK("empty tensor twice", "\x62\x00\x62\x00", MOE_REASON_DUPLICATE_TENSOR);
#undef CHECK
    assert_split("head of 4099 bytes", large, 4 + 4095, MOE_REASON_TOO_LARGE);
    large[2] = 0xfc; /* 4092 bytes: exactly MOE_RPC_HEAD_MAX with the prefix */
    assert_split("head of 4096 bytes", large, 4 + 4092, MOE_REASON_NONE);
    static uint8_t big[128] = {0x7a, 101};
    assert_split("refused by the sink", big, 103, MOE_REASON_QUEUE_FULL);
}

static void parts_sent_by_reference_come_back_by_the_split(void **state)
{
    (void)state;
    for (int i = 0; i < 200; i++) {
        uint8_t bytes[2][4096], wire[16384], head[MOE_RPC_HEAD_MAX];
        size_t length[2] = {random_below(4096), random_below(4096)}, at = 0, n;
        struct sunk s = {.refuse_above = SIZE_MAX};
        for (size_t p = 0; p < 2; p++) {
            fill_random(bytes[p], length[p]);
            at += moe_rpc_put_part_prefix(wire + at, part_fields[p + 2], length[p]);
            memcpy(wire + at, bytes[p], length[p]);
            at += length[p];
        }
        assert_ok(split(wire, at, head, &n, &s));
        assert_int_equal(n, 0);
        for (size_t p = 0; p < 2; p++)
            assert_part(&s, p + 2, &(ProtobufCBinaryData){.data = bytes[p], .len = length[p]});
        sunk_free(&s);
    }
    uint8_t prefix[15];
    assert_int_equal(moe_rpc_put_part_prefix(prefix, (1u << 29) - 1, UINT64_MAX), 15);
}

static void flatten_is_bounded(void **state)
{
    (void)state;
    uint8_t bytes[1000], flat[1000];
    size_t n;
    fill_random(bytes, sizeof bytes);
    struct moe_rpc_msg *m = cut(bytes, sizeof bytes);
    assert_ok(moe_rpc_msg_flatten(m, flat, sizeof flat, &n));
    assert_int_equal(n, sizeof bytes);
    assert_memory_equal(flat, bytes, n);
    assert_refused(moe_rpc_msg_flatten(m, flat, sizeof flat - 1, &n), MOE_INVALID_ARGUMENT,
                   MOE_REASON_TOO_LARGE);
    moe_rpc_msg_free(m);
}

static void a_number_is_found_without_splitting(void **state)
{
    (void)state;
    static const uint8_t bytes[] = {0x10, 0x05, 0x7a, 0x02, 0x10, 0x09, 0x18, 0x07,
                                    0x10, 0x96, 0x01, 0x21, 0,    0,    0,    0,
                                    0,    0,    0,    0,    0x0a, 0x01, 'm'};
    uint64_t value;
    struct moe_rpc_msg *m = cut(bytes, sizeof bytes);
    assert_ok(moe_rpc_msg_find_uint(m, 2, &value));
    assert_int_equal(value, 150); /* the last one, and not what lies inside the tensor */
    assert_ok(moe_rpc_msg_find_uint(m, 9, &value));
    assert_int_equal(value, 0);
    moe_rpc_msg_free(m);
    m = cut(bytes, sizeof bytes - 1);
    assert_refused(moe_rpc_msg_find_uint(m, 2, &value), MOE_INVALID_ARGUMENT, MOE_REASON_TRUNCATED);
    moe_rpc_msg_free(m);
}

/* 2-byte unknown fields blow up most in protobuf-c: 28 times their size. */
static void an_arena_bounds_the_memory_of_a_message(void **state)
{
    (void)state;
    uint8_t bytes[MOE_RPC_HEAD_MAX];
    static struct moe_rpc_arena arena;
    for (size_t i = 0; i + 3 <= sizeof bytes; i += 3)
        memcpy(bytes + i, "\xa0\x06\x01", 3);
    const ProtobufCMessageDescriptor *type = &moe__v1__forward_request__descriptor;
    void *message = NULL;
    assert_refused(moe_rpc_unpack(type, bytes, sizeof bytes / 3 * 3, &arena, &message),
                   MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED);
    assert_null(message);
    assert_ok(moe_rpc_unpack(type, bytes, 60, &arena, &message));
    const Moe__V1__ForwardRequest *q = message;
    assert_int_equal(q->base.n_unknown_fields, 20);
    print_message("  20 unknown fields cost %zu bytes\n", arena.used);
}

static void a_control_message_is_unpacked_whole_or_refused(void **state)
{
    (void)state;
    static uint8_t bytes[MOE_RPC_HEAD_MAX + 1] = {0x10, 0x05}; /* layer = 5 */
    static struct moe_rpc_arena arena;
    const ProtobufCMessageDescriptor *type = &moe__v1__forward_request__descriptor;
    void *message = NULL;
    struct moe_rpc_msg *m = cut(bytes, 2);
    assert_ok(moe_rpc_msg_unpack(m, type, &arena, &message));
    assert_int_equal(((Moe__V1__ForwardRequest *)message)->layer, 5);
    moe_rpc_msg_free(m);
    message = NULL;
    m = cut(bytes, 1);
    assert_refused(moe_rpc_msg_unpack(m, type, &arena, &message), MOE_INVALID_ARGUMENT,
                   MOE_REASON_MALFORMED);
    moe_rpc_msg_free(m);
    m = cut(bytes, sizeof bytes);
    assert_refused(moe_rpc_msg_unpack(m, type, &arena, &message), MOE_INVALID_ARGUMENT,
                   MOE_REASON_TOO_LARGE);
    assert_null(message);
    moe_rpc_msg_free(m);
}

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(valid_messages_in_any_pieces_split_as_protobuf_says),
        cmocka_unit_test(damaged_messages_are_refused_or_read_as_protobuf_reads_them),
        cmocka_unit_test(each_fault_has_its_reason),
        cmocka_unit_test(parts_sent_by_reference_come_back_by_the_split),
        cmocka_unit_test(flatten_is_bounded),
        cmocka_unit_test(a_number_is_found_without_splitting),
        cmocka_unit_test(an_arena_bounds_the_memory_of_a_message),
        cmocka_unit_test(a_control_message_is_unpacked_whole_or_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
