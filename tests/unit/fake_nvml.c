/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of the driver's NVML that moed calls, for test_fabric. MOE_FAKE_FABRIC has the
 * answer: "STATE STATUS CLIQUE CLUSTER", with the first byte of the cluster. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fabric_info {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
};

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu);
int nvmlDeviceGetGpuFabricInfoV(void *gpu, struct fabric_info *info);

int nvmlInit_v2(void)
{
    return getenv("MOE_FAKE_FABRIC") == NULL ? 9 : 0; /* the driver is not loaded */
}

int nvmlShutdown(void)
{
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu)
{
    *gpu = (void *)gpu;
    return strcmp(uuid, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f") == 0 ? 0 : 6;
}

int nvmlDeviceGetGpuFabricInfoV(void *gpu, struct fabric_info *info)
{
    unsigned state, cluster;
    const char *answer = getenv("MOE_FAKE_FABRIC");
    if (gpu == NULL || answer == NULL ||
        sscanf(answer, "%u %d %u %u", &state, &info->status, &info->clique, &cluster) != 4)
        return 3;                   /* not supported */
    if (info->version != 0x2000024) /* version 2, 36 bytes */
        return 25;
    info->state = (unsigned char)state;
    memset(info->cluster, 0, sizeof info->cluster);
    info->cluster[0] = (unsigned char)cluster;
    return 0;
}
