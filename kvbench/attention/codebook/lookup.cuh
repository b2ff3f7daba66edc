// ---- look-up of levels: byte permutations of registers -------------------------------------------------------------
// low, high: bytes of the fp16 levels, four in a register.
struct Levels {
  static constexpr int SIZE = BITS == 4 ? 4 : BITS == 3 ? 2 : 1;
  u32 low[SIZE], high[SIZE];
};
// The same in registers of each thread: the compiler would keep what all threads have in common in uniform registers, and
// move it for each use. zero: a 0 that the compiler knows neither to be one nor to be equal in all lanes.
__device__ __forceinline__ Levels of_thread(Levels x, u32 zero) {
#pragma unroll
  for (int i = 0; i < Levels::SIZE; i++) x.low[i] ^= zero, x.high[i] ^= zero;
  return x;
}
// fp16 cannot hold a level exactly, and the error would be the same for each token with that code: it would grow beside
// a mean over many tokens. Values therefore have several roundings of each level, whose mean is closer to it, for
// different tokens.
constexpr int ROUNDINGS = 4;
// Writes the roundings of a codebook to shared memory: thread n < `count` the n-th.
__device__ __forceinline__ void write_levels(const float* from, u8* to, int count) {
  if ((int)threadIdx.x >= count) return;
  Levels x;
#pragma unroll
  for (int r = 0; r < Levels::SIZE; r++) {
    x.low[r] = x.high[r] = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      // the plane of single bits has the lowest bit of a code of 3 bits, and selects between two registers
      const float level = from[BITS == 3 ? 2 * j + r : 4 * r + j];
      float left = level;  // of (n + 1) times the level, after the roundings before
      u32 h = half2_of(left, 0.f);
      for (int n = 0; n < (int)threadIdx.x; n++) left += level - float_of_half(h), h = half2_of(left, 0.f);
      x.low[r] |= (h & 255) << (8 * j), x.high[r] |= (h >> 8 & 255) << (8 * j);
    }
  }
  *((Levels*)to + threadIdx.x) = x;
}
// The codebook of values as 16-bit integers, signed, in two planes of bytes; returns their unit.
__device__ __forceinline__ float write_integers(const float* from, u8* to) {
  Levels x;
  float most = 1e-30f;
  for (int i = 0; i < 1 << BITS; i++) most = fmaxf(most, fabsf(from[i]));
#pragma unroll
  for (int r = 0; r < Levels::SIZE; r++) {
    x.low[r] = x.high[r] = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 level = (u32)__float2int_rn(from[BITS == 3 ? 2 * j + r : 4 * r + j] * (32767.f / most));
      x.low[r] |= (level & 255) << (8 * j), x.high[r] |= (level >> 8 & 255) << (8 * j);
    }
  }
  *(Levels*)to = x;
  return most / 32767.f;
}
// Looks up four codes, of the nibbles of the lower half of `codes`, in registers with four levels each.
__device__ __forceinline__ u32 bytes_of(const u32 (&levels)[Levels::SIZE], u32 codes, u32 upper) {
  if constexpr (BITS == 4) {
    const u32 a = chosen_bytes(levels[0], levels[1], codes), b = chosen_bytes(levels[2], levels[3], codes);
    return chosen(upper, b, a);
  } else {
    return chosen_bytes(levels[0], levels[Levels::SIZE - 1], codes);
  }
}
// The codes of a word pair as nibbles: those of fields 0, 2, 4, 6 and of fields 1, 3, 5, 7; 4 bits: all at once.
// second: word pair of the plane of single bits, shifted to the bits of these tokens.
struct Codes {
  u32 even, odd;
};
__device__ __forceinline__ Codes codes_of(u32 word, u32 second) {
  Codes c;
  if constexpr (BITS == 4) {
    c.even = word & 0x77777777u, c.odd = word >> 3 & 0x11111111u;
  } else {
    c.even = word & 0x33333333u, c.odd = word >> 2 & 0x33333333u;
    if constexpr (BITS == 3) c.even |= second << 2 & 0x44444444u, c.odd |= second & 0x44444444u;
  }
  return c;
}
// Levels of the four codes in the lower half of `codes` as two pairs: of nibbles 0 and 1, and of nibbles 2 and 3.
__device__ __forceinline__ void pairs_of(const Levels& levels, u32 codes, u32 selects, u32& first, u32& second) {
  u32 upper = 0;
  if constexpr (BITS == 4) upper = __byte_perm(0xff00u, 0u, selects);
  const u32 low = bytes_of(levels.low, codes, upper), high = bytes_of(levels.high, codes, upper);
  first = __byte_perm(low, high, 0x5140), second = __byte_perm(low, high, 0x7362);
}
// Nibbles of a word pair in the order 0 of the first word, 0 of the second, 2, 2, then 1, 1, 3, 3: levels that are looked up
// one after another then are pairs of the two words, without permutations that bring them together.
__device__ __forceinline__ u32 interleaved(u32 w) {
  return chosen(0xf0f00f0fu, w, chosen(0xffffu, divided<12>(w), w << 12));
}
// Levels of a word pair of 2 or 3 bits, interleaved: a pair for each field, lower half of the first word, upper half of the
// second. second: the plane of single bits, interleaved too, of which these tokens have bits H and H + 2 of each nibble.
template <int H>
__device__ __forceinline__ void unpack_interleaved(const Levels& levels, u32 word, u32 second, u32 (&out)[FIELDS]) {
  u32 even = word & 0x33333333u, odd = word >> 2 & 0x33333333u;
  if constexpr (BITS == 3) even |= second << (2 - H) & 0x44444444u, odd |= second >> H & 0x44444444u;
  if constexpr (FIELDS == 8) {
    pairs_of(levels, even, 0, out[0], out[4]);
    pairs_of(levels, divided<16>(even), 0, out[2], out[6]);
    pairs_of(levels, odd, 0, out[1], out[5]);
    pairs_of(levels, divided<16>(odd), 0, out[3], out[7]);
  }
}
// The same of a word pair of 4 bits: a pair for each field, lower half of the first word, upper half of the second.
__device__ __forceinline__ void unpack_fields(const Levels& levels, u32 word, u32 (&out)[FIELDS]) {
  const Codes c = codes_of(word, 0);
  u32 a[2], b[2];
  pairs_of(levels, c.even, c.odd, a[0], a[1]);
  pairs_of(levels, c.even >> 16, c.odd >> 16, b[0], b[1]);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    out[2 * i] = __byte_perm(a[i], b[i], 0x5410);
    out[2 * i + 1] = __byte_perm(a[i], b[i], 0x7632);
  }
}
// Levels of a word pair, pairs of fields of one word each: piece j * FIELDS / 2 + i is the i-th pair of word j
// (weight_place). Words j have the roundings `levels[j]`.
__device__ __forceinline__ void unpack_words(const Levels* levels, u32 word, u32 second, u32 (&out)[FIELDS]) {
  const Codes c = codes_of(word, second);
  if constexpr (BITS == 4) {
    pairs_of(levels[0], c.even, c.odd, out[0], out[1]);
    pairs_of(levels[1], c.even >> 16, c.odd >> 16, out[2], out[3]);
  } else {
    pairs_of(levels[0], c.even, 0, out[0], out[1]);
    pairs_of(levels[0], c.odd, 0, out[2], out[3]);
    pairs_of(levels[1], c.even >> 16, 0, out[4], out[5]);
    pairs_of(levels[1], c.odd >> 16, 0, out[6], out[7]);
  }
}
// Where the digits of the weight of token `x` of a tile lie, in bytes: [4 lanes][4 steps][2 registers][4].
__device__ __forceinline__ int digit_place(int x) {
  const int f = x / WORDROWS, r = x % WORDROWS;
  const int j = r & 1, t = r >> 1 & 3, b = r >> 3 & 1, q = r >> 4;
  return t * 32 + (BITS == 4 ? q * 2 + j : (f & 1) * 2 + j) * 8 + b * 4 + (BITS == 4 ? f : f >> 1);
}
// Where the weight of token `x` of a tile lies, in halves: [4 lanes][8 steps][2 registers][2].
__device__ __forceinline__ int weight_place(int x) {
  const int f = x / WORDROWS, r = x % WORDROWS;
  const int j = r & 1, t = r >> 1 & 3, b = r >> 3 & 1, q = r >> 4;
  const int pair = BITS == 4 ? f >> 1 : (f & 1) * 2 + (f >> 2), half = BITS == 4 ? f & 1 : f >> 1 & 1;
  const int step = BITS == 4 ? q * 4 + j * 2 + pair : j * 4 + pair;
  return t * 32 + step * 4 + b * 2 + half;
}
