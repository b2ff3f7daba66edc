// Sizes, and the ways of weights and inputs from global memory to the lanes that multiply them.

struct Args {
    const u16* x;
    const char* weight;
    const char* groups;  // unused: of 4-bit weights
    const u16* bias;
    u16* out;
    long long stride;  // 16 bits: bytes from one row of the matrix to the next
    int channels, columns, rows;  // output channels, input channels, rows of x
};

#define CODES (16 * UNIT * 2)
#define XROW (UNIT * 2)       // bytes of a row of x in a slot
#define BLOCK (MT * CODES)
#define PARTIAL (MT * NT * 512)
#define STEP 32  // input channels multiplied at a time
#define PER_UNIT (UNIT / STEP)
#define NEXT (SPREAD ? WARPS : 1)  // distance from one unit of a warp to its next

// The weights of 16 MT output channels and STEP input channels that one lane multiplies: 8 input channels of rows g and
// g + 8.
struct Step {
    uint4 w[MT][2];
};

// Request the weights of one slot: the output channels from `channel` on, before `end`.
__device__ __forceinline__ void request(const Args& a, u32 slot, int channel, int end, int unit, int lane, u64 policy) {
#pragma unroll
    for (int m = 0; m < MT; m++, channel += 16) {
#pragma unroll
        for (int i = 0; i < UNIT / 16; i++) {  // whole rows of a slot; lane 4 g + t will read 16 bytes of rows g and g + 8
            const int place = i * 32 + lane, row = place / (XROW / 16), piece = place % (XROW / 16);
            const char* from = a.weight + (long long)(channel + row) * a.stride + unit * XROW + piece * 16;
            const u32 to = slot + m * CODES + (((piece >> 2) * 2 + (row >> 3)) * 32 + (row & 7) * 4 + (piece & 3)) * 16;
            if (channel + row < end) copy_weights(to, from, policy);
        }
    }
}

// Read step k of a slot.
__device__ __forceinline__ void read(Step& s, u32 slot, int k, int lane) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) s.w[m][i] = load16(slot + m * CODES + k * 1024 + i * 512 + lane * 16);
    }
}

// Addresses of a lane's weights in the first step of a unit, for each tile; null for channels that the CTA does not have.
struct Source {
    const char* w[MT][2];
};

__device__ __forceinline__ void aim(Source& s, const Args& a, int channel, int end, int unit, int lane) {
#pragma unroll
    for (int m = 0; m < MT; m++, channel += 16) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = channel + i * 8 + (lane >> 2);
            s.w[m][i] = row < end ? a.weight + (long long)row * a.stride + unit * XROW + (lane & 3) * 16 : 0;
        }
    }
}

// Load step d of the warp, counted from the unit that a source aims at, into registers; without `valid`, weights that
// are 0.
__device__ __forceinline__ void fetch(Step& s, const Source& from, int d, bool valid, u64 policy) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s.w[m][i] = make_uint4(0, 0, 0, 0);
            if (valid && from.w[m][i])
                s.w[m][i] = load_weights16(from.w[m][i] + d / PER_UNIT * (NEXT * XROW) + d % PER_UNIT * 64, policy);
        }
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
