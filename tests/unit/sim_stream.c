/* SPDX-License-Identifier: Apache-2.0 */
#include "sim_stream.h"

bool sim_push(struct sim_queue *q, struct sim_message m, uint64_t at_ns)
{
    if (q->count == SIM_QUEUE_MAX)
        return false;
    uint64_t last = q->count > 0 ? q->items[(q->head + q->count - 1) % SIM_QUEUE_MAX].at_ns : 0;
    m.at_ns = at_ns > last ? at_ns : last;
    q->items[(q->head + q->count++) % SIM_QUEUE_MAX] = m;
    return true;
}

bool sim_pop(struct sim_queue *q, uint64_t now_ns, struct sim_message *m)
{
    if (q->count == 0 || q->items[q->head].at_ns > now_ns)
        return false;
    *m = q->items[q->head];
    q->head = (q->head + 1) % SIM_QUEUE_MAX;
    q->count--;
    return true;
}
