// Products of 1 to 16 rows with a weight matrix of 4 bits: out[r][n] = sum_k w[n][k] x[r][k] + bias[n].
//
// The weights are the A operand of mma.m16n8k16 (16 output channels), the rows of x its 8 columns. A CTA takes every
// gridDim.x-th block of MT tiles of 16 output channels. Its warps share out the input channels; each copies its weights
// into a ring buffer of its own (cp.async), so that the loop has no barrier. At the end of a block the CTA adds the sums
// of its warps, always in the same order.
//
// Macros
//   BF16        1 if x and out are bf16, 0 if they are fp16
//   GROUP       input channels that share a scale
//   HALF        1 if scales are fp16, 0 if they are bf16
//   NT          number of 8 columns: 1 for up to 8 rows of x, 2 for up to 16
//   MT          tiles of 16 output channels in a block
//   WARPS       warps in a CTA
//   UNIT        input channels of a slot of a warp's ring: 128
//   STAGES      slots of a warp's ring
//   XRES        1 if a warp keeps its part of x in shared memory, 0 if x passes through the ring
//   CHAINS      sums that the matrix instructions add to in turn, 1 or 2
//   HINT        how weights pass the L2 cache: 0 as the hardware does, 1 first to be evicted, 2 also 256 bytes at a time
//   PDL, EARLY  1 with programmatic dependent launch: EARLY slots of weights are requested before the kernel launched
//               before this one has ended; x is not
//   MINB        CTAs that a multiprocessor must be able to run, which bounds registers

struct Args {
    const u16* x;
    const char* weight;
    const char* groups;
    const u16* bias;
    u16* out;
    long long stride;  // unused: the tiles of a matrix lie one after another
    int channels, columns, rows, tiles;  // output channels, input channels, rows of x, tiles of 16 output channels
};

#define CODES (16 * UNIT / 2)  // bytes of a slot's weights, for 16 output channels
#define PARAMS (64 * (UNIT / GROUP))
#define XROW (UNIT * 2)       // bytes of a row of x in a slot
#define BLOCK (MT * (CODES + PARAMS))
#define PARTIAL (MT * NT * 512)

// Request the weights (and scales) of one slot.
__device__ __forceinline__ void request(const Args& a, u32 slot, int block, int unit, int lane, u64 policy) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
        int tile = block * MT + m;
        if (MT > 1) tile = min(tile, a.tiles - 1);
        const char* from = a.weight + (size_t)tile * (a.columns * 8) + unit * CODES + lane * 16;
        copy_weights(slot + m * CODES + lane * 16, from, policy);
        copy_weights(slot + m * CODES + 512 + lane * 16, from + 512, policy);
        if (lane < PARAMS / 16)
            copy_weights(slot + MT * CODES + m * PARAMS + lane * 16,
                         a.groups + (size_t)tile * (a.columns / GROUP * 64) + unit * PARAMS + lane * 16, policy);
    }
}

// Request one slot's part of x: rows of XROW bytes, whose 64-byte halves are swapped in odd rows (no bank conflicts).
__device__ __forceinline__ void request_x(const Args& a, u32 to, int unit, int lane) {
    for (int c = lane; c < a.rows * (XROW / 16); c += 32) {
        const int row = c / (XROW / 16), piece = c % (XROW / 16);
        copy16(to + row * XROW + ((piece * 16) ^ ((row & 1) * 64)),
               (const char*)a.x + ((size_t)row * a.columns + (size_t)unit * UNIT) * 2 + piece * 16);
    }
}

// Multiply one slot.
__device__ __forceinline__ void multiply(float (*acc)[NT][4], u32 slot, u32 x, const u32* row, int lane) {
    float part[MT][NT][CHAINS][4], sums[NT][4];
    uint4 words[MT];
#pragma unroll
    for (int k = 0; k < 4; k++) {  // 32 input channels each
        if (k * 32 % GROUP == 0) {
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[n][i] = 0;
#pragma unroll
                    for (int m = 0; m < MT; m++)
#pragma unroll
                        for (int c = 0; c < CHAINS; c++) part[m][n][c][i] = 0;
                }
        }
        uint4 b[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            b[n] = load16(x + (row[n] ^ (k * 64)));
            mma(sums[n], ONES, ONES, ONES, ONES, b[n].x, b[n].y);
            mma(sums[n], ONES, ONES, ONES, ONES, b[n].z, b[n].w);
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
            if (k % 2 == 0) words[m] = load16(slot + m * CODES + (k >> 1) * 512 + lane * 16);
            const u32 w0 = k % 2 ? words[m].z : words[m].x, w1 = k % 2 ? words[m].w : words[m].y;
            const u32 a0 = two_codes(w0), a1 = two_codes(w0 >> 4), a2 = two_codes(w0 >> 8), a3 = two_codes(w0 >> 12);
            const u32 c0 = two_codes(w1), c1 = two_codes(w1 >> 4), c2 = two_codes(w1 >> 8), c3 = two_codes(w1 >> 12);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                mma(part[m][n][0], a0, a1, a2, a3, b[n].x, b[n].y);
                mma(part[m][n][CHAINS - 1], c0, c1, c2, c3, b[n].z, b[n].w);
            }
        }
        if ((k + 1) * 32 % GROUP == 0) {
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const uint2 g = load8(slot + MT * CODES + m * PARAMS + (k * 32 / GROUP) * 64 + (lane >> 2) * 8);
                const float z0 = as_float(g.x & 0xffff0000u) + MORE, z1 = as_float(g.y & 0xffff0000u) + MORE;
#if HALF
                const float s0 = from_half(g.x), s1 = from_half(g.y);
#else
                const float s0 = as_float(g.x << 16), s1 = as_float(g.y << 16);
#endif
#pragma unroll
                for (int n = 0; n < NT; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float p = part[m][n][0][i];
                        if (CHAINS > 1) p += part[m][n][CHAINS - 1][i];
                        acc[m][n][i] += (i < 2 ? s0 : s1) * (p - (i < 2 ? z0 : z1) * sums[n][i & 1]);
                    }
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MINB) product(const __grid_constant__ Args a) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int units = a.columns / UNIT, first = units * warp / WARPS, last = units * (warp + 1) / WARPS;
    const int most = (units + WARPS - 1) / WARPS;
    const u32 xunit = a.rows * XROW, slot_bytes = BLOCK + (XRES ? 0 : xunit), kept = XRES ? most * xunit : 0;
    const u32 base = address(memory) + 2 * WARPS * PARTIAL + warp * (kept + STAGES * slot_bytes);
    const u32 ring = base + kept;
    float* partials = (float*)memory;
    const int blocks = (a.tiles + MT - 1) / MT;
    const u64 policy = read_once();

    u32 row[NT];  // where this lane's column of x begins in a slot
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int r = min((lane >> 2) + 8 * n, a.rows - 1);
        row[n] = r * XROW + (r & 1) * 64 + (lane & 3) * 16;
    }

    // the next slot to request: unit `unit` of block `block`
    int block = blockIdx.x, unit = first;
    if (first == last) block = blocks;
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (s == EARLY) {
#if PDL
            wait_for_previous();
#endif
            if (XRES)
                for (int u = first; u < last; u++) request_x(a, base + (u - first) * xunit, u, lane);
            else
                for (int e = 0, b = blockIdx.x, u = first; e < EARLY && b < blocks && first < last; e++) {
                    request_x(a, ring + e * slot_bytes + BLOCK, u, lane);
                    if (++u == last) u = first, b += gridDim.x;
                }
            commit();
        }
        if (s == STAGES - 1) break;
        if (block < blocks) {
            request(a, ring + s * slot_bytes, block, unit, lane, policy);
            if (!XRES && s >= EARLY) request_x(a, ring + s * slot_bytes + BLOCK, unit, lane);
            if (++unit == last) unit = first, block += gridDim.x;
        }
        commit();
    }

    int slot = 0, side = 0;
    arrive<STAGES - 1 - EARLY>();  // x, and the slots requested before it
    for (int b = blockIdx.x; b < blocks; b += gridDim.x, side ^= 1) {
        float acc[MT][NT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[m][n][i] = 0;
        for (int u = first; u < last; u++) {
            arrive<STAGES - 2>();
            __syncwarp();
            if (block < blocks) {
                const u32 to = ring + (slot == 0 ? STAGES - 1 : slot - 1) * slot_bytes;
                request(a, to, block, unit, lane, policy);
                if (!XRES) request_x(a, to + BLOCK, unit, lane);
                if (++unit == last) unit = first, block += gridDim.x;
            }
            commit();
            const u32 at = ring + slot * slot_bytes;
            multiply(acc, at, XRES ? base + (u - first) * xunit : at + BLOCK, row, lane);
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
        float* to = partials + side * (WARPS * PARTIAL / 4);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
                ((float4*)to)[((warp * MT + m) * NT + n) * 32 + lane] = make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
        __syncthreads();
        for (int i = threadIdx.x; i < a.rows * MT * 16; i += WARPS * 32) {
            const int r = i / (MT * 16), c = i % (MT * 16), channel = b * MT * 16 + c;
            const int place = (((c >> 4) * NT + (r >> 3)) * 32 + (c & 7) * 4 + ((r & 7) >> 1)) * 4 + ((c >> 3) & 1) * 2 + (r & 1);
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += to[w * (PARTIAL / 4) + place];
            if (channel < a.channels) {
                if (a.bias) sum += number(a.bias[channel]);
                a.out[(size_t)r * a.channels + channel] = rounded(sum);
            }
        }
    }
}
