// ---- scores of windows (windows.cuh) -------------------------------------------------------------------------------
// Scores of a packed tile like packed_scores, in each column for the parameters of its group.
template <int P, int MT>
__device__ __forceinline__ void window_scores(float (&s)[NT][MT][4], u32 slot, u32 queries, const State& st, int part,
                                              int lane) {
  using S = Shape<P>;
  using W = Portion<S::KB>;
  const int row = lane & 15, hi = lane >> 4, g = lane >> 2, t = lane & 3;
  // group of the column that this lane holds of the second operand
  const u32 params = slot + S::KCODES + (ONECOL ? g >> 1 : g) % SLOTS * (2 * D + 16) + 4 * t;
  float raw[NT][MT][4], bias[NT][4];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      bias[n][i] = 0.f;
#pragma unroll
      for (int m = 0; m < MT; m++) raw[n][m][i] = 0.f;
    }
  u32 last[4];
#pragma unroll
  for (int a = 0; a < KS; a++) {
    u32 q[NT][2], qs[NT][2];
    load_queries(q, queries, a, lane);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 at = params + (16 * a + 8 * j) * 2, scale = load_u32(at), low = load_u32(at + S::KPARAM);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        qs[n][j] = mul2(q[n][j], scale);
        // q . m as a product with ones: what rounding takes from a term is added by a second one
        const u32 term = mul2(q[n][j], low), rest = fma2(q[n][j], low, term ^ 0x80008000u);
        mma16(bias[n], 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, term, rest);
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
#pragma unroll
        for (int n = 0; n < NT; n++) mma16(raw[n][F * W::BLOCKS + v], c[0], c[1], c[2], c[3], qs[n][0], qs[n][1]);
      });
    }
  }
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int c = (i & 1) < NC ? i & 1 : 0;
        if ((i & 1) < NC) s[n][m][i] = (raw[n][m][i] * lift_of<P>(m) + bias[n][c]) * st.sl[n][c];
      }
}

// Hides from each column the tokens that are not its group's; where groups fit tiles, all but the first column of each
// row see none.
//   first  the tile's first token, within the segment
template <int P, int MT>
__device__ __forceinline__ void hide_other_groups(float (&s)[NT][MT][4], int first, int part, int lane) {
  const float none = __int_as_float(0xff800000);
  const int t = lane & 3;
#pragma unroll
  for (int c = 0; c < NC; c++) {
    const int j = (ONECOL ? t : 2 * t + c) % SLOTS;
    const int group = WINDOWS[P] > 0 ? Window<P>::holding(first) + j : 0;
    const int from = WINDOWS[P] > 0 ? Window<P>::first(group) - first - (lane >> 2) : 0;
    const u32 size = WINDOWS[P] > 0 ? Window<P>::first(group + 1) - Window<P>::first(group) : j ? 0 : 1 << 30;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const int token = 16 * (SHARES * m + part) - from;
        if ((u32)token >= size) s[n][m][c] = none;
        if ((u32)(token + 8) >= size) s[n][m][c + 2] = none;
      }
  }
}
