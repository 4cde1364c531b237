/* SPDX-License-Identifier: Apache-2.0 */
/* Lets several slots run on one GPU, for tests: stands in for NCCL, which refuses two ranks on one
 * GPU, and for the checks that refuse it before. A machine's GPUs share the slots. A module for
 * tests (backend_cuda_one_gpu.so) is the CUDA backend with this file in front of NCCL; all else is
 * the backend's own code. The driver gives the GPU to one process at a time, so waits between slots
 * take milliseconds: results count here, and times do not.
 *
 * Only what the backend calls is here. Windows are memory that processes share by CUDA IPC.
 * Messages go through a file in memory that all processes of the group have mapped: a few blocks
 * per ordered pair of ranks, and two counters on which streams wait. One stream sends and one
 * receives, both in the order of the calls: to the next rank and from the last, then to the second
 * next, and so on. So each message waits for earlier ones only. A call that needs all ranks
 * begins at once and ends when ncclCommGetAsyncError has seen all of them begin it. */
#include <cuda.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include "common/session_rules.h"
#include "cuda/session/window.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    RANKS = 64,
    BLOCKS = 4,             /* of a message that are under way at once */
    BLOCK_MAX = 1 << 20,    /* bytes of a block */
    ALL_BLOCKS = 256 << 20, /* bytes of all blocks of a group; a power of two */
    GENERATIONS = 2,        /* a communicator, and the one that is split off it */
    MEMORY_UNIT = 2 << 20,  /* allocations of this size have separate IPC handles */
    POLL_US = 200,
    DEVICES = 64,
};

/* One direction of a pair. */
struct lane {
    _Alignas(64) _Atomic uint64_t produced; /* blocks that the sender has filled */
    _Alignas(64) _Atomic uint64_t consumed; /* blocks that the receiver has taken */
};

struct board {
    _Atomic uint64_t reached[RANKS]; /* collective calls that each rank has begun */
    cudaIpcMemHandle_t window[RANKS];
    struct lane lane[RANKS][RANKS]; /* [from][to] */
    _Alignas(4096) uint8_t block[]; /* [from][to][BLOCKS] of block_bytes */
};
enum { BOARD_MAX = sizeof(struct board) + ALL_BLOCKS };

struct ncclComm {
    int rank, ranks;
    struct board *board;    /* of this generation */
    size_t block_bytes;     /* the same on all ranks */
    int file;               /* for the communicator that is split off; -1 */
    uint64_t calls;         /* collective calls that this rank has begun */
    struct ncclComm *child; /* while a split is under way */
    void *own;              /* memory of the window that is being registered */
    ncclWindow_t *registered;
    uint8_t *base[RANKS];
    bool connected; /* the fields below are there */
    cudaStream_t out, in;
    cudaEvent_t fork_event, join_event;
    uint64_t sent[RANKS], taken[RANKS]; /* blocks */
};

/* NCCL's headers do not declare these for C. */
struct team {
    int ranks, rank, stride;
};
struct team ncclTeamLsa(ncclComm_t comm);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

/* ------------------------------------------------------------- seams of the backend */

cudaError_t __real_cudaGetDeviceProperties(struct cudaDeviceProp *p, int device);
cudaError_t __real_cudaSetDevice(int device);
cudaError_t __real_cudaGetDeviceCount(int *count);
cudaError_t __wrap_cudaGetDeviceProperties(struct cudaDeviceProp *p, int device);
cudaError_t __wrap_cudaSetDevice(int device);
cudaError_t __wrap_cudaGetDeviceCount(int *count);
struct moe_status __wrap_moe_session_check_gpus(uint64_t live, uint32_t slots,
                                                const struct moe_gpu_uuid *gpu);
struct moe_status __wrap_moe_cuda_window_read_peers(ncclWindow_t handle, uint32_t ranks,
                                                    uint8_t **table, cudaStream_t stream);

static cudaError_t real_device(int device, int *real)
{
    int count = 0;
    cudaError_t rc = __real_cudaGetDeviceCount(&count);
    if (rc == cudaSuccess)
        *real = device % count;
    return rc;
}

cudaError_t __wrap_cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    int real = 0;
    cudaError_t rc = real_device(device, &real);
    return rc == cudaSuccess ? __real_cudaGetDeviceProperties(p, real) : rc;
}

cudaError_t __wrap_cudaSetDevice(int device)
{
    int real = 0;
    cudaError_t rc = real_device(device, &real);
    return rc == cudaSuccess ? __real_cudaSetDevice(real) : rc;
}

cudaError_t __wrap_cudaGetDeviceCount(int *count)
{
    *count = DEVICES;
    return cudaSuccess;
}

struct moe_status __wrap_moe_session_check_gpus(uint64_t live, uint32_t slots,
                                                const struct moe_gpu_uuid *gpu)
{
    (void)live, (void)slots, (void)gpu;
    return moe_ok();
}

/* The handle of a window is its communicator. */
struct moe_status __wrap_moe_cuda_window_read_peers(ncclWindow_t handle, uint32_t ranks,
                                                    uint8_t **table, cudaStream_t stream)
{
    const struct ncclComm *comm = (const void *)handle;
    return MOE_CUDA(
        cudaMemcpyAsync(table, comm->base, ranks * sizeof *table, cudaMemcpyHostToDevice, stream));
}

/* ------------------------------------------------------------------------ forming */

struct group_name {
    char magic[8];
    int pid, file;
};

/* Of the blocks of a group of this size. */
static size_t block_bytes_of(size_t ranks)
{
    size_t bytes = BLOCK_MAX;
    while (bytes * ranks * ranks * BLOCKS > ALL_BLOCKS)
        bytes /= 2;
    return bytes;
}

static size_t board_bytes(const struct ncclComm *comm)
{
    size_t ranks = (size_t)comm->ranks;
    return sizeof(struct board) + ranks * ranks * BLOCKS * comm->block_bytes;
}

static uint8_t *block_of(const struct ncclComm *comm, int from, int to, uint64_t n)
{
    size_t pair = (size_t)from * (size_t)comm->ranks + (size_t)to;
    return comm->board->block + (pair * BLOCKS + n % BLOCKS) * comm->block_bytes;
}

static struct board *map_board(const struct ncclComm *comm, size_t generation)
{
    void *p = mmap(NULL, board_bytes(comm), PROT_READ | PROT_WRITE, MAP_SHARED, comm->file,
                   (off_t)(generation * BOARD_MAX));
    return p == MAP_FAILED ? NULL : p;
}
_Static_assert(BOARD_MAX % 4096 == 0, "generations begin at pages");

ncclResult_t ncclGetVersion(int *version)
{
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    return result == ncclSuccess ? "no error" : "an error of the stand-in for NCCL";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *out)
{
    struct group_name name = {.magic = "one-gpu", .pid = getpid()};
    name.file = memfd_create("one-gpu", MFD_CLOEXEC);
    if (name.file < 0 || ftruncate(name.file, (off_t)GENERATIONS * BOARD_MAX) != 0)
        return ncclSystemError;
    memset(out, 0, sizeof *out);
    memcpy(out->internal, &name, sizeof name);
    return ncclSuccess;
}

static void begin_call(struct ncclComm *comm)
{
    atomic_store(&comm->board->reached[comm->rank], ++comm->calls);
}

static struct ncclComm *new_comm(int rank, int ranks, int file, size_t generation)
{
    struct ncclComm *comm = calloc(1, sizeof *comm);
    if (comm == NULL)
        return NULL;
    comm->rank = rank;
    comm->ranks = ranks;
    comm->file = file;
    comm->block_bytes = block_bytes_of((size_t)ranks);
    comm->board = map_board(comm, generation);
    if (comm->board != NULL)
        return comm;
    free(comm);
    return NULL;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    struct group_name name;
    char path[64];
    (void)config;
    memcpy(&name, id.internal, sizeof name);
    if (ranks > RANKS || strcmp(name.magic, "one-gpu") != 0)
        return ncclInvalidArgument;
    (void)snprintf(path, sizeof path, "/proc/%d/fd/%d", name.pid, name.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return ncclSystemError;
    struct ncclComm *comm = new_comm(rank, ranks, file, 0);
    if (comm == NULL) {
        close(file);
        return ncclSystemError;
    }
    begin_call(comm);
    *out = comm;
    return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out,
                           ncclConfig_t *config)
{
    (void)config;
    if (color != 0 || key != comm->rank)
        return ncclInvalidArgument;
    comm->child = new_comm(comm->rank, comm->ranks, dup(comm->file), 1);
    if (comm->child == NULL)
        return ncclSystemError;
    *out = comm->child;
    begin_call(comm);
    return ncclInProgress;
}

/* ------------------------------------------------------------------------- windows */

ncclResult_t ncclMemAlloc(void **out, size_t bytes)
{
    size_t whole = (bytes + MEMORY_UNIT - 1) / MEMORY_UNIT * MEMORY_UNIT;
    return cudaMalloc(out, whole) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void *p)
{
    return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *memory, size_t bytes,
                                    ncclWindow_t *window, int flags)
{
    (void)bytes, (void)flags;
    if (cudaIpcGetMemHandle(&comm->board->window[comm->rank], memory) != cudaSuccess)
        return ncclUnhandledCudaError;
    comm->own = memory;
    comm->registered = window;
    begin_call(comm);
    return ncclInProgress;
}

static ncclResult_t open_windows(struct ncclComm *comm)
{
    for (int r = 0; r < comm->ranks; r++) {
        void *p = comm->own;
        if (r != comm->rank && cudaIpcOpenMemHandle(&p, comm->board->window[r],
                                                    cudaIpcMemLazyEnablePeerAccess) != cudaSuccess)
            return ncclUnhandledCudaError;
        comm->base[r] = p;
    }
    *comm->registered = (ncclWindow_t)(void *)comm;
    comm->registered = NULL;
    return ncclSuccess;
}

static void close_windows(struct ncclComm *comm)
{
    for (int r = 0; r < comm->ranks; r++) {
        if (comm->base[r] != NULL && r != comm->rank)
            (void)cudaIpcCloseMemHandle(comm->base[r]);
        comm->base[r] = NULL;
    }
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window)
{
    (void)window;
    close_windows(comm);
    begin_call(comm);
    return ncclInProgress;
}

struct team ncclTeamLsa(ncclComm_t comm)
{
    return (struct team){.ranks = comm->ranks, .rank = comm->rank, .stride = 1};
}

/* ------------------------------------------------------------------ ends of calls */

static bool all_have_begun(const struct ncclComm *comm)
{
    bool all = true;
    for (int r = 0; r < comm->ranks; r++)
        all = all && atomic_load(&comm->board->reached[r]) >= comm->calls;
    return all;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state)
{
    *state = ncclInProgress;
    if (!all_have_begun(comm))
        return ncclSuccess;
    *state = comm->registered != NULL ? open_windows(comm) : ncclSuccess;
    return ncclSuccess;
}

/* One that is split off has calls that block, and no peer is waited for when it ends. */
ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    if (comm->connected)
        return ncclSuccess;
    begin_call(comm);
    return ncclInProgress;
}

static void free_comm(struct ncclComm *comm)
{
    close_windows(comm);
    if (comm->connected) {
        (void)cudaStreamDestroy(comm->out);
        (void)cudaStreamDestroy(comm->in);
        (void)cudaEventDestroy(comm->fork_event);
        (void)cudaEventDestroy(comm->join_event);
        (void)cudaHostUnregister(comm->board);
    }
    (void)munmap(comm->board, board_bytes(comm));
    (void)close(comm->file);
    free(comm);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (comm->connected && (cudaStreamSynchronize(comm->out) != cudaSuccess ||
                            cudaStreamSynchronize(comm->in) != cudaSuccess))
        return ncclUnhandledCudaError;
    free_comm(comm);
    return ncclSuccess;
}

static bool busy(const struct ncclComm *comm)
{
    return cudaStreamQuery(comm->out) == cudaErrorNotReady ||
           cudaStreamQuery(comm->in) == cudaErrorNotReady;
}

/* This rank alone waits on these counters, so peers notice nothing. A peer that still runs may
 * store a small number again, so they are set until nothing waits. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    while (comm->connected && busy(comm)) {
        for (int r = 0; r < comm->ranks; r++) {
            atomic_store(&comm->board->lane[comm->rank][r].consumed, INT64_MAX);
            atomic_store(&comm->board->lane[r][comm->rank].produced, INT64_MAX);
        }
        usleep(POLL_US);
    }
    free_comm(comm);
    return ncclSuccess;
}

/* ------------------------------------------------------------------------ messages */

static struct {
    CUresult (*wait)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
    CUresult (*write)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
} driver;

static bool find_driver(void)
{
    enum cudaDriverEntryPointQueryResult found;
    return driver.wait != NULL ||
           (cudaGetDriverEntryPointByVersion("cuStreamWriteValue64", (void **)&driver.write, 12000,
                                             cudaEnableDefault, &found) == cudaSuccess &&
            cudaGetDriverEntryPointByVersion("cuStreamWaitValue64", (void **)&driver.wait, 12000,
                                             cudaEnableDefault, &found) == cudaSuccess);
}

static ncclResult_t connect_comm(struct ncclComm *comm)
{
    if (comm->connected)
        return ncclSuccess;
    bool good = find_driver() && cudaHostRegister(comm->board, board_bytes(comm),
                                                  cudaHostRegisterDefault) == cudaSuccess;
    good = good &&
           cudaEventCreateWithFlags(&comm->fork_event, cudaEventDisableTiming) == cudaSuccess &&
           cudaEventCreateWithFlags(&comm->join_event, cudaEventDisableTiming) == cudaSuccess;
    good = good && cudaStreamCreateWithFlags(&comm->out, cudaStreamNonBlocking) == cudaSuccess &&
           cudaStreamCreateWithFlags(&comm->in, cudaStreamNonBlocking) == cudaSuccess;
    comm->connected = good;
    return good ? ncclSuccess : ncclUnhandledCudaError;
}

struct message {
    bool sends;
    const void *from;
    void *to;
    size_t bytes;
    int peer;
};

static _Thread_local struct {
    struct message message[2 * RANKS];
    size_t count;
    struct ncclComm *comm;
    cudaStream_t stream;
} group;

ncclResult_t ncclGroupStart(void)
{
    group.count = 0;
    group.comm = NULL;
    return ncclSuccess;
}

static ncclResult_t add(const struct message *m, ncclDataType_t type, ncclComm_t comm,
                        cudaStream_t stream)
{
    if (type != ncclInt8 || group.count == 2 * RANKS ||
        (group.comm != NULL && (group.comm != comm || group.stream != stream)))
        return ncclInvalidUsage;
    group.comm = comm;
    group.stream = stream;
    group.message[group.count++] = *m;
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return add(&(struct message){.sends = true, .from = from, .bytes = count, .peer = peer}, type,
               comm, stream);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return add(&(struct message){.to = to, .bytes = count, .peer = peer}, type, comm, stream);
}

static CUdeviceptr address(const void *p)
{
    return (CUdeviceptr)(uintptr_t)p;
}

/* A block at a time; the other side does the same with as many blocks. */
static bool send_message(struct ncclComm *comm, const struct message *m)
{
    struct lane *lane = &comm->board->lane[comm->rank][m->peer];
    cudaStream_t stream = comm->out;
    bool good = true;
    for (size_t at = 0; good && at < m->bytes; at += comm->block_bytes) {
        uint64_t n = comm->sent[m->peer]++;
        size_t bytes = m->bytes - at < comm->block_bytes ? m->bytes - at : comm->block_bytes;
        if (n >= BLOCKS)
            good = driver.wait(stream, address(&lane->consumed), n - BLOCKS + 1,
                               CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS;
        good =
            good &&
            cudaMemcpyAsync(block_of(comm, comm->rank, m->peer, n), (const uint8_t *)m->from + at,
                            bytes, cudaMemcpyDeviceToHost, stream) == cudaSuccess &&
            driver.write(stream, address(&lane->produced), n + 1, CU_STREAM_WRITE_VALUE_DEFAULT) ==
                CUDA_SUCCESS;
    }
    return good;
}

static bool take_message(struct ncclComm *comm, const struct message *m)
{
    struct lane *lane = &comm->board->lane[m->peer][comm->rank];
    cudaStream_t stream = comm->in;
    bool good = true;
    for (size_t at = 0; good && at < m->bytes; at += comm->block_bytes) {
        uint64_t n = comm->taken[m->peer]++;
        size_t bytes = m->bytes - at < comm->block_bytes ? m->bytes - at : comm->block_bytes;
        good = driver.wait(stream, address(&lane->produced), n + 1, CU_STREAM_WAIT_VALUE_GEQ) ==
                   CUDA_SUCCESS &&
               cudaMemcpyAsync((uint8_t *)m->to + at, block_of(comm, m->peer, comm->rank, n), bytes,
                               cudaMemcpyHostToDevice, stream) == cudaSuccess &&
               driver.write(stream, address(&lane->consumed), n + 1,
                            CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS;
    }
    return good;
}

/* Work on `stream` follows the group's stream, which then waits for it. */
static bool fork_stream(const struct ncclComm *comm, cudaStream_t stream)
{
    return cudaStreamWaitEvent(stream, comm->fork_event, 0) == cudaSuccess;
}

static bool join_stream(const struct ncclComm *comm, cudaStream_t stream)
{
    return cudaEventRecord(comm->join_event, stream) == cudaSuccess &&
           cudaStreamWaitEvent(group.stream, comm->join_event, 0) == cudaSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    struct ncclComm *comm = group.comm;
    if (comm == NULL)
        return ncclSuccess;
    ncclResult_t rc = connect_comm(comm);
    if (rc != ncclSuccess)
        return rc;
    bool good = cudaEventRecord(comm->fork_event, group.stream) == cudaSuccess &&
                fork_stream(comm, comm->out) && fork_stream(comm, comm->in);
    for (size_t i = 0; good && i < group.count; i++)
        good = group.message[i].sends ? send_message(comm, &group.message[i])
                                      : take_message(comm, &group.message[i]);
    good = good && join_stream(comm, comm->out) && join_stream(comm, comm->in);
    return good ? ncclSuccess : ncclUnhandledCudaError;
}
