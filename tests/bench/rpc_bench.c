/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of gRPC, our framing and the relay over plain sockets, and of TLS: echo of tensors of 256
 * bytes, 512 KiB (a batch of 128 tokens) and 1 to 64 MiB, between two processes of one host, over
 * loopback TCP and a Unix socket. All kinds alternate within every round, because the machine's
 * speed drifts. Ratios are medians over the rounds.
 *
 *     rpc_bench [ROUNDS [SPIN_US [DIRECTORY [LONGEST]]]]
 *
 * 5 rounds by default. SPIN_US, default 0: how long gRPC's threads spin. DIRECTORY holds ca.pem,
 * and server.pem and server.key for 127.0.0.1: with it, TLS is measured too; "" is none.
 * LONGEST: bytes of the longest tensor.
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
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define UNARY  "/moe.v1.ExpertService/Forward"
#define STREAM "/moe.v1.ExpertService/ForwardStream"

enum { LARGEST = 64 << 20, PING = 256, BATCH = 512 << 10, TENSOR = 15 };
enum { BUFFERS = 4, ROUNDS_MAX = 101, REPEATS_MAX = 10000, PATH_BYTES = 512 };

/* The ways of the bytes. The raw sockets are those of TCP and UNIX. */
enum link { TCP, UNIX, TLS, LINKS };
enum { RAW_LINKS = 2 };
static const char *const link_names[LINKS] = {"TCP", "Unix", "TLS"};

/* What the server process tells the client process. */
struct addresses {
    char raw[RAW_LINKS][PATH_BYTES]; /* a port; a path */
    char rpc[LINKS][PATH_BYTES];     /* targets; TLS is "" without certificates */
};

static uint64_t spin_ns;
static const char *certificates;                 /* the directory, or NULL */
static size_t longest = LARGEST;                 /* bytes of a tensor */
static char sockets[] = "/tmp/rpc_bench-XXXXXX"; /* the directory of the Unix sockets */

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
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* a Unix socket has none */
    while (read_all(fd, &length, sizeof length) && read_all(fd, buffer, length))
        write_all(fd, buffer, length);
    close(fd);
    free(buffer);
    return NULL;
}

static int raw_listen_tcp(char port[PATH_BYTES])
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, length) != 0 || listen(fd, 1) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &length) != 0)
        die("listen");
    (void)snprintf(port, PATH_BYTES, "%u", ntohs(at.sin_port));
    return fd;
}

static struct sockaddr_un unix_address(const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    (void)snprintf(at.sun_path, sizeof at.sun_path, "%s", path);
    return at;
}

static int raw_listen_unix(char path[PATH_BYTES])
{
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    (void)snprintf(path, PATH_BYTES, "%s/raw", sockets);
    struct sockaddr_un at = unix_address(path);
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) != 0 || listen(fd, 1) != 0)
        die("listen");
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

/* A server with TLS, or, if `tls` is NULL, a plain one, also at a Unix socket. */
static struct moe_rpc_server *start_server(const struct moe_rpc_method *methods,
                                           struct moe_tls *tls, struct addresses *at)
{
    char listen[PATH_BYTES], path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/rpc", sockets);
    (void)snprintf(listen, sizeof listen, "127.0.0.1:0%s%s", tls == NULL ? ",unix:" : "",
                   tls == NULL ? path : "");
    struct moe_rpc_server_config config = {.listen = listen,
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
    (void)snprintf(at->rpc[tls == NULL ? TCP : TLS], PATH_BYTES, "127.0.0.1:%u",
                   moe_rpc_server_port(server));
    if (tls == NULL)
        (void)snprintf(at->rpc[UNIX], PATH_BYTES, "unix:%.400s", path);
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

/* Writes the addresses to `tell` and serves until the other end closes `stop`. For each byte
 * before, it writes the relays' processor time. */
static void serve(int tell, int stop)
{
    struct moe_rpc_method methods[] = {
        {.path = UNARY, .kind = MOE_RPC_UNARY, .message = echo},
        {.path = STREAM, .kind = MOE_RPC_STREAM, .message = echo, .ctx = methods}};
    struct moe_rpc_server *plain, *encrypted = NULL;
    struct moe_tls *tls = certificates != NULL ? create_tls() : NULL;
    struct addresses at = {0};
    pthread_t threads[RAW_LINKS];
    char byte;
    moe_rpc_tune_allocator();
    must(moe_rpc_force_polling()); /* as daemons do */
    for (size_t i = 0; i < BUFFERS; i++)
        pool_put(touched(LARGEST));
    plain = start_server(methods, NULL, &at);
    if (tls != NULL)
        encrypted = start_server(methods, tls, &at);
    int listening[RAW_LINKS] = {raw_listen_tcp(at.raw[TCP]), raw_listen_unix(at.raw[UNIX])};
    for (size_t i = 0; i < RAW_LINKS; i++)
        if (pthread_create(&threads[i], NULL, raw_echo, &listening[i]) != 0)
            die("thread");
    write_all(tell, &at, sizeof at);
    while (read(stop, &byte, 1) > 0) {
        double seconds = relay_seconds();
        write_all(tell, &seconds, sizeof seconds);
    }
    for (size_t i = 0; i < RAW_LINKS; i++)
        pthread_join(threads[i], NULL);
    stop_server(plain);
    stop_server(encrypted);
    moe_tls_destroy(tls);
    (void)unlink(at.raw[UNIX]);
    (void)rmdir(sockets);
}

/* ------------------------------------------------------------------ client process */

/* The echo over one link. */
struct bench {
    enum link link;
    int raw;             /* a socket of the same link; none of TLS */
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

/* Of the echoes of one round, in seconds. */
struct times {
    double middle, p99;
};

static struct times measure(struct bench *b, once_fn once, size_t length, size_t repeats)
{
    static double seconds[REPEATS_MAX];
    for (size_t i = 0; i < repeats; i++) {
        uint64_t began = moe_clock_ns();
        once(b, length);
        seconds[i] = (double)(moe_clock_ns() - began) / 1e9;
    }
    const double middle = median(seconds, repeats); /* sorts them */
    return (struct times){.middle = middle, .p99 = seconds[repeats * 99 / 100]};
}

/* One way to echo, and what the rounds have measured. */
struct row {
    const char *what;
    struct bench *bench;
    once_fn once;
    bool raw;
    double middle[ROUNDS_MAX], p99[ROUNDS_MAX];
    double ratio[ROUNDS_MAX]; /* to the raw socket of the link; of TLS: to TCP's */
    double relays;            /* processor time of the server's relays */
};
enum { ROWS_MAX = RAW_LINKS + 2 * LINKS };

static void print_row(struct row *r, size_t length, size_t repeats, size_t rounds)
{
    const double middle = median(r->middle, rounds), ratio = median(r->ratio, rounds);
    printf("%-6s %-4s %9zu B", r->what, link_names[r->bench->link], length);
    if (length < 1 << 20)
        printf("   p50 %7.1f us   p99 %7.1f us", middle * 1e6, median(r->p99, rounds) * 1e6);
    if (length >= BATCH)
        printf("   %5.2f GB/s", 2 * (double)length / middle / 1e9);
    printf("   %.2f times raw", 1 / ratio);
    if (length >= BATCH && r->relays > 0)
        printf("   relay %.2f GB/s per core",
               2 * (double)(length * repeats * rounds) / r->relays / 1e9);
    printf("\n");
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

/* `links` of benches, in the order of their enum. */
static void compare(struct bench *b, size_t links, size_t length, size_t repeats, size_t rounds)
{
    static struct row rows[ROWS_MAX];
    size_t count = 0;
    for (size_t k = 0; k < RAW_LINKS; k++)
        rows[count++] = (struct row){.what = "raw", .bench = &b[k], .once = once_raw, .raw = true};
    for (size_t k = 0; k < links; k++) {
        rows[count++] = (struct row){.what = "unary", .bench = &b[k], .once = once_unary};
        rows[count++] = (struct row){.what = "stream", .bench = &b[k], .once = once_stream};
    }
    for (size_t k = 0; k < count; k++)
        rows[k].once(rows[k].bench, length);
    for (size_t i = 0; i < rounds; i++) {
        for (size_t k = 0; k < count; k++) {
            struct row *r = &rows[k];
            const double before = ask_relays(r->bench);
            const struct times t = measure(r->bench, r->once, length, repeats);
            r->middle[i] = t.middle;
            r->p99[i] = t.p99;
            r->relays += r->raw ? 0 : ask_relays(r->bench) - before;
            r->ratio[i] = rows[r->bench->link == UNIX ? UNIX : TCP].middle[i] / t.middle;
        }
    }
    for (size_t k = 0; k < count; k++)
        print_row(&rows[k], length, repeats, rounds);
    fflush(stdout);
}

static int raw_connect(enum link link, const char *address)
{
    struct sockaddr_in tcp = {.sin_family = AF_INET,
                              .sin_port = htons((uint16_t)strtoul(address, NULL, 10)),
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_un local = unix_address(address);
    const bool is_tcp = link == TCP;
    int fd = socket(is_tcp ? AF_INET : AF_UNIX, SOCK_STREAM, 0), one = 1;
    if (fd < 0 || connect(fd, is_tcp ? (struct sockaddr *)&tcp : (struct sockaddr *)&local,
                          is_tcp ? sizeof tcp : sizeof local) != 0)
        die("connect");
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static void open_bench(struct bench *b, struct moe_rpc_client *client, const struct addresses *at)
{
    char ca[PATH_BYTES];
    struct moe_rpc_channel_config config = {.target = at->rpc[b->link]};
    if (b->link == TLS) {
        name_file(ca, "ca.pem");
        config.trust.tls.ca = ca;
    } else {
        b->raw = raw_connect(b->link, at->raw[b->link]);
    }
    moe_mutex_init(&b->lock);
    pthread_cond_init(&b->changed, NULL);
    must(moe_rpc_channel_open(client, &config, &b->channel));
    must(moe_rpc_stream_open(
        b->channel, STREAM, &(struct moe_rpc_call_options){.deadline_ns = MOE_NEVER},
        &(struct moe_rpc_stream_events){.message = stream_message, .closed = stream_closed}, b,
        &b->stream));
}

static void run(const struct addresses *at, int ask, int answers_at, size_t rounds)
{
    static const struct {
        size_t length, repeats;
    } sizes[] = {{PING, 2000}, {BATCH, 300}, {1 << 20, 100}, {16 << 20, 10}, {LARGEST, 4}};
    const size_t links = certificates != NULL ? LINKS : TLS;
    uint8_t *x = touched(LARGEST), *y = touched(LARGEST);
    struct bench b[LINKS];
    struct moe_rpc_client *client;
    moe_rpc_tune_allocator();
    for (size_t i = 0; i < BUFFERS; i++)
        pool_put(touched(LARGEST));
    must(moe_rpc_client_create(&client));
    moe_rpc_client_set_spin(client, spin_ns);
    for (size_t k = 0; k < links; k++) {
        b[k] = (struct bench){
            .link = (enum link)k, .ask = ask, .answers_at = answers_at, .x = x, .y = y};
        open_bench(&b[k], client, at);
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && sizes[i].length <= longest; i++)
        compare(b, links, sizes[i].length, sizes[i].repeats, rounds);
    for (size_t k = 0; k < links; k++) {
        moe_rpc_stream_free(b[k].stream);
        moe_rpc_channel_close(b[k].channel);
    }
    moe_rpc_client_destroy(client);
    for (size_t k = 0; k < RAW_LINKS; k++)
        close(b[k].raw);
}

int main(int argc, char **argv)
{
    int tell[2], stop[2];
    struct addresses at;
    long rounds = argc > 1 ? atol(argv[1]) : 5;
    spin_ns = argc > 2 ? strtoul(argv[2], NULL, 10) * (MOE_NS_PER_MS / 1000) : 0;
    certificates = argc > 3 && argv[3][0] != '\0' ? argv[3] : NULL;
    longest = argc > 4 ? strtoul(argv[4], NULL, 10) : LARGEST;
    if (rounds < 1 || rounds > ROUNDS_MAX || pipe(tell) != 0 || pipe(stop) != 0) {
        fprintf(stderr, "usage: rpc_bench [ROUNDS up to %d [SPIN_US [DIRECTORY [LONGEST]]]]\n",
                ROUNDS_MAX);
        return 2;
    }
    if (mkdtemp(sockets) == NULL)
        die("/tmp");
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
    if (!read_all(tell[0], &at, sizeof at))
        die("server");
    run(&at, stop[1], tell[0], (size_t)rounds);
    close(stop[1]);
    waitpid(server, NULL, 0);
    return 0;
}
