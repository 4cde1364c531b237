/* SPDX-License-Identifier: Apache-2.0 */
/* What every daemon's main promises: exit codes, what is refused before anything runs, and the line
 * that says where it listens. */
#include "daemon/daemon.h"
#include "daemon/hangup.h"
#include "daemon/log.h"
#include "support/check.h"
#include "support/directory.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *name;
static unsigned runs;
static struct moe_status outcome;
static bool insecure, announces;
static const char *metrics_listen, *token_file, *admin_socket_dir;

static bool was_given;

static const char *check_name(const struct moe_daemon_settings *common, const void *ctx,
                              const bool *given)
{
    (void)common;
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
    token_file = common->token_file;
    admin_socket_dir = common->admin_socket_dir;
    if (announces)
        MOE_TRY(moe_daemon_announce(common, "127.0.0.1:4711"));
    return outcome;
}

/* A daemon with a renamed log file: it gets SIGHUP once before its loop runs, and once after. */
static struct moe_status run_through_hangups(const struct moe_daemon_settings *common, void *ctx)
{
    (void)common;
    (void)ctx;
    runs++;
    uv_loop_t loop;
    uv_poll_t watch;
    const char *path = moe_log_path();
    struct stat file;
    assert_int_equal(kill(getpid(), SIGHUP), 0);
    assert_int_equal(uv_loop_init(&loop), 0);
    MOE_TRY(moe_hangup_watch(&loop, &watch));
    for (int round = 0; round < 2; round++) {
        moe_log_info("round %d", round);
        assert_int_equal(path != NULL ? unlink(path) : 0, 0);
        if (round > 0)
            assert_int_equal(kill(getpid(), SIGHUP), 0);
        (void)uv_run(&loop, UV_RUN_ONCE);
        assert_int_equal(path != NULL ? stat(path, &file) : 0, 0); /* there again */
    }
    uv_close((uv_handle_t *)&watch, NULL);
    (void)uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(kill(getpid(), SIGHUP), 0); /* too late to be served: not fatal */
    return uv_loop_close(&loop) == 0 ? outcome : moe_error(MOE_INTERNAL, MOE_REASON_NONE, "loop");
}

static struct moe_status files;
static unsigned looks;

static struct moe_status check_files(const struct moe_daemon_settings *common)
{
    (void)common;
    looks++;
    return files;
}

static const struct moe_option table[] = {
    {"name", 'n', MOE_OPTION_STRING, &name, 0, 0, "NAME", "A name"},
};
static struct moe_daemon daemon_of_test = {
    .name = "moe-test",
    .component = "test",
    .synopsis = "--name NAME [options]",
    .purpose = "A daemon for a test.",
    .options = table,
    .option_count = 1,
    .metrics_letter = 'm',
    .check = check_name,
    .run = run,
    .check_files = check_files,
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

/* Starts with the credentials that are there, and `token`, if it is not NULL, as a setting. True if
 * the log says that the token file is a copy. */
static bool start_says_copy(char *token)
{
    char text[8192] = "";
    FILE *log = tmpfile();
    int errors = dup(STDERR_FILENO);
    assert_true(log != NULL && errors >= 0 && dup2(fileno(log), STDERR_FILENO) >= 0);
    int code = token == NULL ? START("--name", "a", "--admin-socket-dir", "/run/x")
                             : START("--name", "a", "--token-file", token);
    assert_true(dup2(errors, STDERR_FILENO) >= 0);
    close(errors);
    assert_int_equal(code, 0);
    rewind(log);
    text[fread(text, 1, sizeof text - 1, log)] = '\0';
    (void)fclose(log);
    return strstr(text, "credentials of the service manager: token-file. They are copies") != NULL;
}

static void credentials_of_the_service_manager_are_settings_unless_given(void **state)
{
    char directory[MOE_TEST_DIRECTORY_BYTES], path[MOE_TEST_DIRECTORY_BYTES + 32];
    (void)state;
    assert_true(moe_test_directory("daemon", directory));
    assert_int_equal(setenv("CREDENTIALS_DIRECTORY", directory, 1), 0);
    assert_int_equal(START("--name", "a"), 0);
    assert_null(token_file);
    (void)snprintf(path, sizeof path, "%s/moed.token-file", directory);
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0400);
    assert_true(fd >= 0);
    close(fd);
    assert_true(start_says_copy(NULL));
    assert_string_equal(token_file, path);
    assert_string_equal(admin_socket_dir, "/run/x");
    assert_false(start_says_copy("/t"));
    assert_string_equal(token_file, "/t");
    assert_int_equal(unsetenv("CREDENTIALS_DIRECTORY"), 0);
    assert_int_equal(START("--name", "a"), 0);
    assert_null(token_file);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(directory), 0);
}

static void help_and_version_start_no_daemon(void **state)
{
    (void)state;
    assert_int_equal(START("--help"), 0);
    assert_int_equal(runs, 0);
    assert_int_equal(START("-V"), 0);
    assert_int_equal(runs, 0);
}

static void impossible_settings_are_refused_at_the_start(void **state)
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
    assert_int_equal(START("--name", "a", "--tls-certificate", "/c"), 2); /* no key */
    assert_int_equal(START("--name", "a", "--tls-key", "/k"), 2);
    assert_int_equal(START("--name", "a", "--tls-client-ca", "/ca"), 2);
    assert_int_equal(runs, 0);
    assert_int_equal(START("--name", "a", "-m", "0.0.0.0:1", "--insecure"), 0);
    assert_int_equal(runs, 1);
}

static void check_config_runs_nothing(void **state)
{
    (void)state;
    files = moe_ok();
    assert_int_equal(START("--name", "a", "--check-config", "--log-file", "/no/such/file"), 0);
    assert_int_equal(looks, 1);
    files = moe_error(MOE_NOT_FOUND, MOE_REASON_IO, "a file is missing");
    assert_int_equal(START("--name", "a", "--check-config"), 1);
    assert_int_equal(looks, 2);
    assert_int_equal(START("--check-config"), 2); /* no name */
    assert_int_equal(START("--name", "a", "--check-config", "--tls-key", "/k"), 2);
    assert_int_equal(looks, 2);
    assert_int_equal(runs, 0);
}

/* A file of settings may have any bytes; the terminal gets none that it obeys. */
static void a_complaint_moves_no_cursor(void **state)
{
    (void)state;
    char path[] = "/tmp/moe-daemon-XXXXXX", said[512] = "";
    FILE *screen = tmpfile();
    int fd = mkstemp(path), before = dup(STDERR_FILENO);
    assert_true(fd >= 0 && before >= 0 && screen != NULL);
    assert_int_equal(write(fd, "\x1b[31m = 1\n", 10), 10);
    close(fd);
    (void)fflush(stderr);
    assert_true(dup2(fileno(screen), STDERR_FILENO) >= 0);
    int code = START("--config", path);
    (void)fflush(stderr);
    assert_true(dup2(before, STDERR_FILENO) >= 0);
    close(before);
    unlink(path);
    rewind(screen);
    assert_true(fread(said, 1, sizeof said - 1, screen) > 0);
    (void)fclose(screen);
    assert_int_equal(code, 2);
    assert_null(strchr(said, '\x1b'));
    assert_non_null(strstr(said, "unknown setting '\\x1b[31m'"));
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
    assert_int_equal(START("--name", "a"), 0); /* no ready descriptor */

    assert_int_equal(pipe(ends), 0); /* no reader: an error, no signal */
    snprintf(fd, sizeof fd, "%d", ends[1]);
    close(ends[0]);
    assert_int_equal(START("--name", "a", "--ready-fd", fd), 1);
    announces = false;
}

static void sighup_reopens_the_log_file_and_the_daemon_goes_on(void **state)
{
    (void)state;
    char directory[] = "/tmp/moe-daemon-XXXXXX";
    static char path[64]; /* the log keeps the pointer */
    assert_non_null(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/log", directory);
    daemon_of_test.run = run_through_hangups;
    int out = dup(STDOUT_FILENO), err = dup(STDERR_FILENO);
    int without = START("--name", "a");
    int refused = START("--name", "a", "--log-file", "/no/such/directory/log");
    int refused_runs = (int)runs;
    int with = START("--name", "a", "--log-file", path);
    assert_true(dup2(out, STDOUT_FILENO) >= 0 && dup2(err, STDERR_FILENO) >= 0);
    close(out);
    close(err);
    daemon_of_test.run = run;
    assert_int_equal(without, 0);
    assert_int_equal(refused, 1);
    assert_int_equal(refused_runs, 0);
    assert_int_equal(with, 0);
    assert_int_equal(runs, 1);
    assert_int_equal(unlink(path) | rmdir(directory), 0);
}

/* An open of a FIFO without a reader would wait for one. */
static void a_log_file_that_can_block_is_refused(void **state)
{
    (void)state;
    char directory[] = "/tmp/moe-daemon-XXXXXX";
    static char path[64]; /* the log keeps the pointer */
    assert_non_null(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/fifo", directory);
    assert_int_equal(mkfifo(path, 0600), 0);
    int without_reader = START("--name", "a", "--log-file", path);
    int reader = open(path, O_RDONLY | O_NONBLOCK);
    int with_reader = START("--name", "a", "--log-file", path);
    char byte;
    assert_int_equal(read(reader, &byte, 1), 0); /* no line went there */
    close(reader);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink("/dev/null", path), 0);
    int out = dup(STDOUT_FILENO), err = dup(STDERR_FILENO);
    int device = START("--name", "a", "--log-file", path);
    int flags = fcntl(STDERR_FILENO, F_GETFL);
    assert_true(dup2(out, STDOUT_FILENO) >= 0 && dup2(err, STDERR_FILENO) >= 0);
    close(out);
    close(err);
    assert_int_equal(unlink(path) | rmdir(directory), 0);
    assert_int_equal(without_reader, 1);
    assert_int_equal(with_reader, 1);
    assert_int_equal(device, 0);
    assert_int_equal(flags & (O_NONBLOCK | O_APPEND), O_APPEND);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_start_runs_once_and_its_failure_is_the_exit_code),
        cmocka_unit_test(help_and_version_start_no_daemon),
        cmocka_unit_test(credentials_of_the_service_manager_are_settings_unless_given),
        cmocka_unit_test(impossible_settings_are_refused_at_the_start),
        cmocka_unit_test(check_config_runs_nothing),
        cmocka_unit_test(a_complaint_moves_no_cursor),
        cmocka_unit_test(the_address_is_written_once_as_a_line),
        cmocka_unit_test(sighup_reopens_the_log_file_and_the_daemon_goes_on),
        cmocka_unit_test(a_log_file_that_can_block_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
