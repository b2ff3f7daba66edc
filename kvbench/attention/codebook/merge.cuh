// ---- merging --------------------------------------------------------------------------------------------------------
// Merges the warps of a CTA in shared memory; then writes the output, or a partial result for the CTA that is last.
__device__ __forceinline__ void merge_warps(State& st, const Args& args, u8* memory, int block0, int rows, float* partial,
                                            float* sums, int warp, int lane) {
  __shared__ float tops[WARPS][ROWS], totals[WARPS][ROWS];
  float* merged = (float*)memory;  // [WARPS][ROWS][PITCH]
  const int g = lane >> 2, t = lane & 3;
  __syncthreads();
#pragma unroll
  for (int a = 0; a < D / 16; a++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int row = 2 * t + j;
      if (row >= ROWS) continue;
      float* to = merged + (warp * ROWS + row) * PITCH + 16 * a + g;
      if constexpr (ROWS == 1) to[0] = st.acc[a][0], to[8] = st.acc[a][1];
      else to[0] = st.acc[a][j], to[8] = st.acc[a][2 + j];
    }
  __syncwarp();
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    const float total = sum_of_warp(st.total[row]), bias = sum_of_warp(st.bias[row]);
    if (lane == 0) tops[warp][row] = st.top[row], totals[warp][row] = total;
#pragma unroll
    for (int i = 0; i < OWN; i++) merged[(warp * ROWS + row) * PITCH + lane * OWN + i] += st.extra[row][i] + bias;
  }
  __syncthreads();
  if (threadIdx.x < rows) {  // tops become the warps' weights
    const int r = threadIdx.x;
    float top = tops[0][r], total = 0.f;
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, tops[w][r]);
    for (int w = 0; w < WARPS; w++) {
      const float f = exp2_of(tops[w][r] - top);
      tops[w][r] = f, total += totals[w][r] * f;
    }
    if (args.splits > 1) sums[r * 2] = top, sums[r * 2 + 1] = total;
    else totals[0][r] = 1.f / (total + sink_weight(args, block0 + r, top));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows * QUADS; i += WARPS * 32) {
    const int r = i / QUADS, d = i % QUADS * 4;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int w = 0; w < WARPS; w++) add(x, *(const float4*)(merged + (w * ROWS + r) * PITCH + d), tops[w][r]);
    if (args.splits > 1) *(float4*)(partial + r * D + d) = x;
    else write_output(args, block0 + r, d, x, totals[0][r]);
  }
}
