// ---- softmax -------------------------------------------------------------------------------------------------------
// Hides tokens of the tile before `lo`, or from `hi[block][column]` on: their scores become -inf, their weights 0.
template <int MT>
__device__ __forceinline__ void hide(float (&s)[NT][MT][4], int lo, const int (&hi)[NT][NC], int part, int lane) {
  const float none = __int_as_float(0xff800000);
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int x = 16 * (SHARES * m + part) + (lane >> 2) + 8 * (i >> 1);
        if ((i & 1) < NC && (x < lo || x >= hi[n][(i & 1) < NC ? (i & 1) : 0])) s[n][m][i] = none;
      }
}

// Softcap: s becomes cap * tanh(s / 2) in bits, as tanh(y) = 1 - 2 / (exp(2 y) + 1), right to some 1e-7 of the cap and
// at both ends (tanh.approx is not).
template <int MT>
__device__ __forceinline__ void capped(float (&s)[NT][MT][4], float cap) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if ((i & 1) < NC) s[n][m][i] = cap - 2.f * cap * inverse_of(exp2_of(s[n][m][i]) + 1.f);
}

// Online softmax over a block of tokens of phase P; where values have one group of channels and minima, packed_values
// adds the weights to `total`.
//   st      top, total and low are brought to the new maximum (acc is, with `shrink`, by the second product)
//   s       log2 scores, or products of which `linear` makes them
//   p       out: probabilities times 2^LIFT in the layout of the second product, in the dtype that it needs
//   shrink  out: factor for what was summed before
template <int P, int MT>
__device__ __forceinline__ void weigh(State& st, float (&s)[NT][MT][4], const Linear& linear, u32 (&p)[NT][MT][2],
                                      float (&shrink)[NT][NC]) {
  using S = Shape<P>;
  constexpr bool EXACT = !S::VP, TOTAL = !S::VP || S::VF || S::VGROUPS != 1;
  // blocks whose products need the same factor: every CLASSES-th, as a tile's first CLASSES fields differ in it
  constexpr int RUN = S::LINEAR ? Portion<S::KB>::BLOCKS : 1;
  constexpr int CLASSES = !S::LINEAR || S::KB == 8 ? 1 : S::KB == 4 ? 2 : 4 / Portion<S::KB>::STEP;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float add[NC], by[CLASSES][NC];
#pragma unroll
    for (int c = 0; c < NC; c++) {
      float top = __int_as_float(0xff800000);
#pragma unroll
      for (int k = 0; k < CLASSES; k++) {
        by[k][c] = S::LINEAR ? st.sl[n][c] * lift_of<P>(k * RUN) : 1.f;
        float most = __int_as_float(0xff800000);
#pragma unroll
        for (int m = 0; m < MT; m++)
          if (m / RUN % CLASSES == k) most = fmaxf(most, fmaxf(s[n][m][c], s[n][m][c + 2]));
        top = fmaxf(top, S::LINEAR ? most * by[k][c] + linear.base[n][c] : most);
      }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
      top = fmaxf(top, st.top[n][c]);
      shrink[n][c] = exp2_of(st.top[n][c] - top);
      st.top[n][c] = top;
      add[c] = (S::LINEAR ? linear.base[n][c] : 0.f) + LIFT - top;
    }
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int m = 0; m < MT; m++) {
      float e[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int c = (i & 1) < NC ? (i & 1) : 0;
        const float x = S::LINEAR ? s[n][m][i] * by[m / RUN % CLASSES][c] + add[c] : s[n][m][i] + add[c];
        if ((i & 1) < NC) e[i] = exp2_of(x);
      }
      // results of one product become an operand of the next: movmatrix turns 8 x 8 blocks between lanes
      p[n][m][0] = transposed(EXACT ? exact2_of(e[0], e[1]) : half2_of(e[0], e[1]));
      p[n][m][1] = transposed(EXACT ? exact2_of(e[2], e[3]) : half2_of(e[2], e[3]));
      // the sum of weights is a product with ones: it adds the rounded weights, which are those that values get
      if constexpr (TOTAL && EXACT) {
        const u32 one = BF16 ? 0x3f803f80u : 0x3c003c00u;
        mma_exact(sum, one, one, one, one, p[n][m][0], p[n][m][1]);
      } else if constexpr (TOTAL) {
        mma16(sum, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, p[n][m][0], p[n][m][1]);
      }
    }
#pragma unroll
    for (int c = 0; c < NC; c++) {
      st.total[n][c] = st.total[n][c] * shrink[n][c] + sum[c];
      st.low[n][c] *= shrink[n][c];
    }
  }
}
