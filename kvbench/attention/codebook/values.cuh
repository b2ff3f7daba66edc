// ---- softmax, and the product with values ---------------------------------------------------------------------------
// Softmax of a tile's scores: weights for the product and, in place of the scores, as they are. Returns what is
// left to multiply the product by.
__device__ __forceinline__ float weigh(State& st, const Args& args, u8* own, const float* factors, int left, int lane) {
  const u16* params = (const u16*)(own + PARAMS_AT);
  float scale[4], offset[4], most = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int x = i * 32 + lane;
    scale[i] = x < left ? float_of_half(params[x]) : 0.f, offset[i] = x < left ? float_of_half(params[128 + x]) : 0.f;
    most = fmaxf(most, fabsf(scale[i]));
  }
  if (!WHOLE) most = most_of_warp(most);
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
    if constexpr (WHOLE) {
      // two digits to the base 256, relative to the largest weight of the tile
      float weighted[4], peak = 1e-30f;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int x = i * 32 + lane;
        const float weight = x < left ? exp2_of(s[i] - top) : 0.f;
        st.total[row] += weight, st.bias[row] += weight * offset[i];
        scores[x] = weight;
        weighted[i] = weight * scale[i], peak = fmaxf(peak, weighted[i]);
      }
      peak = __uint_as_float(largest((int)__float_as_uint(peak)));  // none is negative
      const float factor = 65534.f * inverse_of(peak);
      u8* digits = own + WEIGHTS_AT;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        // the low bits of the float are the integer
        const u32 whole = __float_as_uint(fmaf(weighted[i], factor, 8388608.f));
        const int at = digit_place(i * 32 + lane);
        digits[at] = (u8)(whole >> 8), digits[128 + at] = (u8)whole;
      }
      if (lane == 0) ((float*)(own + SHRINK_AT))[row] = shrink;
      return peak * (256.f / 65534.f);
    }
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
#if ROWS == 1
// By products of bytes: the two digits of a weight are columns, and the two bytes of a level are products of their own. The
// product of both lower ones counts 1/256, of which what is cut off is below 2^-22 of the largest level and weight.
__device__ __forceinline__ void dense_values(State& st, const u8* memory, const u8* own, u32 own_at, float lowered,
                                             int lane) {
  const int g = lane >> 2, t = lane & 3, matrix = lane >> 3, r = lane & 7;
  const Levels levels = of_thread(((const Levels*)(memory + LEVELS_AT))[1], ((const u32*)(own + SUMS_AT))[lane]);
  const float unit = *(const float*)(memory + LEVELS_AT + 2 * sizeof(Levels)) * lowered;
  u32 w[8];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint4 y = make_uint4(0, 0, 0, 0);
    if (g < 2) y = *(const uint4*)(own + WEIGHTS_AT + g * 128 + t * 32 + i * 16);
    w[4 * i] = y.x, w[4 * i + 1] = y.y, w[4 * i + 2] = y.z, w[4 * i + 3] = y.w;
  }
  const float shrink = *(const float*)(own + SHRINK_AT);
#pragma unroll
  for (int a = 0; a < D / 16; a++) {
    int high[4] = {0, 0, 0, 0}, low[4] = {0, 0, 0, 0};
    u32 single[4] = {0, 0, 0, 0};  // channels g and g + 8
    if constexpr (PLANES == 2)
      ldsm(single, own_at + VALUES_AT + VALUE_PLANE + (16 * a + r + (matrix & 1) * 8) * 16);
#pragma unroll
    for (int part = 0; part < WORDROWS / 16; part++) {
      u32 words[4];
      ldsm(words, own_at + VALUES_AT + value_place(16 * a + r + (matrix & 1) * 8, 2 * part + (matrix >> 1)));
      Codes c[4];
#pragma unroll
      for (int i = 0; i < 4; i++) c[i] = codes_of(words[i], single[i & 1] >> (i >> 1));
#pragma unroll
      for (int s = 0; s < (BITS == 4 ? 2 : 4); s++) {
        u32 x[4], y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          u32 codes = BITS == 4 || s < 2 ? c[i].even : c[i].odd, upper = 0;
          if (s & 1) codes = divided<16>(codes);
          if constexpr (BITS == 4) upper = __byte_perm(0xff00u, 0u, s & 1 ? divided<16>(c[i].odd) : c[i].odd);
          x[i] = bytes_of(levels.high, codes, upper), y[i] = bytes_of(levels.low, codes, upper);
        }
        const int step = part * 2 + s;
        mma_signed(high, x[0], x[1], x[2], x[3], w[2 * step], w[2 * step + 1]);
        mma_unsigned(low, y[0], y[1], y[2], y[3], w[2 * step], w[2 * step + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int sum = high[2 * i] * 256 + high[2 * i + 1] + low[2 * i] + (low[2 * i + 1] >> 8);
      st.acc[a][i] = st.acc[a][i] * shrink + (float)sum * unit;
    }
  }
}
#else
__device__ __forceinline__ void dense_values(State& st, const u8* memory, const u8* own, u32 own_at, float lowered,
                                             int lane) {
  const int g = lane >> 2, t = lane & 3, matrix = lane >> 3, r = lane & 7;
  Levels levels[ROUNDINGS];
#pragma unroll
  for (int i = 0; i < ROUNDINGS; i++)
    levels[i] = of_thread(((const Levels*)(memory + LEVELS_AT))[1 + i], ((const u32*)(own + SUMS_AT))[lane]);
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
#pragma unroll
    for (int i = 0; i < 4; i++) st.acc[a][i] = st.acc[a][i] * shrink[i & 1] + sum[i] * lowered;
  }
}
#endif
