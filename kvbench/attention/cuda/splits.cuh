// ---- partial results: what CTAs that share the tokens of a head leave for the last of them ------------------------
// Rows of merged outputs in shared memory are PITCH floats apart, so that lanes write to different banks.
constexpr int PITCH = D + 4, QUADS = D / 4;

// Writes four neighbouring channels of row r of the CTA to the output.
__device__ __forceinline__ void write_output(const Args& args, int r, int d, const float4& x, float by) {
  const int bh = blockIdx.y, b = bh / args.heads, head = bh % args.heads;
  const i64 token = (i64)b * args.qlen + r % args.qlen;
  const i64 at = (token * args.heads * args.group + head * args.group + r / args.qlen) * D + d;
  *(uint2*)(args.out + at) = make_uint2(exact2_of(x.x * by, x.y * by), exact2_of(x.z * by, x.w * by));
}

// The sink of a query head in bits.
__device__ __forceinline__ float sink_of(const Args& args, int head) {
#if SINKS == 2
  return ((const float*)args.sinks)[head] * 1.44269504f;
#else
  return float_of_exact(((const u16*)args.sinks)[head]) * 1.44269504f;
#endif
}

// What a query head's sink adds to the sum of weights, whose largest score is `top`.
__device__ __forceinline__ float sink_weight(const Args& args, int r, float top) {
#if SINKS
  return exp2_of(sink_of(args, blockIdx.y % args.heads * args.group + r / args.qlen) - top + LIFT);
#else
  return 0.f;
#endif
}

__device__ __forceinline__ void add(float4& x, const float4& y, float f) {
  x.x += y.x * f, x.y += y.y * f, x.z += y.z * f, x.w += y.w * f;
}

// Merges the partial results of a head's CTAs, a row by one warp, and writes the output.
//   partial, sums  of the head's first CTA
//   weights        shared memory for [WARPS][splits] numbers
__device__ __forceinline__ void merge_splits(const Args& args, const float* partial, const float* sums, float* weights,
                                             int block0, int rows) {
  constexpr int BATCH = 16;  // reads of a lane that are on their way at once
  const int lane = threadIdx.x & 31, splits = args.splits;
  constexpr int PARTS = (QUADS + 31) / 32;  // of a row, of which a lane takes four channels each
  for (int item = threadIdx.x >> 5; item < rows * PARTS; item += WARPS) {
    const int r = item / PARTS, quad = item % PARTS * 32 + lane;
    const float4* from = (const float4*)(partial + r * D) + quad;
    const bool there = quad < QUADS;
    float4 y[BATCH];
    auto read = [&](int begin) {
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (there && begin + i < splits) y[i] = __ldcg(from + (i64)(begin + i) * (ROWS * QUADS));
    };
    read(0);  // which needs no weights yet
    float* own = weights + (threadIdx.x >> 5) * splits;
    __syncwarp();  // the row before is done
    float top = -1e30f, total = 0.f;
    for (int s = lane; s < splits; s += 32) {
      const float2 sum = __ldcg((const float2*)(sums + s * ROWS * 2 + r * 2));
      own[s] = sum.x;
      // of what this lane has seen
      const float most = fmaxf(top, sum.x);
      total = total * exp2_of(top - most) + sum.y * exp2_of(sum.x - most);
      top = most;
    }
    float all = top;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) all = fmaxf(all, __shfl_xor_sync(~0u, all, lanes));
    total *= exp2_of(top - all);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) total += __shfl_xor_sync(~0u, total, lanes);
    for (int s = lane; s < splits; s += 32) own[s] = exp2_of(own[s] - all);
    __syncwarp();
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int begin = 0; begin < splits; begin += BATCH) {
      if (begin > 0) read(begin);
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (begin + i < splits) add(x, y[i], own[begin + i]);
    }
    if (there) write_output(args, block0 + r, quad * 4, x, 1.f / (total + sink_weight(args, block0 + r, all)));
  }
}
