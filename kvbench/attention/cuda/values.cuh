// ---- values --------------------------------------------------------------------------------------------------------
// Adds the weighted values of a packed tile, O^T = V^T P^T, to st.acc in units of 2^-24, and weight * minimum to
// st.low.
//   p       probabilities (times 2^OFFSET) of the tile's tokens, as the second operand
//   shrink  factor for what was summed so far, for each column
//   slot    the item: words, scales, minima
// sum_t (p_t s_tb) c_td + sum_t p_t m_tb: scales go into the probabilities, in fp16.
template <int P, int MT>
__device__ __forceinline__ void packed_values(State& st, u32 (&p)[MT][2], const float (&shrink)[NC], u32 slot,
                                              int lane) {
  using S = Shape<P>;
  constexpr int NW = rows_of(S::VB), FIELDS = MT * 16 / NW, VG = S::VGROUPS;
  const u32 scales = slot + S::VCODES, lows = scales + S::VPARAM;
  const int t = lane & 3, g = lane >> 2, row = lane & 15, hi = lane >> 4;
  u32 any = 0;         // bits of all scales: tells whether one is 2 or more
  u32 raw[MT][2][VG];  // VG 1: the scales of tokens {2t, 2t + 1}; else words of a token's groups, see pair()
  float low[4];
  low[0] = low[1] = low[2] = low[3] = 0.f;
  if constexpr (VG == 1) {
#pragma unroll
    for (int m = 0; m < MT; m += 2) {
      u32 x[4], z[4];
      const u32 at = (16 * m + 8 * (lane >> 3)) * 2;
      ldsm(x, scales + at);
      ldsm(z, lows + at);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if constexpr (S::VK == ATOM) z[i] = mul2(mul2(z[i], x[i]), 0xbc00bc00u);
        if constexpr (S::VK == HIERARCHICAL) z[i] = fma2(x[i], 0xb800b800u, z[i]);
        raw[m + (i >> 1)][i & 1][0] = x[i];
        any |= x[i];
      }
      {
        mma16(low, z[0], z[0], z[1], z[1], p[m][0], p[m][1]);
        mma16(low, z[2], z[2], z[3], z[3], p[m + 1][0], p[m + 1][1]);
      }
    }
  } else {
    const int k = g * VG / LOWS;  // row g of the product with the minima is group g of LOWS
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 at = (16 * m + 8 * j + 2 * t) * VG * 2;
        if constexpr (VG == 2) {
          load64(raw[m][j][0], raw[m][j][1], scales + at);
        } else {
          u32 x[4];
          load128(x, scales + at);
#pragma unroll
          for (int i = 0; i < VG; i++) raw[m][j][i] = x[i];
        }
#pragma unroll
        for (int i = 0; i < VG; i++) any |= raw[m][j][i];
      }
#pragma unroll
    for (int m = 0; m < MT; m++) {
      u32 z[2] = {0, 0};
      if (g < LOWS) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const u32 at = ((16 * m + 8 * j + 2 * t) * VG + k) * 2;
          z[j] = load_u16(lows + at) | (load_u16(lows + at + VG * 2) << 16);
          if constexpr (S::VK == ATOM || S::VK == HIERARCHICAL) {
            const u32 x = load_u16(scales + at) | (load_u16(scales + at + VG * 2) << 16);
            z[j] = S::VK == ATOM ? mul2(mul2(z[j], x), 0xbc00bc00u) : fma2(x, 0xb800b800u, z[j]);
          }
        }
      }
      mma16(low, z[0], 0, z[1], 0, p[m][0], p[m][1]);
    }
  }
#pragma unroll
  for (int c = 0; c < NC; c++) st.low[c] += low[c];
  // a scale of 2 or more would take a probability of 2^14 past fp16: then 2^-14 goes along and is given back below
  const bool large = __any_sync(~0u, any & 0x40004000u);
  // scales of tokens 16 m + 8 j + {2t, 2t + 1} for group k of channels, from the words loaded above
  auto pair = [&](int m, int j, int k) -> u32 {
    if constexpr (VG == 1) return raw[m][j][0];
    if constexpr (VG == 2) return __byte_perm(raw[m][j][0], raw[m][j][VG - 1], k ? 0x7632 : 0x5410);
    return __byte_perm(raw[m][j][k >> 1], raw[m][j][(k >> 1) + VG / 2], k & 1 ? 0x7632 : 0x5410);
  };
#pragma unroll
  for (int k = 0; k < VG; k++) {
    u32 x[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 scale = pair(m, j, k);
        const int shift = low_of(S::VB, m * 16 / NW) + (S::VK == HIERARCHICAL ? 4 : 0);
        {
          u32 y = p[m][j];
          // codes from higher bits of the word are larger by a power of two, by which the probability is divided
          if (shift) y = mul2(y, half2_const(pow2(-shift)));
          if (large) y = mul2(y, half2_const(pow2(-14)));
          x[m][j] = mul2(y, scale);
        }
      }
#pragma unroll
    for (int b = 0; b < KS / VG; b++) {
      const int a = k * (KS / VG) + b;
      float o[4];  // a new fragment per tile: a long chain into one accumulator truncates, always downwards
      o[0] = o[1] = o[2] = o[3] = 0.f;
#pragma unroll
      for (int mt = 0; mt < NW / 16; mt++) {
        u32 w[4], lower[4] = {0, 0, 0, 0};
        ldsm(w, slot + narrow<S::VB>(16 * a + row, 2 * mt + hi));
        if constexpr (S::VB == 8) ldsm(lower, slot + plane_bytes(8) + narrow<8>(16 * a + row, 2 * mt + hi));
        auto one = [&](auto tag) {
          constexpr int F = decltype(tag)::value, M = F * NW / 16;
          u32 c0 = field<S::VB, F>(w[0], lower[0]), c1 = field<S::VB, F>(w[1], lower[1]);
          u32 c2 = field<S::VB, F>(w[2], lower[2]), c3 = field<S::VB, F>(w[3], lower[3]);
          mma16(o, c0, c1, c2, c3, x[M + mt][0], x[M + mt][1]);
        };
        each<0, FIELDS>(one);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if ((i & 1) >= NC) continue;
        if (large) o[i] *= pow2(14);
        st.acc[a][i] = st.acc[a][i] * shrink[(i & 1) < NC ? (i & 1) : 0] + o[i];
      }
    }
  }
}

// Adds 32 exact values, weighted by the probabilities of tiles FIRST and FIRST + 1 of 16 tokens; arguments as of
// packed_values. acc counts in units of 2^-24, as codes do.
template <int FIRST, int MT>
__device__ __forceinline__ void exact_values(State& st, u32 (&p)[MT][2], const float (&shrink)[NC], u32 slot,
                                             int lane) {
#pragma unroll
  for (int a = 0; a < KS; a++) {
    float o[4];
    o[0] = o[1] = o[2] = o[3] = 0.f;
#pragma unroll
    for (int m = 0; m < 2; m++) {
      u32 w[4];
      ldsm_t(w, slot + wide(16 * m + (lane & 7) + 8 * (lane >> 4), 2 * a + ((lane >> 3) & 1)));
      mma_exact(o, w[0], w[1], w[2], w[3], p[FIRST + m][0], p[FIRST + m][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if ((i & 1) >= NC) continue;
      const float before = FIRST == 0 ? st.acc[a][i] * shrink[(i & 1) < NC ? (i & 1) : 0] : st.acc[a][i];
      st.acc[a][i] = before + o[i] * pow2(-24);
    }
  }
}
