// ---- look-up of levels: byte permutations of registers -------------------------------------------------------------
// low, high: bytes of the fp16 levels, four in a register.
struct Levels {
  static constexpr int SIZE = BITS == 4 ? 4 : BITS == 3 ? 2 : 1;
  u32 low[SIZE], high[SIZE];
};
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
// Looks up four codes, of the nibbles of the lower half of `codes`, in registers with four levels each.
__device__ __forceinline__ u32 bytes_of(const u32 (&levels)[Levels::SIZE], u32 codes, u32 upper) {
  if constexpr (BITS == 4) {
    const u32 a = __byte_perm(levels[0], levels[1], codes), b = __byte_perm(levels[2], levels[3], codes);
    return chosen(upper, b, a);
  } else {
    return __byte_perm(levels[0], levels[Levels::SIZE - 1], codes);
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
// Levels of a word pair, a pair for each field: lower half of the first word, upper half of the second.
__device__ __forceinline__ void unpack_fields(const Levels& levels, u32 word, u32 second, u32 (&out)[FIELDS]) {
  const Codes c = codes_of(word, second);
#pragma unroll
  for (int odd = 0; odd < (BITS == 4 ? 1 : 2); odd++) {
    const u32 codes = odd ? c.odd : c.even, selects = BITS == 4 ? c.odd : 0;
    constexpr int STEP = BITS == 4 ? 1 : 2;
    u32 a[2], b[2];
    pairs_of(levels, codes, selects, a[0], a[1]);
    pairs_of(levels, codes >> 16, selects >> 16, b[0], b[1]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      out[odd + 2 * i * STEP] = __byte_perm(a[i], b[i], 0x5410);
      out[odd + (2 * i + 1) * STEP] = __byte_perm(a[i], b[i], 0x7632);
    }
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
// Where the weight of token `x` of a tile lies, in halves: [4 lanes][8 steps][2 registers][2].
__device__ __forceinline__ int weight_place(int x) {
  const int f = x / WORDROWS, r = x % WORDROWS;
  const int j = r & 1, t = r >> 1 & 3, b = r >> 3 & 1, q = r >> 4;
  const int pair = BITS == 4 ? f >> 1 : (f & 1) * 2 + (f >> 2), half = BITS == 4 ? f & 1 : f >> 1 & 1;
  const int step = BITS == 4 ? q * 4 + j * 2 + pair : j * 4 + pair;
  return t * 32 + step * 4 + b * 2 + half;
}
