// ---- 2-bit codes and one query row, as integers --------------------------------------------------------------------
// With one query row, seven of the eight columns of a matrix instruction are free. Here they take the digits of 16-bit
// integers, so that codes need not become fp16 numbers: m16n8k32 multiplies bytes, and one AND leaves one code in each of
// four bytes where it leaves one in each of two halves otherwise.
//
// A pair of words has four bytes of four fields each: bytes 0 and 2 hold fields 0 to 3, bytes 1 and 3 fields 4 to 7 of
// two neighbouring words. `upper` tells a field of the upper byte, `level` is its place in the byte: field 4 upper + level,
// which counts 4^level times its code.
//
// First product, S^T = K q^T: columns {0, 1}, {2, 3}, {4, 5}, {6, 7} are (upper 0, levels 0 and 1), (upper 1, levels 0
// and 1), (upper 0, levels 2 and 3), (upper 1, levels 2 and 3), each with an upper and a lower digit. A column is the
// query times the scales of its fields' group, as 16-bit integers, in its own bytes and 0 in the others. Masks are nested,
// so that the last needs no AND; a level is the difference of two sums, which is exact.
//
// Second product, O^T = V^T P^T: both bytes are summed, as they are tokens; columns {2 l, 2 l + 1} are the two digits of
// the weights of level l, times scales.

// largest magnitude of an integer, and what makes the low bits of a float the integer that it is, plus half a digit: its
// bytes are then the digits, the upper one signed and the lower one 128 too large
constexpr float MOST = 32512.f, LOW_BITS = 12582912.f + 128.f;

// The softmax of a query row over a phase, divided among the lanes of a warp: all numbers of lane (g, t) but `top` are
// parts of sums.
template <int P>
struct Parts {
  static constexpr int VG = Shape<P>::VGROUPS;
  float top, total, low[VG];
  float acc[KS][2];  // channels 16 a + {g, g + 8}, of tokens of level t
};

// Selects one digit of two or four numbers; lane (g, t) needs that of column g.
struct Digits {
  u32 pick, quad, flip;
  __device__ __forceinline__ explicit Digits(int column) {
    const u32 byte = column & 1 ? 0 : 1;
    pick = byte | (4 + byte) << 4;
    quad = byte * 0x11 | (4 + byte) * 0x1100;
    flip = column & 1 ? 0x80808080u : 0;
  }
  // digits of a twice, then of b twice
  __device__ __forceinline__ u32 twice(float a, float b) const {
    return __byte_perm(__float_as_uint(a), __float_as_uint(b), quad) ^ flip;
  }
  __device__ __forceinline__ u32 four(float a, float b, float c, float d) const {
    const u32 low = __byte_perm(__float_as_uint(a), __float_as_uint(b), pick);
    return __byte_perm(low, __byte_perm(__float_as_uint(c), __float_as_uint(d), pick), 0x5410) ^ flip;
  }
};

// Group of a tile's keys to which the fields of a column of the first product belong.
template <int P>
__device__ __forceinline__ int group_of_column(int column) {
  return ((column >> 2) * 2 + (column >> 1 & 1) * 4) * 16 / Shape<P>::KG;
}
// Token of a tile of the i-th score of lane (g, t).
__device__ __forceinline__ int token_of(int i, int lane) {
  const int t = lane & 3;
  return ((t >> 1) * 2 + (t & 1) * 4 + (i >> 1)) * 16 + (lane >> 2) + 8 * (i & 1);
}

// log2 scores of a tile's tokens, four of each lane.
//   slot     the item: words, scales, minima
//   queries  the normalised query in shared memory, fp16
//   sl       factor that converts a product with it to bits
template <int P>
__device__ __forceinline__ void integer_scores(float (&s)[4], u32 slot, u32 queries, float sl, int lane) {
  using S = Shape<P>;
  const int g = lane >> 2, t = lane & 3;
  // rows of the matrices that are loaded: the parameters of channels 8 (lane >> 3), ... for each column
  const u32 params = slot + S::KCODES + group_of_column<P>(lane & 7) * (2 * D) + (lane >> 3) * 16;
  float bias[4] = {0.f, 0.f, 0.f, 0.f};
  u32 x[KS][2], most2 = 0;
#pragma unroll
  for (int a = 0; a < KS; a += 2) {
    u32 scale[4], low[4];
    ldsm(scale, params + 32 * a);
    ldsm(low, params + S::KPARAM + 32 * a);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 q[2];
      load64(q[0], q[1], queries + ((a + i) * 32 + t) * 8);
      // rows 0 to 7 are the groups of the columns, and all columns are the query
      mma16(bias, low[2 * i], 0, low[2 * i + 1], 0, q[0], q[1]);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        x[a + i][j] = mul2(q[j], scale[2 * i + j]);
        most2 = most_of(most2, x[a + i][j]);
      }
    }
  }
  float most = fmaxf(float_of_half(most2), float_of_half(most2 >> 16));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(fmaxf(most, __shfl_xor_sync(~0u, most, 2)), pow2(-30));
  const float factor = MOST * inverse_of(most);
  const Digits digits(g);
  const u32 bytes = g & 2 ? 0xff00ff00u : 0x00ff00ffu;
  int sums[4][4];
  each<0, KS>([&](auto tag) {
    constexpr int a = decltype(tag)::value;
    u32 b[2], w[4];
#pragma unroll
    for (int j = 0; j < 2; j++)
      b[j] = bytes & digits.twice(fmaf(float_of_half(x[a][j]), factor, LOW_BITS),
                                  fmaf(float_of_half(x[a][j] >> 16), factor, LOW_BITS));
    ldsm(w, slot + wide(lane & 15, 2 * a + (lane >> 4)));
    mma_bytes<a == 0>(sums[3], w[0], w[1], w[2], w[3], b[0], b[1]);
#pragma unroll
    for (int level = 0; level < 3; level++) {
      const u32 mask = level == 0 ? 0x03030303u : level == 1 ? 0x0f0f0f0fu : 0x3f3f3f3fu;
      mma_bytes<a == 0>(sums[level], w[0] & mask, w[1] & mask, w[2] & mask, w[3] & mask, b[0], b[1]);
    }
  });
  // lane (g, t) has columns 2t and 2t + 1
  const float unit = __shfl_sync(~0u, most, 8 * t) * (1.f / MOST) * (t & 2 ? 0.0625f : 1.f) * sl;
  const float base = __shfl_sync(~0u, bias[0], 8 * t) * sl;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int sum[4];
#pragma unroll
    for (int level = 0; level < 4; level++) sum[level] = sums[level][2 * i] * 256 + sums[level][2 * i + 1];
    s[i] = (float)(t & 2 ? sum[2] - sum[1] : sum[0]) * unit + base;
    s[2 + i] = (float)(t & 2 ? sum[3] - sum[2] : sum[1] - sum[0]) * (unit * 0.25f) + base;
  }
}

// Softmax of a tile's scores: brings `parts` but acc to the new maximum.
//   place   256 bytes and more of shared memory that nobody needs any more
//   p       out: weights times 2^OFFSET of the tokens of level g / 2 in words 2t, 2t + 1, 2t + 8, 2t + 9, of each the lower
//           byte's and the upper byte's
//   shrink  out: factor for what was summed before
template <int P>
__device__ __forceinline__ void integer_weights(Parts<P>& parts, const float (&s)[4], float (&p)[8], float& shrink,
                                                u32 place, int lane) {
  constexpr int PITCH = 160;  // bytes from one level to the next: no bank conflicts
  const int g = lane >> 2, t = lane & 3;
  const float most = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
  const float top = fmaxf(parts.top, float_in_order(largest(in_order(most))));
  shrink = exp2_of(parts.top - top);
  parts.top = top;
  __syncwarp();  // nobody reads codes any more
#pragma unroll
  for (int i = 0; i < 4; i++)
    store_float(place + ((t >> 1) * 2 + (i >> 1)) * PITCH + (g + 8 * (i & 1)) * 8 + (t & 1) * 4,
                exp2_of(s[i] + (OFFSET - top)));
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 x[4];
    load128(x, place + (g >> 1) * PITCH + t * 16 + i * 64);
#pragma unroll
    for (int j = 0; j < 4; j++) p[4 * i + j] = __uint_as_float(x[j]);
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += p[i];
  parts.total = parts.total * shrink + sum;
#pragma unroll
  for (int k = 0; k < Parts<P>::VG; k++) parts.low[k] *= shrink;
}

// Adds a tile's weighted values.
template <int P>
__device__ __forceinline__ void integer_values(Parts<P>& parts, const float (&p)[8], float shrink, u32 slot, int lane) {
  using S = Shape<P>;
  constexpr int VG = S::VGROUPS;
  const int g = lane >> 2, t = lane & 3, level = g >> 1;
  const Digits digits(g);
  // scales (0) and minima (1) of tokens with weights 2 i + byte and 2 i + byte + 2, VG of each token
  u32 params[2][4][VG];
#pragma unroll
  for (int second = 0; second < 2; second++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 at = slot + S::VCODES + second * S::VPARAM + ((level + 4 * (i & 1)) * 16 + 2 * t + 8 * (i >> 1)) * VG * 2;
      if constexpr (VG == 1) params[second][i][0] = load_u32(at);
      if constexpr (VG == 2) load64(params[second][i][0], params[second][i][VG - 1], at);
      if constexpr (VG == 4) {
        u32 x[4];
        load128(x, at);
#pragma unroll
        for (int k = 0; k < VG; k++) params[second][i][k] = x[k];
      }
    }
  // of the token with weight i, for group k of channels
  auto param = [&](int second, int i, int k) {
    const int j = (i >> 1 & 1) * VG + k;
    return float_of_half(params[second][(i & 1) + 2 * (i >> 2)][j >> 1] >> (16 * (j & 1)));
  };
#pragma unroll
  for (int k = 0; k < VG; k++) {
    float v[8], most = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      v[i] = p[i] * param(0, i, k);
      most = fmaxf(most, v[i]);
      parts.low[k] += p[i] * param(1, i, k);
    }
    most = fmaxf(__uint_as_float(largest((int)__float_as_uint(most))), 1e-30f);  // none is negative
    const float factor = MOST * inverse_of(most);
    u32 b[4][2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i++) v[i] = fmaf(v[i], factor, LOW_BITS);
      const u32 x = digits.four(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
#pragma unroll
      for (int i = 0; i < 4; i++) b[i][j] = level == i ? x : 0;
    }
    const float unit = most * (1.f / MOST) * (t & 2 ? 0.0625f : 1.f) * (t & 1 ? 0.25f : 1.f);
#pragma unroll
    for (int a = k * (KS / VG); a < (k + 1) * (KS / VG); a++) {
      u32 w[4];
      ldsm(w, slot + narrow<2>(16 * a + (lane & 15), lane >> 4));
      int sums[4];
      each<0, 4>([&](auto tag) {
        constexpr u32 mask = 0x03030303u << (2 * decltype(tag)::value);
        constexpr int i = decltype(tag)::value;
        mma_bytes<i == 0>(sums, w[0] & mask, w[1] & mask, w[2] & mask, w[3] & mask, b[i][0], b[i][1]);
      });
#pragma unroll
      for (int i = 0; i < 2; i++)
        parts.acc[a][i] = parts.acc[a][i] * shrink + (float)(sums[2 * i] * 256 + sums[2 * i + 1]) * unit;
    }
  }
}

// Adds what a phase has given to the warp's softmax of the first query row.
template <int P>
__device__ __forceinline__ void fold(State& st, Parts<P>& parts, int lane) {
  constexpr int VG = Parts<P>::VG;
  // both digits' lanes have the same weights, so bit 2 of the lane's number is left out
  auto all = [&](float x) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1)
      if (lanes != 4) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
  };
  const float top = fmaxf(st.top[0][0], parts.top), old = exp2_of(st.top[0][0] - top), by = exp2_of(parts.top - top);
  st.top[0][0] = top;
  st.total[0][0] = st.total[0][0] * old + all(parts.total) * by;
  st.low[0][0] *= old;
#pragma unroll
  for (int k = 0; k < VG; k++) {
    const float low = all(parts.low[k]) * by;
    if ((lane >> 2) * VG / LOWS == k) st.low[0][0] += low;
  }
#pragma unroll
  for (int a = 0; a < KS; a++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float x = parts.acc[a][i];
      x += __shfl_xor_sync(~0u, x, 1);
      x += __shfl_xor_sync(~0u, x, 2);
      st.acc[0][a][2 * i] = st.acc[0][a][2 * i] * old + x * (by * pow2(-24));
    }
}
