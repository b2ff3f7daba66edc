// ---- softmax, and the product with values ---------------------------------------------------------------------------
// Softmax of a tile's scores: weights for the product and, in place of the scores, as they are. Returns the power of two
// that is left to multiply the product by.
__device__ __forceinline__ float weigh(State& st, const Args& args, u8* own, const float* factors, int left, int lane) {
  const u16* params = (const u16*)(own + PARAMS_AT);
  float scale[4], offset[4], most = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int x = i * 32 + lane;
    scale[i] = x < left ? float_of_half(params[x]) : 0.f, offset[i] = x < left ? float_of_half(params[128 + x]) : 0.f;
    most = fmaxf(most, fabsf(scale[i]));
  }
  most = most_of_warp(most);
  const int e = max(64, min(190, (int)(__float_as_uint(most) >> 23)));
  const float lifted = __uint_as_float((u32)(253 - e + 14) << 23), lowered = __uint_as_float((u32)(e + 1 - 14) << 23);
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    float* scores = (float*)(own + SCORES_AT) + row * 128;
    u16* weights = (u16*)(own + WEIGHTS_AT) + row * 128;
    const float factor = factors[row];
    float s[4], top = NOTHING;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int x = i * 32 + lane;
      s[i] = scores[x] * factor;
#if SOFTCAP
      s[i] = args.cap - 2.f * args.cap * inverse_of(exp2_of(s[i]) + 1.f);
#endif
      if (x >= left) s[i] = NOTHING;
      top = fmaxf(top, s[i]);
    }
    top = fmaxf(st.top[row], most_of_warp(top));
    const float shrink = exp2_of(st.top[row] - top);
    st.top[row] = top, st.total[row] *= shrink, st.bias[row] *= shrink;
#pragma unroll
    for (int i = 0; i < OWN; i++) st.extra[row][i] *= shrink;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int x = i * 32 + lane;
      const float weight = x < left ? exp2_of(s[i] - top) : 0.f;
      st.total[row] += weight, st.bias[row] += weight * offset[i];
      scores[x] = weight;
      weights[weight_place(x)] = (u16)half2_of(weight * scale[i] * lifted, 0.f);
    }
    if (lane == 0) ((float*)(own + SHRINK_AT))[row] = shrink;
  }
  return lowered;
}
// Adds the weighted levels of the tile's values to the state.
__device__ __forceinline__ void dense_values(State& st, const u8* memory, const u8* own, u32 own_at, float lowered,
                                             int lane) {
  const int g = lane >> 2, t = lane & 3, matrix = lane >> 3, r = lane & 7;
  Levels levels[ROUNDINGS];
#pragma unroll
  for (int i = 0; i < ROUNDINGS; i++) levels[i] = ((const Levels*)(memory + LEVELS_AT))[1 + i];
  u32 w[16];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint4 y = make_uint4(0, 0, 0, 0);
    if (g < ROWS) y = *(const uint4*)(own + WEIGHTS_AT + g * 256 + t * 64 + i * 16);
    w[4 * i] = y.x, w[4 * i + 1] = y.y, w[4 * i + 2] = y.z, w[4 * i + 3] = y.w;
  }
  const float* shrinks = (const float*)(own + SHRINK_AT);
  const float shrink[2] = {2 * t < ROWS ? shrinks[2 * t] : 1.f, 2 * t + 1 < ROWS ? shrinks[2 * t + 1] : 1.f};
#pragma unroll
  for (int a = 0; a < D / 16; a++) {
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    u32 single[4] = {0, 0, 0, 0};  // channels g and g + 8
    if constexpr (PLANES == 2)
      ldsm(single, own_at + VALUES_AT + VALUE_PLANE + (16 * a + r + (matrix & 1) * 8) * 16);
#pragma unroll
    for (int part = 0; part < WORDROWS / 16; part++) {
      u32 words[4], levels_of_word[4][FIELDS];  // channels g, g + 8 of the first 8 tokens, then of the next 8
      ldsm(words, own_at + VALUES_AT + value_place(16 * a + r + (matrix & 1) * 8, 2 * part + (matrix >> 1)));
#pragma unroll
      for (int i = 0; i < 4; i++) unpack_words(levels + (i & 2), words[i], single[i & 1] >> (i >> 1), levels_of_word[i]);
#pragma unroll
      for (int i = 0; i < FIELDS; i++) {
        const int step = part * FIELDS + i;
        mma16(sum, levels_of_word[0][i], levels_of_word[1][i], levels_of_word[2][i], levels_of_word[3][i], w[2 * step],
              w[2 * step + 1]);
      }
    }
    if constexpr (ROWS == 1) {
      st.acc[a][0] = st.acc[a][0] * shrink[0] + sum[0] * lowered, st.acc[a][1] = st.acc[a][1] * shrink[0] + sum[2] * lowered;
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) st.acc[a][i] = st.acc[a][i] * shrink[i & 1] + sum[i] * lowered;
    }
  }
}
