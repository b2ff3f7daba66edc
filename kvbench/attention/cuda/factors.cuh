// ---- tables of factors: the scales of a tile in the types and the order in which products take them ----------------
// A warp makes them once for each tile, in SCRATCH bytes of its own, at least for the tokens that it takes of the tile.
// No lane reads the table before any more when it begins, and all of it is written when it ends.

// Tables of a tile of keys, fp32 [128 tokens][COUNT groups]; a token with one group needs none.
template <int SCALE, int COUNT>
__device__ __forceinline__ void tabulate_keys(u32 table, u32 scales, int part, int lane) {
  if constexpr (COUNT > 1) {
    __syncwarp();
    constexpr int EACH = 4 / scale_bytes(SCALE), BLOCK = 16 * COUNT / EACH;  // factors of a word, words of 16 tokens
    constexpr int ALL = 8 * BLOCK / SHARES;
#pragma unroll
    for (int i = 0; i < (ALL + 31) / 32; i++) {
      const int mine = i * 32 + lane;
      if (ALL % 32 != 0 && mine >= ALL) break;
      const int word = mine + (SHARES == 1 ? 0 : (mine / BLOCK + part) * BLOCK);
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

// The exponent of the power of two that takes a positive number, given by its bits, to [1, 2).
__device__ __forceinline__ int exponent_to_one(int bits) { return 127 - (bits >> 23); }

// Tables of a tile of values: fp16 [COUNT groups][128 tokens], each factor times a power of two such that the largest is
// at most 2; behind it the zero points of FOLDED, integers of 16 bits [128]. Returns what products must be multiplied by.
//   ROW  stored factors of a token, of which the first COUNT are those of its groups
template <int KIND, int SCALE, int COUNT, int ROW>
__device__ __forceinline__ float tabulate_values(u32 table, u32 scales, int part, int lane) {
  // a lane has four tokens, or two of those that are the warp's, if their factors are whole words
  constexpr int TOKENS = SHARES == 2 && 2 * ROW * scale_bytes(SCALE) % 4 == 0 ? 2 : 4;
  constexpr int WORDS = TOKENS * ROW * scale_bytes(SCALE) / 4, PAIRS = TOKENS / 2;
  static_assert(ROW == 1 || SCALE != SINGLE, "factors in fp32 are those of whole heads");
  const int first = TOKENS == 4 ? 4 * lane : 32 * (lane >> 3) + 16 * part + 2 * (lane & 7);
  u32 w[WORDS], pairs[COUNT][PAIRS], zeros[PAIRS];
  const u32 from = scales + first * ROW * scale_bytes(SCALE);
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    if constexpr (WORDS % 4 == 0) {
      u32 x[4];
      if (i % 4 == 0) {
        load128(x, from + i * 4);
        w[i] = x[0], w[i + 1] = x[1], w[i + 2] = x[2], w[i + 3] = x[3];
      }
    } else if constexpr (WORDS % 2 == 0) {
      if (i % 2 == 0) load64(w[i], w[i + 1], from + i * 4);
    } else {
      w[i] = load_u32(from + i * 4);
    }
  }
  float back = 256.f;
  if constexpr (SCALE == BYTE) {
    // the bits of e4m3 are those of an fp16 number 2^8 times smaller, subnormal or not
#pragma unroll
    for (int k = 0; k < COUNT; k++)
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        const int a = 2 * j * ROW + k, b = a + ROW;
        pairs[k][j] = (__byte_perm(w[a / 4], w[b / 4], a % 4 | (4 + b % 4) << 8) & 0x00ff00ffu) << 7;
      }
  } else if constexpr (SCALE == HALF) {
    u32 most2 = 0;
#pragma unroll
    for (int k = 0; k < COUNT; k++)
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        const int a = 2 * j * ROW + k, b = a + ROW;
        pairs[k][j] = __byte_perm(w[a / 2], w[b / 2], (a % 2 ? 0x32 : 0x10) | (b % 2 ? 0x7600 : 0x5400));
        most2 = most_of(most2, pairs[k][j]);
      }
    const float most = fmaxf(float_of_half(most2), float_of_half(most2 >> 16));
    const int exponent = min(15, max(-15, exponent_to_one(largest(__float_as_uint(most)))));
    const u32 half = exponent == -15 ? 0x0200u : (u32)(15 + exponent) << 10, by = half | half << 16;  // 2^-15: subnormal
#pragma unroll
    for (int k = 0; k < COUNT; k++)
#pragma unroll
      for (int j = 0; j < PAIRS; j++) pairs[k][j] = mul2(pairs[k][j], by);
    back = pow2_of(-exponent);
  } else {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      if (KIND == FOLDED) {
        zeros[i / 2] = i % 2 ? zeros[i / 2] | (w[i] & 15) << 16 : w[i] & 15;
        w[i] &= ~15u;
      }
      most = fmaxf(most, fabsf(__uint_as_float(w[i])));
    }
    const int exponent = min(100, max(-100, exponent_to_one(largest(__float_as_uint(most)))));
    const float by = pow2_of(exponent);
#pragma unroll
    for (int j = 0; j < PAIRS; j++)
      pairs[0][j] = half2_of(__uint_as_float(w[2 * j]) * by, __uint_as_float(w[2 * j + 1]) * by);
    back = pow2_of(-exponent);
  }
  __syncwarp();
  auto store = [&](int at, const u32 (&x)[PAIRS]) {
    const u32 to = table + at + first * 2;
    if constexpr (PAIRS == 2) store64(to, x[0], x[PAIRS - 1]);
    else store_float(to, __uint_as_float(x[0]));
  };
#pragma unroll
  for (int k = 0; k < COUNT; k++) store(k * 256, pairs[k]);
  if (KIND == FOLDED) store(256, zeros);
  __syncwarp();
  return back;
}
