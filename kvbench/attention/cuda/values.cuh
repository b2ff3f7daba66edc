// ---- values --------------------------------------------------------------------------------------------------------
// Loads the words of the second plane: with 8 bits those of the same words, with 3 bits those of channel blocks a and
// a + 1 (a even) in registers 0, 1 and 2, 3.
template <int BITS>
__device__ __forceinline__ void load_second_values(u32 (&w)[4], u32 plane, int v, int a, int lane) {
  if constexpr (BITS == 8) ldsm(w, plane + narrow<8>(16 * a + (lane & 15), 2 * v + (lane >> 4)));
  if constexpr (BITS == 3) ldsm(w, plane + (16 * a + lane) * 16);
}

// Adds the codes of a packed tile, weighted by probability and scale, to st.acc.
//   LARGE  weights take 2^-14 along
//   raw    scales, as packed_values loads them
//   low    sums of weight * minimum, which join the accumulator with the codes if there are cross factors (cross.cuh)
template <int P, bool LARGE, int MT, int VG, int BLOCKS>
__device__ __forceinline__ void weighted_codes(State& st, const u32 (&p)[NT][MT][2], const float (&shrink)[NT][NC],
                                               const u32 (&raw)[MT][2][VG], const float (&low)[BLOCKS][NT][4], u32 slot,
                                               int part, int lane) {
  using S = Shape<P>;
  using W = Portion<S::VB>;
  const int row = lane & 15, hi = lane >> 4;
  // scales of tokens 16 m + 8 j + {2t, 2t + 1} for group k of channels, from the words loaded above
  auto pair = [&](int m, int j, int k) -> u32 {
    if constexpr (VG == 1) return raw[m][j][0];
    if constexpr (VG == 2) return __byte_perm(raw[m][j][0], raw[m][j][VG - 1], k ? 0x7632 : 0x5410);
    if constexpr (VG != 4) {
      const u32 at = slot + S::VCODES + ((16 * (SHARES * m + part) + 8 * j + 2 * (lane & 3)) * VG + k) * 2;
      return load_u16(at) | (load_u16(at + VG * 2) << 16);
    }
    return __byte_perm(raw[m][j][k >> 1], raw[m][j][(k >> 1) + VG / 2], k & 1 ? 0x7632 : 0x5410);
  };
  u32 last[4], factors[BLOCKS][4];
#pragma unroll
  for (int k = 0; k < VG; k++) {
    u32 x[NT][MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 scale = pair(m, j, k);
        const int shift = low_of(S::VB, m / W::BLOCKS * W::STEP) + (S::VK == HIERARCHICAL ? 4 : 0);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          u32 y = p[n][m][j];
          // codes from higher bits of the word are larger by a power of two, by which the probability is divided
          if (shift) y = mul2(y, half2_of(pow2(-shift), pow2(-shift)));
          if (LARGE) y = mul2(y, half2_of(pow2(-14), pow2(-14)));
          x[n][m][j] = mul2(y, scale);
        }
      }
#pragma unroll
    for (int b = 0; b < KS / VG; b++) {
      const int a = k * (KS / VG) + b;
      // a new fragment per tile: a long chain into one accumulator truncates, always downwards
      float o[BLOCKS][NT][4];
      if constexpr (S::VX) {
        if (a % 4 == 0) {
#pragma unroll
          for (int j = 0; j < BLOCKS; j++)
            load_factors(factors[j], slot + S::VCODES + 2 * S::VPARAM + j * 2 * D, lane,
                         [&](int i) { return min(a + i, KS - 1); });
        }
      }
      if (S::VB == 3 && a % 2 == 0) {
        load_second_values<3>(last, slot + plane_bytes(3), 0, a, lane);
        W::align(last, part);
      }
      each<0, W::BLOCKS>([&](auto tag_v) {
        constexpr int V = decltype(tag_v)::value;
        u32 w[4], second[4] = {0, 0, 0, 0};
        const int block = W::block(V, part);
        ldsm(w, slot + narrow<S::VB>(16 * a + row, 2 * block + hi));
        W::align(w, part);
        if constexpr (S::VB == 8) load_second_values<8>(second, slot + plane_bytes(8), block, a, lane);
        if constexpr (S::VB == 3) second[0] = last[a % 2 * 2], second[1] = last[a % 2 * 2 + 1];
        each<0, W::FIELDS>([&](auto tag) {
          constexpr int F = decltype(tag)::value;
          u32 c[4];
          operand<S::VB, F * W::STEP, false>(c, w, second);
          constexpr int M = F * W::BLOCKS + V, J = S::value_block(M);
          constexpr bool NEW = V == 0 && (F == 0 || S::value_block(M - W::BLOCKS) != J);
#pragma unroll
          for (int n = 0; n < NT; n++) mma16<NEW>(o[J][n], c[0], c[1], c[2], c[3], x[n][M][0], x[n][M][1]);
        });
      });
      if constexpr (S::VX) {
        u32 of_channels[BLOCKS];
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) of_channels[j] = factors[j][a % 4];
        join<LARGE>(st.acc, a, shrink, o, low, of_channels);
        continue;
      }
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if ((i & 1) >= NC) continue;
          if (LARGE) o[0][n][i] *= pow2(14);
          st.acc[n][a][i] = st.acc[n][a][i] * shrink[n][(i & 1) < NC ? (i & 1) : 0] + o[0][n][i];
        }
    }
  }
}

// Adds the weighted values of a packed tile, O^T = V^T P^T, to st.acc in units of 2^-24, and weight * minimum to
// st.low; where a token has one group, also the weights to st.total.
//   p       probabilities (times 2^LIFT) of the warp's tokens, as the second operand
//   shrink  factor for what was summed so far, for each column
//   slot    the item: words, scales, minima
// sum_t (p_t s_tb) c_td + sum_t p_t m_tb: scales go into the probabilities, in fp16.
template <int P, int MT>
__device__ __forceinline__ void packed_values(State& st, u32 (&p)[NT][MT][2], const float (&shrink)[NT][NC], u32 slot,
                                              int part, int lane) {
  using S = Shape<P>;
  constexpr int VG = S::VGROUPS;
  const u32 scales = slot + S::VCODES, lows = scales + S::VPARAM;
  const int t = lane & 3, g = lane >> 2, hi = lane >> 4;
  u32 any = 0;         // bits of all scales: tells whether one is 2 or more
  // VG 1: the scales of tokens {2t, 2t + 1}; 2, 4: words of a token's groups, see pair(); else read when needed
  u32 raw[MT][2][VG];
  float low[S::VBLOCKS][NT][4];
#pragma unroll
  for (int j = 0; j < S::VBLOCKS; j++)
#pragma unroll
    for (int n = 0; n < NT; n++) low[j][n][0] = low[j][n][1] = low[j][n][2] = low[j][n][3] = 0.f;
  if constexpr (VG == 1) {
#pragma unroll
    for (int m = 0; m < MT; m += 2) {
      u32 x[4], z[4];
      const u32 at = (16 * (SHARES * (m + hi) + part) + 8 * ((lane >> 3) & 1)) * 2;
      ldsm(x, scales + at);
      ldsm(z, lows + at);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if constexpr (S::VK == ATOM) z[i] = mul2(mul2(z[i], x[i]), 0xbc00bc00u);
        if constexpr (S::VK == HIERARCHICAL) z[i] = fma2(x[i], 0xb800b800u, z[i]);
        raw[m + (i >> 1)][i & 1][0] = x[i];
        any |= x[i];
      }
      // rows 0 to 7 of the product are ones (0x3c00), which sum the weights; rows 8 to 15 are the minima
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const int j = S::value_block(m);
        mma16(low[j][n], 0x3c003c00u, z[0], 0x3c003c00u, z[1], p[n][m][0], p[n][m][1]);
        mma16(low[j][n], 0x3c003c00u, z[2], 0x3c003c00u, z[3], p[n][m + 1][0], p[n][m + 1][1]);
      }
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < NC; c++)
#pragma unroll
        for (int j = 0; j < S::VBLOCKS; j++) {
          st.total[n][c] += low[j][n][c];
          if (!S::VX) st.low[n][c] += low[j][n][c + 2];
        }
  } else {
    const int k = g * VG / LOWS;  // row g of the product with the minima is group g of LOWS
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 at = (16 * (SHARES * m + part) + 8 * j + 2 * t) * VG * 2;
        if constexpr (VG == 2) {
          load64(raw[m][j][0], raw[m][j][1], scales + at);
        } else if constexpr (VG == 4) {
          u32 x[4];
          load128(x, scales + at);
#pragma unroll
          for (int i = 0; i < VG; i++) raw[m][j][i] = x[i];
        }
        if constexpr (VG == 2 || VG == 4) {
#pragma unroll
          for (int i = 0; i < VG; i++) any |= raw[m][j][i];
        }
      }
    if constexpr (VG != 2 && VG != 4) {
      for (int i = lane; i < S::VPARAM / 16; i += 32) {
        u32 x[4];
        load128(x, scales + i * 16);
        any |= x[0] | x[1] | x[2] | x[3];
      }
    }
#pragma unroll
    for (int m = 0; m < MT; m++) {
      u32 z[2] = {0, 0};
      if (g < LOWS) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const u32 at = ((16 * (SHARES * m + part) + 8 * j + 2 * t) * VG + k) * 2;
          z[j] = load_u16(lows + at) | (load_u16(lows + at + VG * 2) << 16);
          if constexpr (S::VK == ATOM || S::VK == HIERARCHICAL) {
            const u32 x = load_u16(scales + at) | (load_u16(scales + at + VG * 2) << 16);
            z[j] = S::VK == ATOM ? mul2(mul2(z[j], x), 0xbc00bc00u) : fma2(x, 0xb800b800u, z[j]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < NT; n++) mma16(low[0][n], z[0], 0, z[1], 0, p[n][m][0], p[n][m][1]);
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < NC; c++) st.low[n][c] += low[0][n][c];
  }
  // a scale of 2 or more would take a probability of 2^14 past fp16: then 2^-14 goes along and is given back afterwards
  if (__any_sync(~0u, any & 0x40004000u)) weighted_codes<P, true>(st, p, shrink, raw, low, slot, part, lane);
  else weighted_codes<P, false>(st, p, shrink, raw, low, slot, part, lane);
}

// Adds 32 exact values, weighted by the probabilities of the warp's blocks FIRST, ... of 16 tokens; arguments as of
// packed_values. acc counts in units of 2^-24, as codes do.
template <int FIRST, int MT>
__device__ __forceinline__ void exact_values(State& st, u32 (&p)[NT][MT][2], const float (&shrink)[NT][NC], u32 slot,
                                             int part, int lane) {
#pragma unroll
  for (int a = 0; a < KS; a++) {
    float o[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
#pragma unroll
    for (int m = 0; m < 2 / SHARES; m++) {
      u32 w[4];
      ldsm_t(w, slot + wide(16 * (SHARES * m + part) + (lane & 7) + 8 * (lane >> 4), 2 * a + ((lane >> 3) & 1)));
#pragma unroll
      for (int n = 0; n < NT; n++) mma_exact(o[n], w[0], w[1], w[2], w[3], p[n][FIRST + m][0], p[n][FIRST + m][1]);
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if ((i & 1) >= NC) continue;
        const float factor = FIRST == 0 ? shrink[n][(i & 1) < NC ? (i & 1) : 0] : 1.f;
        st.acc[n][a][i] = st.acc[n][a][i] * factor + o[n][i] * pow2(-24);
      }
  }
}
