// ---- scores --------------------------------------------------------------------------------------------------------
// Channels 16 a + {2t, 2t + 1} and 16 a + 8 + {2t, 2t + 1} of a query row in each block of 8 rows.
__device__ __forceinline__ void load_queries(u32 (&q)[NT][2], u32 queries, int a, int lane) {
#pragma unroll
  for (int n = 0; n < NT; n++) load64(q[n][0], q[n][1], queries + n * QUERIES + (a * 32 + lane) * 8);
}

// The factor from a product with the codes of the warp's m-th block to one with codes as the format counts them.
template <int P>
CONST float lift_of(int m) {
  using W = Portion<Shape<P>::KB>;
  return pow2(24 - low_of(Shape<P>::KB, m / W::BLOCKS * W::STEP)) * (Shape<P>::KK == HIERARCHICAL ? 0.0625f : 1.f);
}
// What turns a product into a log2 score where a tile has one group of keys: product * lift_of(m) * State::sl + base.
struct Linear {
  float base[NT][NC];
};

// Loads the words of the second plane: with 8 bits those of the same words, with 3 bits those of channel steps a and
// a + 1 (a even) in registers 0, 1 and 2, 3.
//   v  block of 16 word rows
template <int BITS>
__device__ __forceinline__ void load_second_keys(u32 (&w)[4], u32 plane, int v, int a, int lane) {
  if constexpr (BITS == 8) ldsm(w, plane + wide(16 * v + (lane & 15), 2 * a + (lane >> 4)));
  if constexpr (BITS == 3) ldsm(w, plane + wide(lane & 7, 2 * a + (lane >> 3)));
}

// Scores of a packed tile, S^T = K q^T: s[n][m] are log2 scores of the warp's tokens in the columns of this lane, or
// products that are log2 scores once `Linear` is applied (where Shape::LINEAR).
//   slot     the item: words, scales, minima
//   queries  the warp's normalised queries in shared memory, fp16
//   st       sl: the factor that converts a score to bits
// Keys per channel: (q * s_g) . c + q . m_g, the scaled queries made for each step of 16 channels, the biases by matrix
// instructions too. Keys per token: s_t (q_b . c_t) + m_t sum(q_b) after each group b of channels.
template <int P, int MT>
__device__ __forceinline__ void packed_scores(float (&s)[NT][MT][4], Linear& linear, u32 slot, u32 queries,
                                              const State& st, int part, int lane) {
  using S = Shape<P>;
  using W = Portion<S::KB>;
  constexpr bool CHANNELS = S::KA == CHANNEL;
  constexpr int NG = S::KGROUPS;
  constexpr int SPAN = CHANNELS ? KS : S::KG / 16;  // channel steps that share parameters of a token
  // a product with minima has 16 rows but needs one of them: rows 0 to 7 are those of one group, rows 8 to 15 of the
  // next, or the same group's scales where a minimum is known only with them
  constexpr bool TWO = S::KK == HIERARCHICAL;
  constexpr int NB = CHANNELS && !TWO ? (NG + 1) / 2 : NG;
  const u32 params = slot + S::KCODES;
  const int row = lane & 15, hi = lane >> 4, g = lane >> 2;
  float raw[NT][MT][4], bias[NT][NB][4];
#pragma unroll
  for (int n = 0; n < NT; n++) {
#pragma unroll
    for (int m = 0; m < MT; m++) s[n][m][0] = s[n][m][1] = s[n][m][2] = s[n][m][3] = 0.f;
  }
  u32 last[4];
  each<0, KS>([&](auto tag_a) {
    constexpr int a = decltype(tag_a)::value;
    constexpr bool NEW = a % SPAN == 0;  // products begin anew
    u32 q[NT][2], qs[NT][NG][2];
    load_queries(q, queries, a, lane);
    if constexpr (CHANNELS) {
      u32 low[NG][2];
#pragma unroll
      for (int k = 0; k < NG; k++) {
        u32 p[4];  // scales of channels 16 a + {2t, 2t + 8}, then minima
        ldsm(p, params + hi * S::KPARAM + (k * D + 16 * a + 8 * ((lane >> 3) & 1)) * 2);
        if constexpr (S::KK == ATOM) {  // zero points become minima: -zero * scale (0xbc00 is -1)
          p[2] = mul2(mul2(p[2], p[0]), 0xbc00bc00u);
          p[3] = mul2(mul2(p[3], p[1]), 0xbc00bc00u);
        }
        low[k][0] = p[2], low[k][1] = p[3];
#pragma unroll
        for (int n = 0; n < NT; n++) {
          if constexpr (TWO) mma16<NEW>(bias[n][k], p[2], p[0], p[3], p[1], q[n][0], q[n][1]);
          qs[n][k][0] = mul2(q[n][0], p[0]);
          qs[n][k][1] = mul2(q[n][1], p[1]);
        }
      }
      if constexpr (!TWO) {
#pragma unroll
        for (int k = 0; k < NB; k++)
#pragma unroll
          for (int n = 0; n < NT; n++) {
            const int other = 2 * k + 1 < NG ? 2 * k + 1 : 2 * k;
            mma16<NEW>(bias[n][k], low[2 * k][0], low[other][0], low[2 * k][1], low[other][1], q[n][0], q[n][1]);
          }
      }
    } else {
#pragma unroll
      for (int n = 0; n < NT; n++) {
        // a product with ones (0x3c00): sums of the query over the group's channels
        mma16<NEW>(bias[n][0], 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, q[n][0], q[n][1]);
        qs[n][0][0] = q[n][0];
        qs[n][0][1] = q[n][1];
      }
    }
    if (S::KB == 3 && a % 2 == 0) {
      load_second_keys<3>(last, slot + first_room(true, 3), 0, a, lane);
      W::align(last, part);
    }
#pragma unroll
    for (int v = 0; v < W::BLOCKS; v++) {
      u32 w[4], second[4] = {0, 0, 0, 0};
      const int block = W::block(v, part);
      ldsm(w, slot + wide(16 * block + row, 2 * a + hi));
      W::align(w, part);
      if constexpr (S::KB == 8) load_second_keys<8>(second, slot + first_room(true, 8), block, a, lane);
      if constexpr (S::KB == 3) second[0] = last[a % 2 * 2], second[1] = last[a % 2 * 2 + 1];
      each<0, W::FIELDS>([&](auto tag) {
        constexpr int F = decltype(tag)::value;
        u32 c[4];
        operand<S::KB, F * W::STEP, true>(c, w, second);
        const int m = F * W::BLOCKS + v, K = CHANNELS ? m * SHARES * 16 / S::KG : 0;
#pragma unroll
        for (int n = 0; n < NT; n++) mma16<NEW>(raw[n][m], c[0], c[1], c[2], c[3], qs[n][K][0], qs[n][K][1]);
      });
    }
    if constexpr (!CHANNELS) {
      if (a % SPAN == SPAN - 1) {  // the channels of one group are done: apply each token's parameters
        constexpr int COUNT = D / S::KG;
        const int k = a / SPAN;
#pragma unroll
        for (int m = 0; m < MT; m++) {
          const u32 at = params + ((16 * (SHARES * m + part) + g) * COUNT + k) * 2;
          const float f = lift_of<P>(m);
          float scale[2], low[2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            scale[i] = float_of_half(load_u16(at + i * 16 * COUNT));
            low[i] = float_of_half(load_u16(at + i * 16 * COUNT + S::KPARAM));
            if constexpr (S::KK == ATOM) low[i] = -low[i] * scale[i];
            if constexpr (S::KK == HIERARCHICAL) low[i] -= 0.5f * scale[i];
          }
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const int c = i & 1, half = i >> 1;
              if (c < NC)
                s[n][m][i] += (raw[n][m][i] * (scale[half] * f) + low[half] * bias[n][0][c]) * st.sl[n][c < NC ? c : 0];
            }
        }
      }
    }
  });
  if constexpr (CHANNELS) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < NC; c++) {
        float base[NG];
#pragma unroll
        for (int k = 0; k < NG; k++)
          base[k] = (TWO ? bias[n][k][c] - 0.5f * bias[n][k][c + 2] : bias[n][k / 2][c + k % 2 * 2]) * st.sl[n][c];
        linear.base[n][c] = base[0];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int i = c; i < 4; i += 2)
            s[n][m][i] = S::LINEAR ? raw[n][m][i]
                                   : raw[n][m][i] * (st.sl[n][c] * lift_of<P>(m)) + base[m * SHARES * 16 / S::KG];
      }
    if constexpr (S::KX) times_tokens<P, MT>(s, slot, part, lane);
  }
}

// Scores of 32 exact keys: the warp's blocks FIRST, ... of 16 tokens; arguments as of packed_scores.
template <int FIRST, int MT>
__device__ __forceinline__ void exact_scores(float (&s)[NT][MT][4], u32 slot, u32 queries, const State& st, int part,
                                             int lane) {
  constexpr int COUNT = 2 / SHARES;
  const int row = lane & 15, hi = lane >> 4;
  float raw[NT][COUNT][4];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int m = 0; m < COUNT; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) raw[n][m][i] = 0.f;
#pragma unroll
  for (int a = 0; a < KS; a++) {
    u32 q[NT][2];
    load_queries(q, queries, a, lane);
#pragma unroll
    for (int m = 0; m < COUNT; m++) {
      u32 w[4];
      ldsm(w, slot + wide(16 * (SHARES * m + part) + row, 2 * a + hi));
#pragma unroll
      for (int n = 0; n < NT; n++) mma_exact(raw[n][m], w[0], w[1], w[2], w[3], q[n][0], q[n][1]);
    }
  }
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int m = 0; m < COUNT; m++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if ((i & 1) < NC) s[n][FIRST + m][i] = raw[n][m][i] * st.sl[n][(i & 1) < NC ? (i & 1) : 0];
}
