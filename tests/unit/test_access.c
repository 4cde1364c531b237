/* SPDX-License-Identifier: Apache-2.0 */
/* Who may call what: files of rules and tokens, decisions, and changes while a daemon runs. */
#include "access/access.h"
#include "base/clock.h"
#include "daemon/trusted_file.h"
#include "support/check.h"
#include "support/directory.h"

#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define FORWARD  "/moe.v1.ExpertService/Forward"
#define STEP     "/moe.v1.TrainingService/OptimizerStep"
#define SHUTDOWN "/moe.v1.AdminService/Shutdown"
#define STATUS   "/moe.v1.AdminService/GetStatus"
#define SESSION  "/moe.v1.CoordinatorService/Session"
#define HEALTH   "/grpc.health.v1.Health/Check"

enum { OWN_UID = 1000 };

static const char trainers_token[] = "a-token-of-the-trainers";

static const char rules[] =
    "{\"identities\": {"
    " \"spiffe://moed/worker/*\": {\"roles\": [\"worker\"]},"
    " \"spiffe://moed/worker/odd\": {\"roles\": [\"worker\"], \"worker_ids\": [\"w8\", \"w9\"]},"
    " \"spiffe://moed/ops\": {\"roles\": [\"admin\", \"metrics\"]},"
    " \"node7.example\": {\"roles\": [\"client\"]},"
    " \"uid:1001\": {\"roles\": [\"client\", \"trainer\"]}},"
    " \"tokens\": {\"trainers\": {\"sha256\": \"%s\", \"roles\": [\"client\", \"trainer\"]}}}";

static char directory[MOE_TEST_DIRECTORY_BYTES], rules_path[128], token_path[128];

static void write_file(const char *path, const char *text, mode_t mode)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(chmod(path, mode), 0);
}

static void hex_of(const char *token, char hex[2 * MOE_ACCESS_HASH_BYTES + 1])
{
    uint8_t hash[MOE_ACCESS_HASH_BYTES];
    assert_ok(moe_access_hash(token, hash));
    for (size_t i = 0; i < sizeof hash; i++)
        (void)snprintf(hex + 2 * i, 3, "%02x", hash[i]);
}

static void write_rules(void)
{
    char hex[2 * MOE_ACCESS_HASH_BYTES + 1], text[2048];
    hex_of(trainers_token, hex);
    (void)snprintf(text, sizeof text, rules, hex);
    write_file(rules_path, text, 0644);
}

static struct moe_access *make(bool open, uint32_t anonymous, bool with_rules, bool with_token)
{
    struct moe_access_config config = {.open = open,
                                       .anonymous_roles = anonymous,
                                       .access_file = with_rules ? rules_path : NULL,
                                       .token_file = with_token ? token_path : NULL,
                                       .own_uid = OWN_UID};
    struct moe_access *a = NULL;
    assert_ok(moe_access_create(&config, &a));
    return a;
}

static struct moe_access_caller tls(const char *name)
{
    return (struct moe_access_caller){.link = MOE_ACCESS_TLS, .name = name};
}

static struct moe_access_caller unix_uid(uint32_t uid)
{
    return (struct moe_access_caller){.link = MOE_ACCESS_UNIX, .name = "", .uid = uid};
}

static struct moe_access_caller operator_uid(uint32_t uid)
{
    return (struct moe_access_caller){
        .link = MOE_ACCESS_UNIX, .name = "", .uid = uid, .is_operator = true};
}

static const struct moe_access_caller tcp = {.link = MOE_ACCESS_TCP, .name = ""};

static enum moe_code ask(struct moe_access *a, struct moe_access_caller caller, const char *path,
                         const char *token)
{
    struct moe_access_grant grant;
    struct moe_status st = moe_access_decide(a, &caller, path, token, &grant);
    if (moe_failed(&st))
        print_message("  %s: %s\n", moe_code_name(st.code), st.text);
    assert_null(token != NULL && token[0] != '\0' ? strstr(st.text, token) : NULL); /* no secret */
    return st.code;
}

/* Of a call that came by `path`: what it may besides. */
static enum moe_code ask_more(struct moe_access *a, struct moe_access_caller caller,
                              const char *path, const char *more)
{
    struct moe_access_grant grant;
    assert_ok(moe_access_decide(a, &caller, path, "", &grant));
    struct moe_status st = moe_access_may_call(&caller, &grant, more);
    return st.code;
}

static bool speaks(struct moe_access *a, struct moe_access_caller caller, const char *token,
                   const char *worker_id)
{
    struct moe_access_grant grant;
    struct moe_status st = moe_access_decide(a, &caller, SESSION, token, &grant);
    return !moe_failed(&st) && moe_access_speaks_for(a, &grant, worker_id);
}

/* ------------------------------------------------------------------ decisions */

static void without_files_the_owner_may_all_and_tcp_is_a_client(void **state)
{
    (void)state;
    struct moe_access *a = make(false, MOE_ROLE_CLIENT, false, false);
    assert_int_equal(ask(a, unix_uid(OWN_UID), SHUTDOWN, ""), MOE_OK);
    assert_int_equal(ask(a, unix_uid(0), SHUTDOWN, ""), MOE_OK);
    assert_int_equal(ask(a, unix_uid(1001), FORWARD, ""), MOE_PERMISSION_DENIED);
    /* A malformed token is refused, also where the connection has roles. */
    assert_int_equal(ask(a, unix_uid(OWN_UID), SHUTDOWN, NULL), MOE_UNAUTHENTICATED);
    assert_int_equal(ask(a, tcp, FORWARD, NULL), MOE_UNAUTHENTICATED);
    assert_int_equal(ask(a, tcp, FORWARD, ""), MOE_OK);
    assert_int_equal(ask(a, tcp, HEALTH, ""), MOE_OK);
    assert_int_equal(ask(a, tcp, SHUTDOWN, ""), MOE_UNAUTHENTICATED);
    assert_int_equal(ask(a, tcp, STATUS, ""), MOE_UNAUTHENTICATED);
    assert_int_equal(ask(a, tcp, SESSION, ""), MOE_UNAUTHENTICATED);
    assert_int_equal(ask_more(a, tcp, FORWARD, STEP), MOE_UNAUTHENTICATED);
    assert_int_equal(ask_more(a, tcp, FORWARD, "/no.Service/Method"), MOE_UNIMPLEMENTED);
    assert_int_equal(ask_more(a, unix_uid(OWN_UID), FORWARD, STEP), MOE_OK);
    assert_true(speaks(a, unix_uid(OWN_UID), "", "w1"));
    assert_false(speaks(a, tcp, "", "w1"));
    /* A token for another group does not matter where no token counts. */
    assert_int_equal(ask(a, unix_uid(OWN_UID), SHUTDOWN, "a-token-of-another-group"), MOE_OK);
    moe_access_destroy(a);
}

static void open_means_every_caller_may_everything_known(void **state)
{
    (void)state;
    struct moe_access *a = make(true, 0, false, false);
    assert_int_equal(ask(a, tcp, SHUTDOWN, ""), MOE_OK);
    assert_int_equal(ask(a, tcp, "/moe.v1.AdminService/Reset", ""), MOE_UNIMPLEMENTED);
    assert_true(speaks(a, tcp, "", "any"));
    moe_access_destroy(a);
}

static void the_token_of_the_group_has_all_roles(void **state)
{
    (void)state;
    write_file(token_path, "the-token-of-this-group\n", 0600);
    struct moe_access *a = make(false, 0, false, true);
    assert_int_equal(ask(a, tcp, SHUTDOWN, "the-token-of-this-group"), MOE_OK);
    assert_true(speaks(a, tcp, "the-token-of-this-group", "w5"));
    assert_int_equal(ask(a, tcp, SHUTDOWN, "the-token-of-this-groupX"), MOE_UNAUTHENTICATED);
    assert_int_equal(ask(a, tcp, FORWARD, "short"), MOE_UNAUTHENTICATED);
    assert_int_equal(ask(a, tcp, FORWARD, ""), MOE_UNAUTHENTICATED);
    assert_int_equal(ask(a, tcp, HEALTH, ""), MOE_OK);
    moe_access_destroy(a);
}

static void an_operators_socket_adds_the_role_admin_and_no_other(void **state)
{
    (void)state;
    struct moe_access *a = make(false, MOE_ROLE_CLIENT, false, false);
    assert_int_equal(ask(a, operator_uid(1002), SHUTDOWN, ""), MOE_OK);
    assert_int_equal(ask(a, operator_uid(1002), FORWARD, ""), MOE_OK);
    assert_int_equal(ask(a, operator_uid(1002), STEP, ""), MOE_PERMISSION_DENIED);
    assert_false(speaks(a, operator_uid(1002), "", "w1"));
    moe_access_destroy(a);
    write_rules();
    a = make(false, 0, true, false);
    assert_int_equal(ask(a, operator_uid(1001), STEP, ""), MOE_OK); /* by its entry */
    assert_int_equal(ask(a, operator_uid(1001), SHUTDOWN, ""), MOE_OK);
    assert_int_equal(ask(a, operator_uid(1002), STEP, ""), MOE_PERMISSION_DENIED);
    moe_access_destroy(a);
}

static void certificates_have_the_roles_of_their_name(void **state)
{
    (void)state;
    write_rules();
    struct moe_access *a = make(false, 0, true, false);
    assert_int_equal(ask(a, tls("spiffe://moed/ops"), SHUTDOWN, ""), MOE_OK);
    assert_int_equal(ask(a, tls("spiffe://moed/ops"), SESSION, ""), MOE_PERMISSION_DENIED);
    assert_int_equal(ask(a, tls("node7.example"), FORWARD, ""), MOE_OK);
    assert_int_equal(ask(a, tls("node7.example"), STEP, ""), MOE_PERMISSION_DENIED);
    assert_int_equal(ask(a, tls("spiffe://moed/stranger"), FORWARD, ""), MOE_PERMISSION_DENIED);
    assert_int_equal(ask(a, tls(""), FORWARD, ""), MOE_UNAUTHENTICATED);
    assert_int_equal(ask(a, tls(""), HEALTH, ""), MOE_OK);
    assert_int_equal(ask(a, unix_uid(1001), STEP, ""), MOE_OK);
    assert_int_equal(ask(a, unix_uid(1002), FORWARD, ""), MOE_PERMISSION_DENIED);
    /* Names that mean something here mean nothing in a certificate. */
    assert_int_equal(ask(a, tls("uid:1001"), STEP, ""), MOE_PERMISSION_DENIED);
    assert_int_equal(ask(a, tls("uid:0"), SHUTDOWN, ""), MOE_PERMISSION_DENIED);
    assert_int_equal(ask(a, tls("token:trainers"), STEP, ""), MOE_PERMISSION_DENIED);
    assert_int_equal(ask(a, tls("anonymous"), FORWARD, ""), MOE_PERMISSION_DENIED);
    moe_access_destroy(a);
}

static void a_worker_speaks_only_for_its_own_ids(void **state)
{
    (void)state;
    write_rules();
    struct moe_access *a = make(false, 0, true, false);
    assert_true(speaks(a, tls("spiffe://moed/worker/w1"), "", "w1"));
    assert_false(speaks(a, tls("spiffe://moed/worker/w1"), "", "w2"));
    assert_true(speaks(a, tls("spiffe://moed/worker/odd"), "", "w9"));
    assert_false(speaks(a, tls("spiffe://moed/worker/odd"), "", "odd"));
    assert_false(speaks(a, tls("spiffe://moed/worker/a/b"), "", "b"));
    assert_false(speaks(a, tls("spiffe://moed/worker/"), "", ""));
    assert_false(speaks(a, tls("spiffe://moed/worker/*"), "", "*"));
    assert_false(speaks(a, tls("spiffe://moed/ops"), "", "w1"));
    moe_access_destroy(a);
}

/* The names that '*' matches, and which entry counts if several match. */
static void a_wildcard_gives_its_roles_to_one_name_below_it(void **state)
{
    (void)state;
    write_file(rules_path,
               "{\"identities\": {"
               " \"spiffe://moed/*\": {\"roles\": [\"client\"]},"
               " \"spiffe://moed/team/*\": {\"roles\": [\"client\", \"trainer\"]},"
               " \"spiffe://moed/team/ann\": {\"roles\": [\"admin\"]},"
               " \"spiffe://moed/pool/*\": {\"roles\": [\"worker\"], \"worker_ids\": [\"w1\"]}}}",
               0600);
    struct moe_access *a = make(false, 0, true, false);
    assert_int_equal(ask(a, tls("spiffe://moed/web"), FORWARD, ""), MOE_OK);
    assert_int_equal(ask(a, tls("spiffe://moed/web"), STEP, ""), MOE_PERMISSION_DENIED);
    assert_int_equal(ask(a, tls("spiffe://moed/team/bob"), STEP, ""), MOE_OK);
    assert_int_equal(ask(a, tls("spiffe://moed/team/ann"), SHUTDOWN, ""), MOE_OK);
    /* The entry of the whole name counts alone. */
    assert_int_equal(ask(a, tls("spiffe://moed/team/ann"), STEP, ""), MOE_PERMISSION_DENIED);
    assert_int_equal(ask(a, tls("spiffe://moed/team/bob"), SHUTDOWN, ""), MOE_PERMISSION_DENIED);
    static const char *const strangers[] = {
        "spiffe://moed/",          "spiffe://moed",         "spiffe://moed/a/b",
        "spiffe://moed/team/a/b",  "spiffe://moed/team/",   "spiffe://moed/team/*",
        "spiffe://moed/we%2fb",    "spiffe://moed/web?x",   "spiffe://moed.evil/web",
        "xspiffe://moed/team/bob", "SPIFFE://moed/team/bob"};
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++)
        assert_int_equal(ask(a, tls(strangers[i]), FORWARD, ""), MOE_PERMISSION_DENIED);
    assert_true(speaks(a, tls("spiffe://moed/pool/x"), "", "w1"));
    assert_false(speaks(a, tls("spiffe://moed/pool/x"), "", "x"));
    moe_access_destroy(a);
}

static void a_token_decides_alone(void **state)
{
    (void)state;
    write_rules();
    struct moe_access *a = make(false, 0, true, false);
    assert_int_equal(ask(a, tcp, STEP, trainers_token), MOE_OK);
    assert_int_equal(ask(a, tcp, SHUTDOWN, trainers_token), MOE_PERMISSION_DENIED);
    assert_int_equal(ask(a, tls("spiffe://moed/ops"), SHUTDOWN, trainers_token),
                     MOE_PERMISSION_DENIED);
    assert_int_equal(ask(a, tls("spiffe://moed/ops"), SHUTDOWN, "some-unknown-token-text"),
                     MOE_UNAUTHENTICATED);
    moe_access_destroy(a);
}

/* ------------------------------------------------------------------ files */

static void a_bad_access_file_is_refused_with_its_place(void **state)
{
    static const char *const bad[] = {
        "",
        "[]",
        "{",
        "{\"users\": {}}",
        "{\"identities\": []}",
        "{\"identities\": {\"a\": {}}}",
        "{\"identities\": {\"a\": {\"roles\": []}}}",
        "{\"identities\": {\"a\": {\"roles\": [\"root\"]}}}",
        "{\"identities\": {\"a\": {\"roles\": [\"admin\"], \"role\": 1}}}",
        "{\"identities\": {\"a\": {\"roles\": [\"admin\"]}, \"a\": {\"roles\": [\"admin\"]}}}",
        "{\"identities\": {\"*\": {\"roles\": [\"admin\"]}}}",
        "{\"identities\": {\"spiffe://moed*\": {\"roles\": [\"admin\"]}}}",
        "{\"identities\": {\"spiffe://*/a\": {\"roles\": [\"admin\"]}}}",
        "{\"identities\": {\"w\": {\"roles\": [\"worker\"]}}}",
        "{\"identities\": {\"w\": {\"roles\": [\"worker\"], \"worker_ids\": []}}}",
        "{\"identities\": {\"w\": {\"roles\": [\"client\"], \"worker_ids\": [\"w\"]}}}",
        "{\"identities\": {\"a\": {\"roles\": [\"admin\"], \"sha256\": \"00\"}}}",
        "{\"tokens\": {\"t\": {\"roles\": [\"admin\"]}}}",
        "{\"tokens\": {\"t\": {\"roles\": [\"admin\"], \"sha256\": \"0102\"}}}",
        "{\"identities\": {\"a\\u0000b\": {\"roles\": [\"admin\"]}}}",
    };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct moe_access_rules *r = NULL;
        assert_refused(moe_access_rules_parse(bad[i], strlen(bad[i]), "access.json", &r),
                       MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID);
    }
}

static enum moe_code read_token(void)
{
    char *token = NULL;
    struct moe_status st = moe_token_read("--token-file", token_path, &token);
    print_message("  %s\n", moe_failed(&st) ? st.text : "taken");
    free(token);
    return st.code;
}

static void a_token_that_others_can_read_is_refused(void **state)
{
    (void)state;
    write_file(token_path, "0123456789abcdef0123456789abcdef\n", 0600);
    assert_int_equal(read_token(), MOE_OK);
    assert_int_equal(chmod(token_path, 0640), 0);
    assert_int_equal(read_token(), MOE_OK);
    assert_int_equal(chmod(token_path, 0644), 0);
    assert_int_equal(read_token(), MOE_FAILED_PRECONDITION);
    assert_int_equal(chmod(token_path, 0620), 0);
    assert_int_equal(read_token(), MOE_FAILED_PRECONDITION);
    write_file(token_path, "tooshort\n", 0600);
    assert_int_equal(read_token(), MOE_INVALID_ARGUMENT);
    write_file(token_path, "a token that has blanks in it\n", 0600);
    assert_int_equal(read_token(), MOE_INVALID_ARGUMENT);
    write_file(token_path, "", 0600);
    assert_int_equal(read_token(), MOE_INVALID_ARGUMENT);
    assert_int_equal(remove(token_path), 0);
    assert_int_equal(read_token(), MOE_NOT_FOUND);
    assert_int_equal(mkfifo(token_path, 0600), 0);
    assert_int_equal(read_token(), MOE_FAILED_PRECONDITION);
    assert_int_equal(remove(token_path), 0);
}

static void an_access_file_that_others_can_write_is_refused(void **state)
{
    (void)state;
    write_rules();
    assert_int_equal(chmod(rules_path, 0666), 0);
    struct moe_access_config config = {.access_file = rules_path};
    struct moe_access *a = NULL;
    assert_refused(moe_access_create(&config, &a), MOE_FAILED_PRECONDITION,
                   MOE_REASON_CONFIG_INVALID);
    assert_null(a);
}

/* ------------------------------------------------------------------ changes */

static void a_role_that_is_taken_away_names_the_connections_to_drop(void **state)
{
    (void)state;
    write_rules();
    struct moe_access *a = make(false, 0, true, false);
    struct moe_access_caller ops = tls("spiffe://moed/ops"), w1 = tls("spiffe://moed/worker/w1");
    struct moe_access_caller node = tls("node7.example"), owner = unix_uid(OWN_UID);
    assert_false(moe_access_refresh(a, 1));

    write_file(rules_path,
               "{\"identities\": {\"spiffe://moed/ops\": {\"roles\": [\"metrics\"]},"
               " \"spiffe://moed/worker/*\": {\"roles\": [\"worker\"]}, "
               " \"node7.example\": {\"roles\": [\"client\", \"trainer\"]}},"
               " \"tokens\": {}}",
               0600);
    assert_true(moe_access_refresh(a, 2));
    assert_int_equal(ask(a, ops, SHUTDOWN, ""), MOE_PERMISSION_DENIED);
    assert_int_equal(ask(a, node, STEP, ""), MOE_OK);
    assert_int_equal(ask(a, tcp, STEP, trainers_token), MOE_UNAUTHENTICATED);
    assert_true(moe_access_has_lost(a, &ops));
    assert_true(moe_access_has_lost(a, &tcp)); /* it may have used the token that is gone */
    assert_false(moe_access_has_lost(a, &owner));

    write_file(rules_path, "{\"identities\": {\"node7.example\": {\"roles\": [\"client\"]}}}",
               0600);
    assert_true(moe_access_refresh(a, 3));
    assert_true(moe_access_has_lost(a, &node));
    assert_true(moe_access_has_lost(a, &w1));
    assert_false(moe_access_has_lost(a, &tcp)); /* no token was lost this time */
    assert_false(moe_access_refresh(a, 4));
    assert_false(moe_access_has_lost(a, &node));
    moe_access_destroy(a);
}

static void a_bad_new_file_leaves_the_rules_in_force(void **state)
{
    (void)state;
    write_rules();
    struct moe_access *a = make(false, 0, true, false);
    assert_false(moe_access_refused(a).rules);
    write_file(rules_path, "garbage", 0600);
    assert_false(moe_access_refresh(a, 1));
    assert_true(moe_access_refused(a).rules);
    assert_int_equal(ask(a, tls("spiffe://moed/ops"), SHUTDOWN, ""), MOE_OK);
    assert_int_equal(remove(rules_path), 0);
    assert_false(moe_access_refresh(a, 2));
    assert_false(moe_access_refresh(a, 2)); /* not changed since, and still not valid */
    assert_true(moe_access_refused(a).rules);
    assert_int_equal(ask(a, tls("spiffe://moed/ops"), SHUTDOWN, ""), MOE_OK);
    write_file(rules_path, "{}", 0600);
    assert_true(moe_access_refresh(a, 3));
    assert_false(moe_access_refused(a).rules);
    assert_int_equal(ask(a, tls("spiffe://moed/ops"), SHUTDOWN, ""), MOE_PERMISSION_DENIED);
    moe_access_destroy(a);
}

/* The refresh looks again, though the file does not change any more. */
static void a_file_that_could_not_be_opened_is_read_later(void **state)
{
    struct rlimit limit;
    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    const struct rlimit none = {.rlim_cur = 0, .rlim_max = limit.rlim_max};
    write_rules();
    write_file(token_path, "the-old-token-of-this-group", 0600);
    struct moe_access *a = make(false, 0, true, false), *b = make(false, 0, false, true);
    write_file(rules_path, "{}", 0600);
    write_file(token_path, "the-new-token-of-this-group-is-longer", 0600);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    for (uint64_t look = 1; look <= 2; look++) {
        assert_false(moe_access_refresh(a, look));
        assert_false(moe_access_refresh(b, look));
        assert_true(moe_access_refused(a).rules);
        assert_true(moe_access_refused(b).token);
    }
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    assert_true(moe_access_refresh(a, 3));
    assert_false(moe_access_refresh(b, 3));
    assert_false(moe_access_refused(a).rules);
    assert_false(moe_access_refused(b).token);
    assert_int_equal(ask(a, tls("spiffe://moed/ops"), SHUTDOWN, ""), MOE_PERMISSION_DENIED);
    assert_int_equal(ask(b, tcp, SHUTDOWN, "the-new-token-of-this-group-is-longer"), MOE_OK);
    assert_int_equal(ask(b, tcp, SHUTDOWN, "the-old-token-of-this-group"), MOE_OK);
    moe_access_destroy(b);
    moe_access_destroy(a);
}

static void the_old_token_of_a_group_counts_for_a_minute(void **state)
{
    (void)state;
    write_file(token_path, "the-old-token-of-this-group", 0600);
    struct moe_access *a = make(false, 0, false, true);
    uint64_t now = moe_clock_ns();
    write_file(token_path, "readable-by-everybody-here", 0644);
    assert_false(moe_access_refresh(a, now));
    assert_true(moe_access_refused(a).token);
    assert_int_equal(ask(a, tcp, SHUTDOWN, "readable-by-everybody-here"), MOE_UNAUTHENTICATED);
    write_file(token_path, "the-new-token-of-this-group", 0600); /* known without a refresh */
    assert_int_equal(ask(a, tcp, SHUTDOWN, "the-new-token-of-this-group"), MOE_OK);
    assert_int_equal(ask(a, tcp, SHUTDOWN, "the-old-token-of-this-group"), MOE_OK);
    assert_false(moe_access_refused(a).token);
    assert_false(moe_access_refresh(a, now + 59 * MOE_NS_PER_S));
    assert_true(moe_access_refresh(a, now + 70 * MOE_NS_PER_S));
    assert_true(moe_access_has_lost(a, &tcp));
    assert_int_equal(ask(a, tcp, SHUTDOWN, "the-old-token-of-this-group"), MOE_UNAUTHENTICATED);
    assert_int_equal(ask(a, tcp, SHUTDOWN, "the-new-token-of-this-group"), MOE_OK);
    moe_access_destroy(a);
}

static int make_directory(void **state)
{
    (void)state;
    if (!moe_test_directory("access", directory))
        return -1;
    (void)snprintf(rules_path, sizeof rules_path, "%s/access.json", directory);
    (void)snprintf(token_path, sizeof token_path, "%s/token", directory);
    return 0;
}

static int remove_directory(void **state)
{
    (void)state;
    (void)remove(rules_path);
    (void)remove(token_path);
    return rmdir(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_files_the_owner_may_all_and_tcp_is_a_client),
        cmocka_unit_test(open_means_every_caller_may_everything_known),
        cmocka_unit_test(the_token_of_the_group_has_all_roles),
        cmocka_unit_test(an_operators_socket_adds_the_role_admin_and_no_other),
        cmocka_unit_test(certificates_have_the_roles_of_their_name),
        cmocka_unit_test(a_worker_speaks_only_for_its_own_ids),
        cmocka_unit_test(a_wildcard_gives_its_roles_to_one_name_below_it),
        cmocka_unit_test(a_token_decides_alone),
        cmocka_unit_test(a_bad_access_file_is_refused_with_its_place),
        cmocka_unit_test(a_token_that_others_can_read_is_refused),
        cmocka_unit_test(an_access_file_that_others_can_write_is_refused),
        cmocka_unit_test(a_role_that_is_taken_away_names_the_connections_to_drop),
        cmocka_unit_test(a_bad_new_file_leaves_the_rules_in_force),
        cmocka_unit_test(a_file_that_could_not_be_opened_is_read_later),
        cmocka_unit_test(the_old_token_of_a_group_counts_for_a_minute),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
