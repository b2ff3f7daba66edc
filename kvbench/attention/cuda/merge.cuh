// ---- merging ---------------------------------------------------------------------------------------------------------
// Merges the streams of a CTA in shared memory, and the CTAs of a head in device memory; writes the output.
//   memory   shared memory, which no warp needs any more but for this
//   first    the warp's first row in the CTA
//   block0   the CTA's first query row, of `rows`
//   stream   of the warp
__device__ __forceinline__ void merge_streams(State& st, const Args& args, u8* memory, int first, int block0, int rows,
                                              int stream) {
  __shared__ float tops[STREAMS][ROWS < 8 ? 8 : ROWS], totals[STREAMS][ROWS < 8 ? 8 : ROWS];
  __shared__ int last;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, g = lane >> 2;
  const int bh = blockIdx.y, b = bh / args.heads, head = bh % args.heads;
  __syncthreads();
  float* merged = (float*)memory;  // [STREAMS][ROWS][D]
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < NC; c++) {
      const int r = ONECOL ? t : first + 8 * n + 2 * t + c;
      if (g == 0) tops[stream][r] = st.top[n][c], totals[stream][r] = st.total[n][c];
      float* to = merged + (stream * ROWS + r) * D;
#pragma unroll
      for (int a = 0; a < KS; a++) {
        const float low = __shfl_sync(~0u, st.low[n][c], (a * LOWS / KS) * 4 + t);
        to[16 * a + g] = st.acc[n][a][c] * pow2(24) + low;
        to[16 * a + 8 + g] = st.acc[n][a][c + 2] * pow2(24) + low;
      }
    }
  __syncthreads();
  const int blocks = gridDim.z, splits = args.splits, split = blockIdx.x;
  const i64 line = (i64)bh * blocks + blockIdx.z;
  float* partial = args.partial + line * splits * ROWS * (D + 2);  // outputs, then (top, total)
  float* sums = partial + (i64)splits * ROWS * D;
  auto write = [&](int r, int d, float x) {
    const i64 token = (i64)b * args.qlen + (block0 + r) % args.qlen;
    const i64 at = (token * args.heads * args.group + head * args.group + (block0 + r) / args.qlen) * D + d;
    args.out[at] = (u16)exact2_of(x, 0.f);
  };
  for (int i = threadIdx.x; i < rows * D; i += WARPS * 32) {
    const int r = i / D, d = i % D;
    float top = tops[0][r], x = 0.f, total = 0.f;
#pragma unroll
    for (int w = 1; w < STREAMS; w++) top = fmaxf(top, tops[w][r]);
#pragma unroll
    for (int w = 0; w < STREAMS; w++) {
      const float f = exp2_of(tops[w][r] - top);
      x += merged[(w * ROWS + r) * D + d] * f;
      total += totals[w][r] * f;
    }
    if (splits == 1) {
      if constexpr (SINKS) total += exp2_of(sink_of(args, head * args.group + (block0 + r) / args.qlen) - top + OFFSET);
      write(r, d, x / total);
    } else {
      partial[(split * ROWS + r) * D + d] = x;
      if (d == 0) sums[(split * ROWS + r) * 2] = top, sums[(split * ROWS + r) * 2 + 1] = total;
    }
  }
  if (splits == 1) return;
  // the last CTA to finish merges the splits
  __threadfence();  // what this CTA wrote must be visible before its arrival is
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(args.counter + line, 1) == splits - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  float* weights = (float*)memory;  // [ROWS][splits], then 1 / total
  float* inverse = weights + ROWS * splits;
  for (int r = warp; r < rows; r += WARPS) {
    float top = -1e30f, total = 0.f;
    for (int s = lane; s < splits; s += 32) top = fmaxf(top, __ldcg(sums + (s * ROWS + r) * 2));
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    for (int s = lane; s < splits; s += 32) {
      const float f = exp2_of(__ldcg(sums + (s * ROWS + r) * 2) - top);
      weights[r * splits + s] = f;
      total += f * __ldcg(sums + (s * ROWS + r) * 2 + 1);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) total += __shfl_xor_sync(~0u, total, lanes);
    if constexpr (SINKS) total += exp2_of(sink_of(args, head * args.group + (block0 + r) / args.qlen) - top + OFFSET);
    if (lane == 0) inverse[r] = 1.f / total;
  }
  if (threadIdx.x == 0) args.counter[line] = 0;  // reset for the next step, as a captured graph does not zero it
  __syncthreads();
  for (int i = threadIdx.x; i < rows * D / 4; i += WARPS * 32) {
    const int r = i / (D / 4), d = i % (D / 4) * 4;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int s = 0; s < splits; s++) {
      const float4 y = __ldcg((const float4*)(partial + (s * ROWS + r) * D + d));
      const float f = weights[r * splits + s];
      x.x += y.x * f, x.y += y.y * f, x.z += y.z * f, x.w += y.w * f;
    }
    const float f = inverse[r];
    write(r, d, x.x * f), write(r, d + 1, x.y * f), write(r, d + 2, x.z * f), write(r, d + 3, x.w * f);
  }
}
