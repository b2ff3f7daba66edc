// ---- cross factors: affine codes with a third parameter (KVarN) ----------------------------------------------------
// A key is (code * scale + minimum) * factor of its token: the factor multiplies the finished score. A value is the same
// times the factor of its channel in its block of KG tokens: it multiplies the sum over these tokens before that joins
// the accumulator.

// Loads the factors of 16-number blocks as pairs: numbers 16 k + g and 16 k + 8 + g in x[k], of the blocks that
// `block(k)` says, k from 0 to 3. All rows of a transposed 8 x 8 block are one of the two halves, in turn.
//   block  number of the block that matrix k of four reads
template <class Fn>
__device__ __forceinline__ void load_factors(u32 (&x)[4], u32 from, int lane, Fn&& block) {
  ldsm_t(x, from + (16 * block(lane >> 3) + 8 * (lane & 1)) * 2);
}

// Multiplies finished scores of a packed tile by the factors of their tokens; arguments as of packed_scores.
template <int P, int MT>
__device__ __forceinline__ void times_tokens(float (&s)[NT][MT][4], u32 slot, int part, int lane) {
  using S = Shape<P>;
#pragma unroll
  for (int first = 0; first < MT; first += 4) {
    u32 x[4];
    load_factors(x, slot + S::KCODES + 2 * S::KPARAM, lane, [&](int k) { return SHARES * (first + k) + part; });
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float factor[2] = {float_of_half(x[k]), float_of_half(x[k] >> 16)};
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if ((i & 1) < NC) s[n][first + k][i] *= factor[i >> 1];
    }
  }
}

// Adds the partial sums of the a-th block of 16 channels to the accumulator: sum over the blocks of tokens j of
// (o_j + low_j) * factor_j.
//   o    sums of weight * scale * code of the block's channels, in units of 2^-24, times 2^-14 if LARGE
//   low  sums of weight * minimum
//   x    factors of the block's channels (load_factors)
template <bool LARGE, int BLOCKS>
__device__ __forceinline__ void join(float (&acc)[NT][KS][4], int a, const float (&shrink)[NT][NC],
                                     const float (&o)[BLOCKS][NT][4], const float (&low)[BLOCKS][NT][4],
                                     const u32 (&x)[BLOCKS]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if ((i & 1) >= NC) continue;
      const int c = (i & 1) < NC ? (i & 1) : 0;
      acc[n][a][i] *= shrink[n][c];
#pragma unroll
      for (int j = 0; j < BLOCKS; j++) {
        const float sum = o[j][n][i] * (LARGE ? pow2(14) : 1.f) + low[j][n][c + 2] * pow2(-24);
        acc[n][a][i] += sum * float_of_half(i >> 1 ? x[j] >> 16 : x[j]);
      }
    }
}
