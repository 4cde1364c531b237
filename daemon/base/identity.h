/* SPDX-License-Identifier: Apache-2.0 */
/* Who is at the other end of a connection, as this process has checked it, and the files of TLS.
 *
 * An identity belongs to one connection for its whole life. It comes from the kernel (Unix sockets)
 * or from a verified certificate (TLS), never from anything that a client writes into a call. */
#ifndef MOE_BASE_IDENTITY_H
#define MOE_BASE_IDENTITY_H

#include <stdbool.h>
#include <stdint.h>

enum moe_rpc_link {
    MOE_RPC_LINK_TCP,  /* plain: anybody who reaches the address */
    MOE_RPC_LINK_TLS,  /* encrypted; a name only if the client has shown a certificate */
    MOE_RPC_LINK_UNIX, /* this host; the kernel tells the user */
};

struct moe_rpc_identity {
    enum moe_rpc_link link;
    uint32_t uid;     /* Unix only: the user of the process that connected */
    bool is_operator; /* Unix only: at a socket of a group (listener.h, "unix-group:") */
    char name[256];   /* "" = anonymous. Mutual TLS: the first URI of the certificate's alternative
                         names, else the first DNS name. Unix: "uid:1000" */
    char address[64]; /* the peer's IP address without its port; "" for Unix. For logs and limits:
                         it proves nothing */
};

/* What a server's owner has found about the caller of one call. */
struct moe_rpc_grant {
    uint32_t roles; /* bits, with a meaning for the owner only; all without `authorise` */
    char who[256];  /* name of the caller for logs and comparison; "" without `authorise` */
};

/* Paths of PEM files. A server needs certificate and key, a client `ca`; the rest may be NULL. */
struct moe_rpc_tls_files {
    const char *certificate; /* own certificate, then the chain up to, not with, the root */
    const char *key;         /* private key of `certificate`, without a passphrase */
    const char *ca; /* roots that the other side's certificate must lead to; several may overlap
                       during a change. A server without it asks for no certificates */
};

/* What a client shows to servers, and which servers it believes. Zero: nothing, and all. A Unix
 * socket uses none of it: there the user counts.
 *
 * All files are read again when they change. A state that does not validate is logged once, and the
 * one before stays in use. New certificates count for calls that begin a second later; these take a
 * new connection, and calls in flight keep theirs. */
struct moe_rpc_trust {
    struct moe_rpc_tls_files tls; /* with a `ca` connections use TLS, else they are plain. With
                                     `certificate` and `key` the client shows who it is */
    const char *server_name;      /* DNS name or IP address that a server's certificate must have;
                                     NULL: the host of the target */
    const char *token_file;       /* token for each call; NULL: none */
    bool insecure; /* without TLS, send the token also to addresses that are not loopback */
};

#endif
