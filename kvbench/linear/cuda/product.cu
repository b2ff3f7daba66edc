// Products of 1 to 16 rows with a weight matrix of 4 or 16 bits: out[r][n] = sum_k w[n][k] x[r][k] + bias[n].
//
// The weights are the A operand of mma.m16n8k16 (16 output channels), the rows of x its 8 columns. The warps of a CTA
// share out the input channels; each copies its weights into a ring buffer of its own (cp.async), so that the loop has
// no barrier. At the end of a block of output channels the CTA adds the sums of its warps, always in the same order.
//
// Macros: BITS 4 or 16; UNIT: input channels of a slot (4 bits: 128; 16 bits: 64 or 128); BF16 1 or 0 (fp16), the dtype of x and out; GROUP (4 bits): input channels that share a scale;
// HALF (4 bits): 1 if scales are fp16, 0 if bf16; NT: number of 8 columns; MT: tiles of 16 output channels in a block;
// WARPS; CHAINS (4 bits): 1 or 2 sums in turn; STAGES: slots of a warp's ring; XRES: 1 if a warp keeps its part of x in shared memory, 0 if x passes through
// the ring; EARLY: slots whose weights are requested before x (programmatic launch: before the kernel before has ended);
// DIRECT: 1 if weights pass through registers instead of a ring in shared memory, STAGES steps ahead
// (with XRES; PER_UNIT must divide STAGES);
// PDL: 1 to wait for that kernel before x is read; MINB: CTAs that a multiprocessor must be able to run.

struct Args {
    const u16* x;
    const char* weight;
    const char* groups;
    const u16* bias;
    u16* out;
    long long stride;  // 16 bits: bytes from one row of the matrix to the next
    int channels, columns, rows, tiles;  // output channels, input channels, rows of x, tiles of 16 output channels
};

#if BITS == 4
#define CODES (16 * UNIT / 2)  // bytes of a slot's weights, for 16 output channels
#define PARAMS (64 * (UNIT / GROUP))
#else
#define CODES (16 * UNIT * 2)
#define PARAMS 0
#endif
#define XROW (UNIT * 2)       // bytes of a row of x in a slot
#define BLOCK (MT * (CODES + PARAMS))
#define PARTIAL (MT * NT * 512)
#define STEP (BITS == 4 ? 128 : 32)  // input channels multiplied at a time
#define PER_UNIT (UNIT / STEP)

// The weights of 16 MT output channels and STEP input channels that one lane multiplies. 4 bits: 64 input channels in
// each of w[m][0] and w[m][1], and the words of their groups. 16 bits: 8 input channels of rows g and g + 8.
struct Step {
    uint4 w[MT][2];
#if BITS == 4
    uint2 g[MT][STEP / GROUP];
#endif
};

// Request the weights (and scales) of one slot: the tiles from `tile` on, before `end`.
__device__ __forceinline__ void request(const Args& a, u32 slot, int tile, int end, int unit, int lane, u64 policy) {
#pragma unroll
    for (int m = 0; m < MT; m++, tile++) {
        if (MT > 1 && tile >= end) return;
#if BITS == 4
        const char* from = a.weight + (size_t)tile * (a.columns * 8) + unit * CODES + lane * 16;
        copy_weights(slot + m * CODES + lane * 16, from, policy);
        copy_weights(slot + m * CODES + 512 + lane * 16, from + 512, policy);
        if (lane < PARAMS / 16)
            copy_weights(slot + MT * CODES + m * PARAMS + lane * 16,
                         a.groups + (size_t)tile * (a.columns / GROUP * 64) + unit * PARAMS + lane * 16, policy);
#else
#pragma unroll
        for (int i = 0; i < UNIT / 16; i++) {  // whole rows of a slot; lane 4 g + t will read 16 bytes of rows g and g + 8
            const int place = i * 32 + lane, row = place / (XROW / 16), piece = place % (XROW / 16);
            const char* from = a.weight + (long long)min(tile * 16 + row, a.channels - 1) * a.stride + unit * XROW + piece * 16;
            copy_weights(slot + m * CODES + (((piece >> 2) * 2 + (row >> 3)) * 32 + (row & 7) * 4 + (piece & 3)) * 16, from, policy);
        }
#endif
    }
}

// Read step k of a slot.
__device__ __forceinline__ void read(Step& s, u32 slot, int k, int lane) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) s.w[m][i] = load16(slot + m * CODES + k * 1024 + i * 512 + lane * 16);
#if BITS == 4
#pragma unroll
        for (int i = 0; i < STEP / GROUP; i++)
            s.g[m][i] = load8(slot + MT * CODES + m * PARAMS + i * 64 + (lane >> 2) * 8);
#endif
    }
}

// Addresses of a lane's weights in a step, for each tile; null for tiles that the CTA does not have.
struct Source {
    const char* w[MT][BITS == 4 ? 1 : 2];
    const char* g[MT];
};

__device__ __forceinline__ void aim(Source& s, const Args& a, int tile, int end, int step, int lane) {
#pragma unroll
    for (int m = 0; m < MT; m++, tile++) {
#if BITS == 4
        s.w[m][0] = a.weight + (size_t)tile * (a.columns * 8) + step * 1024 + lane * 16;
        s.g[m] = a.groups + ((size_t)tile * (a.columns / GROUP) + step * (STEP / GROUP)) * 64 + (lane >> 2) * 8;
#else
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = min(tile * 16 + i * 8 + (lane >> 2), a.channels - 1);
            s.w[m][i] = a.weight + (long long)row * a.stride + step * 64 + (lane & 3) * 16;
        }
#endif
        if (tile >= end) s.w[m][0] = 0;
    }
}

// Load step d after the one that a source aims at into registers; without `valid`, weights that are 0.
__device__ __forceinline__ void fetch(Step& s, const Source& from, int d, bool valid, u64 policy) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const bool there = valid && from.w[m][0];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s.w[m][i] = make_uint4(0, 0, 0, 0);
#if BITS == 4
            if (there) s.w[m][i] = load_weights16(from.w[m][0] + d * 1024 + i * 512, policy);
#else
            if (there) s.w[m][i] = load_weights16(from.w[m][i] + d * 64, policy);
#endif
        }
#if BITS == 4
#pragma unroll
        for (int i = 0; i < STEP / GROUP; i++) {
            s.g[m][i] = make_uint2(0, 0);
            if (there) s.g[m][i] = load_weights8(from.g[m] + (d * (STEP / GROUP) + i) * 64, policy);
        }
#endif
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

// Multiply one step; x is where its inputs begin, and row[n] where this lane's column of them does.
__device__ __forceinline__ void multiply(float (*acc)[NT][4], const Step& s, u32 x, const u32* row, int k16) {
#if BITS == 4
    float part[MT][NT][CHAINS][4], sums[NT][4];
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
            const uint4 w = s.w[m][k / 2];
            const u32 w0 = k % 2 ? w.z : w.x, w1 = k % 2 ? w.w : w.y;
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
                const uint2 g = s.g[m][k * 32 / GROUP];
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
#else
    uint4 b[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) b[n] = load16(x + (row[n] ^ (k16 * 64)));
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const uint4 p = s.w[m][0], q = s.w[m][1];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma(acc[m][n], p.x, q.x, p.y, q.y, b[n].x, b[n].y);
            mma(acc[m][n], p.z, q.z, p.w, q.w, b[n].z, b[n].w);
        }
    }
#endif
}

// Add the sums of the warps of a CTA, always in the same order, and write the output of the tiles from `tile` on.
__device__ __forceinline__ void merge(const Args& a, float (*acc)[NT][4], float* sums, int tile, int end) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
            ((float4*)sums)[((warp * MT + m) * NT + n) * 32 + lane] =
                make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
    __syncthreads();
    for (int i = threadIdx.x; i < a.rows * MT * 16; i += WARPS * 32) {
        const int r = i / (MT * 16), c = i % (MT * 16), channel = tile * 16 + c;
        const int place = (((c >> 4) * NT + (r >> 3)) * 32 + (c & 7) * 4 + ((r & 7) >> 1)) * 4 + ((c >> 3) & 1) * 2 + (r & 1);
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w * (PARTIAL / 4) + place];
        if (channel < a.channels && channel < end * 16) {
            if (a.bias) sum += number(a.bias[channel]);
            a.out[(size_t)r * a.channels + channel] = rounded(sum);
        }
    }
}

__device__ __forceinline__ void clear(float (*acc)[NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = 0;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MINB) product(const __grid_constant__ Args a) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int units = a.columns / UNIT, first = units * warp / WARPS, last = units * (warp + 1) / WARPS;
    int most = (units + WARPS - 1) / WARPS;
    if (DIRECT) most = (most * PER_UNIT + STAGES - 1) / STAGES * STAGES / PER_UNIT;
    const u32 xunit = a.rows * XROW, slot_bytes = BLOCK + (XRES ? 0 : xunit), kept = XRES ? most * xunit : 0;
    const u32 base = address(memory) + 2 * WARPS * PARTIAL + warp * (kept + (DIRECT ? 0 : STAGES) * slot_bytes);
    // this CTA's tiles; two places for sums, as a warp may be a block ahead of the one that adds them
    const int begin = (int)((long long)a.tiles * blockIdx.x / gridDim.x);
    const int end = (int)((long long)a.tiles * (blockIdx.x + 1) / gridDim.x);
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
    const int steps = (last - first) * PER_UNIT, start = first * PER_UNIT, rounds = (steps + STAGES - 1) / STAGES;
    Step ring[STAGES];
    Source from;
    aim(from, a, begin, end, start, lane);
#if PDL
#pragma unroll
    for (int d = 0; d < STAGES; d++) fetch(ring[d], from, d, d < steps, policy);
    wait_for_previous();
#endif
    for (int u = 0; u < rounds * STAGES / PER_UNIT; u++) request_x(a, base + u * xunit, min(first + u, last - 1), lane);
    commit();
#if !PDL
#pragma unroll
    for (int d = 0; d < STAGES; d++) fetch(ring[d], from, d, d < steps, policy);
#endif
    arrive<0>();
    __syncwarp();
    for (int tile = begin; tile < end; tile += MT, side ^= 1) {
        clear(acc);
        for (int r = 0; r < rounds; r++) {
            const bool on = r + 1 < rounds;
            const int ahead = on ? (r + 1) * STAGES : 0;
            aim(from, a, on ? tile : tile + MT, end, start + ahead, lane);
#pragma unroll
            for (int d = 0; d < STAGES; d++) {
                multiply(acc, ring[d], base + (r * (STAGES / PER_UNIT) + d / PER_UNIT) * xunit, row, d % PER_UNIT);
                fetch(ring[d], from, d, ahead + d < steps, policy);
            }
        }
        merge(a, acc, sums + side * (WARPS * PARTIAL / 4), tile, end);
    }
#else
    // the next slot to request: unit `unit` of the tiles from `tile` on
    const u32 ring = base + kept;
    int tile = first == last ? end : begin, unit = first;
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (s == EARLY) {
#if PDL
            wait_for_previous();
#endif
            if (XRES)
                for (int u = first; u < last; u++) request_x(a, base + (u - first) * xunit, u, lane);
            else
                for (int e = 0, b = begin, u = first; e < EARLY && b < end && first < last; e++) {
                    request_x(a, ring + e * slot_bytes + BLOCK, u, lane);
                    if (++u == last) u = first, b += MT;
                }
            commit();
        }
        if (s == STAGES - 1) break;
        if (tile < end) {
            request(a, ring + s * slot_bytes, tile, end, unit, lane, policy);
            if (!XRES && s >= EARLY) request_x(a, ring + s * slot_bytes + BLOCK, unit, lane);
            if (++unit == last) unit = first, tile += MT;
        }
        commit();
    }

    int slot = 0;
    arrive<STAGES - 1 - EARLY>();  // x, and the slots requested before it
    for (int b = begin; b < end; b += MT, side ^= 1) {
        clear(acc);
        for (int u = first; u < last; u++) {
            arrive<STAGES - 2>();
            __syncwarp();
            if (tile < end) {
                const u32 to = ring + (slot == 0 ? STAGES - 1 : slot - 1) * slot_bytes;
                request(a, to, tile, end, unit, lane, policy);
                if (!XRES) request_x(a, to + BLOCK, unit, lane);
                if (++unit == last) unit = first, tile += MT;
            }
            commit();
            const u32 at = ring + slot * slot_bytes;
#pragma unroll
            for (int k = 0; k < PER_UNIT; k++) {
                Step step;
                read(step, at, k, lane);
                multiply(acc, step, XRES ? base + (u - first) * xunit : at + BLOCK, row, k);
            }
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
        merge(a, acc, sums + side * (WARPS * PARTIAL / 4), b, end);
    }
#endif
}
