/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a message of several types. It is refused, or every string of the unpacked message
 * is as long as on the wire. protobuf-c allocates a string with its wire length plus 1 byte, so an
 * allocator that records sizes reveals a string with a NUL inside. */
#include "driver.h"
#include "moe/v1/admin.pb-c.h"
#include "moe/v1/coordinator.pb-c.h"
#include "moe/v1/training.pb-c.h"
#include "rpc/msg.h"

#include <stdlib.h>
#include <string.h>

static const ProtobufCMessageDescriptor *const types[] = {
    &moe__v1__session_request__descriptor,
    &moe__v1__get_status_response__descriptor,
    &moe__v1__list_checkpoints_response__descriptor,
    &moe__v1__save_checkpoint_request__descriptor,
};
enum { TYPES = sizeof types / sizeof *types, NOTE_BYTES = 16 };

/* The size of an allocation is stored before it. */
static void *note_alloc(void *ctx, size_t size)
{
    (void)ctx;
    char *p = malloc(NOTE_BYTES + size);
    if (p == NULL)
        abort();
    memcpy(p, &size, sizeof size);
    return p + NOTE_BYTES;
}

static void note_free(void *ctx, void *p)
{
    (void)ctx;
    if (p != NULL)
        free((char *)p - NOTE_BYTES);
}

static void check_text(const char *text)
{
    size_t size;
    if (text == NULL || text == protobuf_c_empty_string) /* absent */
        return;
    memcpy(&size, text - NOTE_BYTES, sizeof size);
    MOE_INVARIANT(size == strlen(text) + 1);
}

static void check_message(const ProtobufCMessage *m)
{
    const ProtobufCMessageDescriptor *type = m->descriptor;
    for (unsigned i = 0; i < type->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &type->fields[i];
        const char *place = (const char *)m + f->offset;
        bool text = f->type == PROTOBUF_C_TYPE_STRING;
        if (!text && f->type != PROTOBUF_C_TYPE_MESSAGE)
            continue;
        const char *quantifier = (const char *)m + f->quantifier_offset;
        if ((f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0 &&
            *(const uint32_t *)(const void *)quantifier != f->id)
            continue;
        bool repeated = f->label == PROTOBUF_C_LABEL_REPEATED;
        size_t count = repeated ? *(const size_t *)(const void *)quantifier : 1;
        void *const *items = repeated ? *(void *const *const *)(const void *)place
                                      : (void *const *)(const void *)place;
        for (size_t k = 0; k < count; k++) {
            if (text)
                check_text(items[k]);
            else if (items[k] != NULL)
                check_message(items[k]);
        }
    }
}

/* The first byte selects the type. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    const ProtobufCMessageDescriptor *type = types[data[0] % TYPES];
    void *message = NULL;
    struct moe_status st = moe_rpc_unpack(type, data + 1, size - 1, NULL, &message);
    if (moe_failed(&st)) {
        MOE_INVARIANT(st.code == MOE_INVALID_ARGUMENT && st.text[0] != '\0' && message == NULL);
        return 0;
    }
    protobuf_c_message_free_unpacked(message, NULL);
    ProtobufCAllocator noting = {.alloc = note_alloc, .free = note_free};
    ProtobufCMessage *m = protobuf_c_message_unpack(type, &noting, size - 1, data + 1);
    MOE_INVARIANT(m != NULL);
    check_message(m);
    protobuf_c_message_free_unpacked(m, &noting);
    return 0;
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static uint8_t packed[512];
    Moe__V1__SessionRequest session = MOE__V1__SESSION_REQUEST__INIT;
    Moe__V1__Register hello = MOE__V1__REGISTER__INIT;
    Moe__V1__GetStatusResponse status = MOE__V1__GET_STATUS_RESPONSE__INIT;
    Moe__V1__WorkerStatus worker = MOE__V1__WORKER_STATUS__INIT;
    Moe__V1__WorkerStatus *workers[] = {&worker, &worker};
    Moe__V1__ListCheckpointsResponse list = MOE__V1__LIST_CHECKPOINTS_RESPONSE__INIT;
    Moe__V1__CheckpointInfo info = MOE__V1__CHECKPOINT_INFO__INIT;
    Moe__V1__CheckpointInfo *infos[] = {&info};
    Moe__V1__SaveCheckpointRequest save = MOE__V1__SAVE_CHECKPOINT_REQUEST__INIT;
    char name[] = "worker-0", *targets[] = {name, name};
    hello.worker_id = hello.endpoint = hello.model = name;
    session.body_case = MOE__V1__SESSION_REQUEST__BODY_REGISTER;
    session.register_ = &hello;
    worker.worker_id = worker.endpoint = name;
    status.workers = workers;
    status.n_workers = 2;
    info.name = info.parent = name;
    info.lora_targets = targets;
    info.n_lora_targets = 2;
    list.checkpoints = infos;
    list.n_checkpoints = 1;
    save.name = name;
    const ProtobufCMessage *const seeds[TYPES] = {&session.base, &status.base, &list.base,
                                                  &save.base};
    if (i >= TYPES)
        return 0;
    *data = packed;
    packed[0] = (uint8_t)i;
    MOE_INVARIANT(protobuf_c_message_get_packed_size(seeds[i]) < sizeof packed);
    return 1 + protobuf_c_message_pack(seeds[i], packed + 1);
}
