/* No checkpoints in this build: every function says so. */
#include "worker/checkpoint.h"

#include <stdlib.h>

static struct moe_status not_offered(void)
{
    return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED, "this build writes no checkpoints");
}

void moe_checkpoint_state_free(struct moe_checkpoint_state *s)
{
    free(s->owned);
    *s = (struct moe_checkpoint_state){0};
}

struct moe_status moe_checkpoint_save_begin(const struct moe_checkpoint_context *c,
                                            const char *name)
{
    (void)c;
    (void)name;
    return not_offered();
}

struct moe_status moe_checkpoint_save_write(const struct moe_checkpoint_context *c,
                                            const char *name,
                                            const struct moe_checkpoint_state *state,
                                            uint64_t *bytes)
{
    (void)c;
    (void)name;
    (void)state;
    (void)bytes;
    return not_offered();
}

struct moe_status moe_checkpoint_save_commit(const struct moe_checkpoint_context *c,
                                             const char *name,
                                             const struct moe_checkpoint_state *state,
                                             uint32_t keep)
{
    (void)c;
    (void)name;
    (void)state;
    (void)keep;
    return not_offered();
}

void moe_checkpoint_save_abandon(const struct moe_checkpoint_context *c, const char *name)
{
    (void)c;
    (void)name;
}

struct moe_status moe_checkpoint_load_read(const struct moe_checkpoint_context *c, const char *name,
                                           struct moe_checkpoint_state *state)
{
    (void)c;
    (void)name;
    (void)state;
    return not_offered();
}

struct moe_status moe_checkpoint_load_take(const struct moe_checkpoint_context *c, const char *name)
{
    (void)c;
    (void)name;
    return not_offered();
}

struct moe_status moe_checkpoint_export_begin(const struct moe_checkpoint_context *c,
                                              const char *name)
{
    (void)c;
    (void)name;
    return not_offered();
}

struct moe_status moe_checkpoint_export_write(const struct moe_checkpoint_context *c,
                                              const char *name, uint64_t *bytes)
{
    (void)c;
    (void)name;
    (void)bytes;
    return not_offered();
}

struct moe_status moe_checkpoint_export_commit(const struct moe_checkpoint_context *c,
                                               const char *name)
{
    (void)c;
    (void)name;
    return not_offered();
}

void moe_checkpoint_export_abandon(const struct moe_checkpoint_context *c, const char *name)
{
    (void)c;
    (void)name;
}
