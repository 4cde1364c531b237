/* One lock and a ring of orders; see crew.h. Items are large (a millisecond's fraction of copying),
 * so taking the lock once per item costs nothing. */
#include "base/crew.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct order {
    struct moe_crew_batch *batch;
    uint32_t items, claimed, done;
    _Alignas(max_align_t) unsigned char what[MOE_CREW_ORDER_BYTES];
};

struct moe_crew {
    moe_crew_fn fn;
    void *ctx;
    pthread_mutex_t lock;    /* guards all below but the threads, and the batches */
    pthread_cond_t work;     /* there is an item to claim, or nothing more will come */
    pthread_cond_t finished; /* an order is finished */
    /* Ever given: order n is in place n % MOE_CREW_QUEUE. oldest <= claiming <= given, and
     * given - oldest <= MOE_CREW_QUEUE. Those from `oldest` to `claiming` have no item left to
     * claim; `oldest` is not finished. */
    uint64_t oldest, claiming, given;
    struct order order[MOE_CREW_QUEUE];
    bool quit;
    uint32_t threads; /* started */
    pthread_t thread[MOE_CREW_MAX_THREADS];
};

/* What a new thread is told; its own to free. */
struct start {
    struct moe_crew *crew;
    uint32_t number;
};

static struct order *order_at(struct moe_crew *crew, uint64_t n)
{
    return &crew->order[n % MOE_CREW_QUEUE];
}

/* The next item, and its order; NULL when the crew ends. Holds the lock. */
static struct order *claim(struct moe_crew *crew, uint32_t *item)
{
    while (crew->claiming == crew->given && !crew->quit)
        pthread_cond_wait(&crew->work, &crew->lock);
    if (crew->claiming == crew->given)
        return NULL;
    struct order *order = order_at(crew, crew->claiming);
    *item = order->claimed++;
    if (order->claimed == order->items)
        crew->claiming++;
    return order;
}

/* Holds the lock. */
static void note_done(struct moe_crew *crew, struct order *order, const struct moe_status *st)
{
    if (moe_failed(st) && !moe_failed(&order->batch->failure))
        order->batch->failure = *st;
    if (++order->done < order->items)
        return;
    order->batch->unfinished--;
    while (crew->oldest < crew->claiming &&
           order_at(crew, crew->oldest)->done == order_at(crew, crew->oldest)->items)
        crew->oldest++;
    pthread_cond_broadcast(&crew->finished);
}

static void *crew_thread(void *arg)
{
    struct start start = *(struct start *)arg;
    struct moe_crew *crew = start.crew;
    struct order *order;
    uint32_t item;
    free(arg);
    pthread_mutex_lock(&crew->lock);
    while ((order = claim(crew, &item)) != NULL) {
        struct moe_status st = moe_ok();
        if (!moe_failed(&order->batch->failure)) {
            pthread_mutex_unlock(&crew->lock);
            st = crew->fn(crew->ctx, start.number, order->what, item);
            pthread_mutex_lock(&crew->lock);
        }
        note_done(crew, order, &st);
    }
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

static bool start_thread(struct moe_crew *crew)
{
    struct start *start = malloc(sizeof *start);
    if (start == NULL)
        return false;
    *start = (struct start){crew, crew->threads};
    if (pthread_create(&crew->thread[crew->threads], NULL, crew_thread, start) != 0) {
        free(start);
        return false;
    }
    crew->threads++;
    return true;
}

struct moe_status moe_crew_create(uint32_t threads, moe_crew_fn fn, void *ctx,
                                  struct moe_crew **out)
{
    MOE_INVARIANT(threads >= 1 && threads <= MOE_CREW_MAX_THREADS);
    struct moe_crew *crew = calloc(1, sizeof *crew);
    if (crew == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for threads");
    crew->fn = fn;
    crew->ctx = ctx;
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->work, NULL);
    pthread_cond_init(&crew->finished, NULL);
    for (uint32_t i = 0; i < threads; i++)
        if (!start_thread(crew)) {
            moe_crew_destroy(crew);
            return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                             "the system gives no more threads");
        }
    *out = crew;
    return moe_ok();
}

void moe_crew_destroy(struct moe_crew *crew)
{
    if (crew == NULL)
        return;
    pthread_mutex_lock(&crew->lock);
    MOE_INVARIANT(crew->oldest == crew->given);
    crew->quit = true;
    pthread_cond_broadcast(&crew->work);
    pthread_mutex_unlock(&crew->lock);
    for (uint32_t i = 0; i < crew->threads; i++)
        pthread_join(crew->thread[i], NULL);
    pthread_cond_destroy(&crew->finished);
    pthread_cond_destroy(&crew->work);
    pthread_mutex_destroy(&crew->lock);
    free(crew);
}

struct moe_status moe_crew_give(struct moe_crew *crew, struct moe_crew_batch *batch,
                                const void *order, size_t bytes, uint32_t items)
{
    MOE_INVARIANT(bytes <= MOE_CREW_ORDER_BYTES && items > 0);
    pthread_mutex_lock(&crew->lock);
    while (crew->given - crew->oldest == MOE_CREW_QUEUE && !moe_failed(&batch->failure))
        pthread_cond_wait(&crew->finished, &crew->lock);
    struct moe_status failure = batch->failure;
    if (!moe_failed(&failure)) {
        struct order *o = order_at(crew, crew->given++);
        o->batch = batch;
        o->items = items;
        o->claimed = o->done = 0;
        memcpy(o->what, order, bytes);
        batch->unfinished++;
        pthread_cond_broadcast(&crew->work);
    }
    pthread_mutex_unlock(&crew->lock);
    return failure;
}

struct moe_status moe_crew_wait(struct moe_crew *crew, struct moe_crew_batch *batch)
{
    pthread_mutex_lock(&crew->lock);
    while (batch->unfinished > 0)
        pthread_cond_wait(&crew->finished, &crew->lock);
    struct moe_status failure = batch->failure;
    batch->failure = moe_ok();
    pthread_mutex_unlock(&crew->lock);
    return failure;
}
