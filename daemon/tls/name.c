/* SPDX-License-Identifier: Apache-2.0 */
/* The name in a certificate: the URI of its alternative names, else the first DNS name. */
#include "tls/inside.h"

#include <openssl/x509v3.h>
#include <string.h>

/* The library's text is not a C string: it may hold a NUL, which would hide what follows. */
static bool copy_name(const ASN1_STRING *from, char *to, size_t capacity)
{
    const unsigned char *text = ASN1_STRING_get0_data(from);
    const int length = ASN1_STRING_length(from);
    if (length <= 0 || (size_t)length >= capacity)
        return false;
    for (int i = 0; i < length; i++)
        if (text[i] <= ' ' || text[i] > '~')
            return false;
    memcpy(to, text, (size_t)length);
    to[length] = '\0';
    return true;
}

static const ASN1_STRING *first_of(const GENERAL_NAMES *names, int type)
{
    for (int i = 0; i < sk_GENERAL_NAME_num(names); i++) {
        const GENERAL_NAME *name = sk_GENERAL_NAME_value(names, i);
        if (name->type == type)
            return type == GEN_URI ? name->d.uniformResourceIdentifier : name->d.dNSName;
    }
    return NULL;
}

/* With two URIs, the right one would be a guess (SPIFFE allows one). */
static bool is_ambiguous(const GENERAL_NAMES *names)
{
    int uris = 0;
    for (int i = 0; i < sk_GENERAL_NAME_num(names); i++)
        uris += sk_GENERAL_NAME_value(names, i)->type == GEN_URI;
    return uris > 1;
}

bool moe_tls_name_of(const X509 *certificate, char name[sizeof((struct moe_rpc_identity *)0)->name])
{
    int found;
    GENERAL_NAMES *names = X509_get_ext_d2i(certificate, NID_subject_alt_name, &found, NULL);
    name[0] = '\0';
    if (names == NULL)
        return found == -1; /* there are none; else they cannot be read, or occur twice */
    const ASN1_STRING *first = first_of(names, GEN_URI);
    if (first == NULL)
        first = first_of(names, GEN_DNS);
    bool usable =
        !is_ambiguous(names) &&
        (first == NULL || copy_name(first, name, sizeof((struct moe_rpc_identity *)0)->name));
    GENERAL_NAMES_free(names);
    return usable;
}
