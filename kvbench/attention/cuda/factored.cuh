// ---- products of factored kinds: each value is a factor of its group of channels times an element (elements.cuh) ---
// Scores of a packed tile, S^T = K q^T: s_tb (q_b . e_t) after each group b of channels, e_t the elements; arguments and
// result as of packed_scores, of tiles that have several groups.
//   table  the warp's scratch memory
//   whole  factor on all keys
template <int P, int MT>
__device__ __forceinline__ void factored_scores(float (&s)[NT][MT][4], u32 slot, u32 table, u32 queries,
                                                const State& st, float whole, int part, int lane) {
  using S = Shape<P>;
  using W = Portion<S::KB>;
  constexpr int COUNT = D / S::KG, SPAN = S::KG / 16;
  // factors of a token that are loaded at once: one where there are many, as registers are scarce
  constexpr int LOAD = S::KSCALE == BYTE ? 1 : COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
  constexpr bool SHIFTED = shifted(S::KK);
  const u32 scales = slot + S::KCODES;
  const int row = lane & 15, hi = lane >> 4, g = lane >> 2;
  tabulate_keys<S::KSCALE, COUNT>(table, scales, part, lane);
  each<0, W::BLOCKS>([&](auto tag_v) {
    constexpr int V = decltype(tag_v)::value;
    float raw[NT][W::FIELDS][4], bias[NT][4];
    u32 factor[W::FIELDS][2][LOAD], last[4];
    each<0, KS>([&](auto tag_a) {
      constexpr int a = decltype(tag_a)::value, k = a / SPAN;
      constexpr bool NEW = a % SPAN == 0;
      u32 q[NT][2];
      load_queries(q, queries, a, lane);
      if constexpr (SHIFTED) {  // sums of the query over the group's channels
#pragma unroll
        for (int n = 0; n < NT; n++)
          mma16<NEW>(bias[n], 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, q[n][0], q[n][1]);
      }
      if (S::KB == 3 && a % 2 == 0) {
        load_second_keys<3>(last, slot + first_room(true, 3), 0, a, lane);
        W::align(last, part);
      }
      u32 w[4], second[4] = {0, 0, 0, 0};
      const int block = W::block(V, part);
      ldsm(w, slot + wide(16 * block + row, 2 * a + hi));
      W::align(w, part);
      if constexpr (S::KB == 8) load_second_keys<8>(second, slot + first_room(true, 8), block, a, lane);
      if constexpr (S::KB == 3) second[0] = last[a % 2 * 2], second[1] = last[a % 2 * 2 + 1];
      each<0, W::FIELDS>([&](auto tag) {
        constexpr int F = decltype(tag)::value;
        u32 c[4];
        elements<S::KK, S::KB, F * W::STEP, true>(c, w, second);
#pragma unroll
        for (int n = 0; n < NT; n++) mma16<NEW>(raw[n][F], c[0], c[1], c[2], c[3], q[n][0], q[n][1]);
      });
      if constexpr (a % SPAN == SPAN - 1) {  // the channels of one group are done
#pragma unroll
        for (int F = 0; F < W::FIELDS; F++) {
          const int m = F * W::BLOCKS + V;
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int token = 16 * (SHARES * m + part) + g + 8 * i;
            if constexpr (COUNT == 1) {
              if (S::KSCALE == HALF) factor[F][i][0] = __float_as_uint(float_of_half(load_u16(scales + token * 2)));
              else if (S::KSCALE == SINGLE) factor[F][i][0] = load_u32(scales + token * 4);
            } else if (k % LOAD == 0) {
              load_words(factor[F][i], table + (token * COUNT + k) * 4);
            }
            float scale = __uint_as_float(factor[F][i][k % LOAD]), middle = middle_of(S::KK, S::KB);
            if constexpr (S::KK == FOLDED) {
              middle = (float)(__float_as_uint(scale) & 15);
              scale = __uint_as_float(__float_as_uint(scale) & ~15u);
            }
            middle *= -pow2(unit_of(S::KK, S::KB, F * W::STEP));
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
              for (int c = 0; c < NC; c++) {
                float& sum = s[n][m][c + 2 * i];
                float x = raw[n][F][c + 2 * i];
                if (SHIFTED) x += middle * bias[n][c];
                if (S::KSCALE == NO_SCALE) sum = x;
                else sum = k == 0 ? x * scale : sum + x * scale;
              }
          }
        }
      }
    });
  });
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < NC; c++) {
      const float by = has_whole(S::KK) ? st.sl[n][c] * whole : st.sl[n][c];
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = c; i < 4; i += 2) s[n][m][i] *= by * pow2(-unit_of(S::KK, S::KB, m / W::BLOCKS * W::STEP));
    }
}

// Adds the weighted values of a packed tile, O^T = V^T P^T, to st.acc in units of 2^-24; arguments as of packed_values.
// sum_t (p_t s_tb) e_td: factors go into the probabilities, in fp16. What operands have too much (shifted()) is taken off
// by the same rounded weights, before a group's products begin.
template <int P, int MT>
__device__ __forceinline__ void factored_values(State& st, u32 (&p)[NT][MT][2], const float (&shrink)[NT][NC],
                                                u32 slot, u32 table, float whole, int part, int lane) {
  using S = Shape<P>;
  using W = Portion<S::VB>;
  constexpr int VG = S::VGROUPS;
  constexpr bool SHIFTED = shifted(S::VK);
  const int row = lane & 15, hi = lane >> 4;
  float back = (has_whole(S::VK) ? whole : 1.f) * pow2(-24 - unit_of(S::VK, S::VB, 0));
  if constexpr (S::VSCALE != NO_SCALE) back *= tabulate_values<S::VK, S::VSCALE, VG, S::VROW>(table, slot + S::VCODES, part, lane);
  // a row of a table as operands: tokens 16 m + 8 j + {2t, 2t + 1} of the warp's blocks m and m + 1
  auto load_pairs = [&](u32 (&x)[4], int m, int at) {
    ldsm(x, table + at + (16 * (SHARES * (m + hi) + part) + 8 * ((lane >> 3) & 1)) * 2);
  };
#pragma unroll
  for (int m = 0; m < MT; m++) {
    // codes from higher bits of the word are larger by a power of two, by which the probability is divided
    const int shift = unit_of(S::VK, S::VB, m / W::BLOCKS * W::STEP) - unit_of(S::VK, S::VB, 0);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (shift) p[n][m][j] = mul2(p[n][m][j], half2_of(pow2(-shift), pow2(-shift)));
  }
  u32 last[4];
#pragma unroll
  for (int k = 0; k < VG; k++) {
    u32 x[NT][MT][2];
    float middle[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++) middle[n][0] = middle[n][1] = middle[n][2] = middle[n][3] = 0.f;
#pragma unroll
    for (int m = 0; m < MT; m += 2) {
      u32 scale[4], zero[4];
      if constexpr (S::VSCALE != NO_SCALE) load_pairs(scale, m, k * 256);
      if constexpr (S::VK == FOLDED) load_pairs(zero, m, 256);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int b = m + (i >> 1), low = unit_of(S::VK, S::VB, b / W::BLOCKS * W::STEP) + 24;
        if (SHIFTED && S::VK != FOLDED) zero[i] = middle_of(S::VK, S::VB) * 0x00010001u;
#pragma unroll
        for (int n = 0; n < NT; n++) x[n][b][i & 1] = S::VSCALE == NO_SCALE ? p[n][b][i & 1] : mul2(p[n][b][i & 1], scale[i]);
        if (SHIFTED) zero[i] = zero[i] << low | 0x80008000u;  // a negative number in the units of the codes
      }
      if constexpr (SHIFTED) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
          mma16(middle[n], zero[0], zero[0], zero[1], zero[1], x[n][m][0], x[n][m][1]);
          mma16(middle[n], zero[2], zero[2], zero[3], zero[3], x[n][m + 1][0], x[n][m + 1][1]);
        }
      }
    }
#pragma unroll
    for (int b = 0; b < KS / VG; b++) {
      const int a = k * (KS / VG) + b;
      float o[NT][4];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][i] = middle[n][i];
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
          elements<S::VK, S::VB, F * W::STEP, false>(c, w, second);
          const int m = F * W::BLOCKS + V;
#pragma unroll
          for (int n = 0; n < NT; n++)
            mma16<!SHIFTED && V + F == 0>(o[n], c[0], c[1], c[2], c[3], x[n][m][0], x[n][m][1]);
        });
      });
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if ((i & 1) < NC) {
            float& sum = st.acc[n][a][i];
            sum = sum * shrink[n][(i & 1) < NC ? (i & 1) : 0] + o[n][i] * back;
          }
    }
  }
}
