// ---- tables: codes that select an integer of a fixed table ---------------------------------------------------------
// Levels of iq4_nl and of octave are integers of a byte, the same for all tokens. A byte permutation (prmt) looks up four
// codes in eight entries; its selector is nibbles, so codes need no unpacking but masks. With 4 bits, the lower and the
// upper eight levels are looked up, and a third permutation takes either by the highest bit of each code. Entries are
// levels plus 128, so from here on they are codes of OFFSET with 8 bits: 16 operations for 8 codes of 4 bits.
#ifndef TABLE_BYTES  // no phase has such codes
#define TABLE_BYTES {}
#endif
// levels plus 128, four a number: of iq4_nl, then of octave with 3 and with 4 bits
constexpr u32 BYTES_OF_TABLES[3][4] = TABLE_BYTES;
CONST bool in_table(int kind) { return kind == IQ4_NL || kind == OCTAVE; }

// Exchanges the middle bytes of a word pair: a half of it then has the codes of the same fields of both words.
__device__ __forceinline__ u32 mixed(u32 w) { return __byte_perm(w, 0u, 0x3120); }
// The fields that a selector's half has (PAIR): the first, and the distance to the second.
CONST int first_of(int bits, int pair) { return bits == 4 ? 2 * pair : (pair & 1) + 4 * (pair >> 1); }
CONST int next_of(int bits) { return bits == 4 ? 1 : 2; }
// Selectors of the entries of fields PAIR, in the lower half: nibbles of the first and second field of the first word,
// then of the second word.
//   w     word pair, mixed; with 4 bits without the highest bit of each code
//   last  with 3 bits the word pair of the second plane, mixed; E: which eight tokens are meant. The bit of field F is at
//         2 F + E, so it becomes bit 2 of a selector whose bits 0 and 1 are the code's upper bits.
template <int BITS, int PAIR, int E>
__device__ __forceinline__ u32 selectors(u32 w, u32 last) {
  if constexpr (BITS == 4) return PAIR ? w >> 16 : w;
  const u32 bits = (E ? last >> 1 : last) & 0x55555555u;
  const u32 both = PAIR & 1 ? chosen(0x33333333u, w >> 2, bits) : chosen(0x33333333u, w, bits << 2);
  return PAIR & 2 ? both >> 16 : both;
}

// Entries of field F of two neighbouring words as two fp16 numbers, each times 2^-24; arguments as of field(). The other
// field of the pair takes the same permutations.
template <int KIND, int BITS, int F, int E>
__device__ __forceinline__ u32 entries(u32 w, u32 second) {
  constexpr const u32(&T)[4] = BYTES_OF_TABLES[KIND == IQ4_NL ? 0 : BITS - 2];
  constexpr int PAIR = BITS == 4 ? F / 2 : (F & 1) + 2 * (F / 4);
  const u32 zero = gridDim.x >> 24;  // as in levels.cuh: keeps the table in registers
  const u32 order = mixed(w);
  u32 four;
  if constexpr (BITS == 4) {
    const u32 codes = selectors<4, PAIR, 0>(order & 0x77777777u, 0);
    const u32 upper = order >> 1 & 0x44444444u | 0x32103210u;
    four = __byte_perm(__byte_perm(T[0] ^ zero, T[1] ^ zero, codes), __byte_perm(T[2] ^ zero, T[3] ^ zero, codes),
                       PAIR ? upper >> 16 : upper);
  } else {
    four = __byte_perm(T[0] ^ zero, T[1] ^ zero, selectors<3, PAIR, E>(order, mixed(second)));
  }
  return __byte_perm(four, 0, F == first_of(BITS, PAIR) ? 0x4240 : 0x4341);
}
