// ---- levels: keys whose codes stand for levels of a codebook -------------------------------------------------------
// TurboQuant's keys: norm of the token times level[code], with the same levels for all tokens. With 4 bits, a code is the
// number of a magnitude and, in its highest bit, a sign (stored_codes in kvbench/quantizers/turboquant.py).
//
// Levels are fp16 numbers whose lower and upper bytes are in registers, and one byte permutation (prmt) looks up a byte
// of four codes, with selectors as in tables.cuh. Two more permutations per four codes join lower and upper bytes to pairs
// as a matrix instruction takes them. The eight levels of 3 bits have their signs; of 4 bits,
// the eight magnitudes are looked up, and one operation per pair sets the signs.
//
// Levels are multiplied by a number with which fp16 holds all of them nearly exactly; LEVEL_UNITS has its inverse.
#ifndef LEVEL_BYTES  // no phase has such keys
#define LEVEL_BYTES {}
#define LEVEL_UNITS {}
#define ENTRY_BYTES {}
#define ENTRY_UNITS {}
#endif
// for codes of 3 and of 4 bits {lower bytes of entries 0 to 3, of 4 to 7, upper bytes}, and what to multiply entries by
constexpr u32 BYTES_OF_LEVELS[2][4] = LEVEL_BYTES;
constexpr float UNITS_OF_LEVELS[2] = LEVEL_UNITS;
// levels of 3 bits as bytes, then their squares; what to multiply levels by, without and with division by their length
constexpr u32 BYTES_OF_ENTRIES[4] = ENTRY_BYTES;
constexpr float UNITS_OF_ENTRIES[2] = ENTRY_UNITS;

// The tables in registers. The compiler would move constants to registers again for each look-up, so they are mixed with
// a number that is 0, which it cannot know.
struct Book {
  u32 low[2], high[2];
};
template <int BITS>
__device__ __forceinline__ Book book_of() {
  constexpr const u32(&T)[4] = BYTES_OF_LEVELS[BITS - 3];
  const u32 zero = gridDim.x >> 24;
  return {{T[0] ^ zero, T[1] ^ zero}, {T[2] ^ zero, T[3] ^ zero}};
}
// Entries of two fields of a word pair, each as a pair of fp16 numbers.
template <int BITS, int PAIR>
__device__ __forceinline__ void look_up(const Book& book, u32& first, u32& second, u32 codes, u32 w) {
  const u32 low = __byte_perm(book.low[0], book.low[1], codes), high = __byte_perm(book.high[0], book.high[1], codes);
  first = __byte_perm(low, high, 0x6240), second = __byte_perm(low, high, 0x7351);
  if constexpr (BITS == 4) {
    constexpr int SHIFT = 12 - 8 * PAIR;  // of the sign of field 2 PAIR
    first |= w << SHIFT & 0x80008000u;
    second |= w << (SHIFT - 4) & 0x80008000u;
  }
}

// Log2 scores of a packed tile of such keys; arguments as of packed_scores. With LEVELS_READ, the levels of a token are
// divided by their length. Squares are summed in fp16 by the units that multiply, as those of logic and permutations are
// busy: a lane has two sums of D / 8 squares for each token, and a product with ones adds up those of four lanes.
template <int P, int MT>
__device__ __forceinline__ void level_scores(float (&s)[NT][MT][4], u32 slot, u32 queries, const State& st, int part,
                                             int lane) {
  using S = Shape<P>;
  using W = Portion<S::KB>;
  constexpr int BITS = S::KB, PAIRS = fields_of(BITS) / 2;
  constexpr u32 ONES = 0x3c003c00u;
  constexpr bool LENGTH = S::KK == LEVELS_READ;
  const int row = lane & 15, hi = lane >> 4, g = lane >> 2;
  const Book book = book_of<BITS>();
  // word pairs, queries and the second plane are loaded a step ahead
  u32 words[2][4], q[2][NT][2], plane[2][4];
  auto load = [&](auto tag) {
    constexpr int I = decltype(tag)::value, a = I % KS, v = I / KS;
    if constexpr (I < KS * W::BLOCKS) {
      ldsm(words[I & 1], slot + wide(16 * W::block(v, part) + row, 2 * a + hi));
      load_queries(q[I & 1], queries, a, lane);
      if constexpr (BITS == 3 && a % 2 == 0) load_second_keys<3>(plane[a / 2 & 1], slot + first_room(true, 3), 0, a, lane);
    }
  };
  load(Number<0>{});
  each<0, W::BLOCKS>([&](auto tag_v) {
    constexpr int v = decltype(tag_v)::value;
    float raw[NT][W::FIELDS][4];
    u32 squares[LENGTH ? W::FIELDS : 1][2];  // of words g and g + 8
    each<0, KS>([&](auto tag_a) {
      constexpr int a = decltype(tag_a)::value, I = v * KS + a;
      load(Number<I + 1>{});
      u32(&w)[4] = words[I & 1], order[4], last[2] = {0, 0};
      W::align(w, part);
#pragma unroll
      for (int i = 0; i < 4; i++) order[i] = mixed(BITS == 4 ? w[i] & 0x77777777u : w[i]);
      if constexpr (BITS == 3) {
        if constexpr (a % 2 == 0) W::align(plane[a / 2 & 1], part);
        last[0] = mixed(plane[a / 2 & 1][a % 2 * 2]), last[1] = mixed(plane[a / 2 & 1][a % 2 * 2 + 1]);
      }
      each<0, PAIRS>([&](auto tag) {
        constexpr int PAIR = decltype(tag)::value, F = first_of(BITS, PAIR);
        if constexpr (F % W::STEP == 0) {
          u32 c[2][4];
          each<0, 4>([&](auto tag_i) {
            constexpr int i = decltype(tag_i)::value;
            const u32 codes = selectors<BITS, PAIR, i & 1>(order[i], last[i >> 1]);
            look_up<BITS, PAIR>(book, c[0][i], c[1][i], codes, w[i]);
          });
#pragma unroll
          for (int j = 0; j < 2; j++)
#pragma unroll
            for (int n = 0; n < NT; n++)
              mma16<a == 0>(raw[n][(F + j * next_of(BITS)) / W::STEP], c[j][0], c[j][1], c[j][2], c[j][3],
                            q[I & 1][n][0], q[I & 1][n][1]);
          if constexpr (LENGTH) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
              u32(&sum)[2] = squares[(F + j * next_of(BITS)) / W::STEP];
#pragma unroll
              for (int i = 0; i < 4; i++) {
                const u32 x = c[j][i];
                sum[i & 1] = a == 0 && i < 2 ? mul2(x, x) : fma2(x, x, sum[i & 1]);
              }
            }
          }
        }
      });
    });
    each<0, PAIRS>([&](auto tag) {
      constexpr int PAIR = decltype(tag)::value, F = first_of(BITS, PAIR);
      if constexpr (F % W::STEP == 0) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int f = (F + j * next_of(BITS)) / W::STEP, m = f * W::BLOCKS + v;
          const u32 at = slot + S::KCODES + (16 * (SHARES * m + part) + g) * 2;
          float length[4];
          if constexpr (LENGTH) mma16<true>(length, squares[f][0], squares[f][1], 0, 0, ONES, 0);
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float norm = float_of_half(load_u16(at + 16 * half));
            norm *= LENGTH ? rsqrt_of(length[2 * half]) : UNITS_OF_LEVELS[BITS - 3];
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
              for (int c = 0; c < NC; c++) s[n][m][2 * half + c] = raw[n][f][2 * half + c] * (norm * st.sl[n][c]);
          }
        }
      }
    });
  });
}
