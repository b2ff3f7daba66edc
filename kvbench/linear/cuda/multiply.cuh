// Products of one step, and the sum over the warps of a CTA.

// Multiply one step; x is where its inputs begin, and row[n] where this lane's column of them does.
__device__ __forceinline__ void multiply(float (*acc)[NT][4], const Step& s, u32 x, const u32* row, int k) {
    uint4 b[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) b[n] = load16(x + (row[n] ^ (k * 64)));
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const uint4 p = s.w[m][0], q = s.w[m][1];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma(acc[m][n], p.x, q.x, p.y, q.y, b[n].x, b[n].y);
            mma(acc[m][n], p.z, q.z, p.w, q.w, b[n].z, b[n].w);
        }
    }
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
