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
// and 1), (upper 0, levels 2 and 3), (upper 1, levels 2 and 3), each with an upper and a lower digit; where groups have 64
// tokens or more, all levels have the same columns {0, 1} and {2, 3}, and the others have two more digits. A column is the
// query times the scales of its fields' group, as 16-bit integers, in its own bytes and 0 in the others. Masks are nested,
// so that the last needs no AND; a level is the difference of two sums, which is exact. Where groups do not fit tiles
// (windows.cuh), columns {0, 1}, {2, 3} belong to the tile's first group, {4, 5}, {6, 7} to its second, and so on in a
// second block of columns; a lane then has every level of both groups, and takes the tokens that are theirs. For them and
// groups of 32, a last block has what 16 bits leave of each column, as one more digit: a channel may be a thousand times as
// large as the others, which count all the same. Its columns 2 t and 2 t + 1 belong to those of lane (g, t) in the first and
// in the second block.
//
// Second product, O^T = V^T P^T: both bytes are summed, as they are tokens; columns {2 l, 2 l + 1} are the two digits of
// the weights of level l, times scales.

// largest magnitude of an integer, and what makes the low bits of a float the integer that it is, plus half a digit: its
// bytes are then the digits, the upper one signed and the lower one 128 too large
constexpr float MOST = 32512.f, LOW_BITS = 12582912.f + 128.f;
// what 16 bits leave is multiplied by FINE, and is then a signed byte; or by FINEST, and has 16 bits
constexpr float FINE = 254.f, FINEST = 65024.f;

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

// The first product of a phase.
//   WINDOWED  groups do not fit tiles
//   FOLDED    all levels of a byte have the same group, so that half the columns have further digits
//   N         blocks of eight columns
//   LEVELS    levels of which a lane has scores: tokens of two words each
template <int P>
struct Plan {
  static constexpr bool WINDOWED = WINDOWS[P] > 0, FOLDED = !WINDOWED && Shape<P>::KG >= 64;
  static constexpr int N = WINDOWED ? (MET + 1) / 2 : 1, LEVELS = WINDOWED ? 4 : 2, COUNT = 2 * LEVELS;
  // group of a tile's keys by which a column of block n is scaled
  static __device__ __forceinline__ int group(int column, int n) {
    const int level = FOLDED ? 0 : (column >> 2) * 2;
    return WINDOWED ? 2 * n + (column >> 2) : (level + (column >> 1 & 1) * 4) * 16 / Shape<P>::KG;
  }
  // level and token of the i-th score of lane (g, t): words g and g + 8 of each level
  static __device__ __forceinline__ int level(int i, int t) { return (WINDOWED ? 0 : t >> 1) * 2 + (i >> 1); }
  static __device__ __forceinline__ int token(int i, int lane) {
    return (level(i, lane & 3) + (lane & 1) * 4) * 16 + (lane >> 2) + 8 * (i & 1);
  }
};

// log2 scores of a tile's tokens. Bit i of the result tells whether the i-th score is of a token of this lane; if not, it
// is -inf, and another lane has the token's score.
//   slot     the item: words, scales, minima
//   queries  the normalised query in shared memory, fp16
//   sl       factor that converts a product with it to bits
//   tile     the tile's first token, within the segment
template <int P>
__device__ __forceinline__ u32 integer_scores(float (&s)[Plan<P>::COUNT], u32 slot, u32 queries, float sl, int tile,
                                              int lane) {
  using S = Shape<P>;
  using L = Plan<P>;
  constexpr int N = L::N;
  const int g = lane >> 2, t = lane & 3;
  float bias[4] = {0.f, 0.f, 0.f, 0.f}, most[N], factor[N];
  u32 x[N][KS][2], most2[N];
#pragma unroll
  for (int n = 0; n < N; n++) most2[n] = 0;
#pragma unroll
  for (int a = 0; a < KS; a += 2) {
    u32 scale[N][4], low[N][4], q[2][2];
#pragma unroll
    for (int n = 0; n < N; n++) {
      // rows of the matrices that are loaded: the parameters of channels 8 (lane >> 3), ... for each column
      const u32 params = slot + S::KCODES + L::group(lane & 7, n) * S::GPARAM + (lane >> 3) * 16 + 32 * a;
      ldsm(scale[n], params);
      ldsm(low[n], params + S::KPARAM);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      load64(q[i][0], q[i][1], queries + ((a + i) * 32 + t) * 8);
      // rows 0 to 7 are the groups of the columns, rows 8 to 15 those of the second block; all columns are the query
      mma16(bias, low[0][2 * i], N > 1 ? low[N - 1][2 * i] : 0, low[0][2 * i + 1], N > 1 ? low[N - 1][2 * i + 1] : 0,
            q[i][0], q[i][1]);
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          x[n][a + i][j] = mul2(q[i][j], scale[n][2 * i + j]);
          most2[n] = most_of(most2[n], x[n][a + i][j]);
        }
    }
  }
#pragma unroll
  for (int n = 0; n < N; n++) {
    most[n] = fmaxf(float_of_half(most2[n]), float_of_half(most2[n] >> 16));
    most[n] = fmaxf(most[n], __shfl_xor_sync(~0u, most[n], 1));
    most[n] = fmaxf(fmaxf(most[n], __shfl_xor_sync(~0u, most[n], 2)), pow2(-30));
    factor[n] = MOST * inverse_of(most[n]);
  }
  const Digits digits(g);
  const u32 bytes = g & 2 ? 0xff00ff00u : 0x00ff00ffu, last = N == 1 && g & 1 ? 0 : bytes;
  const float fine_factor = g & 1 ? factor[N - 1] : factor[0];
  auto rest = [&](u32 half) {
    const float y = float_of_half(half), whole = fmaf(y, fine_factor, LOW_BITS) - LOW_BITS;
    return fmaf(fmaf(y, fine_factor, -whole), FINE, LOW_BITS - 128.f);
  };
  // a number as the integer whose digits this lane's column has
  auto integer = [&](u32 half, int n) {
    const float y = float_of_half(half), whole = fmaf(y, factor[n], LOW_BITS);
    if (!L::FOLDED) return whole;
    return fmaf(fmaf(y, factor[n], g & 4 ? LOW_BITS - whole : 0.f), g & 4 ? FINEST : 1.f, LOW_BITS);
  };
  int sums[N][4][4], fine[4][4];
  each<0, KS>([&](auto tag) {
    constexpr int a = decltype(tag)::value;
    u32 b[N][2], w[4];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        b[n][j] = bytes & digits.twice(integer(x[n][a][j], n), integer(x[n][a][j] >> 16, n));
    u32 third[2];
#pragma unroll
    for (int j = 0; j < 2 && !L::FOLDED; j++) {
      const u32 y = g & 1 ? x[N - 1][a][j] : x[0][a][j];
      third[j] = last & __byte_perm(__float_as_uint(rest(y)), __float_as_uint(rest(y >> 16)), 0x4400);
    }
    ldsm(w, slot + wide(lane & 15, 2 * a + (lane >> 4)));
#pragma unroll
    for (int level = 0; level < 4; level++) {
      const u32 mask = (4u << (2 * level)) - 1, all = mask * 0x01010101u;
      const u32 c[4] = {w[0] & all, w[1] & all, w[2] & all, w[3] & all};
#pragma unroll
      for (int n = 0; n < N; n++) mma_bytes<a == 0>(sums[n][level], c[0], c[1], c[2], c[3], b[n][0], b[n][1]);
      if constexpr (!L::FOLDED) mma_bytes<a == 0>(fine[level], c[0], c[1], c[2], c[3], third[0], third[1]);
    }
  });
  // lane (g, t) has columns 2t and 2t + 1
  float unit[N], base[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    unit[n] = __shfl_sync(~0u, most[n], 8 * t) * (1.f / MOST) * sl;
    base[n] = __shfl_sync(~0u, bias[2 * n], 8 * t) * sl;
  }
  int ends[4];  // of the first groups
  if constexpr (L::WINDOWED) {
    const int number = Window<P>::holding(tile);
#pragma unroll
    for (int j = 1; j < 2 * N; j++) ends[j - 1] = Window<P>::first(number + j) - tile;
  }
  u32 own = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    // sums of the codes of all levels up to one, and a level's alone
    int sum[N][4];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int level = 0; level < 4; level++)
        sum[n][level] = sums[n][level][2 * i] * 256 + sums[n][level][2 * i + 1];
    auto alone = [&](int n, int level) {
      const int whole = level ? sum[n][level] - sum[n][level - 1] : sum[n][0], at = 2 * i + n;
      if (L::FOLDED) return (float)whole * (t & 2 ? 1.f / FINEST : 1.f);
      const int part = level ? fine[level][at] - fine[level - 1][at] : fine[0][at];
      return (float)whole + (float)part * (1.f / FINE);
    };
    if constexpr (L::WINDOWED) {
#pragma unroll
      for (int level = 0; level < 4; level++) {
        const int token = L::token(2 * level + i, lane);
        const bool second = N > 1 && token >= ends[1];
        const bool mine = token >= (second ? ends[2 * N - 2] : ends[0]) == (t >> 1);
        const float product = second ? alone(N - 1, level) : alone(0, level);
        const float scale = (second ? unit[N - 1] : unit[0]) * pow2(-2 * level);
        s[2 * level + i] = mine ? product * scale + (second ? base[N - 1] : base[0]) : __int_as_float(0xff800000);
        own |= (u32)mine << (2 * level + i);
      }
    } else {
      const float scale = unit[0] * (t & 2 ? 0.0625f : 1.f);
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const float low = alone(0, k), high = alone(0, 2 + k);
        float product = t & 2 ? high : low;
        if (L::FOLDED) product += __shfl_xor_sync(~0u, t & 2 ? low : high, 2);  // the other digits
        s[2 * k + i] = product * (k ? scale * 0.25f : scale) + base[0];
      }
      own = 15;
    }
  }
  return own;
}
