/* SPDX-License-Identifier: Apache-2.0 */
/* A client that shares memory with a worker:
 *
 *     regions_client ENDPOINT same           y by region equals y by Forward, bit for bit
 *     regions_client ENDPOINT session        opens a session, and sleeps
 *     regions_client ENDPOINT region         also makes a region, and sleeps
 *     regions_client ENDPOINT busy           also runs requests, one after the other, for ever
 *     regions_client ENDPOINT device         the same with memory of a device, which for a CPU
 * worker is a memfd regions_client ENDPOINT trace          runs three requests of 1, 2, 3 tokens
 * with the parent of trace(): sampled, not sampled, and refused; prints the first one's server_ns
 *     regions_client ENDPOINT once TIMEOUT   opens a session of TIMEOUT ms; at a line on stdin
 *                                            submits one request, waits, and prints
 *                                            "CODE REASON BEGIN END" (CLOCK_MONOTONIC, ns)
 *
 * Says "ready" on stdout when it is. Exits with 0 = done, 1 = a failure, 2 = wrong arguments. */
#include <moe/regions_device.h>

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { TOKENS = 37, PART = 1 << 20, PARTS = 2 };

static struct moe_client *client;
static struct moe_client_session *session;
static struct moe_client_region *region;

static void need(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "%s %s: %s\n", moe_code_name(st.code), moe_reason_name(st.reason), st.text);
    exit(1);
}

static void say(const char *text)
{
    puts(text);
    fflush(stdout);
}

static unsigned long long now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (unsigned long long)t.tv_sec * 1000000000ull + (unsigned long long)t.tv_nsec;
}

/* x at the start of the region, y in its second part. */
static struct moe_client_session_forward request(uint32_t tokens)
{
    const struct moe_client_layer *layer = &moe_client_get_info(client)->layers[0];
    struct moe_client_session_forward f = {.size = sizeof f,
                                           .layer = layer->layer,
                                           .tokens = tokens,
                                           .hidden = layer->hidden,
                                           .dtype = MOE_DTYPE_F32};
    f.x = (struct moe_client_tensor){region, 0};
    f.y = (struct moe_client_tensor){region, PART};
    return f;
}

static void open_session(uint64_t timeout_ms)
{
    const struct moe_client_session_config config = {.size = sizeof config,
                                                     .timeout_ms = timeout_ms};
    need(moe_session_open(client, &config, &session));
}

static void make_region(void)
{
    need(moe_region_create(session, "data", (size_t)PARTS * PART, &region));
    float *x = moe_region_data(region);
    for (size_t i = 0; i < PART / sizeof *x; i++)
        x[i] = (float)((i * 2654435761u) % 2000) / 1000.0F - 1.0F;
}

static void make_device_region(void)
{
    enum { BYTES = PARTS * PART };
    int descriptor = memfd_create("moe-region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    struct moe_client_memory memory = {
        .size = sizeof memory, .bytes = BYTES, .descriptor = descriptor};
    if (descriptor < 0 || ftruncate(descriptor, BYTES) != 0 ||
        fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        exit(1);
    memory.data = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory.data == MAP_FAILED)
        exit(1);
    need(moe_region_adopt(session, "data", &memory, &region));
    close(descriptor);
}

static struct moe_status run(const struct moe_client_session_forward *f)
{
    uint64_t id;
    struct moe_status st = moe_session_submit(session, f, &id);
    return moe_failed(&st) ? st : moe_session_wait(session, id, NULL);
}

static int same(void)
{
    static float y[PART / sizeof(float)];
    const struct moe_client_layer *layer = &moe_client_get_info(client)->layers[0];
    for (uint32_t tokens = 0; tokens <= TOKENS; tokens++) {
        struct moe_client_session_forward f = request(tokens);
        if (tokens == 0)
            f.x.region = f.y.region = NULL;
        need(run(&f));
        struct moe_client_forward g = {.size = sizeof g,
                                       .layer = f.layer,
                                       .tokens = tokens,
                                       .hidden = f.hidden,
                                       .dtype = f.dtype,
                                       .x = moe_region_data(region),
                                       .y = y};
        if (tokens == 0)
            continue;
        need(moe_client_forward(client, &g));
        if (memcmp((char *)moe_region_data(region) + PART, y,
                   (size_t)tokens * layer->hidden * sizeof *y) != 0) {
            fprintf(stderr, "%u tokens: y by region is not y by Forward\n", tokens);
            return 1;
        }
    }
    need(moe_region_destroy(region));
    moe_session_close(session);
    moe_client_close(client);
    say("same");
    return 0;
}

/* A context with trace id 00..0N and parent id 00f067aa0ba902b7. */
static void trace(struct moe_client_session_forward *f, uint8_t n, uint32_t flags)
{
    static const uint8_t parent[] = {0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7};
    f->trace_id[sizeof f->trace_id - 1] = n;
    memcpy(f->parent_id, parent, sizeof parent);
    f->trace_flags = flags;
}

static int traced(void)
{
    struct moe_client_session_answer a = {.size = sizeof a};
    uint64_t id;
    struct moe_client_session_forward f = request(1);
    trace(&f, 1, 1);
    need(moe_session_submit(session, &f, &id));
    need(moe_session_wait(session, id, &a));
    f = request(2);
    trace(&f, 2, 0);
    need(run(&f));
    f = request(3);
    trace(&f, 3, 1);
    f.x.offset = 4;
    struct moe_status st = run(&f);
    if (st.reason != MOE_REASON_REGION_RANGE)
        return 1;
    printf("%llu\n", (unsigned long long)a.server_ns);
    return 0;
}

static int once(void)
{
    char line[16];
    struct moe_client_session_forward f = request(3);
    need(run(&f));
    say("ready");
    if (fgets(line, sizeof line, stdin) == NULL)
        return 1;
    unsigned long long begin = now_ns();
    struct moe_status st = run(&f);
    printf("%s %s %llu %llu\n", moe_code_name(st.code), moe_reason_name(st.reason), begin,
           now_ns());
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    const struct moe_client_config config = {
        .size = sizeof config, .endpoint = argv[1], .timeout_ms = 30000};
    need(moe_client_connect(&config, &client));
    open_session(argc > 3 ? strtoull(argv[3], NULL, 10) : 0);
    if (strcmp(argv[2], "device") == 0)
        make_device_region();
    else if (strcmp(argv[2], "session") != 0)
        make_region();
    if (strcmp(argv[2], "same") == 0)
        return same();
    if (strcmp(argv[2], "trace") == 0)
        return traced();
    if (strcmp(argv[2], "once") == 0)
        return once();
    if (strcmp(argv[2], "busy") == 0 || strcmp(argv[2], "device") == 0) {
        struct moe_client_session_forward f = request(TOKENS);
        need(run(&f));
        say("ready");
        for (;;)
            need(run(&f));
    }
    say("ready");
    pause();
    return 1;
}
