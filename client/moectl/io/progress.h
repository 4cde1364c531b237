/* SPDX-License-Identifier: Apache-2.0 */
/* Progress of a transfer on stderr. On a terminal it is one line with a bar that changes in place,
 * elsewhere a line every 5 s or 10 %. */
#ifndef MOECTL_PROGRESS_H
#define MOECTL_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

/* One transfer after the other; starts as {0}. One thread at a time. */
struct moectl_progress {
    char what[96];     /* of the present transfer; "" = none */
    bool on_screen;    /* a bar is on the terminal's last line */
    bool said;         /* a line was printed */
    uint64_t first;    /* bytes done at its first look */
    uint64_t begun_ns; /* time of its first look */
    uint64_t said_ns;  /* of the last line */
    unsigned said_percent;
};

/* Whether stderr is a terminal: then ask for figures often. */
bool moectl_progress_is_live(void);
/* Shows that `done` of `total` bytes (> 0) are through. Another `what` ("loading", "saving k5")
 * begins a new transfer. The rate counts from its first look. */
void moectl_progress_show(struct moectl_progress *p, const char *what, uint64_t done,
                          uint64_t total);
/* Takes the bar off the terminal: call it before any other output, and at the end. */
void moectl_progress_clear(struct moectl_progress *p);

#endif
