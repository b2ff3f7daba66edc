// ---- softmax -------------------------------------------------------------------------------------------------------
// Hides tokens of the block before `lo`, or from `hi[column]` on: their scores become -inf, their weights 0.
template <int MT>
__device__ __forceinline__ void hide(float (&s)[MT][4], int lo, const int (&hi)[NC], int lane) {
  const float none = __int_as_float(0xff800000);
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int x = 16 * m + (lane >> 2) + 8 * (i >> 1);
      if ((i & 1) < NC && (x < lo || x >= hi[(i & 1) < NC ? (i & 1) : 0])) s[m][i] = none;
    }
}

// Softcap: s becomes cap * tanh(s / 2) in bits, as tanh(y) = 1 - 2 / (exp(2 y) + 1), right to some 1e-7 of the cap and
// at both ends (tanh.approx is not).
template <int MT>
__device__ __forceinline__ void capped(float (&s)[MT][4], float cap) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if ((i & 1) < NC) s[m][i] = cap - 2.f * cap * inverse_of(exp2_of(s[m][i]) + 1.f);
}

// The sink of a query head in bits.
__device__ __forceinline__ float sink_of(const Args& args, int head) {
#if SINKS == 2
  return ((const float*)args.sinks)[head] * 1.44269504f;
#else
  return float_of_exact(((const u16*)args.sinks)[head]) * 1.44269504f;
#endif
}

// Online softmax over a block of tokens.
//   EXACT   values are exact: probabilities in their dtype, else fp16
//   st      top, total and low are brought to the new maximum (acc is, with `shrink`, by the second product)
//   s       log2 scores, which are left as they are
//   p       out: probabilities times 2^OFFSET in the layout of the second product
//   shrink  out: factor for what was summed before
template <bool EXACT, int MT>
__device__ __forceinline__ void weigh(State& st, float (&s)[MT][4], u32 (&p)[MT][2], float (&shrink)[NC]) {
  {
    float base[NC];
#pragma unroll
    for (int c = 0; c < NC; c++) {
      float top = fmaxf(s[0][c], s[0][c + 2]);
#pragma unroll
      for (int m = 1; m < MT; m++) top = fmaxf(top, fmaxf(s[m][c], s[m][c + 2]));
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
      top = fmaxf(top, st.top[c]);
      shrink[c] = exp2_of(st.top[c] - top);
      st.top[c] = top;
      base[c] = top - OFFSET;
    }
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int m = 0; m < MT; m++) {
      float e[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 4; i++)
        if ((i & 1) < NC) e[i] = exp2_of(s[m][i] - base[(i & 1) < NC ? (i & 1) : 0]);
      // results of one product become an operand of the next: movmatrix turns 8 x 8 blocks between lanes
      p[m][0] = transposed(EXACT ? exact2_of(e[0], e[1]) : half2_of(e[0], e[1]));
      p[m][1] = transposed(EXACT ? exact2_of(e[2], e[3]) : half2_of(e[2], e[3]));
      // the sum of weights is a product with ones: it adds the rounded weights, which are those that values get
      if constexpr (EXACT) {
        const u32 one = BF16 ? 0x3f803f80u : 0x3c003c00u;
        mma_exact(sum, one, one, one, one, p[m][0], p[m][1]);
      } else {
        mma16(sum, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, p[m][0], p[m][1]);
      }
    }
#pragma unroll
    for (int c = 0; c < NC; c++) {
      st.total[c] = st.total[c] * shrink[c] + sum[c];
      st.low[c] *= shrink[c];
    }
  }
}
