// Decode attention over packed and exact segments in one launch, for sm_80 and later.
//
// The ideas are those of a feasibility study that is part of this project's specification: codes of 2 to 8 bits are
// fp16 subnormals as they stand in the word (one AND unpacks two of them), scales are folded into the query and into
// the probabilities, and each field of a word row is a whole sub-tile. Tokens are the M of the first product
// (S^T = K q^T) and channels the M of the second (O^T = V^T P^T), so a warp's 8 columns are query rows. Words reach
// the tensor cores by ldmatrix straight from the storage order of kvbench/cache/layout.py; no other order exists.
//
// A team of TEAM warps reads the same tiles through one ring of slots, each warp for 8 query rows of its own.
//
// Compiled by nvrtc with these macros (kvbench/attention/cuda_decode.py):
//   D         channels of a head: 64 or 128
//   TEAM      warps that share a ring: blocks of 8 query rows that a CTA serves
//   ONECOL    1: at most 4 rows, in the even columns, so that odd columns cost nothing (TEAM 1)
//   TEAMS, STAGES, MINB   teams of a CTA, slots of a ring (2 or 3), CTAs that a multiprocessor must hold
//   BF16      exact segments (and query and output) are bf16; else fp16
//   NPHASES, PHASE_TABLE  formats of the phases: {kind, bits, axis, group} of keys, then of values
//   SLOT      bytes of a slot
//   SOFTCAP   1: scores are capped
//   SINKS     each query head has one more logit, 1: of the query's type, 2: fp32; 0: none
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
#define CONST __host__ __device__ constexpr

enum { FULL = 0, AFFINE = 1, ATOM = 2, HIERARCHICAL = 3 };
enum { CHANNEL = 0, TOKEN = 1 };
constexpr int PH[NPHASES][8] = PHASE_TABLE;
constexpr int KS = D / 16;          // steps of 16 channels
constexpr int NC = ONECOL ? 1 : 2;  // columns of a lane that hold query rows
constexpr int WARPS = TEAM * TEAMS, ROWS = ONECOL ? 4 : 8 * TEAM;
constexpr int QUERY = KS * 256;  // bytes of 8 query rows
constexpr float OFFSET = 14.f;   // probabilities are at most 2^14: small ones stay normal in fp16

struct Phase {
  const u8 *kw, *kw2, *ks, *km, *vw, *vw2, *vs, *vm;  // words (upper plane, lower plane), scales, minima or zeros
  int kcap, vcap;                                     // tiles (packed) or tokens (exact) of a head's buffer
};
struct Args {
  Phase phase[NPHASES];
  const int* table;  // [B, NPHASES, 3]: first key token, first value token, tokens
  const u16* query;  // [B, Hq, q, D] with strides
  i64 stride_b, stride_h, stride_q;
  u16* out;        // [B, q, Hq, D]
  float* partial;  // [B * H, blocks, splits, ROWS, D], then (top, total) of each row
  int* counter;    // [B * H, blocks], zero before and after
  int heads, group, qlen, splits;
  float scale;        // scaling * log2(e); with a softcap, 2 * scaling * log2(e) / softcap
  float cap;          // softcap * log2(e)
  const void* sinks;  // [Hq]
};
