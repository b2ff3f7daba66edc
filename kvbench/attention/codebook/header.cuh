// Decode attention over a codebook's codes (KVQuant) in one launch, for sm_80 and later.
//
// The ideas, which docs/kernels.md explains: levels are looked up in registers by byte permutations (lookup.cuh). RoPE
// is linear, so a rotated key is a sum of the looked-up levels of its two channels times constants; a warp's products
// take the query turned back to the beginning of every 16 tokens, so that the constants are those of 16 angles for all
// positions (rotation.cuh). Outliers add their difference to what their code stands for, to scores and to outputs, by
// integers in shared memory, whose sum does not depend on an order (outliers.cuh). A warp takes whole tiles of 128 tokens.
//
// Compiled by nvrtc with these macros (Build.macros of kvbench/attention/codebook/decode.py):
//   D         channels of a head, of keys and of values: 64 or 128
//   BITS      bits of a code: 2, 3 or 4
//   ROWS      query rows of a CTA: query heads of a KV head, 1 to 8
//   HEADS     KV heads
//   BLOCK     tokens of a block of outliers
//   BF16      1: queries, output, outliers and tokens in full precision are bf16; 0: fp16
//   NPHASES   phases of the layer, at most 3, of which PACKED has codes and the others are in full precision
//   ROTATE    1: keys are stored before RoPE
//   OUTLIERS  1: there are outliers of keys and of values
//   SOFTCAP, SINKS  as in kvbench/attention/cuda/header.cuh
//   WARPS     warps of a CTA
//   MINB      CTAs that a multiprocessor must hold: bounds the registers of a thread
//   SHARED    bytes of dynamic shared memory
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
constexpr int HALF = D / 2, STEPS = D / 16;       // steps of 8 channels of the first half with 8 of the second
constexpr int PLANES = BITS == 3 ? 2 : 1;
constexpr int FIELDS = BITS == 4 ? 4 : 8;         // codes of a word of the first plane
constexpr int WORDROWS = 128 / FIELDS;            // word rows of a tile in the first plane
constexpr int PACKS = ROWS == 1 ? 1 : ROWS == 2 ? 2 : ROWS <= 4 ? 4 : 8;  // columns of the query rows of 16 tokens
constexpr int SETS = PACKS;                       // second operands of a tile's scores: 8 / PACKS blocks of 16 tokens each
constexpr int SLOTS = 1;
constexpr float LIFT = 0.f, NOTHING = -1e30f;
constexpr int WIDTH = HEADS * D, SEGMENTS = 128 / BLOCK, LANES = 32 / SEGMENTS;  // lanes of a block of outliers
constexpr int OWN = D / 32;                       // channels of a lane where a warp holds a row of the output
constexpr bool WHOLE = ROWS == 1;                 // values are multiplied as integers
constexpr int KEPT = 8;                           // entries of a lane that are read at once
// shared memory of a CTA
constexpr int TURNS = STEPS * 3 * 512, SMALL = 16 * HALF * 4;
constexpr int QUERY_AT = TURNS + SMALL, STAND_AT = QUERY_AT + ROWS * D * 4, FACTOR_AT = STAND_AT + D * 4,
              LEVELS_AT = FACTOR_AT + 64,
              CTA_BYTES = LEVELS_AT + 256;  // levels of keys, then of values: integers and their unit, or ROUNDINGS
// shared memory of a warp, whose keys and values take turns in one buffer
constexpr int KEY_PLANE = WORDROWS * D * 2, VALUE_PLANE = KEY_PLANE, SECOND = PLANES == 2 ? 8 * D * 2 : 0;
constexpr int KEYS_AT = 0, VALUES_AT = 0, PARAMS_AT = VALUES_AT + VALUE_PLANE + SECOND,
              SCORES_AT = PARAMS_AT + 512, SUMS_AT = SCORES_AT + ROWS * 512, WEIGHTS_AT = SUMS_AT + 512,
              TURNED_AT = WEIGHTS_AT + ROWS * 256, SHRINK_AT = TURNED_AT + SETS * (STEPS / 2) * 512,
              WARP_BYTES = SHRINK_AT + 64;
static_assert(CTA_BYTES + WARPS * WARP_BYTES <= SHARED && WARPS * ROWS * (D + 4) * 4 <= SHARED);

// Buffers of a phase in full precision.
struct Exact {
  const u16 *key, *value;  // [B, H, room, D]
  i64 key_room, value_room;
};
// Outliers of keys or of values.
struct Sparse {
  const u16 *values, *indices;  // [B, room]
  const int* ends;              // [B, blocks, H]
  i64 room, blocks;
};
// The kernel's one argument; packed by `arguments` of kvbench/attention/codebook/decode.py, so the
// order is part of both.
struct Args {
  const int* table;                   // [B, NPHASES, 3]: first key token, first value token, tokens
  const u16* query;                   // [B, Hq, 1, D] with strides
  i64 stride_b, stride_h, stride_q;
  u16* out;                           // [B, 1, Hq, D]
  float* partial;                     // [B * H, blocks, splits, ROWS, D], then (top, total) of each row, and room
  int* counter;                       // [B * H, blocks], zero before and after
  int heads, group, qlen, splits;     // KV heads, query heads of each, 1, CTAs that share a head
  float scale, cap;                   // as in kvbench/attention/cuda/header.cuh
  const void* sinks;                  // [Hq], or null
  const u8 *kw, *kw2, *vw, *vw2;      // words of the planes of keys and of values
  i64 key_tiles, value_tiles;         // of a head's buffers
  const float *key_levels, *value_levels;  // [B, 2^BITS]
  const u16 *key_scale, *key_offset;       // of channels, fp16 [B, H, D]
  const u16 *value_scale, *value_offset;   // of tokens, fp16 [B, value_tiles * 128]
  const float *stand_in, *level;      // what the code of an outlier stands for: keys [B, H, D], level of values [B]
  const int* starts;                  // [B]: RoPE position of the first slot
  const float *fine, *coarse;         // [128, D], [n, D]: cosines, then sines, of positions, and of multiples of 128
  Exact exact[2];                     // before and after the packed tokens
  Sparse sparse[2];                   // of keys, of values
};
