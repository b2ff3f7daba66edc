// ---- elements: what a code stands for before the factor of its group -----------------------------------------------
// A value of these kinds is a factor times an element that follows from the code alone:
//   OFFSET   code - 2^(bits - 1); the operand holds the code, and 2^(bits - 1) times the sum of what it is multiplied by
//            is subtracted
//   FOLDED   code - zero, likewise; zero is in the 4 lowest bits of the factor
//   FLOAT    the small float whose bits are the code, as an fp16 number
//   IQ4_NL, OCTAVE  the code's level; the operand holds the level plus 128, and 128 is subtracted likewise (tables.cuh)
// LEVELS and LEVELS_READ are in levels.cuh.
// The two nibbles of an e4m3 code are in two planes, as those of an 8-bit integer.

// Codes of field F of two neighbouring words of 8-bit codes as the bytes 0 and 2 (F < 2) or 1 and 3 of the result.
template <int F>
__device__ __forceinline__ u32 joined_nibbles(u32 w, u32 second) {
  return F & 1 ? chosen(0xf0f0f0f0u, w, second >> 4) : chosen(0xf0f0f0f0u, w << 4, second);
}

// e2m1: s eem at the top of each nibble becomes s at bit 15 and eem at bits 11 to 9 of a half, which is the number times
// 2^-14, subnormal or not. Fields 1 and 3, and 0 and 2, are selected together, in bytes. With up to 4 rows, a shift by three
// is 2 to 6 % faster on an H200 than a multiplication that does the same; with more rows, the two were not compared.
template <int F>
__device__ __forceinline__ u32 halves_of_e2m1(u32 w) {
  const u32 lower = ONECOL ? w >> 3 : divided<3>(w);
  const u32 both = F & 1 ? chosen(0x80808080u, w, lower) : chosen(0x80808080u, w << 4, w << 1);
  return (F < 2 ? both << 8 : both) & 0x8e008e00u;
}

// Field F of two neighbouring words as two fp16 numbers, each an element (or a code) times 2^unit_of(KIND, BITS, F).
template <int KIND, int BITS, int F, int E>
__device__ __forceinline__ u32 element(u32 w, u32 second) {
  if constexpr (KIND == FLOAT && BITS == 8) {
    // bytes in the order 0, 2, 1, 3: one permutation for fields F and F + 2
    return halves_of_e4m3<(F >= 2)>(__byte_perm(joined_nibbles<F>(w, second), 0, 0x3120));
  } else if constexpr (KIND == FLOAT) {
    return halves_of_e2m1<F>(w);
  } else if constexpr (in_table(KIND)) {
    return entries<KIND, BITS, F, E>(w, second);
  } else {
    return field<BITS, F, E>(w, second);
  }
}
CONST int unit_of(int kind, int bits, int f) {
  return kind == FLOAT ? (bits == 8 ? 0 : -14) : in_table(kind) ? -24 : low_of(bits, f) - 24;
}
// whether operands hold elements plus a number; that number, unless it is a token's own (FOLDED)
CONST bool shifted(int kind) { return kind == OFFSET || kind == FOLDED || in_table(kind); }
CONST int middle_of(int kind, int bits) { return in_table(kind) ? 128 : 1 << (bits - 1); }
// whether one more factor, on all keys or all values, belongs to the format
CONST bool has_whole(int kind) { return kind == FLOAT || kind == OCTAVE; }

// operand() of elements.
template <int KIND, int BITS, int F, bool KEYS>
__device__ __forceinline__ void elements(u32 (&c)[4], const u32 (&w)[4], const u32 (&second)[4]) {
  each<0, 4>([&](auto tag) {
    constexpr int I = decltype(tag)::value, E = KEYS ? I & 1 : I >> 1;
    c[I] = element<KIND, BITS, F, E>(w[I], second[BITS == 3 ? (KEYS ? I >> 1 : I & 1) : I]);
  });
}
