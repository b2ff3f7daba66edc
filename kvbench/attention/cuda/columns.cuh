// ---- e2m1 codes and one query row: a column for each group of channels ---------------------------------------------
// With one query row, seven of the eight columns of a matrix instruction are free. Here each group of 16 channels has one,
// which is also the number of the step (of 16 channels) that the group is in either product.
//
// First product: in step k, column k of the query has the channels of group k, and the other columns are 0. All steps add
// to the same sums, in which groups stay apart, so that a sum is multiplied by its factor once, at the end.
//
// Second product: column k of the second operand has the weights times the factors of group k, for all steps. Step k
// yields the channels of group k, for which column k of its result is right; the lane that has it keeps it.

// The softmax of a query row over a phase, divided among the lanes of a warp: total is a part of a sum, and acc has
// channels 16 (2t + (i & 1)) + 8 (i >> 1) + g.
struct Column {
  float top, total, acc[4];
};

// Sum of x over this lane and the one whose number differs in BIT, or of y in the lanes where BIT is set: of two sums, each
// lane gets one.
template <int BIT>
__device__ __forceinline__ float one_of_two(float x, float y, int lane) {
  const bool upper = lane & BIT;
  return (upper ? y : x) + __shfl_xor_sync(~0u, upper ? x : y, BIT);
}

// Log2 scores of a packed tile: s[h][i] is that of token 16 (SHARES (4 h + t) + part) + g + 8 i.
//   q   the query as second operands of all steps: 0 but in column a in step a
//   by  factor that converts a product with it to bits
template <int P, int MT>
__device__ __forceinline__ void column_scores(float (&s)[MT / 4][2], u32 slot, const u32 (&q)[KS][2], float by,
                                              int part, int lane) {
  using S = Shape<P>;
  using W = Portion<4>;
  const int row = lane & 15, hi = lane >> 4, g = lane >> 2, t = lane & 3;
  // lanes whose columns are those of no group (64 channels) multiply zeros, by factors that are there
  const u32 scales = slot + S::KCODES + g * KS + 2 * min(t, KS / 2 - 1);
  float sums[MT][2];
  each<0, W::BLOCKS>([&](auto tag_v) {
    constexpr int V = decltype(tag_v)::value;
    float raw[W::FIELDS][4];
    each<0, KS>([&](auto tag_a) {
      constexpr int a = decltype(tag_a)::value;
      u32 w[4];
      ldsm(w, slot + wide(16 * W::block(V, part) + row, 2 * a + hi));
      each<0, W::FIELDS>([&](auto tag) {
        constexpr int F = decltype(tag)::value;
        u32 c[4];
        elements<FLOAT, 4, F, true>(c, w, w);
        mma16<a == 0>(raw[F], c[0], c[1], c[2], c[3], q[a][0], q[a][1]);
      });
    });
#pragma unroll
    for (int F = 0; F < W::FIELDS; F++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int m = F * W::BLOCKS + V;
        const u32 factors = halves_of_e4m3<false>(load_u16(scales + (16 * (SHARES * m + part) + 8 * i) * KS));
        sums[m][i] = raw[F][2 * i] * float_of_half(factors) + raw[F][2 * i + 1] * float_of_upper(factors);
      }
  });
#pragma unroll
  for (int h = 0; h < MT / 4; h++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      s[h][i] = by * one_of_two<2>(one_of_two<1>(sums[4 * h][i], sums[4 * h + 1][i], lane),
                                   one_of_two<1>(sums[4 * h + 2][i], sums[4 * h + 3][i], lane), lane);
}

// Softmax of a tile's scores: brings `own` but acc to the new maximum.
//   s       log2 scores as of column_scores
//   table   the warp's scratch memory
//   p       out: weights times 2^LIFT of tokens 16 (SHARES m + part) + 8 i + {2t, 2t + 1} in p[m][i]
//   shrink  out: factor for what was summed before
template <int MT>
__device__ __forceinline__ void column_weights(Column& own, const float (&s)[MT / 4][2], u32 (&p)[MT][2], float& shrink,
                                               u32 table, int lane) {
  const int g = lane >> 2, t = lane & 3;
  float most = fmaxf(s[0][0], s[0][1]);
#pragma unroll
  for (int h = 1; h < MT / 4; h++) most = fmaxf(most, fmaxf(s[h][0], s[h][1]));
  const float top = fmaxf(own.top, float_in_order(largest(in_order(most))));
  shrink = exp2_of(own.top - top);
  own.top = top;
  own.total *= shrink;
  __syncwarp();  // all weights of the tile before have been read
#pragma unroll
  for (int h = 0; h < MT / 4; h++) {
    const u32 e = half2_of(exp2_of(s[h][0] + (LIFT - top)), exp2_of(s[h][1] + (LIFT - top)));
    const u32 to = table + (g >> 1) * (MT * 8) + (4 * h + t) * 8 + (g & 1) * 2;
    store_u16(to, e);
    store_u16(to + 4, e >> 16);
    own.total += float_of_half(e) + float_of_upper(e);
  }
  __syncwarp();
#pragma unroll
  for (int m = 0; m < MT; m += 2) {
    u32 x[4];
    load128(x, table + t * (MT * 8) + m * 8);
    p[m][0] = x[0], p[m][1] = x[1], p[m + 1][0] = x[2], p[m + 1][1] = x[3];
  }
}

// Adds a tile's weighted values.
template <int P, int MT>
__device__ __forceinline__ void column_values(Column& own, const u32 (&p)[MT][2], float shrink, u32 slot, int part,
                                              int lane) {
  using S = Shape<P>;
  using W = Portion<4>;
  const int row = lane & 15, hi = lane >> 4, g = lane >> 2, t = lane & 3;
  const u32 scales = slot + S::VCODES + 2 * t * KS + min(g, KS - 1);
  u32 x[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // the bits of e4m3 are those of an fp16 number 2^8 times smaller, subnormal or not
      const u32 at = scales + (16 * (SHARES * m + part) + 8 * i) * KS;
      x[m][i] = mul2(p[m][i], load_u8(at + KS) * (1u << 23) + load_u8(at) * (1u << 7));
    }
  float picked[4] = {0.f, 0.f, 0.f, 0.f};
  each<0, KS>([&](auto tag_a) {
    constexpr int a = decltype(tag_a)::value;
    float o[4];
    each<0, W::BLOCKS>([&](auto tag_v) {
      constexpr int V = decltype(tag_v)::value;
      u32 w[4];
      ldsm(w, slot + narrow<4>(16 * a + row, 2 * W::block(V, part) + hi));
      each<0, W::FIELDS>([&](auto tag) {
        constexpr int F = decltype(tag)::value, m = F * W::BLOCKS + V;
        u32 c[4];
        elements<FLOAT, 4, F, false>(c, w, w);
        mma16<V + F == 0>(o, c[0], c[1], c[2], c[3], x[m][0], x[m][1]);
      });
    });
    if (t == a >> 1) picked[a & 1] = o[a & 1], picked[2 + (a & 1)] = o[2 + (a & 1)];
  });
#pragma unroll
  for (int i = 0; i < 4; i++) own.acc[i] = own.acc[i] * shrink + picked[i];
}

// Adds what a phase has given to the warp's softmax of the first query row.
//   factor  of all values
__device__ __forceinline__ void fold(State& st, const Column& own, float factor, int lane) {
  float total = own.total;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes <<= 1) total += __shfl_xor_sync(~0u, total, lanes);
  const float top = fmaxf(st.top[0][0], own.top), old = exp2_of(st.top[0][0] - top), by = exp2_of(own.top - top);
  st.top[0][0] = top;
  st.total[0][0] = st.total[0][0] * old + total * by;
  st.low[0][0] *= old;
  const float back = by * factor * pow2(-24 + 8 - unit_of(FLOAT, 4, 0));
#pragma unroll
  for (int a = 0; a < KS; a++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float sum = __shfl_sync(~0u, own.acc[2 * i + (a & 1)], (lane & ~3) | a >> 1);
      st.acc[0][a][2 * i] = st.acc[0][a][2 * i] * old + sum * back;
    }
}
