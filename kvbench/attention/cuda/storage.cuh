// each<A, B>(f): f(Number<A>{}), ..., f(Number<B - 1>{}): a loop whose index is a constant inside of `f`, so that it
// may be a template argument there.
template <int N>
struct Number {
  static constexpr int value = N;
};
template <int A, int B, class Fn>
__device__ __forceinline__ void each(Fn&& fn) {
  if constexpr (A < B) {
    fn(Number<A>{});
    each<A + 1, B>(fn);
  }
}

// ---- storage -------------------------------------------------------------------------------------------------------
CONST int fields_of(int bits) { return bits == 2 || bits == 3 ? 8 : 4; }  // of the first plane: 2 or 4 bits
CONST int rows_of(int bits) { return 128 / fields_of(bits); }             // its word rows of a tile
CONST int plane_bytes(int bits) { return rows_of(bits) * D * 2; }
// bytes of the second plane: 8 bits have two of 4; 3 bits have one of 2 and one of 1, which has 8 word rows
CONST int second_bytes(int bits) { return bits == 8 ? plane_bytes(8) : bits == 3 ? 8 * D * 2 : 0; }
// Rows of keys lie in shared memory WIDE bytes apart: as they are where their 16-byte units can be permuted (wide()),
// else with one unit more, so that eight rows begin in different banks.
constexpr bool PERMUTED = D % 64 == 0;
constexpr int WIDE = PERMUTED ? 2 * D : 2 * D + 16;
// bytes in a slot of the planes of keys, of values; of the first plane alone
CONST int first_room(bool keys, int bits) { return keys ? rows_of(bits) * WIDE : plane_bytes(bits); }
CONST int room(bool keys, int bits) {
  return keys ? (rows_of(bits) + second_bytes(bits) / (2 * D)) * WIDE : plane_bytes(bits) + second_bytes(bits);
}
// bits below a field's code once the word is shifted: the code is read as code * 2^(low - 24)
CONST int low_of(int bits, int f) { return fields_of(bits) == 8 ? 2 * (f & 3) : bits == 4 ? 4 * (f & 1) : 0; }
CONST float pow2(int e) { return e >= 0 ? (float)(1ll << e) : 1.f / (float)(1ll << -e); }

// Codes of field F of two neighbouring words as two fp16 numbers of value code * 2^(low_of(BITS, F) - 24).
// w: a pair of words of the first plane; second: a pair of words of the second plane; with 3 bits, that plane's fields
// 2 F and 2 F + 1 hold the last bits of field F's first and second eight tokens, of which E says the one.
template <int BITS, int F, int E>
__device__ __forceinline__ u32 field(u32 w, u32 second) {
  if constexpr (BITS == 2) return (F < 4 ? w : w >> 8) & (0x00030003u << (2 * (F & 3)));
  if constexpr (BITS == 4) return (F < 2 ? w : w >> 8) & (0x000f000fu << (4 * (F & 1)));
  if constexpr (BITS == 3) {
    // the upper two bits move to 2 F + {1, 2} and the last to 2 F; fields of equal parity share a select
    const u32 upper = F < 4 ? w << 1 : w >> 7, last = second >> (E + (F < 4 ? 0 : 8));
    const u32 both = chosen(F & 1 ? 0x99999999u : 0x66666666u, upper, last);
    return both & (0x00070007u << (2 * (F & 3)));
  }
  // upper nibble from w, lower nibble from `second`; fields 0 and 2 share a select, so do 1 and 3
  u32 both = F & 1 ? ((w & 0xf0f0f0f0u) | ((second >> 4) & 0x0f0f0f0fu))
                   : (((w << 4) & 0xf0f0f0f0u) | (second & 0x0f0f0f0fu));
  return __byte_perm(both, 0, F < 2 ? 0x4240 : 0x4341);
}
// Which word rows and fields a warp takes of a packed tile: all (SHARES 1), or every second block of 16 tokens, as
// `part` says (SHARES 2). Where a block of 16 word rows holds all of a field's tokens, that is every second field.
//   BLOCKS   blocks of 16 word rows that the warp reads
//   STEP     from a field it takes to the next
//   FIELDS   fields that it takes
template <int BITS>
struct Portion {
  static constexpr int ALL = rows_of(BITS) / 16, BLOCKS = ALL >= SHARES ? ALL / SHARES : 1;
  static constexpr bool FIELDWISE = ALL < SHARES;
  static constexpr int STEP = FIELDWISE ? SHARES : 1, FIELDS = fields_of(BITS) / STEP;
  // block of 16 word rows of the warp's i-th
  static __device__ __forceinline__ int block(int i, int part) { return FIELDWISE || SHARES == 1 ? i : part; }
  // shifts words so that the warp's fields are 0, STEP, 2 STEP, ...
  static __device__ __forceinline__ void align(u32 (&w)[4], int part) {
    if constexpr (FIELDWISE) {
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] >>= 2 * part;
    }
  }
};
// Field F of four registers of words as an operand of a matrix instruction. second: as many registers of the second
// plane; with 3 bits two, whose eight words serve both halves of the tokens.
template <int BITS, int F, bool KEYS>
__device__ __forceinline__ void operand(u32 (&c)[4], const u32 (&w)[4], const u32 (&second)[4]) {
  each<0, 4>([&](auto tag) {
    constexpr int I = decltype(tag)::value, E = KEYS ? I & 1 : I >> 1;
    c[I] = field<BITS, F, E>(w[I], second[BITS == 3 ? (KEYS ? I >> 1 : I & 1) : I]);
  });
}
// Rows lie in shared memory with their 16-byte units permuted (XOR with bits of the row's number), so that the eight
// rows that an ldmatrix reads at once lie in different banks.
// offset of a 16-byte unit of a row of exact keys or values, or of key words
__device__ __forceinline__ u32 wide(int row, int unit) {
  return row * WIDE + ((PERMUTED ? unit ^ (row & 7) : unit) << 4);
}
// the same for value words: rows of 2 NW bytes
template <int BITS>
__device__ __forceinline__ u32 narrow(int row, int unit) {
  if constexpr (rows_of(BITS) == 16) return row * 32 + ((unit ^ ((row >> 2) & 1)) << 4);
  return row * 64 + ((unit ^ ((row >> 1) & 3)) << 4);
}

// whether a value is a factor of its group times an element that follows from the code alone (elements.cuh)
CONST bool factored(int kind) {
  return kind == OFFSET || kind == FOLDED || kind == FLOAT || kind == LEVELS || kind == LEVELS_READ || kind == IQ4_NL ||
         kind == OCTAVE;
}
CONST int scale_bytes(int scale) { return scale == HALF ? 2 : scale == SINGLE ? 4 : scale == BYTE ? 1 : 0; }

// most groups of channels that the values of a phase have: what row g of State::low counts
CONST int most_groups() {
  int most = 1;
  for (int i = 0; i < NPHASES; i++)
    if (PH[i][5] != FULL && !factored(PH[i][5]) && D / PH[i][8] > most) most = D / PH[i][8];
  return most;
}
constexpr int LOWS = most_groups();

// the running softmax of a warp's query rows; lane (g, t) holds columns 2t and 2t + 1 of each of NT blocks of 8
struct State {
  float top[NT][NC], total[NT][NC];  // largest log2 score; sum of probabilities
  float low[NT][NC];                 // sum of probability * minimum of value group g
  float acc[NT][KS][4];              // sum of probability * scale * code, times 2^-24: channels 16 a + {g, g + 8}
  float sl[NT][NC];                  // scaling * log2(e) * 2^exponent of the query
};

// How a tile is divided into items, each of which fills one slot of the ring. Exact keys or values of a tile of 128
// tokens come 32 tokens at a time.
//   KK, KB, KA, KG; VK, VB, VG   kind, bits, axis and group of keys; kind, bits and group of values (axis: token)
//   KSCALE, VSCALE    types of scales
//   KP, VP            keys, values are packed
//   KF, VF            values are factors times elements (elements.cuh); a tile then has one run of parameters, not two
//   TOKENS            of a tile: 128, or 32 where both sides are exact
//   KI, VI, ITEMS     items (slots of the ring) that a tile's keys, values, and both take
//   MT                blocks of 16 tokens in it that are a warp's: its m-th is block SHARES m + part
//   KGROUPS, VGROUPS  groups of tokens in a tile of keys; groups of channels in a token's value
//   KPARAM, VPARAM    bytes of a tile's scales (and again of its minima)
//   KCODES, VCODES    bytes of a tile's words in a slot
//   KX, VX            keys, values have cross factors (cross.cuh)
//   KCROSS, VCROSS    bytes of a tile's cross factors
//   VBLOCKS           blocks of tokens in a tile whose values have cross factors of their own, as many as groups of keys
//   value_block       the block in which the warp's m-th 16 tokens lie
template <int P>
struct Shape {
  static constexpr int KK = PH[P][0], KB = PH[P][1], KA = PH[P][2], KG = PH[P][3], KSCALE = PH[P][4];
  static constexpr int VK = PH[P][5], VB = PH[P][6], VG = PH[P][8], VSCALE = PH[P][9];
  static constexpr bool KP = KK != FULL, VP = VK != FULL, KF = factored(KK), VF = factored(VK);
  static constexpr bool KX = KK == CROSS, VX = VK == CROSS;
  static constexpr int TOKENS = KP || VP ? 128 : 32;
  static constexpr int KI = KP ? 1 : TOKENS / 32, VI = VP ? 1 : TOKENS / 32, ITEMS = KI + VI;
  static constexpr int MT = TOKENS / 16 / SHARES;
  // groups of tokens in a tile
  static constexpr int KGROUPS = !KP || KA != CHANNEL ? 1 : WINDOWS[P] ? MET : 128 / KG;
  static constexpr int GPARAM = D * 2 + (WINDOWS[P] ? 16 : 0);  // bytes of the scales of a group of tokens
  static constexpr int KPARAM = !KP ? 0 : KA == CHANNEL ? KGROUPS * GPARAM : 128 * (D / KG) * scale_bytes(KSCALE);
  // a tile has one group of keys: scores are one linear function of the products, applied with the exponential
  static constexpr bool LINEAR = KP && KA == CHANNEL && KGROUPS == 1 && !WINDOWS[P] && !SOFTCAP && !KX;
  static constexpr int KCODES = KP ? room(true, KB) : 0;
  static constexpr int VGROUPS = VP ? D / VG : 1;     // groups of channels in a token
  static constexpr int VROW = VGROUPS + PADDING[P];  // scales of a token, with unused ones
  static constexpr int VPARAM = VP ? 128 * VROW * scale_bytes(VSCALE) : 0;
  static constexpr int VCODES = VP ? room(false, VB) : 0;
  static constexpr int KCROSS = KX ? 256 : 0, VBLOCKS = VX ? 128 / KG : 1, VCROSS = VX ? VBLOCKS * 2 * D : 0;
  static CONST int value_block(int m) { return VX ? SHARES * m * 16 / KG : 0; }
  // groups of e2m1 codes have columns of their own (columns.cuh)
  static constexpr bool COLUMNS = ONEROW && KK == FLOAT && VK == FLOAT && KB == 4 && VB == 4 && KG == 16 && VG == 16 &&
                                  KSCALE == BYTE && VSCALE == BYTE && (KS == 4 || KS == 8);
  // codes of keys stand for levels (levels.cuh)
  static constexpr bool BOOK = KK == LEVELS || KK == LEVELS_READ;
  // ... as integers of a byte (byte_levels.cuh)
  static constexpr bool BYTES = BOOK && KB == 3 && DIGIT_BYTES > 0;
  // codes are multiplied as integers (integer.cuh)
  static constexpr bool INT = INTEGER == 1 && KP && VP && KK == AFFINE && VK == AFFINE && KB == 2 && VB == 2 &&
                              KA == CHANNEL && (WINDOWS[P] ? MET <= 4 : KG >= 32) && VGROUPS <= 4;
};

// A line of the table of phases: first token in the key segment, in the value segment, tokens.
struct Range {
  int first_k, first_v, count;
};
