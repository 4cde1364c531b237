/* SPDX-License-Identifier: Apache-2.0 */
#include "regions_device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __typeof__(&moe_stream_session_open) open_streams;
static __typeof__(&moe_stream_session_close) close_streams;
static __typeof__(&moe_region_alloc) alloc;
static __typeof__(&moe_region_copy_in) copy_in;
static __typeof__(&moe_region_copy_out) copy_out;
static struct moe_stream_session *streams;

static void fail(const char *text)
{
    fprintf(stderr, "regions on a device: %s\n", text);
    exit(1);
}

static void need(struct moe_status st)
{
    if (moe_failed(&st))
        fail(st.text);
}

static void find(void *library, const char *name, void *pointer)
{
    void *found = dlsym(library, name);
    if (found == NULL)
        fail(dlerror());
    memcpy(pointer, &found, sizeof found);
}

static void load(void)
{
    void *library = dlopen("libmoeclient_cuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        fail(dlerror());
    find(library, "moe_stream_session_open", &open_streams);
    find(library, "moe_stream_session_close", &close_streams);
    find(library, "moe_region_alloc", &alloc);
    find(library, "moe_region_copy_in", &copy_in);
    find(library, "moe_region_copy_out", &copy_out);
}

void device_open(struct moe_client_session *session, int device)
{
    const struct moe_stream_session_config config = {.size = sizeof config, .device = device};
    if (open_streams == NULL)
        load();
    need(open_streams(session, &config, &streams));
}

void device_close(void)
{
    close_streams(streams);
    streams = NULL;
}

struct moe_status device_alloc(const char *name, size_t bytes, struct moe_client_region **out)
{
    return alloc(streams, name, bytes, out);
}

void device_copy_in(struct moe_client_region *to, uint64_t offset, const void *from, size_t bytes)
{
    need(copy_in(streams, to, offset, from, bytes));
}

void device_copy_out(const struct moe_client_region *from, void *to, size_t bytes)
{
    need(copy_out(streams, from, 0, to, bytes));
}
