// Decode attention over packed and exact segments in one launch, for sm_80 and later.
//
// The ideas, which docs/kernels.md explains with pictures: codes of 2 to 8 bits are
// fp16 subnormals as they stand in the word (one AND unpacks two of them), scales are folded into the query and into
// the probabilities, and each field of a word row is a whole sub-tile. Tokens are the M of the first product
// (S^T = K q^T) and channels the M of the second (O^T = V^T P^T), so a warp's 8 columns are query rows. Words reach
// the tensor cores by ldmatrix straight from the storage order of kvbench/cache/segments/layout.py; no other
// order exists.
//
// A team of TEAM warps reads the same tiles through one ring of slots. SHARES of them serve the same query rows and
// divide the tokens of each tile; a warp serves NT blocks of 8 rows, for all of which it unpacks a code once.
//
// Compiled by nvrtc with these macros (Build.macros of kvbench/attention/cuda/config.py):
//   D            channels of a head, of keys and of values: 64 or 128
//   TEAM         warps that share a ring
//   SHARES       warps of a team that divide the tokens of a tile between them: 1 or 2
//   NT           blocks of 8 query rows that a warp serves
//   ONECOL       1: at most 4 rows, in the even columns, so that odd columns cost nothing (TEAM 1, NT 1)
//   TEAMS        teams of a CTA; each walks tiles of its own, and they are merged in shared memory
//   STAGES       slots of a team's ring: 2 or 3, one that is read while the others are filled
//   MINB         CTAs that a multiprocessor must hold: bounds the registers of a thread
//   BF16         1: exact segments, query and output are bf16; 0: fp16
//   NPHASES      phases of the layer
//   PHASE_TABLE  their formats: {kind, bits, axis, group, scale} of the keys, then of the values
//   WINDOW_TABLE tokens of a window of the keys of each phase: {W, ...}, 0 unless their groups do not fit tiles
//   PADDING_TABLE  unused factors after those of each value: {number, ...}; undefined if there are none
//   MET          most groups of such keys in a tile; 1 without any
//   SLOTS        columns that a query row takes: MET (windows.cuh), or 1 where all such codes are multiplied as integers
//   SLOT         bytes of a slot: the largest item of any phase
//   SCRATCH      bytes of a warp's tables of factors (factors.cuh), or of a tile's weights (columns.cuh)
//   SOFTCAP      1: scores are capped
//   INTEGER      1: there is one query row, for which codes of 2 bits (integer.cuh) and 3-bit levels (byte_levels.cuh)
//                are multiplied as integers; 4: there are 2 to 4, for which levels are; 0: none are
//   DIGIT_BYTES  bytes of shared memory for queries as digits, where levels are multiplied as integers, else 0
//   ONEROW       1: there is one query row, for which groups of e2m1 codes have columns (columns.cuh)
//   SINKS        each query head has one more logit, 1: of the query's type, 2: fp32; 0: none
//
// Template parameters that recur: P, a phase; MT, blocks of 16 tokens (rows of a matrix instruction) that a warp takes
// of a tile, and `part` which ones (SHARES 2: block 2 m + part is its m-th); BITS, of a code; F, a field of a word. A lane
// is (g, t) = (lane >> 2, lane & 3): of a result of mma.m16n8k16 it holds rows g and g + 8 in columns 2t and 2t + 1, as
// {(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)}.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
#define CONST __host__ __device__ constexpr

// the numbers of KINDS, AXES and SCALES in config.py
enum { FULL = 0, AFFINE = 1, ATOM = 2, HIERARCHICAL = 3, OFFSET = 4, FOLDED = 5, FLOAT = 6, LEVELS = 7, CROSS = 8 };
enum { LEVELS_READ = 9, IQ4_NL = 10, OCTAVE = 11 };
enum { CHANNEL = 0, TOKEN = 1 };
enum { NO_SCALE = 0, HALF = 1, SINGLE = 2, BYTE = 3 };  // types of scales: none, fp16, fp32, e4m3
constexpr int PH[NPHASES][10] = PHASE_TABLE;
constexpr int WINDOWS[NPHASES] = WINDOW_TABLE;
#ifndef PADDING_TABLE
#define PADDING_TABLE {}
#endif
constexpr int PADDING[NPHASES] = PADDING_TABLE;
constexpr int KS = D / 16;          // steps of 16 channels
constexpr int NC = ONECOL ? 1 : 2;  // columns of a lane that hold query rows
constexpr int WARPS = TEAM * TEAMS, ROWS = ONECOL ? 4 : 8 * NT * (TEAM / SHARES);
constexpr int STREAMS = TEAMS * SHARES;  // warps that have a running softmax of the same query rows
constexpr int QUERY = KS * 256;  // bytes of 8 query rows
constexpr int QUERIES = (BF16 ? 2 : 1) * QUERY + DIGIT_BYTES;  // the same in the types that products need
constexpr float LIFT = 14.f;     // probabilities are at most 2^14: small ones stay normal in fp16

// Buffers of one phase; packed by `pack` of kvbench/attention/cuda/decode.py. Exact segments use kw and vw alone.
struct Phase {
  const u8 *kw, *kw2, *ks, *km, *vw, *vw2, *vs, *vm;  // words (upper plane, lower plane), scales, minima or zeros
  int kcap, vcap;                                     // tiles (packed) or tokens (exact) of a head's buffer
  int kgroups, none;                                  // rows of scales of a head's keys, where groups do not fit tiles
  const u8 *kx, *vx;                                  // cross factors (cross.cuh)
  float kfactor, vfactor;                             // of all keys, of all values (FLOAT, OCTAVE)
};
// The kernel's one argument; packed by `attend` of kvbench/attention/cuda/decode.py, so the order is part of both.
struct Args {
  Phase phase[NPHASES];
  const int* table;  // [B, NPHASES, 3]: first key token, first value token, tokens
  const u16* query;  // [B, Hq, q, D] with strides
  i64 stride_b, stride_h, stride_q;
  u16* out;        // [B, q, Hq, D]
  float* partial;  // [B * H, blocks, splits, ROWS, D], then (top, total) of each row
  int* counter;    // [B * H, blocks], zero before and after
  // KV heads, query heads of each, new tokens of the step, CTAs that share a head
  int heads, group, qlen, splits;
  float scale;        // scaling * log2(e); with a softcap, 2 * scaling * log2(e) / softcap
  float cap;          // softcap * log2(e)
  const void* sinks;  // [Hq], or null
};
