// ---- scores --------------------------------------------------------------------------------------------------------
// Scores of a packed tile, S^T = K q^T: s[m] are log2 scores of tokens 16 m + {g, g + 8} in the columns of this lane.
//   slot     the item: words, scales, minima
//   queries  the warp's normalised queries in shared memory, fp16
//   st       sl: the factor that converts a score to bits
// Keys per channel: (q * s_g) . c + q . m_g, the scaled queries made for each step of 16 channels, the biases by matrix
// instructions too. Keys per token: s_t (q_b . c_t) + m_t sum(q_b) after each group b of channels.
template <int P, int MT>
__device__ __forceinline__ void packed_scores(float (&s)[MT][4], u32 slot, u32 queries, const State& st, int lane) {
  using S = Shape<P>;
  constexpr int NW = rows_of(S::KB), FIELDS = MT * 16 / NW;
  constexpr bool CHANNELS = S::KA == CHANNEL;
  constexpr int NG = S::KGROUPS;
  constexpr int SPAN = CHANNELS ? KS : S::KG / 16;  // channel steps that share parameters of a token
  constexpr float PART16 = S::KK == HIERARCHICAL ? 0.0625f : 1.f;
  const u32 params = slot + S::KCODES;
  const int row = lane & 15, hi = lane >> 4, g = lane >> 2;
  float raw[MT][4], bias[NG][4], bias2[NG][4];
  {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) raw[m][i] = 0.f, s[m][i] = 0.f;
#pragma unroll
    for (int k = 0; k < NG; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) bias[k][i] = 0.f, bias2[k][i] = 0.f;
  }
#pragma unroll
  for (int a = 0; a < KS; a++) {
    u32 q[2], qs[NG][2];
    load64(q[0], q[1], queries + (a * 32 + lane) * 8);
    if constexpr (CHANNELS) {
#pragma unroll
      for (int k = 0; k < NG; k++) {
        u32 p[4];  // scales of channels 16 a + {2t, 2t + 8}, then minima
        ldsm(p, params + hi * S::KPARAM + (k * D + 16 * a + 8 * ((lane >> 3) & 1)) * 2);
        if constexpr (S::KK == ATOM) {  // zero points become minima: -zero * scale (0xbc00 is -1)
          p[2] = mul2(mul2(p[2], p[0]), 0xbc00bc00u);
          p[3] = mul2(mul2(p[3], p[1]), 0xbc00bc00u);
        }
        {
          // a product with the minima in every row: each row of the result is the bias, so it lies where scores do
          mma16(bias[k], p[2], p[2], p[3], p[3], q[0], q[1]);
          if constexpr (S::KK == HIERARCHICAL) mma16(bias2[k], p[0], p[0], p[1], p[1], q[0], q[1]);
          qs[k][0] = mul2(q[0], p[0]);
          qs[k][1] = mul2(q[1], p[1]);
        }
      }
    } else {
      {
        // a product with ones (0x3c00): sums of the query over the group's channels
        mma16(bias[0], 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, q[0], q[1]);
        qs[0][0] = q[0];
        qs[0][1] = q[1];
      }
    }
#pragma unroll
    for (int mt = 0; mt < NW / 16; mt++) {
      u32 w[4], lower[4] = {0, 0, 0, 0};
      ldsm(w, slot + wide(16 * mt + row, 2 * a + hi));
      if constexpr (S::KB == 8) ldsm(lower, slot + plane_bytes(8) + wide(16 * mt + row, 2 * a + hi));
      auto one = [&](auto tag) {
        constexpr int F = decltype(tag)::value, M = F * NW / 16;
        u32 c0 = field<S::KB, F>(w[0], lower[0]), c1 = field<S::KB, F>(w[1], lower[1]);
        u32 c2 = field<S::KB, F>(w[2], lower[2]), c3 = field<S::KB, F>(w[3], lower[3]);
        constexpr int K = CHANNELS ? F * NW / S::KG : 0;
        mma16(raw[M + mt], c0, c1, c2, c3, qs[K][0], qs[K][1]);
      };
      each<0, FIELDS>(one);
    }
    if constexpr (!CHANNELS) {
      if (a % SPAN == SPAN - 1) {  // the channels of one group are done: apply each token's parameters
        constexpr int COUNT = D / S::KG;
        const int k = a / SPAN;
#pragma unroll
        for (int m = 0; m < MT; m++) {
          const u32 at = params + ((16 * m + g) * COUNT + k) * 2;
          const float f = pow2(24 - low_of(S::KB, m * 16 / NW)) * PART16;
          float scale[2], low[2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            scale[i] = float_of_half(load_u16(at + i * 16 * COUNT));
            low[i] = float_of_half(load_u16(at + i * 16 * COUNT + S::KPARAM));
            if constexpr (S::KK == ATOM) low[i] = -low[i] * scale[i];
            if constexpr (S::KK == HIERARCHICAL) low[i] -= 0.5f * scale[i];
          }
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int c = i & 1, half = i >> 1;
            if (c < NC) s[m][i] += (raw[m][i] * (scale[half] * f) + low[half] * bias[0][c]) * st.sl[c];
            raw[m][i] = 0.f;
          }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) bias[0][i] = 0.f;
      }
    }
  }
  if constexpr (CHANNELS) {
#pragma unroll
    for (int c = 0; c < NC; c++) {
      float base[NG];
#pragma unroll
      for (int k = 0; k < NG; k++)
        base[k] = (S::KK == HIERARCHICAL ? bias[k][c] - 0.5f * bias2[k][c] : bias[k][c]) * st.sl[c];
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const float f = st.sl[c] * (pow2(24 - low_of(S::KB, m * 16 / NW)) * PART16);
        const int k = m * 16 / S::KG;
        s[m][c] = raw[m][c] * f + base[k];
        s[m][c + 2] = raw[m][c + 2] * f + base[k];
      }
    }
  }
}

// Scores of 32 exact keys: tiles FIRST and FIRST + 1 of 16 tokens; arguments as of packed_scores.
template <int FIRST, int MT>
__device__ __forceinline__ void exact_scores(float (&s)[MT][4], u32 slot, u32 queries, const State& st, int lane) {
  const int row = lane & 15, hi = lane >> 4;
  float raw[2][4];
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) raw[m][i] = 0.f;
#pragma unroll
  for (int a = 0; a < KS; a++) {
    u32 q[2];
    load64(q[0], q[1], queries + (a * 32 + lane) * 8);
#pragma unroll
    for (int m = 0; m < 2; m++) {
      u32 w[4];
      ldsm(w, slot + wide(16 * m + row, 2 * a + hi));
      mma_exact(raw[m], w[0], w[1], w[2], w[3], q[0], q[1]);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if ((i & 1) < NC) s[FIRST + m][i] = raw[m][i] * st.sl[i & 1];
}
