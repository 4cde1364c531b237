/* SPDX-License-Identifier: Apache-2.0 */
/* Random lives of clients that share memory with a worker:
 *
 *     regions_schedules ENDPOINT FIRST COUNT [GPU]   the schedules FIRST .. FIRST + COUNT - 1
 *
 * Each schedule is a process: it opens a session, registers regions, submits requests, good and bad
 * ones, unregisters, and closes. At any moment it may be killed: by itself, at a place of the
 * schedule, or by this process, after a random time. PARALLEL of them run at the same time.
 *
 * Every schedule knows each byte of its regions: rows of x come from a table, and so do their y and
 * their routing, which Forward computed before. Whenever no request uses a region, all of its bytes
 * are compared. Each refusal must have the reason that the schedule expects.
 *
 * With GPU, the ordinal of a device that the worker's reaches, half of the regions lie on it.
 *
 * A schedule depends on its number and MOE_SEED; the moment of a kill from outside and the order of
 * the worker's threads do not. Exits with 0 = done, 1 = a failure, 2 = wrong arguments. */
#include "regions_device.h"
#include "support/random.h"

#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    PARALLEL = 4, /* below the connections of one identity */
    ROWS = 48,    /* of the table */
    HIDDEN_MAX = 64,
    TOP_K_MAX = 8,
    REGIONS = 4,
    SLOTS = 6, /* places of a region; a tensor lies in one */
    SLOT = 16384,
    IN_FLIGHT = 24,
    STEPS = 40,             /* of a session, at most */
    OPEN_S = 30,            /* to get in while those before are being freed */
    KILL_US = 60000,        /* from outside: up to this long after the begin */
    KILL_CUDA_US = 1500000, /* the same with a GPU: CUDA takes its time to begin */
    SMALLEST = 2 << 20,     /* a region on a GPU */
};

/* What Forward says of each row, in memory that all schedules share. */
struct table {
    uint32_t layer, hidden, top_k;
    float x[ROWS][HIDDEN_MAX], y[ROWS][HIDDEN_MAX], weights[ROWS][TOP_K_MAX];
    int32_t ids[ROWS][TOP_K_MAX];
};
static struct table *table;

static const char *endpoint;
static int gpu = -1;
static uint64_t number; /* of this process' schedule */
static struct rng dice;
static struct moe_client *client;
static struct moe_client_session *session;

static void fail(const char *what)
{
    fprintf(stderr, "schedule %" PRIu64 ": %s\n", number, what);
    exit(1);
}

static void need(const char *what, struct moe_status st)
{
    char text[256];
    if (!moe_failed(&st))
        return;
    (void)snprintf(text, sizeof text, "%s: %s %s: %s", what, moe_code_name(st.code),
                   moe_reason_name(st.reason), st.text);
    fail(text);
}

/* ------------------------------------------------------------------ the session */

struct request {
    bool used;
    uint64_t id;
    uint32_t tokens, first; /* rows of the table */
    bool routing;           /* ids and weights are returned */
    int region[4], slot[4]; /* of x, y, ids, weights; -1 = absent or gone */
    uint32_t offset[4];
    enum moe_reason expected; /* MOE_REASON_NONE: it succeeds */
    bool region_gone;         /* if the worker had not taken it by then, it has no region */
};
enum { X, Y, IDS, WEIGHTS, TENSORS };

struct place {
    struct moe_client_region *region; /* NULL: there is none */
    bool on_gpu;
    uint8_t *shadow; /* what its bytes must be */
    bool busy[SLOTS];
};

static struct place places[REGIONS];
static struct request requests[IN_FLIGHT];

static void sleep_ms(uint32_t ms)
{
    const struct timespec t = {.tv_nsec = ms * 1000000L};
    nanosleep(&t, NULL);
}

/* Clients that were killed before may still be in the way: their places, and their tickets. */
static void open_session(void)
{
    struct moe_client_session_config config = {.size = sizeof config, .timeout_ms = 30000};
    const time_t end = time(NULL) + OPEN_S;
    config.spin_us = rng_chance(&dice, 50) ? 50 : 0;
    struct moe_status st;
    while ((st = moe_session_open(client, &config, &session)).code == MOE_RESOURCE_EXHAUSTED &&
           time(NULL) < end)
        sleep_ms(20);
    need("open", st);
    if (gpu >= 0)
        device_open(session, gpu);
}

static bool uses(const struct request *r, int region)
{
    for (int i = 0; i < TENSORS; i++)
        if (r->used && r->region[i] == region)
            return true;
    return false;
}

/* Its bytes, until the next call. */
static const uint8_t *look_at(const struct place *p)
{
    static uint8_t copy[SLOTS * SLOT];
    if (!p->on_gpu)
        return moe_region_data(p->region);
    device_copy_out(p->region, copy, sizeof copy);
    return copy;
}

static struct moe_status make_region(const char *name, struct place *p)
{
    p->on_gpu = gpu >= 0 && rng_chance(&dice, 50);
    if (!p->on_gpu)
        return moe_region_create(session, name, SLOTS * (size_t)SLOT, &p->region);
    struct moe_status st = device_alloc(name, SLOTS * (size_t)SLOT, &p->region);
    if (!moe_failed(&st) && moe_region_bytes(p->region) < SMALLEST)
        fail("a region on a GPU is smaller than its pages");
    return st;
}

/* All bytes of a region that no request uses. */
static void check_region(int i)
{
    char text[128];
    struct place *p = &places[i];
    for (int n = 0; n < IN_FLIGHT; n++)
        if (uses(&requests[n], i))
            return;
    const uint8_t *data = look_at(p);
    for (size_t at = 0; at < SLOTS * (size_t)SLOT; at++)
        if (data[at] != p->shadow[at]) {
            (void)snprintf(text, sizeof text, "byte %zu of region %d is %u, not %u", at, i,
                           data[at], p->shadow[at]);
            fail(text);
        }
}

static void create(void)
{
    char name[8];
    int i = (int)rng_below(&dice, REGIONS);
    struct place *p = &places[i];
    if (p->region != NULL)
        return;
    (void)snprintf(name, sizeof name, "r%d", i);
    need("create", make_region(name, p));
    p->shadow = calloc(SLOTS, SLOT);
    if (p->shadow == NULL)
        fail("memory");
    memset(p->busy, 0, sizeof p->busy);
    check_region(i);
    if (rng_chance(&dice, 30)) { /* the name is taken now */
        struct moe_client_region *again;
        struct moe_status st = moe_region_create(session, name, SLOT, &again);
        if (st.reason != MOE_REASON_REGION_EXISTS)
            fail("a second region of one name");
    }
}

/* Also with requests in flight: it waits for those that the worker has taken. */
static void destroy(void)
{
    int i = (int)rng_below(&dice, REGIONS);
    struct place *p = &places[i];
    if (p->region == NULL)
        return;
    check_region(i);
    for (int n = 0; n < IN_FLIGHT; n++)
        for (int t = 0; t < TENSORS; t++)
            if (requests[n].used && requests[n].region[t] == i) {
                requests[n].region[t] = -1;
                requests[n].region_gone = true;
            }
    need("destroy", moe_region_destroy(p->region));
    free(p->shadow);
    *p = (struct place){0};
}

/* ------------------------------------------------------------------ requests */

static uint8_t *shadow_of(const struct request *r, int t)
{
    return places[r->region[t]].shadow + (size_t)r->slot[t] * SLOT + r->offset[t];
}

/* Finds a free place for a tensor of `bytes` bytes. */
static bool find_place(struct request *r, int t, size_t bytes)
{
    for (int tries = 0; tries < 16; tries++) {
        int i = (int)rng_below(&dice, REGIONS), s = (int)rng_below(&dice, SLOTS);
        if (places[i].region == NULL || places[i].busy[s])
            continue;
        places[i].busy[s] = true;
        r->region[t] = i;
        r->slot[t] = s;
        r->offset[t] = 16 * rng_below(&dice, (uint32_t)((SLOT - bytes) / 16) + 1);
        return true;
    }
    return false;
}

static void give_back(const struct request *r)
{
    for (int t = 0; t < TENSORS; t++)
        if (r->region[t] >= 0)
            places[r->region[t]].busy[r->slot[t]] = false;
}

static size_t bytes_of(const struct request *r, int t)
{
    return 4 * (size_t)r->tokens * (t == X || t == Y ? table->hidden : table->top_k);
}

/* Rows of the table in a tensor's format, one after the other. */
static void put_rows(const struct request *r, int t, uint8_t *to)
{
    const size_t row = bytes_of(r, t) / r->tokens;
    for (uint32_t i = 0; i < r->tokens; i++) {
        const uint32_t at = (r->first + i) % ROWS;
        const void *from = t == X     ? (const void *)table->x[at]
                           : t == Y   ? (const void *)table->y[at]
                           : t == IDS ? (const void *)table->ids[at]
                                      : (const void *)table->weights[at];
        memcpy(to + i * row, from, row);
    }
}

/* x, in its region and in what the region must be. */
static void put_input(const struct request *r)
{
    const struct place *p = &places[r->region[X]];
    const size_t at = (size_t)r->slot[X] * SLOT + r->offset[X];
    put_rows(r, X, shadow_of(r, X));
    if (p->on_gpu)
        device_copy_in(p->region, at, shadow_of(r, X), bytes_of(r, X));
    else
        put_rows(r, X, (uint8_t *)moe_region_data(p->region) + at);
}

static struct moe_client_tensor tensor(const struct request *r, int t)
{
    if (r->region[t] < 0)
        return (struct moe_client_tensor){0};
    return (struct moe_client_tensor){places[r->region[t]].region,
                                      (uint64_t)r->slot[t] * SLOT + r->offset[t]};
}

/* One thing is wrong. False: the library itself refuses it, and has. */
static bool spoil(struct request *r, struct moe_client_session_forward *f)
{
    struct moe_status st;
    switch (rng_below(&dice, 5)) {
    case 0: /* past the end */
        f->y.offset = moe_region_bytes(f->y.region) - bytes_of(r, Y) + 16;
        r->expected = MOE_REASON_REGION_RANGE;
        return true;
    case 1:
        f->x.offset += 4;
        r->expected = MOE_REASON_REGION_RANGE;
        return true;
    case 2: /* y overwrites x, in part or all of it */
        f->y = f->x;
        r->expected = MOE_REASON_REGION_OVERLAP;
        return true;
    case 3: /* an offset that wraps */
        f->x.offset = UINT64_MAX - 15;
        r->expected = MOE_REASON_REGION_RANGE;
        return true;
    default:
        f->hidden += 1;
        st = moe_session_submit(session, f, &r->id);
        if (st.reason != MOE_REASON_SHAPE_MISMATCH)
            fail("a wrong width was not refused");
        return false;
    }
}

static void submit(void)
{
    int n = 0;
    while (n < IN_FLIGHT && requests[n].used)
        n++;
    if (n == IN_FLIGHT)
        return;
    struct request r = {.used = true,
                        .tokens = rng_range(&dice, 1, ROWS),
                        .first = rng_below(&dice, ROWS),
                        .routing = rng_chance(&dice, 40),
                        .region = {-1, -1, -1, -1}};
    bool placed = true;
    for (int t = 0; t < (r.routing ? TENSORS : IDS) && placed; t++)
        placed = find_place(&r, t, bytes_of(&r, t));
    if (!placed) {
        give_back(&r);
        return;
    }
    put_input(&r);
    struct moe_client_session_forward f = {.size = sizeof f,
                                           .layer = table->layer,
                                           .tokens = r.tokens,
                                           .hidden = table->hidden,
                                           .dtype = MOE_DTYPE_F32,
                                           .x = tensor(&r, X),
                                           .y = tensor(&r, Y),
                                           .ids = tensor(&r, IDS),
                                           .weights = tensor(&r, WEIGHTS)};
    if (rng_chance(&dice, 15) && !spoil(&r, &f)) {
        give_back(&r);
        return;
    }
    need("submit", moe_session_submit(session, &f, &r.id));
    requests[n] = r;
}

/* The end of a request: its rows are in the regions, and nothing else has changed. */
static void end_request(struct request *r, struct moe_status st)
{
    char text[256];
    const bool was_late = r->region_gone && st.reason == MOE_REASON_REGION_NOT_FOUND;
    if (st.reason != r->expected && !was_late) {
        (void)snprintf(text, sizeof text, "a request ended with %s %s: %s; %s was expected",
                       moe_code_name(st.code), moe_reason_name(st.reason), st.text,
                       moe_reason_name(r->expected));
        fail(text);
    }
    for (int t = Y; t < TENSORS && !moe_failed(&st); t++)
        if (r->region[t] >= 0)
            put_rows(r, t, shadow_of(r, t));
    give_back(r);
    r->used = false;
    for (int i = 0; i < REGIONS; i++)
        if (places[i].region != NULL)
            check_region(i);
}

static void look(bool waits)
{
    struct request *r = &requests[rng_below(&dice, IN_FLIGHT)];
    bool done = true;
    struct moe_status st;
    if (!r->used)
        return;
    st = waits ? moe_session_wait(session, r->id, NULL)
               : moe_session_poll(session, r->id, &done, NULL);
    if (done)
        end_request(r, st);
}

static void wait_for_all(void)
{
    for (int n = 0; n < IN_FLIGHT; n++)
        if (requests[n].used)
            end_request(&requests[n], moe_session_wait(session, requests[n].id, NULL));
}

/* ------------------------------------------------------------------ a schedule */

static void close_session(void)
{
    if (gpu >= 0)
        device_close();
    moe_session_close(session);
    for (int i = 0; i < REGIONS; i++)
        free(places[i].shadow);
    memset(places, 0, sizeof places);
    memset(requests, 0, sizeof requests);
}

static void live(void)
{
    const uint32_t steps = rng_below(&dice, STEPS);
    open_session();
    for (uint32_t i = 0; i < steps; i++) {
        const uint32_t what = rng_below(&dice, 100);
        if (what < 18)
            create();
        else if (what < 24)
            destroy();
        else if (what < 64)
            submit();
        else if (what < 80)
            look(true);
        else if (what < 96)
            look(false);
        else if (what < 99)
            wait_for_all();
        else
            kill(getpid(), SIGKILL);
    }
    if (rng_chance(&dice, 50))
        wait_for_all();
    close_session();
}

static void connect_client(void)
{
    const struct moe_client_config config = {
        .size = sizeof config, .endpoint = endpoint, .timeout_ms = 30000};
    need("connect", moe_client_connect(&config, &client));
}

static int run(uint64_t seed)
{
    dice.state = seed + number * UINT64_C(0x9e3779b97f4a7c15);
    connect_client();
    for (uint32_t sessions = rng_range(&dice, 1, 3); sessions > 0; sessions--)
        live();
    if (rng_chance(&dice, 30))
        _exit(0); /* without a farewell */
    moe_client_close(client);
    return 0;
}

/* In a separate process: this one must not start threads before it forks. */
static int fill_table(uint64_t seed)
{
    static float x[ROWS * HIDDEN_MAX], y[ROWS * HIDDEN_MAX], weights[ROWS * TOP_K_MAX];
    static int32_t ids[ROWS * TOP_K_MAX];
    connect_client();
    const struct moe_client_layer *l = &moe_client_get_info(client)->layers[0];
    if (l->hidden > HIDDEN_MAX || l->top_k > TOP_K_MAX || 4 * ROWS * l->hidden + 16 > SLOT)
        fail("the model is too wide for this test");
    dice.state = seed;
    for (size_t i = 0; i < (size_t)ROWS * l->hidden; i++)
        x[i] = rng_float(&dice);
    struct moe_client_forward f = {.size = sizeof f,
                                   .layer = l->layer,
                                   .tokens = ROWS,
                                   .hidden = l->hidden,
                                   .dtype = MOE_DTYPE_F32,
                                   .x = x,
                                   .y = y,
                                   .topk_ids = ids,
                                   .topk_weights = weights};
    need("forward", moe_client_forward(client, &f));
    table->layer = l->layer;
    table->hidden = l->hidden;
    table->top_k = l->top_k;
    for (size_t i = 0; i < ROWS; i++) {
        memcpy(table->x[i], x + i * l->hidden, l->hidden * sizeof *x);
        memcpy(table->y[i], y + i * l->hidden, l->hidden * sizeof *y);
        memcpy(table->ids[i], ids + i * l->top_k, l->top_k * sizeof *ids);
        memcpy(table->weights[i], weights + i * l->top_k, l->top_k * sizeof *weights);
    }
    moe_client_close(client);
    return 0;
}

/* ------------------------------------------------------------------ all schedules */

struct child {
    pid_t pid; /* 0: none */
    uint64_t number, kill_at_us;
};

static uint64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static pid_t begin(int (*body)(uint64_t seed), uint64_t seed)
{
    pid_t pid = fork();
    if (pid == 0)
        exit(body(seed));
    if (pid < 0) {
        perror("fork");
        exit(1);
    }
    return pid;
}

/* Waits for the end of any schedule, and kills those that have had their time. */
static int reap(struct child all[PARALLEL], uint32_t counts[2])
{
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        for (int i = 0; i < PARALLEL; i++) {
            struct child *c = &all[i];
            if (c->pid != 0 && pid == 0 && now_us() >= c->kill_at_us)
                kill(c->pid, SIGKILL);
            if (c->pid == 0 || c->pid != pid)
                continue;
            const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
            c->pid = 0;
            counts[killed]++;
            return killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0) ? 0 : 1;
        }
        const struct timespec moment = {.tv_nsec = 100000};
        nanosleep(&moment, NULL);
    }
}

static int run_all(uint64_t seed, uint64_t first, uint64_t count)
{
    struct child all[PARALLEL] = {0};
    struct rng kills = {.state = seed ^ first};
    uint32_t counts[2] = {0};
    uint64_t started = 0, ended = 0;
    int failed = 0;
    while (ended < started || (started < count && failed == 0)) {
        int i = 0;
        while (i < PARALLEL && all[i].pid != 0)
            i++;
        if (i == PARALLEL || started == count || failed != 0) {
            failed |= reap(all, counts);
            ended++;
            continue;
        }
        number = first + started++;
        const uint32_t most = gpu >= 0 ? KILL_CUDA_US : KILL_US;
        const uint64_t after = rng_chance(&kills, 40) ? rng_below(&kills, most) : UINT32_MAX;
        all[i] = (struct child){
            .pid = begin(run, seed), .number = number, .kill_at_us = now_us() + after};
    }
    printf("%" PRIu64 " schedules: %u ended, %u killed\n", ended, counts[0], counts[1]);
    return failed;
}

int main(int argc, char **argv)
{
    int status;
    if (argc < 4 || argc > 5)
        return 2;
    endpoint = argv[1];
    gpu = argc == 5 ? atoi(argv[4]) : -1;
    const uint64_t seed = choose_seed();
    fflush(stdout);
    table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (table == MAP_FAILED)
        return 1;
    if (waitpid(begin(fill_table, seed), &status, 0) < 0 || status != 0)
        return 1;
    return run_all(seed, strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10));
}
