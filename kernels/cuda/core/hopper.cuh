/* SPDX-License-Identifier: Apache-2.0 */
/* The few instructions of Hopper (sm_90a) that C++ cannot express: barriers in shared memory, the
 * bulk tensor copy engine, the warpgroup matrix multiply. Each is one inline function, named after
 * its effect; nothing here knows about GEMMs. Sources: PTX ISA 8.x, sections mbarrier,
 * cp.async.bulk.tensor, wgmma, stmatrix.
 *
 * Waits are unbounded on purpose: a barrier waits only for copies and arithmetic of its cluster,
 * never for a peer. So it ends, or the device reports an error. */
#ifndef MOE_CUDA_HOPPER_CUH
#define MOE_CUDA_HOPPER_CUH

#include <cuda.h>
#include <stdint.h>

namespace hopper
{

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/* ------------------------------------------------------------------- clusters */

/* Rank of this block in its cluster. */
__device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* Synchronises all threads of the cluster; earlier writes to shared memory are visible afterwards.
 * Also needed before a block ends while others may write to its shared memory. */
__device__ __forceinline__ void cluster_meet()
{
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::
                     : "memory");
}

/* ------------------------------------------------------------------ barriers */

__device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals));
}

/* Call after barrier_init, before another thread or the copy engine uses the barriers. */
__device__ __forceinline__ void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;\n"
                 "fence.proxy.async.shared::cta;" ::
                     : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

/* Arrives at the barrier at the same shared-memory address in block `rank` of the cluster. This
 * orders earlier writes for this block only; a release to the cluster would wait for all its stores
 * to global memory each time. */
__device__ __forceinline__ void barrier_arrive_at(uint64_t *barrier, uint32_t rank)
{
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}

/* Arrives, and extends the phase until the copy engine has delivered `bytes` more. */
__device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

/* Waits for the end of the phase with this parity. A parity distinguishes only two successive
 * phases: a thread that may be two phases behind needs another means to stay in step. */
__device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\n"
                 "AGAIN_%=:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra READY_%=;\n"
                 "bra AGAIN_%=;\n"
                 "READY_%=:\n}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

/* Named barriers of a block (1..15; 0 is __syncthreads). `threads` counts waiting and arriving
 * threads. */
__device__ __forceinline__ void named_wait(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* --------------------------------------------------------------- copy engine */

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Call before a block's first use of a map in global memory that was written after the module was
 * loaded. The block's other threads need a barrier after it. */
__device__ __forceinline__ void acquire_map(const CUtensorMap *map)
{
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

__device__ __forceinline__ uint64_t policy_evict_first()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Loads the box at (x, y) into `to`. Elements outside the tensor arrive as zeros and count as
 * bytes. */
__device__ __forceinline__ void load_box(void *to, const CUtensorMap *map, uint64_t *barrier,
                                         uint32_t x, uint32_t y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
                 : "memory");
}

/* The same for every block of the cluster in `blocks` (bit: rank), to the same address and barrier
 * in each. */
__device__ __forceinline__ void load_box_for_all(void *to, const CUtensorMap *map,
                                                 uint64_t *barrier, uint32_t x, uint32_t y,
                                                 uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(blocks)
                 : "memory");
}

/* Loads the box at (x, y, z) into `to`, with default caching in L2. */
__device__ __forceinline__ void load_box3(void *to, const CUtensorMap *map, uint64_t *barrier,
                                          uint32_t x, uint32_t y, uint32_t z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void load_box4(void *to, const CUtensorMap *map, uint64_t *barrier,
                                          uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* Loads the box at (x, y, z) into every block of the cluster in `blocks`, as load_box_for_all. */
__device__ __forceinline__ void load_box3_for_all(void *to, const CUtensorMap *map,
                                                  uint64_t *barrier, uint32_t x, uint32_t y,
                                                  uint32_t z, uint16_t blocks)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}

/* As load_box3, for data that is not read again soon. */
__device__ __forceinline__ void load_box3_once(void *to, const CUtensorMap *map, uint64_t *barrier,
                                               uint32_t x, uint32_t y, uint32_t z, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "l"(policy)
                 : "memory");
}

/* Loads contiguous bytes: a multiple of 16, both ends 16-byte aligned; no map. */
__device__ __forceinline__ void load_bytes(void *to, const void *from, uint64_t *barrier,
                                           uint32_t bytes)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %3, [%2];" ::"r"(shared_address(to)),
                 "l"(from), "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

/* The same, for data that is not read again soon. */
__device__ __forceinline__ void load_bytes_once(void *to, const void *from, uint64_t *barrier,
                                                uint32_t bytes, uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %3, [%2], %4;" ::"r"(shared_address(to)),
                 "l"(from), "r"(shared_address(barrier)), "r"(bytes), "l"(policy)
                 : "memory");
}

/* Makes ordinary stores to shared memory visible to the store_box calls that follow. */
__device__ __forceinline__ void stores_before_copies()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void store_box(const CUtensorMap *map, uint32_t from, uint32_t x,
                                          uint32_t y)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(from), "r"(x), "r"(y)
        : "memory");
}

/* Stores the box at (x, y, z), for data that is not read again soon. */
__device__ __forceinline__ void store_box3_once(const CUtensorMap *map, uint32_t from, uint32_t x,
                                                uint32_t y, uint32_t z, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint "
                 "[%0, {%2, %3, %4}], [%1], %5;" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void store_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until at most `PENDING` of this thread's committed stores still read shared memory. */
template <int PENDING> __device__ __forceinline__ void store_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void store_wait_all()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* ------------------------------------------------------------ matrix multiply */

/* Descriptor of a K-major operand in shared memory: rows of 64 bf16 (128 bytes), with the copy
 * engine's 128-byte swizzle in groups of 8 rows (1024 bytes). Add 2 to move 16 along K. */
__device__ __forceinline__ uint64_t operand(uint32_t address)
{
    return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (UINT64_C(1) << 16) |
           (static_cast<uint64_t>(1024 >> 4) << 32) | (UINT64_C(1) << 62);
}

/* The same for an operand with K along rows ("MN-major"): slabs of 64 columns, `slab_bytes` apart,
 * each with K rows of 128 bytes. Add OPERAND_16_ROWS to move 16 along K. */
__device__ __forceinline__ uint64_t operand_rows(uint32_t address, uint32_t slab_bytes)
{
    return static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
           (static_cast<uint64_t>(slab_bytes >> 4) << 16) |
           (static_cast<uint64_t>(1024 >> 4) << 32) | (UINT64_C(1) << 62);
}
constexpr uint32_t OPERAND_16_ROWS = 16 * 128 >> 4;

__device__ __forceinline__ void multiply_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void multiply_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> __device__ __forceinline__ void multiply_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* The instruction's text depends only on the number of columns and of accumulators, eight for every
 * 16 columns. Each macro adds one step to both lists. */
#define MOE_NAMES_4   "%0, %1, %2, %3"
#define MOE_NAMES_8   "%0, %1, %2, %3, %4, %5, %6, %7"
#define MOE_NAMES_16  MOE_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MOE_NAMES_24  MOE_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MOE_NAMES_32  MOE_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MOE_NAMES_40  MOE_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MOE_NAMES_48  MOE_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MOE_NAMES_56  MOE_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MOE_NAMES_64  MOE_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MOE_NAMES_72  MOE_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MOE_NAMES_80  MOE_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define MOE_NAMES_88  MOE_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define MOE_NAMES_96  MOE_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define MOE_NAMES_104 MOE_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define MOE_NAMES_112 MOE_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define MOE_NAMES_120 MOE_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define MOE_NAMES_128 MOE_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define MOE_VALUES(i)                                                                              \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define MOE_VALUES_4   "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define MOE_VALUES_8   MOE_VALUES(0)
#define MOE_VALUES_16  MOE_VALUES_8, MOE_VALUES(8)
#define MOE_VALUES_24  MOE_VALUES_16, MOE_VALUES(16)
#define MOE_VALUES_32  MOE_VALUES_24, MOE_VALUES(24)
#define MOE_VALUES_40  MOE_VALUES_32, MOE_VALUES(32)
#define MOE_VALUES_48  MOE_VALUES_40, MOE_VALUES(40)
#define MOE_VALUES_56  MOE_VALUES_48, MOE_VALUES(48)
#define MOE_VALUES_64  MOE_VALUES_56, MOE_VALUES(56)
#define MOE_VALUES_72  MOE_VALUES_64, MOE_VALUES(64)
#define MOE_VALUES_80  MOE_VALUES_72, MOE_VALUES(72)
#define MOE_VALUES_88  MOE_VALUES_80, MOE_VALUES(80)
#define MOE_VALUES_96  MOE_VALUES_88, MOE_VALUES(88)
#define MOE_VALUES_104 MOE_VALUES_96, MOE_VALUES(96)
#define MOE_VALUES_112 MOE_VALUES_104, MOE_VALUES(104)
#define MOE_VALUES_120 MOE_VALUES_112, MOE_VALUES(112)
#define MOE_VALUES_128 MOE_VALUES_120, MOE_VALUES(120)

/* d [64, N] (+)= a [64, 16] b [N, 16]^T, asynchronously, by the 128 threads of a warpgroup. For
 * each 8 columns j, thread t of warp w holds columns 8j + 2 (t%4) and the next: of row 16 w + t/4
 * in d[4j], d[4j+1], and of the row 8 below in d[4j+2], d[4j+3]. */
template <uint32_t N> struct multiply;

#define MOE_MULTIPLY_START(name, transposed, n, count, a_name, b_name, p_name)                     \
    template <uint32_t SIZE>                                                                       \
    static __device__ __forceinline__ void name(float(&d)[SIZE], uint64_t a, uint64_t b,           \
                                                int accumulate)                                    \
    {                                                                                              \
        static_assert(SIZE >= count, "accumulators");                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" p_name ", 0;\n"                          \
                     "wgmma.mma_async.sync.aligned.m64n" #n                                        \
                     "k16.f32.bf16.bf16 {" MOE_NAMES_##count "}, %" a_name ", %" b_name            \
                                                             ", p, 1, 1, " transposed ";\n}"       \
                     : MOE_VALUES_##count                                                          \
                     : "l"(a), "l"(b), "r"(accumulate));                                           \
    }

/* start: both operands from `operand`; start_a_rows, start_b_rows, start_both_rows: a, b or both
 * from `operand_rows`. */
#define MOE_MULTIPLY(n, count, a_name, b_name, p_name)                                             \
    template <> struct multiply<n> {                                                               \
        MOE_MULTIPLY_START(start, "0, 0", n, count, a_name, b_name, p_name)                        \
        MOE_MULTIPLY_START(start_a_rows, "1, 0", n, count, a_name, b_name, p_name)                 \
        MOE_MULTIPLY_START(start_b_rows, "0, 1", n, count, a_name, b_name, p_name)                 \
        MOE_MULTIPLY_START(start_both_rows, "1, 1", n, count, a_name, b_name, p_name)              \
    }

MOE_MULTIPLY(16, 8, "8", "9", "10");
MOE_MULTIPLY(32, 16, "16", "17", "18");
MOE_MULTIPLY(48, 24, "24", "25", "26");
MOE_MULTIPLY(64, 32, "32", "33", "34");
MOE_MULTIPLY(80, 40, "40", "41", "42");
MOE_MULTIPLY(96, 48, "48", "49", "50");
MOE_MULTIPLY(112, 56, "56", "57", "58");
MOE_MULTIPLY(128, 64, "64", "65", "66");
MOE_MULTIPLY(144, 72, "72", "73", "74");
MOE_MULTIPLY(160, 80, "80", "81", "82");
MOE_MULTIPLY(176, 88, "88", "89", "90");
MOE_MULTIPLY(192, 96, "96", "97", "98");
MOE_MULTIPLY(208, 104, "104", "105", "106");
MOE_MULTIPLY(224, 112, "112", "113", "114");
MOE_MULTIPLY(240, 120, "120", "121", "122");
MOE_MULTIPLY(256, 128, "128", "129", "130");

#undef MOE_MULTIPLY
#undef MOE_MULTIPLY_START

/* The same with `a` in registers. Two bf16 each: of thread t of warp w, row 16 w + t/4 and columns
 * 2 (t%4) and the next in a[0], the row 8 below in a[1]; columns 8 further in a[2], a[3]. The
 * registers must not change until the multiplication is complete. */
template <uint32_t N> struct multiply_registers;

#define MOE_MULTIPLY_REGISTERS(n, count, a0, a1, a2, a3, b_name, p_name)                           \
    template <> struct multiply_registers<n> {                                                     \
        template <uint32_t SIZE>                                                                   \
        static __device__ __forceinline__ void start(float (&d)[SIZE], const uint32_t *a,          \
                                                     uint64_t b, int accumulate)                   \
        {                                                                                          \
            static_assert(SIZE >= count, "accumulators");                                          \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" p_name ", 0;\n"                      \
                         "wgmma.mma_async.sync.aligned.m64n" #n                                    \
                         "k16.f32.bf16.bf16 {" MOE_NAMES_##count                                   \
                         "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b_name ", p, 1, 1, 0;\n}"    \
                         : MOE_VALUES_##count                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));   \
        }                                                                                          \
    }

MOE_MULTIPLY_REGISTERS(8, 4, "4", "5", "6", "7", "8", "9");
MOE_MULTIPLY_REGISTERS(16, 8, "8", "9", "10", "11", "12", "13");
MOE_MULTIPLY_REGISTERS(32, 16, "16", "17", "18", "19", "20", "21");
MOE_MULTIPLY_REGISTERS(64, 32, "32", "33", "34", "35", "36", "37");
MOE_MULTIPLY_REGISTERS(96, 48, "48", "49", "50", "51", "52", "53");
MOE_MULTIPLY_REGISTERS(128, 64, "64", "65", "66", "67", "68", "69");
MOE_MULTIPLY_REGISTERS(160, 80, "80", "81", "82", "83", "84", "85");
MOE_MULTIPLY_REGISTERS(192, 96, "96", "97", "98", "99", "100", "101");

#undef MOE_MULTIPLY_REGISTERS

/* d [64, 128] (+)= a [64, 32] b [128, 32]^T for E4M3, both from `operand`: rows of 128 elements.
 * Add 2 to move 32 along K. Accumulators as above; sums inside have about 14 bits. */
__device__ __forceinline__ void multiply_e4m3(float (&d)[64], uint64_t a, uint64_t b,
                                              int accumulate)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MOE_NAMES_64
                 "}, %64, %65, p, 1, 1;\n}"
                 : MOE_VALUES_64
                 : "l"(a), "l"(b), "r"(accumulate));
}

/* Keeps the compiler from moving a read of the accumulators before the preceding wait. */
template <int N> __device__ __forceinline__ void multiply_done(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

/* Stores four 8 x 8 blocks of 16-bit elements from accumulator layout as rows of 16 bytes in shared
 * memory. Lane l has the address of row l%8 of block l/8. */
__device__ __forceinline__ void store_matrix(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                             uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

/* The same, transposed. */
__device__ __forceinline__ void store_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                                 uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ float2 load_shared8(uint32_t from)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared8(uint32_t to, float2 v)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(v.x), "f"(v.y) : "memory");
}

__device__ __forceinline__ uint4 load_shared16(uint32_t from)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

template <int COUNT> __device__ __forceinline__ void registers_give_back()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ __forceinline__ void registers_take()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

} // namespace hopper

#endif
