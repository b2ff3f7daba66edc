// Products of 1 to 16 rows with a weight matrix of 16 bits: out[r][n] = sum_k w[n][k] x[r][k] + bias[n].
//
// The weights are the A operand of mma.m16n8k16 (16 output channels), the rows of x its 8 columns. A CTA computes a range
// of output channels, MT tiles of 16 at a time (a block). Its warps share out the input channels; each copies its
// weights into a ring buffer of its own (cp.async) or into registers, so that the loop has no barrier. At the end of a
// block the CTA adds the sums of its warps, always in the same order.
//
// Macros
//   BF16        1 if x and out are bf16, 0 if they are fp16
//   NT          number of 8 columns: 1 for up to 8 rows of x, 2 for up to 16
//   MT          tiles of 16 output channels in a block
//   WARPS       warps in a CTA
//   UNIT        input channels of a slot of a warp's ring: 64 or 128
//   SPREAD      1 if the warps take units in turn, so that a CTA reads long pieces of rows; 0 if each takes a range
//   STAGES      slots of a warp's ring
//   XRES        1 if a warp keeps its part of x in shared memory, 0 if x passes through the ring
//   DIRECT      1 if weights pass through registers, STAGES steps ahead, instead of the ring; requires XRES, and that the
//               steps of a unit divide STAGES
//   HINT        how weights pass the L2 cache: 0 as the hardware does, 1 first to be evicted, 2 also 256 bytes at a time
//   PDL, EARLY  1 with programmatic dependent launch: EARLY slots of weights are requested before the kernel launched
//               before this one has ended; x is not
//   MINB        CTAs that a multiprocessor must be able to run, which bounds registers

extern "C" __global__ void __launch_bounds__(WARPS * 32, MINB) product(const __grid_constant__ Args a) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // this warp's units: `count` of them from `first` on, each NEXT units after the one before
    const int units = a.columns / UNIT, first = SPREAD ? warp : units * warp / WARPS;
    const int count = SPREAD ? (units - warp + WARPS - 1) / WARPS : units * (warp + 1) / WARPS - first;
    int most = (units + WARPS - 1) / WARPS;
    if (DIRECT) most = (most * PER_UNIT + STAGES - 1) / STAGES * STAGES / PER_UNIT;
    const u32 xunit = a.rows * XROW, slot_bytes = BLOCK + (XRES ? 0 : xunit), kept = XRES ? most * xunit : 0;
    const u32 base = address(memory) + 2 * WARPS * PARTIAL + warp * (kept + (DIRECT ? 0 : STAGES) * slot_bytes);
    const int begin = (int)((long long)a.channels * blockIdx.x / gridDim.x);  // this CTA's output channels
    const int end = (int)((long long)a.channels * (blockIdx.x + 1) / gridDim.x);
    // two places, as a warp may be a block ahead of the one that adds the sums
    float* const sums = (float*)memory;
    const u64 policy = read_once();
    int side = 0;
    float acc[MT][NT][4];

    u32 row[NT];  // where this lane's column of x begins in a slot
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int r = min((lane >> 2) + 8 * n, a.rows - 1);
        row[n] = r * XROW + (r & 1) * 64 + (lane & 3) * 16;
    }

#if DIRECT
    // weights pass through registers, STAGES steps ahead; a warp's steps are made a multiple of STAGES by empty ones
    const int steps = count * PER_UNIT, rounds = (steps + STAGES - 1) / STAGES;
    Step ring[STAGES];
    Source from;
    aim(from, a, begin, end, first, lane);
#if PDL
#pragma unroll
    for (int d = 0; d < STAGES; d++) fetch(ring[d], from, d, d < steps, policy);
    wait_for_previous();
#endif
    for (int i = 0; i < rounds * STAGES / PER_UNIT; i++)
        request_x(a, base + i * xunit, first + min(i, count - 1) * NEXT, lane);
    commit();
#if !PDL
#pragma unroll
    for (int d = 0; d < STAGES; d++) fetch(ring[d], from, d, d < steps, policy);
#endif
    arrive<0>();
    __syncwarp();
    for (int b = begin; b < end; b += MT * 16, side ^= 1) {
        clear(acc);
        for (int r = 0; r < rounds; r++) {
            const bool on = r + 1 < rounds;
            const int ahead = on ? (r + 1) * STAGES : 0;
            aim(from, a, on ? b : b + MT * 16, end, first + ahead / PER_UNIT * NEXT, lane);
#pragma unroll
            for (int d = 0; d < STAGES; d++) {
                multiply(acc, ring[d], base + (r * (STAGES / PER_UNIT) + d / PER_UNIT) * xunit, row, d % PER_UNIT);
                fetch(ring[d], from, d, ahead + d < steps, policy);
            }
        }
        merge(a, acc, sums + side * (WARPS * PARTIAL / 4), b, end);
    }
#else
    // the next slot to request: the warp's unit `i` of the output channels from `ahead` on
    const u32 ring = base + kept;
    int ahead = count ? begin : end, i = 0;
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (s == EARLY) {
#if PDL
            wait_for_previous();
#endif
            if (XRES)
                for (int j = 0; j < count; j++) request_x(a, base + j * xunit, first + j * NEXT, lane);
            else
                for (int e = 0, b = begin, j = 0; e < EARLY && b < end && count; e++) {
                    request_x(a, ring + e * slot_bytes + BLOCK, first + j * NEXT, lane);
                    if (++j == count) j = 0, b += MT * 16;
                }
            commit();
        }
        if (s == STAGES - 1) break;
        if (ahead < end) {
            request(a, ring + s * slot_bytes, ahead, end, first + i * NEXT, lane, policy);
            if (!XRES && s >= EARLY) request_x(a, ring + s * slot_bytes + BLOCK, first + i * NEXT, lane);
            if (++i == count) i = 0, ahead += MT * 16;
        }
        commit();
    }

    int slot = 0;
    arrive<STAGES - 1 - EARLY>();  // x, and the slots requested before it
    for (int b = begin; b < end; b += MT * 16, side ^= 1) {
        clear(acc);
        for (int j = 0; j < count; j++) {
            arrive<STAGES - 2>();
            __syncwarp();
            if (ahead < end) {
                const u32 to = ring + (slot == 0 ? STAGES - 1 : slot - 1) * slot_bytes;
                request(a, to, ahead, end, first + i * NEXT, lane, policy);
                if (!XRES) request_x(a, to + BLOCK, first + i * NEXT, lane);
                if (++i == count) i = 0, ahead += MT * 16;
            }
            commit();
            const u32 at = ring + slot * slot_bytes;
#pragma unroll
            for (int k = 0; k < PER_UNIT; k++) {
                Step step;
                read(step, at, k, lane);
                multiply(acc, step, XRES ? base + j * xunit : at + BLOCK, row, k);
            }
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
        merge(a, acc, sums + side * (WARPS * PARTIAL / 4), b, end);
    }
#endif
}
