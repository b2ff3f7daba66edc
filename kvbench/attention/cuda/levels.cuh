// ---- levels: keys whose codes stand for levels of a codebook -------------------------------------------------------
// TurboQuant's keys: norm of the token times level[code], with the same levels for all tokens. Levels come in pairs of
// opposite sign, so a code is the number of a magnitude and a sign bit (stored_codes in
// kvbench/quantizers/turboquant.py): the highest bit of four, or with 3 bits the lowest, which is the second plane.
//
// The magnitudes are fp16 numbers whose lower and upper bytes are in registers, and one byte permutation (prmt) looks up
// a byte of four codes. Its selector is nibbles, so codes need no unpacking but a mask: with the two middle bytes of a
// word pair exchanged, a half of it has the codes of the same fields of both words. Two more permutations per four codes
// join lower and upper bytes to pairs as a matrix instruction takes them, and one operation per pair sets its signs.
//
// Magnitudes are multiplied by a number (LEVEL_UNITS has its inverse) with which fp16 holds all of them nearly exactly.
#ifndef MAGNITUDE_TABLE  // no phase has such keys
#define MAGNITUDE_TABLE {}
#define LEVEL_UNITS {}
#endif
// {lower bytes of magnitudes 0 to 3, 4 to 7, upper bytes of 0 to 3, 4 to 7} for codes of 3 and of 4 bits
constexpr u32 MAGNITUDES[2][4] = MAGNITUDE_TABLE;
constexpr float UNITS_OF_LEVELS[2] = LEVEL_UNITS;

// Brings a word pair's codes into the order of a selector: the fields of bytes 0 and 2 in the lower half.
template <int BITS>
__device__ __forceinline__ u32 selectors(u32 w) {
  return __byte_perm(BITS == 4 ? w & 0x77777777u : w, 0u, 0x3120);
}
// The fields that look_up<BITS, PAIR> yields: the first, and the distance to the second.
CONST int first_of(int bits, int pair) { return bits == 4 ? 2 * pair : (pair & 1) + 4 * (pair >> 1); }
CONST int next_of(int bits) { return bits == 4 ? 1 : 2; }
// Levels of two fields of a word pair, each as a pair of fp16 numbers.
//   mixed   selectors of the word pair
//   signs   the word pair; with 3 bits, a word pair of the second plane, in which E says which eight tokens are meant
template <int BITS, int PAIR, int E>
__device__ __forceinline__ void look_up(u32& first, u32& second, u32 mixed, u32 signs) {
  constexpr const u32(&T)[4] = MAGNITUDES[BITS - 3];
  constexpr int F = first_of(BITS, PAIR), G = F + next_of(BITS);
  u32 low, high;
  if constexpr (BITS == 4) {
    const u32 codes = PAIR ? mixed >> 16 : mixed;
    low = __byte_perm(T[0], T[1], codes), high = __byte_perm(T[2], T[3], codes);
  } else {
    const u32 both = PAIR & 1 ? mixed >> 2 & 0x33333333u : mixed & 0x33333333u, codes = PAIR & 2 ? both >> 16 : both;
    low = __byte_perm(T[0], T[0], codes), high = __byte_perm(T[2], T[2], codes);
  }
  constexpr int AT = BITS == 4 ? 4 * F + 3 : 2 * F + E, NEXT = BITS == 4 ? 4 * G + 3 : 2 * G + E;  // of the sign bits
  first = __byte_perm(low, high, 0x6240) | (signs << (15 - AT) & 0x80008000u);
  second = __byte_perm(low, high, 0x7351) | (signs << (15 - NEXT) & 0x80008000u);
}

// Log2 scores of a packed tile of such keys; arguments as of packed_scores. With LEVELS_READ, the levels of a token are
// divided by their length: products of squares with ones yield it in the columns that queries leave free (ONECOL), else
// in accumulators of their own.
template <int P, int MT>
__device__ __forceinline__ void level_scores(float (&s)[NT][MT][4], u32 slot, u32 queries, const State& st, int part,
                                             int lane) {
  using S = Shape<P>;
  using W = Portion<S::KB>;
  constexpr bool LENGTH = S::KK == LEVELS_READ, OWN = LENGTH && !ONECOL;
  constexpr int PAIRS = fields_of(S::KB) / 2;
  const int row = lane & 15, hi = lane >> 4, g = lane >> 2;
  const u32 ones = ONECOL && !(g & 1) ? 0u : 0x3c003c00u;
  float raw[NT][MT][4], squares[OWN ? MT : 1][4];
  u32 last[4];
  each<0, KS>([&](auto tag_a) {
    constexpr int a = decltype(tag_a)::value;
    u32 q[NT][2];
    load_queries(q, queries, a, lane);
    if (S::KB == 3 && a % 2 == 0) {
      load_second_keys<3>(last, slot + first_room(true, 3), 0, a, lane);
      W::align(last, part);
    }
#pragma unroll
    for (int v = 0; v < W::BLOCKS; v++) {
      u32 w[4], mixed[4];
      ldsm(w, slot + wide(16 * W::block(v, part) + row, 2 * a + hi));
      W::align(w, part);
#pragma unroll
      for (int i = 0; i < 4; i++) mixed[i] = selectors<S::KB>(w[i]);
      each<0, PAIRS>([&](auto tag) {
        constexpr int PAIR = decltype(tag)::value, F = first_of(S::KB, PAIR);
        if constexpr (F % W::STEP == 0) {
          u32 c[2][4];
          each<0, 4>([&](auto tag_i) {
            constexpr int I = decltype(tag_i)::value;
            look_up<S::KB, PAIR, I & 1>(c[0][I], c[1][I], mixed[I], S::KB == 4 ? w[I] : last[a % 2 * 2 + (I >> 1)]);
          });
          each<0, 2>([&](auto tag_j) {
            constexpr int J = decltype(tag_j)::value;
            const int m = (F + J * next_of(S::KB)) / W::STEP * W::BLOCKS + v;
            u32(&x)[4] = c[J];
#pragma unroll
            for (int n = 0; n < NT; n++) mma16<a == 0>(raw[n][m], x[0], x[1], x[2], x[3], q[n][0], q[n][1]);
            if constexpr (LENGTH) {
#pragma unroll
              for (int i = 0; i < 4; i++) x[i] = mul2(x[i], x[i]);
              mma16<OWN && a == 0>(OWN ? squares[OWN ? m : 0] : raw[0][m], x[0], x[1], x[2], x[3], ones, ones);
            }
          });
        }
      });
    }
  });
#pragma unroll
  for (int m = 0; m < MT; m++) {
    const u32 at = slot + S::KCODES + (16 * (SHARES * m + part) + g) * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float norm = float_of_half(load_u16(at + 16 * half));
      const float f = LENGTH ? norm * rsqrt_of(OWN ? squares[OWN ? m : 0][2 * half] : raw[0][m][2 * half + 1])
                             : norm * UNITS_OF_LEVELS[S::KB - 3];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int c = 0; c < NC; c++) s[n][m][2 * half + c] = raw[n][m][2 * half + c] * (f * st.sl[n][c]);
    }
  }
}
