// Products of one step, and the sum over the warps of a CTA.

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

// Add the sums of the warps of a CTA, always in the same order, and write the output channels from `begin` on.
__device__ __forceinline__ void merge(const Args& a, float (*acc)[NT][4], float* sums, int begin, int end) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
            ((float4*)sums)[((warp * MT + m) * NT + n) * 32 + lane] =
                make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
    __syncthreads();
    for (int i = threadIdx.x; i < a.rows * MT * 16; i += WARPS * 32) {
        const int r = i / (MT * 16), c = i % (MT * 16), channel = begin + c;
        const int place = (((c >> 4) * NT + (r >> 3)) * 32 + (c & 7) * 4 + ((r & 7) >> 1)) * 4 + ((c >> 3) & 1) * 2 + (r & 1);
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w * (PARTIAL / 4) + place];
        if (channel < end) {
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
