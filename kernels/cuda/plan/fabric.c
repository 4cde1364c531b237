/* SPDX-License-Identifier: Apache-2.0 */
/* See fabric.h. Declares the four functions of NVML that are used, because its header is a separate
 * package. NVML compares `version`, which has the size of the struct, and refuses others. */
#include "cuda/plan/fabric.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, FABRIC_COMPLETED = 3, DIGITS = 32 };

/* nvmlGpuFabricInfo_v2_t. */
struct fabric_info {
    unsigned version;
    unsigned char cluster[16];
    int status; /* of the registration with the fabric */
    unsigned clique;
    unsigned char state;
    unsigned health;
};
#define FABRIC_INFO_VERSION ((unsigned)sizeof(struct fabric_info) | 2u << 24)

struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*find)(const char *uuid, void **gpu);
    int (*read)(void *gpu, struct fabric_info *info);
};

static bool load(void *library, struct nvml *out)
{
    *(void **)&out->init = dlsym(library, "nvmlInit_v2");
    *(void **)&out->shutdown = dlsym(library, "nvmlShutdown");
    *(void **)&out->find = dlsym(library, "nvmlDeviceGetHandleByUUID");
    *(void **)&out->read = dlsym(library, "nvmlDeviceGetGpuFabricInfoV");
    return out->init != NULL && out->shutdown != NULL && out->find != NULL && out->read != NULL;
}

static void print_bytes(const unsigned char *bytes, uint32_t n, char *out)
{
    for (uint32_t i = 0; i < n; i++)
        (void)snprintf(out + (size_t)2 * i, 3, "%02x", bytes[i]);
}

/* "GPU-01234567-89ab-cdef-0123-456789abcdef" */
static void print_uuid(const uint8_t uuid[16], char out[48])
{
    char hex[DIGITS + 1];
    print_bytes(uuid, 16, hex);
    (void)snprintf(out, 48, "GPU-%.8s-%.4s-%.4s-%.4s-%.12s", hex, hex + 8, hex + 12, hex + 16,
                   hex + 20);
}

static bool read_fabric(const struct nvml *nvml, const uint8_t uuid[16], struct fabric_info *out)
{
    static const unsigned char none[sizeof out->cluster] = {0};
    char name[48];
    void *gpu = NULL;
    *out = (struct fabric_info){.version = FABRIC_INFO_VERSION};
    print_uuid(uuid, name);
    return nvml->find(name, &gpu) == SUCCESS && nvml->read(gpu, out) == SUCCESS &&
           out->state == FABRIC_COMPLETED && out->status == SUCCESS &&
           memcmp(out->cluster, none, sizeof none) != 0;
}

void moe_cuda_fabric_domain(const char *library, const uint8_t uuid[16], char out[64])
{
    struct nvml nvml;
    struct fabric_info info;
    out[0] = '\0';
    void *opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (opened == NULL)
        return;
    if (load(opened, &nvml) && nvml.init() == SUCCESS) {
        if (read_fabric(&nvml, uuid, &info)) {
            char hex[DIGITS + 1];
            print_bytes(info.cluster, sizeof info.cluster, hex);
            (void)snprintf(out, 64, "%s-%u", hex, info.clique);
        }
        (void)nvml.shutdown();
    }
    (void)dlclose(opened);
}
