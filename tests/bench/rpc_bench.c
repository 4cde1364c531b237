/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of gRPC and our framing over a plain TCP socket, and of TLS: echo of tensors of 1 to 64 MiB
 * and of 256 bytes, between two processes on loopback. All kinds alternate within every round,
 * because the machine's speed drifts. The ratio is the median over the rounds.
 *
 *     rpc_bench [ROUNDS [SPIN_US [DIRECTORY]]]
 *
 * 5 rounds by default. SPIN_US, default 0: how long gRPC's threads spin. DIRECTORY holds ca.pem,
 * and server.pem and server.key for 127.0.0.1: with it, TLS is measured too, and the server tells
 * how much processor time its relays took.
 *
 * Both sides work as the product does: they send tensors by reference from existing memory, and
 * copy them once, from the core's slices, when they arrive. */
#include "base/clock.h"
#include "base/mutex.h"
#include "base/wait.h"
#include "rpc/client.h"
#include "rpc/server.h"
#include "support/median.h"
#include "tls/tls.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define UNARY  "/moe.v1.ExpertService/Forward"
#define STREAM "/moe.v1.ExpertService/ForwardStream"

enum { LARGEST = 64 << 20, PING = 256, TENSOR = 15, BUFFERS = 4, ROUNDS_MAX = 101 };
enum { PORTS = 3 /* plain, raw, TLS */, PATH_BYTES = 512 };

static uint64_t spin_ns;
static const char *certificates; /* the directory, or NULL */

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static void must(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "%s: %s\n", moe_code_name(st.code), st.text);
    exit(1);
}

static void *touched(size_t bytes)
{
    void *p = malloc(bytes);
    if (p == NULL)
        die("malloc");
    memset(p, 1, bytes);
    return p;
}

/* ------------------------------------------------------------------ staging buffers */

static struct moe_mutex pool_lock = MOE_MUTEX_INITIALIZER;
static void *pool[BUFFERS];
static size_t pool_count;

static void pool_put(void *buffer)
{
    moe_mutex_lock(&pool_lock);
    pool[pool_count++] = buffer;
    moe_mutex_unlock(&pool_lock);
}

static void *pool_take(void)
{
    moe_mutex_lock(&pool_lock);
    void *buffer = pool_count > 0 ? pool[--pool_count] : NULL;
    moe_mutex_unlock(&pool_lock);
    return buffer;
}

struct taken {
    void *buffer;
    size_t length;
};

static struct moe_status take(void *ctx, uint32_t field, size_t length, void **dst)
{
    struct taken *t = ctx;
    (void)field;
    t->buffer = length <= LARGEST ? pool_take() : NULL;
    if (t->buffer == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, "no staging buffer");
    t->length = length;
    *dst = t->buffer;
    return moe_ok();
}

static struct moe_status unload(struct moe_rpc_msg *m, struct taken *t)
{
    static const uint32_t fields[] = {TENSOR};
    uint8_t head[MOE_RPC_HEAD_MAX];
    size_t length;
    *t = (struct taken){.buffer = NULL};
    struct moe_status st = moe_rpc_msg_split(m, fields, 1, head, &length, take, t);
    moe_rpc_msg_free(m);
    if (!moe_failed(&st) && t->buffer == NULL)
        st = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "no tensor");
    return st;
}

/* ------------------------------------------------------------------ server process */

static struct moe_rpc_out loaded(const struct taken *t)
{
    return (struct moe_rpc_out){.parts[0] = {.field = TENSOR,
                                             .data = t->buffer,
                                             .length = t->length,
                                             .release = pool_put,
                                             .owner = t->buffer},
                                .part_count = 1};
}

static void echo(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct taken t;
    bool stream = ctx != NULL;
    if (m == NULL) {
        moe_rpc_finish(call);
        return;
    }
    struct moe_status st = unload(m, &t);
    if (moe_failed(&st)) {
        moe_rpc_fail(call, st);
        return;
    }
    struct moe_rpc_out out = loaded(&t);
    if (stream) {
        moe_rpc_send(call, &out);
        moe_rpc_read_next(call);
    } else {
        moe_rpc_reply(call, &out);
    }
}

static bool read_all(int fd, void *to, size_t length)
{
    for (size_t at = 0; at < length;) {
        ssize_t n = read(fd, (char *)to + at, length - at);
        if (n <= 0)
            return false;
        at += (size_t)n;
    }
    return true;
}

static void write_all(int fd, const void *from, size_t length)
{
    for (size_t at = 0; at < length;) {
        ssize_t n = write(fd, (const char *)from + at, length - at);
        if (n <= 0)
            die("write");
        at += (size_t)n;
    }
}

/* Reads a length and that many bytes, and answers with the same bytes. */
static void *raw_echo(void *arg)
{
    int fd = accept(*(int *)arg, NULL, NULL), one = 1;
    void *buffer = touched(LARGEST);
    uint32_t length;
    if (fd < 0)
        die("accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    while (read_all(fd, &length, sizeof length) && read_all(fd, buffer, length))
        write_all(fd, buffer, length);
    close(fd);
    free(buffer);
    return NULL;
}

static int raw_listen(uint16_t *port)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, length) != 0 || listen(fd, 1) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &length) != 0)
        die("listen");
    *port = ntohs(at.sin_port);
    return fd;
}

static void name_file(char path[PATH_BYTES], const char *name)
{
    (void)snprintf(path, PATH_BYTES, "%s/%s", certificates, name);
}

/* The first line of a file of one thread of this process; "" if there is none. */
static void read_line(const char *thread, const char *name, char *line, int size)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "/proc/self/task/%s/%s", thread, name);
    FILE *file = fopen(path, "r");
    if (file == NULL || fgets(line, size, file) == NULL)
        line[0] = '\0';
    if (file != NULL)
        fclose(file);
}

/* Processor time of all relays of this process, in seconds. */
static double relay_seconds(void)
{
    unsigned long long ns = 0, of_thread;
    char line[PATH_BYTES];
    DIR *threads = opendir("/proc/self/task");
    if (threads == NULL)
        die("/proc/self/task");
    for (const struct dirent *e = readdir(threads); e != NULL; e = readdir(threads)) {
        read_line(e->d_name, "comm", line, sizeof line);
        if (strcmp(line, "moe-relay\n") != 0)
            continue;
        read_line(e->d_name, "schedstat", line, sizeof line);
        if (sscanf(line, "%llu", &of_thread) == 1)
            ns += of_thread;
    }
    closedir(threads);
    return (double)ns / 1e9;
}

/* A server with TLS, or without if `tls` is NULL. */
static struct moe_rpc_server *start_server(const struct moe_rpc_method *methods,
                                           struct moe_tls *tls, uint16_t *port)
{
    struct moe_rpc_server_config config = {.listen = "127.0.0.1:0",
                                           .tls = tls,
                                           .max_message_bytes = LARGEST + 4096,
                                           .max_reading_bytes = 4ull * LARGEST,
                                           .max_waiting_reads = 16,
                                           .max_concurrent_streams = 64,
                                           .spin_ns = spin_ns,
                                           .methods = methods,
                                           .method_count = 2};
    struct moe_rpc_server *server;
    must(moe_rpc_server_start(&config, &server));
    *port = moe_rpc_server_port(server);
    return server;
}

static void stop_server(struct moe_rpc_server *server)
{
    if (server == NULL)
        return;
    moe_rpc_server_drain(server, moe_clock_ns() + MOE_NS_PER_S);
    moe_rpc_server_stop(server);
}

static struct moe_tls *create_tls(void)
{
    char certificate[PATH_BYTES], key[PATH_BYTES];
    struct moe_tls *tls;
    name_file(certificate, "server.pem");
    name_file(key, "server.key");
    must(moe_tls_create(&(struct moe_rpc_tls_files){certificate, key, NULL}, &tls));
    return tls;
}

/* Writes the ports to `tell` and serves until the other end closes `stop`. For each byte before, it
 * writes the relays' processor time. */
static void serve(int tell, int stop)
{
    struct moe_rpc_method methods[] = {
        {.path = UNARY, .kind = MOE_RPC_UNARY, .message = echo},
        {.path = STREAM, .kind = MOE_RPC_STREAM, .message = echo, .ctx = methods}};
    struct moe_rpc_server *plain, *encrypted = NULL;
    struct moe_tls *tls = certificates != NULL ? create_tls() : NULL;
    uint16_t ports[PORTS] = {0};
    pthread_t thread;
    char byte;
    moe_rpc_tune_allocator();
    for (size_t i = 0; i < BUFFERS; i++)
        pool_put(touched(LARGEST));
    plain = start_server(methods, NULL, &ports[0]);
    if (tls != NULL)
        encrypted = start_server(methods, tls, &ports[2]);
    int listening = raw_listen(&ports[1]);
    if (pthread_create(&thread, NULL, raw_echo, &listening) != 0)
        die("thread");
    write_all(tell, ports, sizeof ports);
    while (read(stop, &byte, 1) > 0) {
        double seconds = relay_seconds();
        write_all(tell, &seconds, sizeof seconds);
    }
    pthread_join(thread, NULL);
    stop_server(plain);
    stop_server(encrypted);
    moe_tls_destroy(tls);
}

/* ------------------------------------------------------------------ client process */

struct bench {
    int raw;
    int ask, answers_at; /* to and from the server process */
    struct moe_rpc_channel *channel;
    struct moe_rpc_stream *stream;
    uint8_t *x, *y;
    /* Answers on the stream. */
    struct moe_mutex lock;
    pthread_cond_t changed;
    unsigned answers;
};

static void check(const struct bench *b, const struct taken *t, size_t length)
{
    const uint8_t *y = t->buffer;
    if (t->length != length || y[0] != b->x[0] || y[length - 1] != b->x[length - 1]) {
        fprintf(stderr, "the echo is not what was sent\n");
        exit(1);
    }
    pool_put(t->buffer);
}

static void once_raw(struct bench *b, size_t length)
{
    uint32_t n = (uint32_t)length;
    write_all(b->raw, &n, sizeof n);
    write_all(b->raw, b->x, length);
    if (!read_all(b->raw, b->y, length))
        die("read");
}

static struct moe_rpc_out request(const struct bench *b, size_t length)
{
    return (struct moe_rpc_out){.parts[0] = {.field = TENSOR, .data = b->x, .length = length},
                                .part_count = 1};
}

static void once_unary(struct bench *b, size_t length)
{
    struct moe_rpc_msg *m;
    struct taken t;
    struct moe_rpc_out out = request(b, length);
    must(moe_rpc_call_wait(b->channel, UNARY,
                           &(struct moe_rpc_call_options){.deadline_ns = MOE_NEVER}, &out, &m));
    must(unload(m, &t));
    check(b, &t, length);
}

static void stream_message(void *ctx, struct moe_rpc_msg *m)
{
    struct bench *b = ctx;
    struct taken t;
    must(unload(m, &t));
    check(b, &t, t.length);
    moe_mutex_lock(&b->lock);
    b->answers++;
    pthread_cond_signal(&b->changed);
    moe_mutex_unlock(&b->lock);
}

static void stream_closed(void *ctx, struct moe_status status)
{
    (void)ctx;
    (void)status;
}

static void once_stream(struct bench *b, size_t length)
{
    struct moe_rpc_out out = request(b, length);
    moe_mutex_lock(&b->lock);
    unsigned want = b->answers + 1;
    moe_mutex_unlock(&b->lock);
    must(moe_rpc_stream_send(b->stream, &out));
    moe_mutex_lock(&b->lock);
    while (b->answers < want)
        moe_wait(&b->changed, &b->lock);
    moe_mutex_unlock(&b->lock);
}

typedef void (*once_fn)(struct bench *b, size_t length);

/* Median time of one echo, in seconds. */
static double measure(struct bench *b, once_fn once, size_t length, size_t repeats)
{
    static double seconds[10000];
    for (size_t i = 0; i < repeats; i++) {
        uint64_t began = moe_clock_ns();
        once(b, length);
        seconds[i] = (double)(moe_clock_ns() - began) / 1e9;
    }
    return median(seconds, repeats);
}

static void print_line(const char *what, size_t length, const char *kind, double seconds,
                       double ratio)
{
    if (length >= 1 << 20)
        printf("%-8s %9zu B   %-5s %7.2f GB/s   %.2f of raw\n", what, length, kind,
               2 * (double)length / seconds / 1e9, ratio);
    else
        printf("%-8s %9zu B   %-5s %7.1f us     %.1f times raw\n", what, length, kind,
               seconds * 1e6, 1 / ratio);
}

/* Processor time of the server's relays so far. */
static double ask_relays(const struct bench *b)
{
    double seconds;
    write_all(b->ask, "", 1);
    if (!read_all(b->answers_at, &seconds, sizeof seconds))
        die("server");
    return seconds;
}

/* `kinds` of benches: plain, and TLS. */
static void compare(struct bench *b, size_t kinds, const char *what, once_fn once, size_t length,
                    size_t repeats, size_t rounds)
{
    static const char *const names[] = {"gRPC", "TLS"};
    double raw[ROUNDS_MAX], rpc[2][ROUNDS_MAX], ratio[2][ROUNDS_MAX], relays[2] = {0};
    once_raw(b, length);
    for (size_t k = 0; k < kinds; k++)
        once(&b[k], length);
    for (size_t i = 0; i < rounds; i++) {
        raw[i] = measure(b, once_raw, length, repeats);
        for (size_t k = 0; k < kinds; k++) {
            double before = ask_relays(b);
            rpc[k][i] = measure(&b[k], once, length, repeats);
            ratio[k][i] = raw[i] / rpc[k][i];
            relays[k] += ask_relays(b) - before;
        }
    }
    print_line(what, length, "raw", median(raw, rounds), 1);
    for (size_t k = 0; k < kinds; k++) {
        print_line(what, length, names[k], median(rpc[k], rounds), median(ratio[k], rounds));
        if (length >= 1 << 20 && relays[k] > 0)
            printf("%36s relay: %.2f GB/s per core\n", "",
                   2 * (double)(length * repeats * rounds) / relays[k] / 1e9);
    }
    fflush(stdout);
}

static int raw_connect(uint16_t port)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (fd < 0 || connect(fd, (struct sockaddr *)&at, sizeof at) != 0)
        die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static void open_bench(struct bench *b, struct moe_rpc_client *client, uint16_t port, bool tls)
{
    char target[32], ca[PATH_BYTES] = "";
    struct moe_rpc_channel_config config = {.target = target};
    if (tls) {
        name_file(ca, "ca.pem");
        config.trust.tls.ca = ca;
    }
    moe_mutex_init(&b->lock);
    pthread_cond_init(&b->changed, NULL);
    snprintf(target, sizeof target, "127.0.0.1:%u", port);
    must(moe_rpc_channel_open(client, &config, &b->channel));
    must(moe_rpc_stream_open(
        b->channel, STREAM, &(struct moe_rpc_call_options){.deadline_ns = MOE_NEVER},
        &(struct moe_rpc_stream_events){.message = stream_message, .closed = stream_closed}, b,
        &b->stream));
}

static void run(const uint16_t ports[PORTS], int ask, int answers_at, size_t rounds)
{
    static const struct {
        size_t length, repeats;
    } sizes[] = {{PING, 2000}, {1 << 20, 100}, {16 << 20, 10}, {LARGEST, 4}};
    const size_t kinds = certificates != NULL ? 2 : 1;
    struct bench b[2] = {{.raw = raw_connect(ports[1]),
                          .ask = ask,
                          .answers_at = answers_at,
                          .x = touched(LARGEST),
                          .y = touched(LARGEST)}};
    struct moe_rpc_client *client;
    b[1] = b[0];
    moe_rpc_tune_allocator();
    for (size_t i = 0; i < BUFFERS; i++)
        pool_put(touched(LARGEST));
    must(moe_rpc_client_create(&client));
    moe_rpc_client_set_spin(client, spin_ns);
    for (size_t k = 0; k < kinds; k++)
        open_bench(&b[k], client, ports[2 * k], k == 1);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        compare(b, kinds, "unary", once_unary, sizes[i].length, sizes[i].repeats, rounds);
        compare(b, kinds, "stream", once_stream, sizes[i].length, sizes[i].repeats, rounds);
    }
    for (size_t k = 0; k < kinds; k++) {
        moe_rpc_stream_free(b[k].stream);
        moe_rpc_channel_close(b[k].channel);
    }
    moe_rpc_client_destroy(client);
    close(b[0].raw);
}

int main(int argc, char **argv)
{
    int tell[2], stop[2];
    uint16_t ports[PORTS];
    long rounds = argc > 1 ? atol(argv[1]) : 5;
    spin_ns = argc > 2 ? strtoul(argv[2], NULL, 10) * (MOE_NS_PER_MS / 1000) : 0;
    certificates = argc > 3 ? argv[3] : NULL;
    if (rounds < 1 || rounds > ROUNDS_MAX || pipe(tell) != 0 || pipe(stop) != 0) {
        fprintf(stderr, "usage: rpc_bench [ROUNDS up to %d [SPIN_US [DIRECTORY]]]\n", ROUNDS_MAX);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    pid_t server = fork(); /* before the core has threads */
    if (server < 0)
        die("fork");
    if (server == 0) {
        close(stop[1]);
        serve(tell[1], stop[0]);
        return 0;
    }
    close(stop[0]);
    if (!read_all(tell[0], ports, sizeof ports))
        die("server");
    run(ports, stop[1], tell[0], (size_t)rounds);
    close(stop[1]);
    waitpid(server, NULL, 0);
    return 0;
}
