// ---- levels as bytes: scores of up to four query rows and keys of 3-bit codes, as integers -------------------------
// The eight levels of 3 bits are nearly odd multiples of one number (storage.py), so each fits a byte, and one permutation
// yields four of them, ready for a product of integers: no halves need to be joined. The query becomes 16-bit integers, of
// which a column of the product has one digit.
//
// A register has levels of several tokens, of which a column needs one: it has 0 for the others.
//   one row    A register has four fields of one channel. The columns 2 i and 2 i + 1 are the two digits for field i, so
//              that one product serves all; lane (g, t) has field t.
//   2-4 rows   A register has two fields of two channels (levels.cuh). Each field has a product of its own, whose columns
//              2 r and 2 r + 1 are the digits of row r.
// For LEVELS_READ, bytes with the squares of levels are looked up as well, and a product with ones adds them up.

// what is added to a level so that it is an unsigned byte
constexpr float CENTRE = 127.5f;
constexpr bool ONE_ROW = INTEGER == 1;
constexpr int DIGITS = (BF16 ? 2 : 1) * QUERY;  // where the digits of queries begin, behind the queries
constexpr int CENTRES = DIGITS + KS * 256 * (ONE_ROW ? 2 : 1);  // and CENTRE times the sums of four rows' integers

// Stores the digits that lane (g, t), whose column is g, needs of channels 16 a + 8 j + 2t + h.
//   one row    words [a][lane][h][j]: the digit in the byte of the column's field
//   2-4 rows   words [a][lane][j]: the digits of both h, in bytes 0 and 2
//   to         the stored queries
__device__ __forceinline__ void store_digits(u8* to, int lane) {
  const int g = lane >> 2, from = ONE_ROW ? lane & 3 : lane & 27;  // rows have the even columns
  float sum = 0.f;
  __syncwarp();
#pragma unroll
  for (int a = 0; a < KS; a++) {
    const uint2 x = *(const uint2*)(to + (a * 32 + from) * 8);
    u32 digit[2][2];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float y = fmaf(float_of_half((j ? x.y : x.x) >> 16 * h), MOST, LOW_BITS);
        sum += y - LOW_BITS;
        const u32 bits = __float_as_uint(y);
        digit[h][j] = g & 1 ? (bits & 255) ^ 128 : bits >> 8 & 255;
      }
    const int place = a * 32 + lane, shift = 8 * (g >> 1);
    if (ONE_ROW)
      *(uint4*)(to + DIGITS + place * 16) = make_uint4(digit[0][0] << shift, digit[0][1] << shift,
                                                       digit[1][0] << shift, digit[1][1] << shift);
    else
      *(uint2*)(to + DIGITS + place * 8) =
          make_uint2(digit[0][0] | digit[1][0] << 16, digit[0][1] | digit[1][1] << 16);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if ((lane & 7) == 0) *(float*)(to + CENTRES + (lane >> 1)) = sum * CENTRE;
}

// Log2 scores of a packed tile of keys of 3 bits; arguments as of packed_scores.
template <int P, int MT>
__device__ __forceinline__ void byte_level_scores(float (&s)[NT][MT][4], u32 slot, u32 queries, const State& st,
                                                  int lane) {
  using S = Shape<P>;
  constexpr bool LENGTH = S::KK == LEVELS_READ;
  constexpr int HALVES = ONE_ROW ? 1 : 2;
  const int row = lane & 15, hi = lane >> 4, g = lane >> 2, t = lane & 3;
  const u32 zero = gridDim.x >> 24;  // as in book_of
  const u32 levels[2] = {BYTES_OF_ENTRIES[0] ^ zero, BYTES_OF_ENTRIES[1] ^ zero};
  const u32 square[2] = {BYTES_OF_ENTRIES[2] ^ zero, BYTES_OF_ENTRIES[3] ^ zero};
  // columns 2 t and 2 t + 1 of the squares are those of field t, or of every second field from t & 1 on
  const u32 ones = ONE_ROW ? 1u << 8 * (g >> 1) : 0x00010001u << 8 * (g >> 1 & 1);
  // [set]: even fields, odd ones; the i-th of a set is field 2 i + set
  int sums[2][ONE_ROW ? 1 : 4][4], squares[2][HALVES][4];
  u32 plane[4];
  each<0, KS>([&](auto tag_a) {
    constexpr int a = decltype(tag_a)::value;
    u32 w[4], q[ONE_ROW ? 4 : 2], codes[2][4];
    ldsm(w, slot + wide(row, 2 * a + hi));
    load_words(q, queries + DIGITS + (a * 32 + lane) * (ONE_ROW ? 16 : 8));
    if constexpr (a % 2 == 0) {
      load_second_keys<3>(plane, slot + first_room(true, 3), 0, a, lane);
#pragma unroll
      for (int i = 0; i < 4; i++) plane[i] = ONE_ROW ? plane[i] : mixed(plane[i]);
    }
    // selectors: the last bit of field F is at 2 F + {0, 1} for the first and second eight tokens
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 upper = ONE_ROW ? w[i] : mixed(w[i]), both = plane[a % 2 * 2 + (i >> 1)];
      const u32 last = (i & 1 ? both >> 1 : both) & 0x55555555u;
      codes[0][i] = chosen(0x33333333u, upper, last << 2);
      codes[1][i] = chosen(0x33333333u, upper >> 2, last);
    }
    each<0, 4>([&](auto tag) {
      constexpr int set = decltype(tag)::value >> 1, h = decltype(tag)::value & 1;
      constexpr bool NEW = a == 0 && (!ONE_ROW || h == 0);
      u32 x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 selector = h ? codes[set][i] >> 16 : codes[set][i];
        x[i] = __byte_perm(levels[0], levels[1], selector);
        if (LENGTH) y[i] = __byte_perm(square[0], square[1], selector);
      }
      if constexpr (ONE_ROW) {
        mma_bytes<NEW>(sums[set][0], x[0], x[1], x[2], x[3], q[2 * h], q[2 * h + 1]);
      } else {
        mma_bytes<NEW>(sums[set][2 * h], x[0], x[1], x[2], x[3], q[0], q[1]);
        mma_bytes<NEW>(sums[set][2 * h + 1], x[0], x[1], x[2], x[3], q[0] << 8, q[1] << 8);
      }
      if constexpr (LENGTH) mma_bytes<NEW>(squares[set][ONE_ROW ? 0 : h], y[0], y[1], y[2], y[3], ones, ones);
    });
  });
  const float centre = __uint_as_float(load_u32(queries + CENTRES + 4 * t));
  const float by = (ONE_ROW ? __shfl_sync(~0u, st.sl[0][0], 0) : st.sl[0][0]) * (UNITS_OF_ENTRIES[LENGTH] / MOST);
#pragma unroll
  for (int set = 0; set < 2; set++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      auto product = [&](int n) {
        return (float)(sums[set][n][2 * half] * 256 + sums[set][n][2 * half + 1]) - centre;
      };
      // a lane makes the factor of its t-th field and, with one row, the score, and gets those of the others
      float own = float_of_half(load_u16(slot + S::KCODES + (16 * (2 * t + set) + g + 8 * half) * 2));
      const int length = t >> 1 ? squares[set][HALVES - 1][2 * half] : squares[set][0][2 * half];
      if (LENGTH) own *= rsqrt_of((float)length);
      if (ONE_ROW) own *= product(0) * by;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float x = __shfl_sync(~0u, own, lane & 28 | i);
        s[0][2 * i + set][2 * half] = ONE_ROW ? x : product(ONE_ROW ? 0 : i) * (x * by);
      }
    }
}
