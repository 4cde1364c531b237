/* SPDX-License-Identifier: Apache-2.0 */
/* Connects libmoeclient with the trust that the arguments give, and prints why that failed:
 *
 *     connect_client ENDPOINT [tls_ca FILE] [tls_certificate FILE] [tls_key FILE]
 *                    [tls_server_name NAME] [token_file FILE] [insecure True]
 *
 * Prints nothing and exits with 0 if the server answers; 1 = it does not, 2 = wrong arguments. */
#include <moe/client.h>

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    struct moe_client_config config = {.size = sizeof config, .timeout_ms = 5000};
    const char *insecure = NULL;
    const struct {
        const char *name;
        const char **to;
    } settings[] = {
        {"tls_ca", &config.tls_ca},         {"tls_certificate", &config.tls_certificate},
        {"tls_key", &config.tls_key},       {"tls_server_name", &config.tls_server_name},
        {"token_file", &config.token_file}, {"insecure", &insecure}};
    const int count = sizeof settings / sizeof *settings;
    if (argc < 2 || argc % 2 != 0)
        return 2;
    config.endpoint = argv[1];
    for (int i = 2; i < argc; i += 2) {
        int n = 0;
        while (n < count && strcmp(settings[n].name, argv[i]) != 0)
            n++;
        if (n == count)
            return 2;
        *settings[n].to = argv[i + 1];
    }
    config.insecure = insecure != NULL;

    struct moe_client *client = NULL;
    struct moe_status status = moe_client_connect(&config, &client);
    if (status.code == MOE_OK) {
        moe_client_close(client);
        return 0;
    }
    printf("%s", status.text);
    return fflush(stdout) == 0 ? 1 : 3;
}
