/* SPDX-License-Identifier: Apache-2.0 */
/* moectl context: names for groups. */
#include "commands.h"

#include <stdio.h>
#include <string.h>

static json_t *describe(const struct moectl_context *c)
{
    json_t *item = json_pack("{s:s, s:s}", "name", c->name, "endpoint", c->endpoint);
    for (int i = 0; i < MOECTL_TRUST_COUNT; i++)
        json_object_set_new(item, moectl_trust_names[i].json, json_string(c->trust[i]));
    return item;
}

static int list(const struct moectl_common *common, const struct moectl_contexts *contexts)
{
    json_t *document = moectl_document("Contexts"), *items = json_array();
    json_object_set_new(document, "current", json_string(contexts->current));
    for (size_t i = 0; i < contexts->count; i++) {
        const struct moectl_context *c = &contexts->all[i];
        bool current = strcmp(c->name, contexts->current) == 0;
        if (!common->document)
            moectl_put("%c %-24s %s%s%s\n", current ? '*' : ' ', c->name, c->endpoint,
                       c->trust[MOECTL_TLS_CA][0] != '\0' ? " (TLS)" : "",
                       c->trust[MOECTL_TOKEN_FILE][0] != '\0' ? " (with a token)" : "");
        json_array_append_new(items, describe(c));
    }
    json_object_set_new(document, "contexts", items);
    if (common->document)
        return moectl_print(document);
    if (contexts->current[0] == '\0')
        moectl_put("* the local group\n");
    json_decref(document);
    return MOECTL_OK;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct moectl_common common = {.format = "table", .words_max = 2, .words = {"list"}};
    struct moectl_contexts contexts;
    const char *const *words = common.words; /* list, or use NAME */
    int code;
    if (!moectl_parse(self, NULL, 0, &common, argc, argv, &code))
        return code;
    bool use = strcmp(words[0], "use") == 0;
    if (!use && strcmp(words[0], "list") != 0)
        return moectl_usage_error("there is no action 'context %s'", words[0]);
    if (use != (words[1] != NULL))
        return moectl_usage_error(use ? "context use: which one?" : "unexpected argument '%s'",
                                  words[1]);
    struct moe_status st = use ? moectl_contexts_use(words[1]) : moectl_contexts_read(&contexts);
    if (moe_failed(&st))
        return moectl_fail(&st);
    return use ? MOECTL_OK : list(&common, &contexts);
}

const struct moectl_command moectl_context = {
    .name = "context",
    .summary = "Lists the names of groups, or chooses the one that commands use.",
    .usage = "[ACTION]",
    .more = "actions:\n"
            "  list           list the contexts; * = the current one (default)\n"
            "  use NAME       make NAME the current one\n"
            "\n"
            "The file is $XDG_CONFIG_HOME/moed/contexts, else ~/.config/moed/contexts:\n"
            "\n"
            "  [prod]\n"
            "  endpoint = 10.0.0.7:7700\n"
            "  tls-ca = /home/me/prod/ca.pem\n"
            "  tls-certificate = /home/me/prod/me.pem\n"
            "  tls-key = /home/me/prod/me.key\n"
            "\n"
            "More settings are token-file and tls-server-name. Each is the option of the same\n"
            "name, which has priority.\n"
            "The name local stands for the group of this host.\n",
    .examples = "  moectl context use prod\n"
                "  moectl status --context prod\n",
    .local = true,
    .run = run,
};
