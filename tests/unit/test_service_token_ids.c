/* SPDX-License-Identifier: Apache-2.0 */
/* Forward with token ids, for layers that route by them. test_service has their bad inputs. */
#include "service_fixture.h"

/* The backend's layer is as before: its router would choose, if it were asked. */
static void a_layer_that_routes_by_token_id_needs_ids(void **state)
{
    (void)state;
    service.worker.spec[0].router.by_token = true; /* no thread has read it yet */
    for (int mode = MOE_ROUTE_SERVER; mode <= MOE_ROUTE_IDS_WEIGHTS; mode++) {
        struct request r;
        Ask ask;
        Answer *answer;
        request_fill(&r, &service.worker, 0, 5, MOE_DTYPE_F32, (enum moe_routing_mode)mode);
        ask_fill(&ask, &service, &r, true);
        struct moe_status st = call_ask(&service, &ask, &answer);
        if (mode == MOE_ROUTE_SERVER) {
            assert_refused(st, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
            assert_non_null(strstr(st.text, "layer 1 routes by token id: give token_ids"));
        } else {
            assert_ok(st);
            answer_check(&service, &r, answer);
            answer_free(answer);
        }
        request_free(&r);
    }
}

/* A request with token ids instead of the ids that the oracle gets. */
static void give_token_ids(Ask *ask, struct request *r, int64_t *token_ids)
{
    for (uint32_t t = 0; t < r->work.tokens; t++) {
        token_ids[t] = random_below(SERVICE_VOCABULARY);
        for (uint32_t k = 0; k < 2; k++)
            r->ids_in[2 * t + k] = service_experts[token_ids[t]][k];
    }
    ask->routing_mode = MOE__V1__ROUTING_MODE__ROUTING_MODE_SERVER;
    ask->topk_ids_dtype = 0;
    ask->topk_ids.len = 0;
    ask->token_ids = (ProtobufCBinaryData){.len = r->work.tokens * sizeof *token_ids,
                                           .data = (uint8_t *)token_ids};
}

static void token_ids_are_looked_up_in_the_table_of_their_layer(void **state)
{
    (void)state;
    service.worker.spec[0].router.by_token = true; /* no thread has read it yet */
    for (int i = 0; i < 20; i++) {
        struct request r;
        Ask ask;
        Answer *answer;
        int64_t token_ids[40];
        request_fill(&r, &service.worker, 0, 1 + random_below(40),
                     i % 2 == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16, MOE_ROUTE_IDS);
        ask_fill(&ask, &service, &r, true);
        give_token_ids(&ask, &r, token_ids);
        assert_ok(call_ask(&service, &ask, &answer));
        answer_check(&service, &r, answer);
        answer_free(answer);
        request_free(&r);
    }
}

static void token_ids_for_a_layer_without_a_table_are_refused(void **state)
{
    (void)state;
    struct request r;
    Ask ask;
    Answer *answer;
    int64_t token_ids[3] = {0};
    request_fill(&r, &service.worker, 1, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    ask_fill(&ask, &service, &r, false);
    ask.token_ids = (ProtobufCBinaryData){.len = sizeof token_ids, .data = (uint8_t *)token_ids};
    struct moe_status st = call_ask(&service, &ask, &answer);
    assert_refused(st, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
    assert_non_null(strstr(st.text, "does not route by token id"));
    request_free(&r);
    assert_serves(&service);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_service(a_layer_that_routes_by_token_id_needs_ids),
        with_service(token_ids_are_looked_up_in_the_table_of_their_layer),
        with_service(token_ids_for_a_layer_without_a_table_are_refused),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
