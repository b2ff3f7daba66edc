// ---- merging -------------------------------------------------------------------------------------------------------
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
