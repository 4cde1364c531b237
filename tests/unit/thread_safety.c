/* SPDX-License-Identifier: Apache-2.0 */
/* What clang must refuse: thread_safety.sh compiles this once as it is, which must pass, and once
 * for each PLANT, which must fail. */
#include "base/mutex.h"
#include "base/wait.h"

struct account {
    struct moe_mutex lock;
    pthread_cond_t changed;
    MOE_GUARDED_BY(lock) struct {
        int balance;
        bool closed;
    };
};

struct other {
    struct moe_mutex lock;
};

static struct moe_mutex total_lock = MOE_MUTEX_INITIALIZER;
MOE_GUARDED_BY(total_lock) static int total;

void deposit(struct account *a, int amount) MOE_REQUIRES(a->lock);
int use(struct account *a, struct account *b, struct other *o, bool now);

void deposit(struct account *a, int amount)
{
    a->balance += amount;
}

int use(struct account *a, struct account *b, struct other *o, bool now)
{
    moe_mutex_lock(&a->lock);
    deposit(a, 1);
    while (!a->closed)
        moe_wait(&a->changed, &a->lock);
    int balance = a->balance;
    moe_mutex_unlock(&a->lock);
    moe_mutex_lock(&total_lock);
    total += balance;
    moe_mutex_unlock(&total_lock);
#if PLANT == 1 /* a function, its lock not held */
    deposit(a, 1);
#elif PLANT == 2  /* a field, its lock not held */
    a->balance = 0;
#elif PLANT == 3  /* a field under the lock of another struct */
    moe_mutex_lock(&o->lock);
    a->closed = true;
    moe_mutex_unlock(&o->lock);
#elif PLANT == 4  /* a function under the lock of another object */
    moe_mutex_lock(&b->lock);
    deposit(a, 1);
    moe_mutex_unlock(&b->lock);
#elif PLANT == 5  /* a lock that one path does not give back */
    moe_mutex_lock(&a->lock);
    if (now)
        return balance;
    moe_mutex_unlock(&a->lock);
#elif PLANT == 6  /* a lock that is taken twice */
    moe_mutex_lock(&a->lock);
    moe_mutex_lock(&a->lock);
    moe_mutex_unlock(&a->lock);
#elif PLANT == 7  /* a lock that is not held */
    moe_mutex_unlock(&b->lock);
#elif PLANT == 8  /* a wait without the lock */
    moe_wait(&a->changed, &a->lock);
#elif PLANT == 9  /* a variable, its lock not held */
    total = 0;
#elif PLANT == 10 /* after a wait, the lock is still held */
    moe_mutex_lock(&a->lock);
    (void)moe_wait_until(&a->changed, &a->lock, 0);
#endif
    (void)b;
    (void)o;
    (void)now;
    return balance;
}
