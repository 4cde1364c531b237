/* SPDX-License-Identifier: Apache-2.0 */
/* PEM files of TLS: what is read, and one clear error for each thing that can be wrong. */
#include "certificates.h"
#include "support/check.h"
#include "tls/pem.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { DAY = 24 * 3600 };

static char at[CERTIFICATES_PATH];

static const char *file(const char *name, const char *what)
{
    return certificates_file(at, name, what);
}

static int set_up(void **state)
{
    (void)state;
    certificates_directory(at);
    certificates_make(at, "ca", NULL, NULL, -60, DAY);
    certificates_make(at, "pair", "ca", "DNS:localhost", -60, DAY);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    certificates_remove(at);
    return 0;
}

static void a_pair_and_a_root_are_read(void **state)
{
    struct moe_tls_pem pem;
    struct moe_rpc_tls_files files = {file("pair", "pem"), file("pair", "key"), file("ca", "pem")};
    (void)state;
    assert_ok(moe_tls_pem_read(&files, &pem));
    assert_non_null(strstr(pem.certificate, "BEGIN CERTIFICATE"));
    assert_non_null(strstr(pem.key, "BEGIN PRIVATE KEY"));
    moe_tls_pem_free(&pem);
    assert_ok(moe_tls_pem_read(&(struct moe_rpc_tls_files){.ca = files.ca}, &pem));
    assert_null(pem.certificate);
    assert_null(pem.key);
    moe_tls_pem_free(&pem);
    assert_null(pem.ca);
}

static void expect(const struct moe_rpc_tls_files *files, const char *path, const char *why)
{
    struct moe_tls_pem pem;
    struct moe_status st = moe_tls_pem_read(files, &pem);
    print_message("  %s\n", st.text);
    assert_true(moe_failed(&st));
    assert_non_null(strstr(st.text, path));
    assert_non_null(strstr(st.text, why));
    assert_null(strstr(st.text, "PRIVATE"));
    assert_null(pem.certificate);
    assert_null(pem.key);
    assert_null(pem.ca);
}

static void each_bad_file_has_one_clear_error(void **state)
{
    const char *pem = file("pair", "pem"), *key = file("pair", "key"), *ca = file("ca", "pem");
    (void)state;
    certificates_make(at, "other", "ca", "DNS:localhost", -60, DAY);
    expect(&(struct moe_rpc_tls_files){pem, file("other", "key"), ca}, "other.key",
           "the key is not that of the certificate");
    certificates_make(at, "old", "ca", "DNS:localhost", -2 * DAY, -DAY);
    expect(&(struct moe_rpc_tls_files){file("old", "pem"), file("old", "key"), ca}, "old.pem",
           "expired on");
    certificates_make(at, "new", "ca", "DNS:localhost", DAY, 2 * DAY);
    expect(&(struct moe_rpc_tls_files){file("new", "pem"), file("new", "key"), ca}, "new.pem",
           "not valid before");
    expect(&(struct moe_rpc_tls_files){"/nowhere/a.pem", key, ca}, "/nowhere/a.pem",
           "No such file");
    certificates_write(at, "rubbish", "pem", "not a certificate\n", 0644);
    expect(&(struct moe_rpc_tls_files){.ca = file("rubbish", "pem")}, "rubbish.pem",
           "not a PEM file with certificates");
    certificates_write(at, "rubbish", "key", "not a key\n", 0600);
    expect(&(struct moe_rpc_tls_files){pem, file("rubbish", "key"), ca}, "rubbish.key",
           "not a PEM private key");
    expect(&(struct moe_rpc_tls_files){pem, pem, ca}, "pair.pem", "other users can read it");
    assert_int_equal(chmod(key, 0644), 0);
    expect(&(struct moe_rpc_tls_files){pem, key, ca}, "pair.key", "other users can read it");
    assert_int_equal(chmod(key, 0600), 0);
    assert_int_equal(chmod(ca, 0666), 0);
    expect(&(struct moe_rpc_tls_files){.ca = ca}, "ca.pem", "other users can write it");
}

static void a_cut_certificate_is_damaged(void **state)
{
    struct moe_tls_pem pem;
    (void)state;
    assert_ok(moe_tls_pem_read(&(struct moe_rpc_tls_files){.ca = file("ca", "pem")}, &pem));
    for (size_t length = strlen(pem.ca) - 2; length > 40; length -= 60) {
        pem.ca[length] = '\0';
        certificates_write(at, "cut", "pem", pem.ca, 0644);
        expect(&(struct moe_rpc_tls_files){.ca = file("cut", "pem")}, "cut.pem", "damaged");
    }
    moe_tls_pem_free(&pem);
}

static void a_chain_is_in_order(void **state)
{
    struct moe_tls_pem pem;
    (void)state;
    certificates_make(at, "middle", "ca", NULL, -60, DAY);
    certificates_make(at, "leaf", "middle", "DNS:localhost", -60, DAY);
    certificates_join(at, "chain", "leaf", "middle");
    certificates_join(at, "mixed", "leaf", "pair");
    const char *key = file("leaf", "key");
    struct moe_rpc_tls_files good = {.certificate = file("chain", "pem"), .key = key};
    assert_ok(moe_tls_pem_read(&good, &pem));
    moe_tls_pem_free(&pem);
    expect(&(struct moe_rpc_tls_files){.certificate = file("mixed", "pem"), .key = key},
           "mixed.pem", "has not signed the one before it");
}

static void roots_may_overlap(void **state)
{
    struct moe_tls_pem pem;
    (void)state;
    certificates_make(at, "over", NULL, NULL, -2 * DAY, -DAY);
    expect(&(struct moe_rpc_tls_files){.ca = file("over", "pem")}, "over.pem", "expired on");
    certificates_join(at, "both", "over", "ca");
    assert_ok(moe_tls_pem_read(&(struct moe_rpc_tls_files){.ca = file("both", "pem")}, &pem));
    moe_tls_pem_free(&pem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_pair_and_a_root_are_read, set_up, tear_down),
        cmocka_unit_test_setup_teardown(each_bad_file_has_one_clear_error, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_cut_certificate_is_damaged, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_chain_is_in_order, set_up, tear_down),
        cmocka_unit_test_setup_teardown(roots_may_overlap, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
