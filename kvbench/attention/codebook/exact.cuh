// ---- tokens in full precision ------------------------------------------------------------------------------------------
// Up to 32 tokens from `begin` on; position: RoPE position of the first.
__device__ __forceinline__ void exact_tokens(State& st, const Args& args, const u8* memory, u8* own, const Exact& exact,
                                             i64 bh, int key_at, int value_at, int count, int position, int lane) {
  constexpr int PAIRS = HALF / 32;  // of channels of a lane: lane, lane + 32
  const float* q = (const float*)(memory + QUERY_AT);
  const float* factors = (const float*)(memory + FACTOR_AT);
  float* scores = (float*)(own + SCORES_AT);
  for (int x = 0; x < count; x++) {
    const u16* key = exact.key + (bh * exact.key_room + key_at + x) * D;
    float first[PAIRS], second[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int j = i * 32 + lane;
      const float a = float_of_exact(key[j]), b = float_of_exact(key[j + HALF]);
      float c = 1.f, s = 0.f;
      if (ROTATE) angle(args, position + x, j, c, s);
      first[i] = a * c - b * s, second[i] = b * c + a * s;
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < PAIRS; i++)
        sum += first[i] * q[row * D + i * 32 + lane] + second[i] * q[row * D + HALF + i * 32 + lane];
      sum = sum_of_warp(sum);
      if (lane == 0) scores[row * 128 + x] = sum;
    }
  }
  __syncwarp();
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    float s = scores[row * 128 + lane] * factors[row];
#if SOFTCAP
    s = args.cap - 2.f * args.cap * inverse_of(exp2_of(s) + 1.f);
#endif
    if (lane >= count) s = NOTHING;
    const float top = fmaxf(st.top[row], most_of_warp(s)), shrink = exp2_of(st.top[row] - top);
    const float weight = lane < count ? exp2_of(s - top) : 0.f;
    st.top[row] = top, st.total[row] = st.total[row] * shrink + weight, st.bias[row] *= shrink;
#pragma unroll
    for (int i = 0; i < OWN; i++) st.extra[row][i] *= shrink;
    scores[row * 128 + lane] = weight;
    if (lane == 0) ((float*)(own + SHRINK_AT))[row] = shrink;
  }
  __syncwarp();
  const int t = lane & 3;
  const float* shrinks = (const float*)(own + SHRINK_AT);
#pragma unroll
  for (int a = 0; a < D / 16; a++) {
    if constexpr (ROWS == 1) {
      st.acc[a][0] *= shrinks[0], st.acc[a][1] *= shrinks[0];
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) st.acc[a][i] *= 2 * t + (i & 1) < ROWS ? shrinks[2 * t + (i & 1)] : 1.f;
    }
  }
  for (int x = 0; x < count; x++) {
    const u16* value = exact.value + (bh * exact.value_room + value_at + x) * D + lane * OWN;
    float v[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) v[i] = float_of_exact(value[i]);
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
      for (int i = 0; i < OWN; i++) st.extra[row][i] += scores[row * 128 + x] * v[i];
  }
  __syncwarp();
}
