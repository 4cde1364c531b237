/* What every daemon's main promises: exit codes, what is refused before anything runs, and the line
 * that says where it listens. */
#include "base/daemon.h"
#include "support/check.h"

#include <unistd.h>

static const char *name;
static unsigned runs;
static struct moe_status outcome;
static bool insecure, announces;
static const char *metrics_listen;

static bool was_given;

static const char *check_name(const void *ctx, const bool *given)
{
    (void)ctx;
    was_given = given[0];
    return name == NULL ? "--name is required" : NULL;
}

static struct moe_status run(const struct moe_daemon_settings *common, void *ctx)
{
    (void)ctx;
    runs++;
    insecure = common->insecure;
    metrics_listen = common->metrics_listen;
    if (announces)
        MOE_TRY(moe_daemon_announce(common, "127.0.0.1:4711"));
    return outcome;
}

static const struct moe_option table[] = {
    {"name", 'n', MOE_OPTION_STRING, &name, 0, 0, "NAME", "A name"},
};
static const struct moe_daemon daemon_of_test = {
    .name = "moe-test",
    .component = "test",
    .synopsis = "--name NAME [options]",
    .purpose = "A daemon for a test.",
    .options = table,
    .option_count = 1,
    .metrics_letter = 'm',
    .check = check_name,
    .run = run,
};

/* The exit code with these arguments. */
#define START(...) start((char *[]){"moe-test", __VA_ARGS__, NULL})
static int start(char **argv)
{
    int argc = 0;
    while (argv[argc] != NULL)
        argc++;
    name = NULL;
    runs = 0;
    return moe_daemon_main(&daemon_of_test, argc, argv);
}

static void a_good_start_runs_once_and_its_failure_is_the_exit_code(void **state)
{
    (void)state;
    outcome = moe_ok();
    assert_int_equal(START("--name", "a", "--insecure", "-m", "127.0.0.1:1"), 0);
    assert_int_equal(runs, 1);
    assert_true(was_given && insecure);
    assert_string_equal(metrics_listen, "127.0.0.1:1");
    assert_int_equal(START("-n", "a", "--log-level", "warn", "--log-format", "json"), 0);
    assert_false(insecure);
    assert_null(metrics_listen);
    outcome = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "failed as asked");
    assert_int_equal(START("--name", "a", "--log-format", "text"), 1);
    assert_int_equal(runs, 1);
    outcome = moe_ok();
}

static void help_and_version_run_nothing(void **state)
{
    (void)state;
    assert_int_equal(START("--help"), 0);
    assert_int_equal(runs, 0);
    assert_int_equal(START("-V"), 0);
    assert_int_equal(runs, 0);
}

static void what_makes_no_sense_is_refused_before_anything_runs(void **state)
{
    (void)state;
    assert_int_equal(START("--log-level", "info"), 2); /* no name */
    assert_false(was_given);
    assert_int_equal(START("--name", "a", "--log-level", "loud"), 2);
    assert_int_equal(START("--name", "a", "--log-format", "xml"), 2);
    assert_int_equal(START("--name", "a", "--ready-fd", "1000"), 2);
    assert_int_equal(START("--name", "a", "--config", "/no/such/file"), 2);
    assert_int_equal(START("--name", "a", "argument"), 2);
    assert_int_equal(START("--nonsense"), 2);
    assert_int_equal(START("--name", "a", "-m", "0.0.0.0:1"), 2); /* to all, without --insecure */
    assert_int_equal(START("--name", "a", "-m", "[::]:1"), 2);
    assert_int_equal(runs, 0);
    assert_int_equal(START("--name", "a", "-m", "0.0.0.0:1", "--insecure"), 0);
    assert_int_equal(runs, 1);
}

static void the_address_is_written_once_as_a_line(void **state)
{
    (void)state;
    int ends[2];
    char fd[16], line[64] = "";
    assert_int_equal(pipe(ends), 0);
    snprintf(fd, sizeof fd, "%d", ends[1]);
    announces = true;
    assert_int_equal(START("--name", "a", "--ready-fd", fd), 0);
    assert_int_equal(read(ends[0], line, sizeof line - 1), 15);
    assert_string_equal(line, "127.0.0.1:4711\n");
    assert_int_equal(read(ends[0], line, sizeof line), 0); /* closed */
    close(ends[0]);
    assert_int_equal(START("--name", "a"), 0); /* nobody wants to know */

    assert_int_equal(pipe(ends), 0); /* nobody listens any more: an error, no signal */
    snprintf(fd, sizeof fd, "%d", ends[1]);
    close(ends[0]);
    assert_int_equal(START("--name", "a", "--ready-fd", fd), 1);
    announces = false;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_start_runs_once_and_its_failure_is_the_exit_code),
        cmocka_unit_test(help_and_version_run_nothing),
        cmocka_unit_test(what_makes_no_sense_is_refused_before_anything_runs),
        cmocka_unit_test(the_address_is_written_once_as_a_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
