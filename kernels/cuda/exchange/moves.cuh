/* SPDX-License-Identifier: Apache-2.0 */
/* Moves rows in registers, 16 bytes per lane at a time if the shape allows: loads a row once and
 * stores it at all its destinations. */
#ifndef MOE_CUDA_MOVES_CUH
#define MOE_CUDA_MOVES_CUH

#include "cuda/exchange/rows.cuh"

constexpr uint32_t MOVE_UNROLL = 8; /* loads in flight per lane */

/* The part of a row that a warp moves, in units. */
struct span {
    uint32_t begin, end;
};

/* Piece i of `pieces` of a row of `units`. */
__device__ inline struct span piece_of(uint32_t units, uint32_t i, uint32_t pieces)
{
    uint32_t width = ((units + pieces - 1) / pieces + 31) / 32 * 32;
    return {min(i * width, units), min((i + 1) * width, units)};
}

/* A lane's part of a row: units `at`, `at` + 32, ... below `end`. */
template <typename Unit> struct held_units {
    Unit value[MOVE_UNROLL];
    uint32_t at, end;
};

template <typename Unit>
__device__ inline void load_units(const void *from, uint32_t at, uint32_t end,
                                  struct held_units<Unit> *h)
{
    h->at = at;
    h->end = end;
#pragma unroll
    for (uint32_t u = 0; u < MOVE_UNROLL; u++)
        if (at + 32 * u < end)
            h->value[u] = __ldcg(static_cast<const Unit *>(from) + at + 32 * u);
}

/* Stores the units to the address `to` of each lane in `lanes`. `BLANKS`: into quick regions. */
template <typename Unit, bool BLANKS>
__device__ inline void scatter_units(const struct held_units<Unit> &h, uint32_t lanes, void *to)
{
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
        Unit *target = reinterpret_cast<Unit *>(
            __shfl_sync(ALL_LANES, reinterpret_cast<unsigned long long>(to), __ffs(left) - 1));
#pragma unroll
        for (uint32_t u = 0; u < MOVE_UNROLL; u++) {
            if (h.at + 32 * u >= h.end)
                continue;
            if constexpr (BLANKS)
                store_relaxed(target + h.at + 32 * u, without_blanks(h.value[u]));
            else
                target[h.at + 32 * u] = h.value[u];
        }
    }
}

/* Moves a span of a row. The first units are already loaded. */
template <typename Unit, bool BLANKS>
__device__ inline void scatter_row(const void *from, struct span s, struct held_units<Unit> *h,
                                   uint32_t lanes, void *to)
{
    scatter_units<Unit, BLANKS>(*h, lanes, to);
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t at = s.begin + 32 * MOVE_UNROLL; at < s.end; at += 32 * MOVE_UNROLL) {
        load_units(from, at + lane, s.end, h);
        scatter_units<Unit, BLANKS>(*h, lanes, to);
    }
}

#endif
