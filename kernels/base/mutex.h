/* SPDX-License-Identifier: Apache-2.0 */
/* The mutex of this project, and annotations for functions and fields.
 *
 * clang (19 or newer) checks the annotations with -Wthread-safety (preset `clang`). It refuses
 * access to a guarded field without the lock, a lock that is taken twice or not released, and a
 * call without a required lock. Other compilers ignore the annotations. daemon/CONCURRENCY.md lists
 * the mutexes and the order in which they are taken.
 *
 *   MOE_GUARDED_BY(m)  field or variable: used only while `m` is held. In C, `m` stands before
 *                      the field, in the same struct.
 *   MOE_REQUIRES(m)    function: the caller holds `m`, and still does when the function returns,
 *                      but may release `m` in between.
 *   MOE_ACQUIRE(m), MOE_RELEASE(m)
 *                      function: takes `m`; releases it.
 *   MOE_EXCLUDES(m)    function: the caller does not hold `m`.
 *   MOE_NO_THREAD_SAFETY_ANALYSIS
 *                      function: the check skips its body. Needs a comment with the reason. */
#ifndef MOE_BASE_MUTEX_H
#define MOE_BASE_MUTEX_H

#include <pthread.h>
#include <stdbool.h>

#if defined(__clang__) && __clang_major__ >= 19 && !defined(__cplusplus)
#define MOE_THREAD_SAFETY(...) __attribute__((__VA_ARGS__))
#else
#define MOE_THREAD_SAFETY(...)
#endif

#define MOE_CAPABILITY(name)          MOE_THREAD_SAFETY(capability(name))
#define MOE_GUARDED_BY(m)             MOE_THREAD_SAFETY(guarded_by(&m))
#define MOE_REQUIRES(...)             MOE_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define MOE_ACQUIRE(...)              MOE_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define MOE_TRY_ACQUIRE(...)          MOE_THREAD_SAFETY(try_acquire_capability(__VA_ARGS__))
#define MOE_RELEASE(...)              MOE_THREAD_SAFETY(release_capability(__VA_ARGS__))
#define MOE_EXCLUDES(...)             MOE_THREAD_SAFETY(locks_excluded(__VA_ARGS__))
#define MOE_ASSERT_HELD(...)          MOE_THREAD_SAFETY(assert_capability(__VA_ARGS__))
#define MOE_NO_THREAD_SAFETY_ANALYSIS MOE_THREAD_SAFETY(no_thread_safety_analysis)

struct MOE_CAPABILITY("mutex") moe_mutex {
    pthread_mutex_t os;
};

#define MOE_MUTEX_INITIALIZER                                                                      \
    {                                                                                              \
        PTHREAD_MUTEX_INITIALIZER                                                                  \
    }

/* Not recursive. Cannot fail: a default mutex of this system takes no resources. */
static inline void moe_mutex_init(struct moe_mutex *m)
{
    (void)pthread_mutex_init(&m->os, NULL);
}

/* No thread holds it. */
static inline void moe_mutex_destroy(struct moe_mutex *m)
{
    (void)pthread_mutex_destroy(&m->os);
}

/* The check does not know the system's mutex, so it skips these three. */
static inline void moe_mutex_lock(struct moe_mutex *m) MOE_ACQUIRE(m) MOE_NO_THREAD_SAFETY_ANALYSIS
{
    (void)pthread_mutex_lock(&m->os);
}

static inline bool moe_mutex_try_lock(struct moe_mutex *m)
    MOE_TRY_ACQUIRE(true, m) MOE_NO_THREAD_SAFETY_ANALYSIS
{
    return pthread_mutex_trylock(&m->os) == 0;
}

static inline void moe_mutex_unlock(struct moe_mutex *m)
    MOE_RELEASE(m) MOE_NO_THREAD_SAFETY_ANALYSIS
{
    (void)pthread_mutex_unlock(&m->os);
}

/* Does nothing. Declares to the check that only this thread can reach the object, as at its
 * creation or end. Valid to the end of the function, which does not take `m` in another way. */
static inline void moe_mutex_not_shared(struct moe_mutex *m) MOE_ASSERT_HELD(m)
{
    (void)m;
}

#endif
