/* SPDX-License-Identifier: Apache-2.0 */
/* moectl: starts, inspects, uses and ends a group of moed daemons. This file finds the command;
 * each command has a separate file. */
#include "commands.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const struct moectl_command *const commands[] = {
    &moectl_up,       &moectl_down,      &moectl_status,   &moectl_wait,      &moectl_get,
    &moectl_describe, &moectl_health,    &moectl_top,      &moectl_placement, &moectl_diag,
    &moectl_drain,    &moectl_cordon,    &moectl_uncordon, &moectl_replace,   &moectl_restart,
    &moectl_scale,    &moectl_rebalance, &moectl_load,     &moectl_unload,    &moectl_forward,
    &moectl_bench,    &moectl_training,  &moectl_model,    &moectl_context,   &moectl_log_level,
    &moectl_version,
};
enum { COMMAND_COUNT = sizeof commands / sizeof *commands };

static void print_help(FILE *to)
{
    fputs("usage: moectl COMMAND [options]\n\n", to);
    for (size_t i = 0; i < COMMAND_COUNT; i++)
        fprintf(to, "  %-9s %s\n", commands[i]->name, commands[i]->summary);
    fputs("  help      Shows this text; `moectl help COMMAND` shows the options of a command.\n"
          "\n"
          "exit codes: 0 done, 1 failed, 2 wrong command line, 3 the group does not serve,\n"
          "4 not found, 5 unreachable or out of time, 6 not allowed, 7 conflict,\n"
          "8 warnings (health).\n"
          "With 2 no daemon was contacted and nothing has changed. Errors of a daemon give 1, 4,\n"
          "5, 6 or 7.\n"
          "\n"
          "environment: MOED_ENDPOINT, MOED_CONTEXT, MOED_TOKEN_FILE, MOED_TLS_CA,\n"
          "MOED_TLS_CERTIFICATE, MOED_TLS_KEY, MOED_TLS_SERVER_NAME, MOED_INSECURE = defaults of\n"
          "the options; the default of --state-dir is $XDG_RUNTIME_DIR/moed, else /tmp/moed-UID\n",
          to);
}

static const struct moectl_command *find(const char *name)
{
    for (size_t i = 0; i < COMMAND_COUNT; i++)
        if (strcmp(commands[i]->name, name) == 0)
            return commands[i];
    return NULL;
}

static bool is_help(const char *word)
{
    return strcmp(word, "help") == 0 || strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
}

static int run(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return MOECTL_USAGE;
    }
    const char *name = argv[1];
    bool help = is_help(name);
    if (help && (argc == 2 || is_help(argv[2]))) {
        print_help(stdout);
        return MOECTL_OK;
    }
    if (help) /* `moectl help training` is `moectl training --help` */
        name = argv[2];
    const struct moectl_command *command =
        find(strcmp(name, "--version") == 0 ? moectl_version.name : name);
    if (command == NULL) {
        moectl_say("there is no command '%s'; see moectl help", name);
        return MOECTL_USAGE;
    }
    if (!help)
        return command->run(command, argc - 1, argv + 1);
    char text[] = "--help", *arguments[] = {argv[2], text, NULL};
    return command->run(command, 2, arguments);
}

/* A reader that has gone, as `head` does, needs no message. */
static bool reader_is_gone(void)
{
    struct pollfd out = {.fd = STDOUT_FILENO, .events = POLLOUT};
    return poll(&out, 1, 0) == 1 && (out.revents & POLLERR) != 0;
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    int code = run(argc, argv);
    if (moectl_flush() == MOECTL_OK)
        return code;
    if (!reader_is_gone())
        moectl_say("cannot write the answer to the standard output");
    return code != MOECTL_OK ? code : MOECTL_FAILED;
}
