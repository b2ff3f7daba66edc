// ---- merging -------------------------------------------------------------------------------------------------------
// Rows of merged outputs in shared memory are PITCH floats apart, so that lanes write to different banks.
constexpr int PITCH = D + 4, QUADS = D / 4;

// Writes four neighbouring channels of row r of the CTA to the output.
__device__ __forceinline__ void write_output(const Args& args, int r, int d, const float4& x, float by) {
  const int bh = blockIdx.y, b = bh / args.heads, head = bh % args.heads;
  const i64 token = (i64)b * args.qlen + r % args.qlen;
  const i64 at = (token * args.heads * args.group + head * args.group + r / args.qlen) * D + d;
  *(uint2*)(args.out + at) = make_uint2(exact2_of(x.x * by, x.y * by), exact2_of(x.z * by, x.w * by));
}

// What a query head's sink adds to the sum of weights, whose largest score is `top`.
__device__ __forceinline__ float sink_weight(const Args& args, int r, float top) {
#if SINKS
  return exp2_of(sink_of(args, blockIdx.y % args.heads * args.group + r / args.qlen) - top + OFFSET);
#else
  return 0.f;
#endif
}

__device__ __forceinline__ void add(float4& x, const float4& y, float f) {
  x.x += y.x * f, x.y += y.y * f, x.z += y.z * f, x.w += y.w * f;
}

// Merges the streams of a CTA in shared memory; then writes the output, or a partial result for the CTA that is last.
//   memory  shared memory, which no warp needs any more but for this
//   first   the warp's first row in the CTA
//   block0  the CTA's first query row, of `rows`
//   stream  of the warp
//   tops    out: largest score of each row; where there are several CTAs, `totals` are the sums of weights
__device__ __forceinline__ void merge_streams(State& st, const Args& args, u8* memory, int first, int block0, int rows,
                                              int stream, float* partial, float* sums) {
  constexpr int MOST = ROWS < 8 ? 8 : ROWS;
  __shared__ float tops[STREAMS][MOST], totals[STREAMS][MOST];
  const int lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
  float* merged = (float*)memory;  // [STREAMS][ROWS][PITCH]
  __syncthreads();
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < NC; c++) {
      const int r = ONECOL ? t : first + 8 * n + 2 * t + c;
      if (g == 0) tops[stream][r] = st.top[n][c], totals[stream][r] = st.total[n][c];
      float* to = merged + (stream * ROWS + r) * PITCH;
#pragma unroll
      for (int a = 0; a < KS; a++) {
        const float low = __shfl_sync(~0u, st.low[n][c], (a * LOWS / KS) * 4 + t);
        to[16 * a + g] = st.acc[n][a][c] * pow2(24) + low;
        to[16 * a + 8 + g] = st.acc[n][a][c + 2] * pow2(24) + low;
      }
    }
  __syncthreads();
  if (threadIdx.x < rows) {  // tops become the streams' weights
    const int r = threadIdx.x;
    float top = tops[0][r * SLOTS], total = 0.f;
#pragma unroll
    for (int w = 1; w < STREAMS * SLOTS; w++) top = fmaxf(top, tops[w / SLOTS][r * SLOTS + w % SLOTS]);
#pragma unroll
    for (int w = 0; w < STREAMS * SLOTS; w++) {
      const int column = r * SLOTS + w % SLOTS;
      const float f = exp2_of(tops[w / SLOTS][column] - top);
      tops[w / SLOTS][column] = f;
      total += totals[w / SLOTS][column] * f;
    }
    if (args.splits > 1) *(uint2*)(sums + r * 2) = make_uint2(__float_as_uint(top), __float_as_uint(total));
    else totals[0][r * SLOTS] = 1.f / (total + sink_weight(args, block0 + r, top));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows * QUADS; i += WARPS * 32) {
    const int r = i / QUADS, d = i % QUADS * 4;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < STREAMS * SLOTS; w++) {
      const int column = r * SLOTS + w % SLOTS;
      add(x, *(const float4*)(merged + (w / SLOTS * ROWS + column) * PITCH + d), tops[w / SLOTS][column]);
    }
    if (args.splits > 1) *(float4*)(partial + r * D + d) = x;
    else write_output(args, block0 + r, d, x, totals[0][r * SLOTS]);
  }
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

// Merges the streams of this CTA, and, in the last CTA of a head to finish, the CTAs.
__device__ __forceinline__ void merge(State& st, const Args& args, u8* memory, int first, int block0, int rows,
                                      int stream) {
  __shared__ int last;
  const int splits = args.splits;
  const i64 line = (i64)blockIdx.y * gridDim.z + blockIdx.z;
  float* partial = args.partial + line * splits * ROWS * (D + 2);  // outputs, then (top, total)
  float* sums = partial + (i64)splits * ROWS * D;
  merge_streams(st, args, memory, first, block0, rows, stream, partial + (i64)blockIdx.x * ROWS * D,
                sums + blockIdx.x * ROWS * 2);
  if (splits == 1) return;
  __threadfence();  // what this CTA wrote must be visible before its arrival is
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(args.counter + line, 1) == splits - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) args.counter[line] = 0;  // reset for the next step, as a captured graph does not zero it
  merge_splits(args, partial, sums, (float*)memory, block0, rows);
}
