// ---- tables of factors: the scales of a tile in the types and the order in which products take them ----------------
// A warp makes them once for each tile, in SCRATCH bytes of its own. Nobody reads the table before it any more when
// it begins, and all of it is written when it ends.

// Tables of a tile of keys, fp32 [128 tokens][COUNT groups]; a token with one group needs none.
template <int SCALE, int COUNT>
__device__ __forceinline__ void tabulate_keys(u32 table, u32 scales, int lane) {
  if constexpr (COUNT > 1) {
    __syncwarp();
    constexpr int EACH = 4 / scale_bytes(SCALE);  // factors of a word
#pragma unroll
    for (int i = 0; i < 4 * COUNT / EACH; i++) {
      const int word = i * 32 + lane;
      const u32 x = load_u32(scales + word * 4), to = table + word * 4 * EACH;
      if constexpr (SCALE == BYTE) {
        const u32 low = halves_of_e4m3<false>(x), high = halves_of_e4m3<true>(x);
        store128(to, __float_as_uint(float_of_half(low)), __float_as_uint(float_of_half(low >> 16)),
                 __float_as_uint(float_of_half(high)), __float_as_uint(float_of_half(high >> 16)));
      } else if constexpr (SCALE == HALF) {
        store64(to, __float_as_uint(float_of_half(x)), __float_as_uint(float_of_half(x >> 16)));
      } else {
        store_float(to, __uint_as_float(x));
      }
    }
    __syncwarp();
  }
}

// The power of two, as an exponent, that takes a number to [1, 2), as far as fp16 has it.
__device__ __forceinline__ int exponent_to_one(float most) {
  return min(15, max(-15, 127 - (int)(__float_as_uint(most) >> 23 & 255)));
}

// Tables of a tile of values: fp16 [COUNT groups][128 tokens], each factor times a power of two such that the largest is
// at most 2; behind it the zero points of FOLDED, integers of 16 bits [128]. Returns what products must be multiplied by.
template <int KIND, int SCALE, int COUNT>
__device__ __forceinline__ float tabulate_values(u32 table, u32 scales, int lane) {
  // a lane has four tokens
  constexpr int WORDS = COUNT * scale_bytes(SCALE);
  u32 w[WORDS];
  const u32 from = scales + lane * WORDS * 4;
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    if constexpr (WORDS % 4 == 0) {
      u32 x[4];
      if (i % 4 == 0) {
        load128(x, from + i * 4);
        w[i] = x[0], w[i + 1] = x[1], w[i + 2] = x[2], w[i + 3] = x[3];
      }
    } else {
      w[i] = load_u32(from + i * 4);
    }
  }
  __syncwarp();
  float back = 256.f;
  if constexpr (SCALE == BYTE) {
    // the bits of e4m3 are those of an fp16 number 2^8 times smaller, subnormal or not
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
      u32 y[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int a = 2 * j * COUNT + k, b = a + COUNT;
        y[j] = (__byte_perm(w[a / 4], w[b / 4], a % 4 | (4 + b % 4) << 8) & 0x00ff00ffu) << 7;
      }
      store64(table + k * 256 + lane * 8, y[0], y[1]);
    }
  } else if constexpr (SCALE == HALF) {
    u32 most2 = 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++) most2 = most_of(most2, w[i]);
    const float most = fmaxf(float_of_half(most2), float_of_half(most2 >> 16));
    const int exponent = exponent_to_one(__int_as_float(largest(__float_as_uint(most))));
    const u32 half = (u32)(15 + exponent) << 10, by = half | half << 16;
#pragma unroll
    for (int i = 0; i < WORDS; i++) w[i] = mul2(w[i], by);
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
      u32 y[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int a = 2 * j * COUNT + k, b = a + COUNT;
        y[j] = __byte_perm(w[a / 2], w[b / 2], (a % 2 ? 0x32 : 0x10) | (b % 2 ? 0x7600 : 0x5400));
      }
      store64(table + k * 256 + lane * 8, y[0], y[1]);
    }
    back = pow2_of(-exponent);
  } else {
    static_assert(COUNT == 1 || SCALE != SINGLE, "factors in fp32 are those of whole heads");
    u32 zero[4];
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (KIND == FOLDED) zero[i] = w[i] & 15, w[i] &= ~15u;
      most = fmaxf(most, fabsf(__uint_as_float(w[i])));
    }
    // fp32 has exponents that fp16 has not
    const int exponent = min(100, max(-100, 127 - (int)(largest(__float_as_uint(most)) >> 23)));
    const float by = pow2_of(exponent);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __uint_as_float(w[i]) * by;
    store64(table + lane * 8, half2_of(x[0], x[1]), half2_of(x[2], x[3]));
    if (KIND == FOLDED) store64(table + 256 + lane * 8, zero[0] | zero[1] << 16, zero[2] | zero[3] << 16);
    back = pow2_of(-exponent);
  }
  __syncwarp();
  return back;
}
