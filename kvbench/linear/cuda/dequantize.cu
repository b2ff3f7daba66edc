// Dequantized 4-bit weights, (code - zero) * scale, exact in fp32 and rounded once: out [channels, columns], contiguous.
//
// A CTA writes 16 output channels; each warp takes every WARPS-th tile of 64 input channels. A lane reads 16 bytes of
// codes and writes 8 neighbouring weights at a time.
//
// Macros: BF16 1 or 0 (fp16), the dtype of out; GROUP: input channels that share a scale; HALF: 1 if scales are fp16, 0
// if they are bf16; WARPS.

struct Args {
    const uint4* codes;
    const uint2* groups;
    uint4* out;
    int channels, columns;
};

// Two weights of one output channel, as the register `part` (0 to 3) of the matrix instruction holds them.
__device__ __forceinline__ u32 two_weights(u32 word, int part, float zero, float scale) {
    const u32 pair = word >> (4 * part) & 0x000f000fu;
    const u32 low = rounded(((float)(pair & 15) - zero) * scale), high = rounded(((float)(pair >> 16) - zero) * scale);
    return low | high << 16;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) dequantize(const __grid_constant__ Args a) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, tile = blockIdx.x;
    const int steps = a.columns / 64, groups = a.columns / GROUP;
    for (int step = threadIdx.x >> 5; step < steps; step += WARPS) {
        const uint4 words = a.codes[((size_t)tile * steps + step) * 32 + lane];
        const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint2 group = a.groups[((size_t)tile * groups + (step * 64 + h * 32) / GROUP) * 8 + g];
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const u32 bits = row ? group.y : group.x;
                const float zero = as_float(bits & 0xffff0000u) - 128.0f;
#if HALF
                const float scale = from_half(bits & 0xffffu);
#else
                const float scale = as_float(bits << 16);
#endif
                uint4 weights;
                weights.x = two_weights(word[2 * h], row, zero, scale);
                weights.y = two_weights(word[2 * h], row + 2, zero, scale);
                weights.z = two_weights(word[2 * h + 1], row, zero, scale);
                weights.w = two_weights(word[2 * h + 1], row + 2, zero, scale);
                const int channel = tile * 16 + g + 8 * row;
                if (channel < a.channels) a.out[((size_t)channel * a.columns + step * 64 + h * 32) / 8 + t] = weights;
            }
        }
    }
}
