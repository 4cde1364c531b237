/* SPDX-License-Identifier: Apache-2.0 */
/* UCX below ucx.h: one context, worker and listener; active messages, always eager. */
#include "cpu/network/ucx.h"

#include "cpu/network/ucx_library.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    AM_MESSAGE = 1, /* the only kind of active message */
    MAX_CLOSE_TRIES = 100000,
};

struct moe_ucx {
    const struct moe_ucx_library *lib;
    struct moe_ucx_callbacks callbacks;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_listener_h listener;
    int events; /* of the worker; not ours to close */
};

static struct moe_status ucx_error(const struct moe_ucx *u, const char *what, ucs_status_t why)
{
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "UCX cannot %s: %s", what,
                     u->lib->ucs_status_string(why));
}

static struct moe_status read_address(const char *text, uint16_t port, struct sockaddr_storage *out,
                                      socklen_t *length)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    memset(out, 0, sizeof *out);
    if (inet_pton(AF_INET, text, &v4.sin_addr) == 1) {
        memcpy(out, &v4, *length = sizeof v4);
        return moe_ok();
    }
    if (inet_pton(AF_INET6, text, &v6.sin6_addr) == 1) {
        memcpy(out, &v6, *length = sizeof v6);
        return moe_ok();
    }
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                     "'%.64s' is not a numeric address", text);
}

/* ------------------------------------------------------------------- callbacks */

static ucs_status_t on_message(void *arg, const void *header, size_t header_length, void *data,
                               size_t length, const ucp_am_recv_param_t *param)
{
    struct moe_ucx *u = arg;
    bool whole = !(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) &&
                 (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP);
    if (whole)
        u->callbacks.message(u->callbacks.ctx, param->reply_ep, header, header_length, data,
                             length);
    return UCS_OK;
}

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    struct moe_ucx *u = arg;
    u->callbacks.broken(u->callbacks.ctx, ep, u->lib->ucs_status_string(status));
}

static struct moe_status make_link(struct moe_ucx *u, ucp_ep_params_t *params, moe_ucx_link *out)
{
    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params->err_handler = (ucp_err_handler_t){.cb = on_error, .arg = u};
    ucs_status_t rc = u->lib->ucp_ep_create(u->worker, params, out);
    return rc == UCS_OK ? moe_ok() : ucx_error(u, "connect", rc);
}

static void on_sent(void *request, ucs_status_t status, void *user_data)
{
    struct moe_ucx_send *send = user_data;
    (void)status; /* a link that fails reports itself */
    send->ucx->lib->ucp_request_free(request);
    send->done(send);
}

static void on_connection(ucp_conn_request_h request, void *arg)
{
    struct moe_ucx *u = arg;
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST,
                              .conn_request = request};
    moe_ucx_link link;
    struct moe_status st = make_link(u, &params, &link);
    if (moe_failed(&st))
        return; /* the request went with the attempt */
    if (!u->callbacks.connected(u->callbacks.ctx, link))
        moe_ucx_hang_up(u, link);
}

/* ---------------------------------------------------------------- open and close */

/* TCP alone, unless the user has chosen: shared memory is for windows, and other lines are not
 * tested. One line for a link, so messages keep their order. */
static struct moe_status configure(struct moe_ucx *u, ucp_config_t **out)
{
    static const char *const settings[][2] = {
        {"TLS", "tcp,self"}, {"SOCKADDR_TLS_PRIORITY", "tcp"}, {"MAX_EAGER_LANES", "1"}};
    ucs_status_t rc = u->lib->ucp_config_read(NULL, NULL, out);
    for (size_t i = 0; rc == UCS_OK && i < sizeof settings / sizeof *settings; i++) {
        char variable[48];
        (void)snprintf(variable, sizeof variable, "UCX_%s", settings[i][0]);
        if (getenv(variable) == NULL)
            rc = u->lib->ucp_config_modify(*out, settings[i][0], settings[i][1]);
        if (rc == UCS_ERR_NO_ELEM) /* another release names it otherwise */
            rc = UCS_OK;
    }
    return rc == UCS_OK ? moe_ok() : ucx_error(u, "be configured", rc);
}

static struct moe_status make_worker(struct moe_ucx *u, const ucp_config_t *config)
{
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                 .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    const ucp_worker_params_t worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                        .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    const ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS,
        .id = AM_MESSAGE,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_message,
        .arg = u};
    ucs_status_t rc =
        u->lib->ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &u->context);
    if (rc != UCS_OK)
        return ucx_error(u, "start", rc);
    rc = u->lib->ucp_worker_create(u->context, &worker, &u->worker);
    if (rc == UCS_OK)
        rc = u->lib->ucp_worker_set_am_recv_handler(u->worker, &handler);
    if (rc == UCS_OK)
        rc = u->lib->ucp_worker_get_efd(u->worker, &u->events);
    return rc == UCS_OK ? moe_ok() : ucx_error(u, "start", rc);
}

static struct moe_status start_listening(struct moe_ucx *u, const char *address, uint16_t *port)
{
    struct sockaddr_storage at;
    socklen_t length = 0;
    MOE_TRY(read_address(address, 0, &at, &length));
    const ucp_listener_params_t params = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
        .sockaddr = {.addr = (struct sockaddr *)&at, .addrlen = length},
        .conn_handler = {.cb = on_connection, .arg = u}};
    ucp_listener_attr_t attr = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
    ucs_status_t rc = u->lib->ucp_listener_create(u->worker, &params, &u->listener);
    if (rc == UCS_OK)
        rc = u->lib->ucp_listener_query(u->listener, &attr);
    if (rc != UCS_OK)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO,
                         "UCX cannot listen on %.64s: %s (--net-interface names another)", address,
                         u->lib->ucs_status_string(rc));
    const struct sockaddr_in *v4 = (const void *)&attr.sockaddr;
    const struct sockaddr_in6 *v6 = (const void *)&attr.sockaddr;
    *port = ntohs(attr.sockaddr.ss_family == AF_INET ? v4->sin_port : v6->sin6_port);
    return moe_ok();
}

struct moe_status moe_ucx_open(const char *address, const struct moe_ucx_callbacks *callbacks,
                               struct moe_ucx **out, uint16_t *port)
{
    const struct moe_ucx_library *lib;
    MOE_TRY(moe_ucx_library_open(&lib));
    struct moe_ucx *u = calloc(1, sizeof *u);
    if (u == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session's network");
    u->lib = lib;
    u->callbacks = *callbacks;
    ucp_config_t *config = NULL;
    struct moe_status st = configure(u, &config);
    if (!moe_failed(&st))
        st = make_worker(u, config);
    if (config != NULL)
        lib->ucp_config_release(config);
    if (!moe_failed(&st))
        st = start_listening(u, address, port);
    if (moe_failed(&st))
        moe_ucx_close(u);
    else
        *out = u;
    return st;
}

void moe_ucx_stop_listening(struct moe_ucx *u)
{
    if (u->listener != NULL)
        u->lib->ucp_listener_destroy(u->listener);
    u->listener = NULL;
}

void moe_ucx_close(struct moe_ucx *u)
{
    if (u == NULL)
        return;
    moe_ucx_stop_listening(u);
    if (u->worker != NULL)
        u->lib->ucp_worker_destroy(u->worker);
    if (u->context != NULL)
        u->lib->ucp_cleanup(u->context);
    free(u);
}

/* ------------------------------------------------------------------------- links */

struct moe_status moe_ucx_dial(struct moe_ucx *u, const char *address, uint16_t port,
                               moe_ucx_link *out)
{
    struct sockaddr_storage to;
    socklen_t length = 0;
    MOE_TRY(read_address(address, port, &to, &length));
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
                              .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
                              .sockaddr = {.addr = (struct sockaddr *)&to, .addrlen = length}};
    return make_link(u, &params, out);
}

void moe_ucx_send(struct moe_ucx *u, moe_ucx_link link, struct moe_ucx_send *send)
{
    const ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS |
                                                        UCP_OP_ATTR_FIELD_CALLBACK |
                                                        UCP_OP_ATTR_FIELD_USER_DATA,
                                        .flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER,
                                        .cb.send = on_sent,
                                        .user_data = send};
    send->ucx = u;
    ucs_status_ptr_t request = u->lib->ucp_am_send_nbx(
        link, AM_MESSAGE, send->head, send->head_bytes, send->data, send->bytes, &params);
    if (request == NULL || UCS_PTR_IS_ERR(request))
        send->done(send);
}

bool moe_ucx_progress(struct moe_ucx *u)
{
    return u->lib->ucp_worker_progress(u->worker) != 0;
}

bool moe_ucx_arm(struct moe_ucx *u)
{
    return u->lib->ucp_worker_arm(u->worker) == UCS_OK;
}

int moe_ucx_events(const struct moe_ucx *u)
{
    return u->events;
}

void moe_ucx_hang_up(struct moe_ucx *u, moe_ucx_link link)
{
    const ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                        .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_ptr_t request = u->lib->ucp_ep_close_nbx(link, &params);
    if (request == NULL || UCS_PTR_IS_ERR(request))
        return;
    for (uint32_t tries = 0; tries < MAX_CLOSE_TRIES; tries++) {
        if (u->lib->ucp_request_check_status(request) != UCS_INPROGRESS)
            break;
        (void)u->lib->ucp_worker_progress(u->worker);
    }
    u->lib->ucp_request_free(request);
}
