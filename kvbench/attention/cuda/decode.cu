// Decode attention over packed and exact segments in one launch, for sm_80 and later.
//
// The ideas are those of a feasibility study that is part of this project's specification: codes of 2 to 8 bits are
// fp16 subnormals as they stand in the word (one AND unpacks two of them), scales are folded into the query and into
// the probabilities, and each field of a word row is a whole sub-tile. Tokens are the M of the first product
// (S^T = K q^T) and channels the M of the second (O^T = V^T P^T), so a warp's 8 columns are query rows. Words reach
// the tensor cores by ldmatrix straight from the storage order of kvbench/cache/layout.py; no other order exists.
//
// Compiled by nvrtc with these macros (kvbench/attention/cuda_decode.py):
//   D         channels of a head: 64 or 128
//   NT        blocks of 8 query rows that a CTA serves
//   ONECOL    1: at most 4 rows, in the even columns, so that odd columns cost nothing
//   WARPS, STAGES, MINB   warps of a CTA, slots of a warp's ring, CTAs that a multiprocessor must hold
//   BF16      exact segments (and query and output) are bf16; else fp16
//   NPHASES, PHASE_TABLE  formats of the phases: {kind, bits, axis, group} of keys, then of values
//   SLOT      bytes of a slot
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
#define CONST __host__ __device__ constexpr

enum { FULL = 0, AFFINE = 1, ATOM = 2, HIERARCHICAL = 3 };
enum { CHANNEL = 0, TOKEN = 1 };
constexpr int PH[NPHASES][8] = PHASE_TABLE;
constexpr int KS = D / 16;       // steps of 16 channels
constexpr int NC = ONECOL ? 1 : 2;  // columns of a lane that hold query rows
constexpr int HALVES = NT > 1 ? 2 : 1;
constexpr float OFFSET = 14.f;   // probabilities are at most 2^14: small ones stay normal in fp16

struct Phase {
  const u8 *kw, *kw2, *ks, *km, *vw, *vw2, *vs, *vm;  // words (upper plane, lower plane), scales, minima or zeros
  int kcap, vcap;                                      // tiles (packed) or tokens (exact) of a head's buffer
};
struct Args {
  Phase phase[NPHASES];
  const int *table;     // [B, NPHASES, 3]: first key token, first value token, tokens
  const u16 *query;     // [B, Hq, q, D] with strides
  i64 stride_b, stride_h, stride_q;
  u16 *out;             // [B, q, Hq, D]
  float *partial;       // [B * H, blocks, splits, 8 NT, D + 2]
  int *counter;         // [B * H, blocks], zero before and after
  int heads, group, qlen, splits;
  float scale;          // scaling * log2(e)
};

// ---- instructions --------------------------------------------------------------------------------------------------
__device__ __forceinline__ void mma16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_exact(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  mma16(c, a0, a1, a2, a3, b0, b1);
#endif
}
__device__ __forceinline__ void ldsm(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
__device__ __forceinline__ void ldsm_t(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
__device__ __forceinline__ u32 transposed(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 c; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b)); return c; }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ u32 half2_of(float low, float high) {
  u32 c;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(high), "f"(low));
  return c;
}
__device__ __forceinline__ u32 exact2_of(float low, float high) {
#if BF16
  u32 c;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(high), "f"(low));
  return c;
#else
  return half2_of(low, high);
#endif
}
__device__ __forceinline__ float float_of_half(u32 x) {
  float y;
  asm("{.reg .b16 h, t; mov.b32 {h, t}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ float float_of_exact(u32 x) {
#if BF16
  return __uint_as_float(x << 16);
#else
  return float_of_half(x);
#endif
}
__device__ __forceinline__ float exp2_of(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ void copy16(u32 to, const u8 *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copy16_if(u32 to, const u8 *from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ u32 load_u16(u32 a) { u16 x; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(a)); return x; }
__device__ __forceinline__ void load64(u32 &x, u32 &y, u32 a) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "r"(a));
}
__device__ __forceinline__ void load128(u32 (&x)[4], u32 a) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(a));
}
__device__ __forceinline__ u32 half2_const(float x) { return half2_of(x, x); }

// each<A, B>(f): f(Number<A>{}), ..., f(Number<B - 1>{})
template <int N> struct Number { static constexpr int value = N; };
template <int A, int B, class Fn> __device__ __forceinline__ void each(Fn &&fn) {
  if constexpr (A < B) {
    fn(Number<A>{});
    each<A + 1, B>(fn);
  }
}

// ---- storage -------------------------------------------------------------------------------------------------------
CONST int fields_of(int bits) { return bits == 2 ? 8 : 4; }    // 8 bits: two planes of 4
CONST int rows_of(int bits) { return 128 / fields_of(bits); }  // word rows of a tile
CONST int plane_bytes(int bits) { return rows_of(bits) * D * 2; }
CONST int planes_of(int bits) { return bits == 8 ? 2 : 1; }
// bits below a field's code once the word is shifted: the code is read as code * 2^(low - 24)
CONST int low_of(int bits, int f) { return bits == 2 ? 2 * (f & 3) : bits == 4 ? 4 * (f & 1) : 0; }
CONST float pow2(int e) { return e >= 0 ? (float)(1ll << e) : 1.f / (float)(1ll << -e); }

template <int BITS, int F> __device__ __forceinline__ u32 field(u32 w, u32 lower) {
  if constexpr (BITS == 2) return (F < 4 ? w : w >> 8) & (0x00030003u << (2 * (F & 3)));
  if constexpr (BITS == 4) return (F < 2 ? w : w >> 8) & (0x000f000fu << (4 * (F & 1)));
  // upper nibble from w, lower nibble from `lower`; fields 0 and 2 share a select, so do 1 and 3
  u32 both = F & 1 ? ((w & 0xf0f0f0f0u) | ((lower >> 4) & 0x0f0f0f0fu)) : (((w << 4) & 0xf0f0f0f0u) | (lower & 0x0f0f0f0fu));
  return (F < 2 ? both : both >> 8) & 0x00ff00ffu;
}
// offset of a 16-byte unit of a row of exact keys or values, or of key words: rows of 2 D bytes
__device__ __forceinline__ u32 wide(int row, int unit) { return row * (2 * D) + ((unit ^ (row & 7)) << 4); }
// the same for value words: rows of 2 NW bytes
template <int BITS> __device__ __forceinline__ u32 narrow(int row, int unit) {
  if constexpr (BITS == 2) return row * 32 + ((unit ^ ((row >> 2) & 1)) << 4);
  return row * 64 + ((unit ^ ((row >> 1) & 3)) << 4);
}

// most groups of channels that the values of a phase have: what row g of State::low counts
CONST int most_groups() {
  int most = 1;
  for (int i = 0; i < NPHASES; i++)
    if (PH[i][4] != FULL && D / PH[i][7] > most) most = D / PH[i][7];
  return most;
}
constexpr int LOWS = most_groups();

struct State {
  float top[NT][NC], total[NT][NC], low[NT][NC], acc[NT][KS][4];
  float sl[NT][NC];     // scaling * log2(e) * 2^exponent of the column's query
};

template <int BYTES> __device__ __forceinline__ void copy_run(u32 to, const u8 *from, int lane) {
#pragma unroll
  for (int i = 0; i < (BYTES + 511) / 512; i++)
    if (BYTES % 512 == 0 || i * 32 + lane < BYTES / 16) copy16(to + (i * 32 + lane) * 16, from + (i * 32 + lane) * 16);
}

// What of a tile goes into one slot of the ring. Exact parts of a tile of 128 tokens come 32 tokens at a time.
template <int P> struct Shape {
  static constexpr int KK = PH[P][0], KB = PH[P][1], KA = PH[P][2], KG = PH[P][3];
  static constexpr int VK = PH[P][4], VB = PH[P][5], VG = PH[P][7];
  static constexpr bool KP = KK != FULL, VP = VK != FULL;
  static constexpr int TOKENS = KP || VP ? 128 : 32;
  static constexpr int KI = KP ? 1 : TOKENS / 32, VI = VP ? 1 : TOKENS / 32, ITEMS = KI + VI;
  static constexpr int MT = TOKENS / 16;
  static constexpr int KGROUPS = KP && KA == CHANNEL ? 128 / KG : 1;          // groups of tokens in a tile
  static constexpr int KPARAM = KP ? (KA == CHANNEL ? KGROUPS * D * 2 : 128 * (D / KG) * 2) : 0;
  static constexpr int KCODES = KP ? planes_of(KB) * plane_bytes(KB) : 0;
  static constexpr int VGROUPS = VP ? D / VG : 1;                             // groups of channels in a token
  static constexpr int VPARAM = VP ? 128 * VGROUPS * 2 : 0;
  static constexpr int VCODES = VP ? planes_of(VB) * plane_bytes(VB) : 0;
};

struct Range { int first_k, first_v, count; };

template <int P, int PART> __device__ __forceinline__ void issue(const Phase &ph, const Range &r, i64 bh, int tile, u32 slot, int lane) {
  using S = Shape<P>;
  if constexpr (PART < S::KI) {
    if constexpr (S::KP) {
      const i64 t = bh * ph.kcap + r.first_k / 128 + tile;
#pragma unroll
      for (int plane = 0; plane < planes_of(S::KB); plane++) {
        const u8 *from = (plane ? ph.kw2 : ph.kw) + t * plane_bytes(S::KB);
        constexpr int UNITS = D / 8;
#pragma unroll
        for (int i = 0; i < plane_bytes(S::KB) / 512; i++) {
          const int c = i * 32 + lane;
          copy16(slot + plane * plane_bytes(S::KB) + wide(c / UNITS, c % UNITS), from + c * 16);
        }
      }
      copy_run<S::KPARAM>(slot + S::KCODES, ph.ks + t * S::KPARAM, lane);
      copy_run<S::KPARAM>(slot + S::KCODES + S::KPARAM, ph.km + t * S::KPARAM, lane);
    } else {
      // token of the key buffer at which this run of 32 begins; tokens outside of the phase are zeros
      const int begin = S::VP ? tile * 128 + PART * 32 - (r.first_v & 127) : tile * 32;
      const u8 *from = ph.kw + (bh * ph.kcap + r.first_k) * (2 * D);
      constexpr int UNITS = D / 8;
#pragma unroll
      for (int i = 0; i < UNITS; i++) {
        const int c = i * 32 + lane, token = begin + c / UNITS;
        const bool there = token >= 0 && token < r.count;
        copy16_if(slot + wide(c / UNITS, c % UNITS), from + (there ? (i64)token * (2 * D) + c % UNITS * 16 : 0), there);
      }
    }
  } else {
    if constexpr (S::VP) {
      const i64 t = bh * ph.vcap + r.first_v / 128 + tile;
#pragma unroll
      for (int plane = 0; plane < planes_of(S::VB); plane++) {
        const u8 *from = (plane ? ph.vw2 : ph.vw) + t * plane_bytes(S::VB);
        constexpr int UNITS = rows_of(S::VB) / 8;
#pragma unroll
        for (int i = 0; i < plane_bytes(S::VB) / 512; i++) {
          const int c = i * 32 + lane;
          copy16(slot + plane * plane_bytes(S::VB) + narrow<S::VB>(c / UNITS, c % UNITS), from + c * 16);
        }
      }
      copy_run<S::VPARAM>(slot + S::VCODES, ph.vs + t * S::VPARAM, lane);
      copy_run<S::VPARAM>(slot + S::VCODES + S::VPARAM, ph.vm + t * S::VPARAM, lane);
    } else {
      const int begin = S::KP ? tile * 128 + (PART - S::KI) * 32 - (r.first_k & 127) : tile * 32;
      const u8 *from = ph.vw + (bh * ph.vcap + r.first_v) * (2 * D);
      constexpr int UNITS = D / 8;
#pragma unroll
      for (int i = 0; i < UNITS; i++) {
        const int c = i * 32 + lane, token = begin + c / UNITS;
        const bool there = token >= 0 && token < r.count;
        copy16_if(slot + wide(c / UNITS, c % UNITS), from + (there ? (i64)token * (2 * D) + c % UNITS * 16 : 0), there);
      }
    }
  }
}

// ---- scores --------------------------------------------------------------------------------------------------------
// Of a half (or the whole) of a packed tile: s[n][m] are log2 scores of tokens 16 (H * MT + m) + {g, g + 8}.
template <int P, int H, int MT>
__device__ __forceinline__ void packed_scores(float (&s)[NT][MT][4], u32 slot, u32 queries, const State &st, int lane) {
  using S = Shape<P>;
  constexpr int NW = rows_of(S::KB), F0 = H * MT * 16 / NW, F1 = (H + 1) * MT * 16 / NW;
  constexpr bool CHANNELS = S::KA == CHANNEL;
  constexpr int NG = CHANNELS ? (MT * 16 / S::KG > 0 ? MT * 16 / S::KG : 1) : 1, G0 = CHANNELS ? H * MT * 16 / S::KG : 0;
  constexpr int SPAN = CHANNELS ? KS : S::KG / 16;  // channel steps that share parameters of a token
  constexpr float PART16 = S::KK == HIERARCHICAL ? 0.0625f : 1.f;
  const u32 params = slot + S::KCODES;
  const int row = lane & 15, hi = lane >> 4, g = lane >> 2;
  float raw[NT][MT][4], bias[NT][NG][4], bias2[NT][NG][4];
#pragma unroll
  for (int n = 0; n < NT; n++) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) raw[n][m][i] = 0.f, s[n][m][i] = 0.f;
#pragma unroll
    for (int k = 0; k < NG; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) bias[n][k][i] = 0.f, bias2[n][k][i] = 0.f;
  }
#pragma unroll
  for (int a = 0; a < KS; a++) {
    u32 q[NT][2], qs[NT][NG][2];
#pragma unroll
    for (int n = 0; n < NT; n++) load64(q[n][0], q[n][1], queries + ((n * KS + a) * 32 + lane) * 8);
    if constexpr (CHANNELS) {
#pragma unroll
      for (int k = 0; k < NG; k++) {
        u32 p[4];  // scales of channels 16 a + {2t, 2t + 8}, then minima
        ldsm(p, params + hi * S::KPARAM + ((G0 + k) * D + 16 * a + 8 * ((lane >> 3) & 1)) * 2);
        if constexpr (S::KK == ATOM) {
          p[2] = mul2(mul2(p[2], p[0]), 0xbc00bc00u);
          p[3] = mul2(mul2(p[3], p[1]), 0xbc00bc00u);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
          mma16(bias[n][k], p[2], p[2], p[3], p[3], q[n][0], q[n][1]);
          if constexpr (S::KK == HIERARCHICAL) mma16(bias2[n][k], p[0], p[0], p[1], p[1], q[n][0], q[n][1]);
          qs[n][k][0] = mul2(q[n][0], p[0]);
          qs[n][k][1] = mul2(q[n][1], p[1]);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < NT; n++) {
        mma16(bias[n][0], 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, q[n][0], q[n][1]);
        qs[n][0][0] = q[n][0];
        qs[n][0][1] = q[n][1];
      }
    }
#pragma unroll
    for (int mt = 0; mt < NW / 16; mt++) {
      u32 w[4], lower[4] = {0, 0, 0, 0};
      ldsm(w, slot + wide(16 * mt + row, 2 * a + hi));
      if constexpr (S::KB == 8) ldsm(lower, slot + plane_bytes(8) + wide(16 * mt + row, 2 * a + hi));
      auto one = [&](auto tag) {
        constexpr int F = decltype(tag)::value, M = (F * NW + 16 * 0) / 16 - H * MT;
        u32 c0 = field<S::KB, F>(w[0], lower[0]), c1 = field<S::KB, F>(w[1], lower[1]);
        u32 c2 = field<S::KB, F>(w[2], lower[2]), c3 = field<S::KB, F>(w[3], lower[3]);
        constexpr int K = CHANNELS ? F * NW / S::KG - G0 : 0;
#pragma unroll
        for (int n = 0; n < NT; n++) mma16(raw[n][M + mt], c0, c1, c2, c3, qs[n][K][0], qs[n][K][1]);
      };
      each<F0, F1>(one);
    }
    if constexpr (!CHANNELS) {
      if (a % SPAN == SPAN - 1) {  // the channels of one group are done: apply each token's parameters
        constexpr int COUNT = D / S::KG;
        const int k = a / SPAN;
#pragma unroll
        for (int m = 0; m < MT; m++) {
          const u32 at = params + ((16 * (H * MT + m) + g) * COUNT + k) * 2;
          const float f = pow2(24 - low_of(S::KB, (H * MT + m) * 16 / NW)) * PART16;
          float scale[2], low[2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            scale[i] = float_of_half(load_u16(at + i * 16 * COUNT));
            low[i] = float_of_half(load_u16(at + i * 16 * COUNT + S::KPARAM));
            if constexpr (S::KK == ATOM) low[i] = -low[i] * scale[i];
            if constexpr (S::KK == HIERARCHICAL) low[i] -= 0.5f * scale[i];
          }
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const int c = i & 1, half = i >> 1;
              if (c < NC) s[n][m][i] += (raw[n][m][i] * (scale[half] * f) + low[half] * bias[n][0][c]) * st.sl[n][c];
              raw[n][m][i] = 0.f;
            }
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) bias[n][0][i] = 0.f;
      }
    }
  }
  if constexpr (CHANNELS) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < NC; c++) {
        float base[NG];
#pragma unroll
        for (int k = 0; k < NG; k++)
          base[k] = (S::KK == HIERARCHICAL ? bias[n][k][c] - 0.5f * bias2[n][k][c] : bias[n][k][c]) * st.sl[n][c];
#pragma unroll
        for (int m = 0; m < MT; m++) {
          const float f = st.sl[n][c] * (pow2(24 - low_of(S::KB, (H * MT + m) * 16 / NW)) * PART16);
          const int k = (H * MT + m) * 16 / S::KG - G0;
          s[n][m][c] = raw[n][m][c] * f + base[k];
          s[n][m][c + 2] = raw[n][m][c + 2] * f + base[k];
        }
      }
  }
}

// Of 32 exact keys: m tiles FIRST and FIRST + 1.
template <int FIRST, int MT>
__device__ __forceinline__ void exact_scores(float (&s)[NT][MT][4], u32 slot, u32 queries, const State &st, int lane) {
  const int row = lane & 15, hi = lane >> 4;
  float raw[NT][2][4];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) raw[n][m][i] = 0.f;
#pragma unroll
  for (int a = 0; a < KS; a++) {
    u32 q[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) load64(q[n][0], q[n][1], queries + ((n * KS + a) * 32 + lane) * 8);
#pragma unroll
    for (int m = 0; m < 2; m++) {
      u32 w[4];
      ldsm(w, slot + wide(16 * m + row, 2 * a + hi));
#pragma unroll
      for (int n = 0; n < NT; n++) mma_exact(raw[n][m], w[0], w[1], w[2], w[3], q[n][0], q[n][1]);
    }
  }
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if ((i & 1) < NC) s[n][FIRST + m][i] = raw[n][m][i] * st.sl[n][i & 1];
}

// ---- softmax -------------------------------------------------------------------------------------------------------
// Tokens before `lo`, or from `hi[column]` on, are hidden; x0: the first token of s within the tile.
template <int MT>
__device__ __forceinline__ void hide(float (&s)[NT][MT][4], int x0, int lo, const int (&hi)[NT][NC], int lane) {
  const float none = __int_as_float(0xff800000);
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int x = x0 + 16 * m + (lane >> 2) + 8 * (i >> 1);
        if ((i & 1) < NC && (x < lo || x >= hi[n][(i & 1) < NC ? (i & 1) : 0])) s[n][m][i] = none;
      }
}

// Online softmax: probabilities (times 2^OFFSET) in the layout of the second product, and the factor for what was.
template <bool EXACT, int MT>
__device__ __forceinline__ void weigh(State &st, float (&s)[NT][MT][4], u32 (&p)[NT][MT][2], float (&shrink)[NT][NC]) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float base[NC];
#pragma unroll
    for (int c = 0; c < NC; c++) {
      float top = fmaxf(s[n][0][c], s[n][0][c + 2]);
#pragma unroll
      for (int m = 1; m < MT; m++) top = fmaxf(top, fmaxf(s[n][m][c], s[n][m][c + 2]));
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
      top = fmaxf(top, st.top[n][c]);
      shrink[n][c] = exp2_of(st.top[n][c] - top);
      st.top[n][c] = top;
      base[c] = top - OFFSET;
    }
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int m = 0; m < MT; m++) {
      float e[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 4; i++)
        if ((i & 1) < NC) e[i] = exp2_of(s[n][m][i] - base[(i & 1) < NC ? (i & 1) : 0]);
      p[n][m][0] = transposed(EXACT ? exact2_of(e[0], e[1]) : half2_of(e[0], e[1]));
      p[n][m][1] = transposed(EXACT ? exact2_of(e[2], e[3]) : half2_of(e[2], e[3]));
      if constexpr (EXACT) {
        const u32 one = BF16 ? 0x3f803f80u : 0x3c003c00u;
        mma_exact(sum, one, one, one, one, p[n][m][0], p[n][m][1]);
      } else {
        mma16(sum, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, p[n][m][0], p[n][m][1]);
      }
    }
#pragma unroll
    for (int c = 0; c < NC; c++) {
      st.total[n][c] = st.total[n][c] * shrink[n][c] + sum[c];
      st.low[n][c] *= shrink[n][c];
    }
  }
}

// ---- values --------------------------------------------------------------------------------------------------------
template <int P, int H, int MT>
__device__ __forceinline__ void packed_values(State &st, u32 (&p)[NT][MT][2], const float (&shrink)[NT][NC], u32 slot, int lane) {
  using S = Shape<P>;
  constexpr int NW = rows_of(S::VB), F0 = H * MT * 16 / NW, F1 = (H + 1) * MT * 16 / NW, VG = S::VGROUPS;
  const u32 scales = slot + S::VCODES, lows = scales + S::VPARAM;
  const int t = lane & 3, g = lane >> 2, row = lane & 15, hi = lane >> 4;
  u32 any = 0;
  u32 raw[MT][2][VG];  // VG 1: the scales of tokens {2t, 2t + 1}; else words of a token's groups, see pair()
  float low[NT][4];
#pragma unroll
  for (int n = 0; n < NT; n++) low[n][0] = low[n][1] = low[n][2] = low[n][3] = 0.f;
  if constexpr (VG == 1) {
#pragma unroll
    for (int m = 0; m < MT; m += 2) {
      u32 x[4], z[4];
      const u32 at = (16 * (H * MT + m) + 8 * (lane >> 3)) * 2;
      ldsm(x, scales + at);
      ldsm(z, lows + at);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if constexpr (S::VK == ATOM) z[i] = mul2(mul2(z[i], x[i]), 0xbc00bc00u);
        if constexpr (S::VK == HIERARCHICAL) z[i] = fma2(x[i], 0xb800b800u, z[i]);
        raw[m + (i >> 1)][i & 1][0] = x[i];
        any |= x[i];
      }
#pragma unroll
      for (int n = 0; n < NT; n++) {
        mma16(low[n], z[0], z[0], z[1], z[1], p[n][m][0], p[n][m][1]);
        mma16(low[n], z[2], z[2], z[3], z[3], p[n][m + 1][0], p[n][m + 1][1]);
      }
    }
  } else {
    const int k = g * VG / LOWS;  // row g of the product with the minima is group g of LOWS
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 at = (16 * (H * MT + m) + 8 * j + 2 * t) * VG * 2;
        if constexpr (VG == 2) {
          load64(raw[m][j][0], raw[m][j][1], scales + at);
        } else {
          u32 x[4];
          load128(x, scales + at);
#pragma unroll
          for (int i = 0; i < VG; i++) raw[m][j][i] = x[i];
        }
#pragma unroll
        for (int i = 0; i < VG; i++) any |= raw[m][j][i];
      }
#pragma unroll
    for (int m = 0; m < MT; m++) {
      u32 z[2] = {0, 0};
      if (g < LOWS) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const u32 at = ((16 * (H * MT + m) + 8 * j + 2 * t) * VG + k) * 2;
          z[j] = load_u16(lows + at) | (load_u16(lows + at + VG * 2) << 16);
          if constexpr (S::VK == ATOM || S::VK == HIERARCHICAL) {
            const u32 x = load_u16(scales + at) | (load_u16(scales + at + VG * 2) << 16);
            z[j] = S::VK == ATOM ? mul2(mul2(z[j], x), 0xbc00bc00u) : fma2(x, 0xb800b800u, z[j]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < NT; n++) mma16(low[n], z[0], 0, z[1], 0, p[n][m][0], p[n][m][1]);
    }
  }
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < NC; c++) st.low[n][c] += low[n][c];
  // a scale of 2 or more would take a probability of 2^14 past fp16: then 2^-14 goes along and is given back below
  const bool large = __any_sync(~0u, any & 0x40004000u);
  auto pair = [&](int m, int j, int k) -> u32 {
    if constexpr (VG == 1) return raw[m][j][0];
    if constexpr (VG == 2) return __byte_perm(raw[m][j][0], raw[m][j][VG - 1], k ? 0x7632 : 0x5410);
    return __byte_perm(raw[m][j][k >> 1], raw[m][j][(k >> 1) + VG / 2], k & 1 ? 0x7632 : 0x5410);
  };
#pragma unroll
  for (int k = 0; k < VG; k++) {
    u32 x[NT][MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 scale = pair(m, j, k);
        const int shift = low_of(S::VB, (H * MT + m) * 16 / NW) + (S::VK == HIERARCHICAL ? 4 : 0);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          u32 y = p[n][m][j];
          if (shift) y = mul2(y, half2_const(pow2(-shift)));
          if (large) y = mul2(y, half2_const(pow2(-14)));
          x[n][m][j] = mul2(y, scale);
        }
      }
#pragma unroll
    for (int b = 0; b < KS / VG; b++) {
      const int a = k * (KS / VG) + b;
      float o[NT][4];
#pragma unroll
      for (int n = 0; n < NT; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
#pragma unroll
      for (int mt = 0; mt < NW / 16; mt++) {
        u32 w[4], lower[4] = {0, 0, 0, 0};
        ldsm(w, slot + narrow<S::VB>(16 * a + row, 2 * mt + hi));
        if constexpr (S::VB == 8) ldsm(lower, slot + plane_bytes(8) + narrow<8>(16 * a + row, 2 * mt + hi));
        auto one = [&](auto tag) {
          constexpr int F = decltype(tag)::value, M = F * NW / 16 - H * MT;
          u32 c0 = field<S::VB, F>(w[0], lower[0]), c1 = field<S::VB, F>(w[1], lower[1]);
          u32 c2 = field<S::VB, F>(w[2], lower[2]), c3 = field<S::VB, F>(w[3], lower[3]);
#pragma unroll
          for (int n = 0; n < NT; n++) mma16(o[n], c0, c1, c2, c3, x[n][M + mt][0], x[n][M + mt][1]);
        };
        each<F0, F1>(one);
      }
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if ((i & 1) >= NC) continue;
          if (large) o[n][i] *= pow2(14);
          st.acc[n][a][i] = st.acc[n][a][i] * shrink[n][(i & 1) < NC ? (i & 1) : 0] + o[n][i];
        }
    }
  }
}

// 32 exact values: probabilities of m tiles FIRST and FIRST + 1. acc counts in units of 2^-24, as codes do.
template <int FIRST, int MT>
__device__ __forceinline__ void exact_values(State &st, u32 (&p)[NT][MT][2], const float (&shrink)[NT][NC], u32 slot, int lane) {
#pragma unroll
  for (int a = 0; a < KS; a++) {
    float o[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
#pragma unroll
    for (int m = 0; m < 2; m++) {
      u32 w[4];
      ldsm_t(w, slot + wide(16 * m + (lane & 7) + 8 * (lane >> 4), 2 * a + ((lane >> 3) & 1)));
#pragma unroll
      for (int n = 0; n < NT; n++) mma_exact(o[n], w[0], w[1], w[2], w[3], p[n][FIRST + m][0], p[n][FIRST + m][1]);
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if ((i & 1) >= NC) continue;
        const float before = FIRST == 0 ? st.acc[n][a][i] * shrink[n][(i & 1) < NC ? (i & 1) : 0] : st.acc[n][a][i];
        st.acc[n][a][i] = before + o[n][i] * pow2(-24);
      }
  }
}

// ---- one phase -----------------------------------------------------------------------------------------------------
// A warp's ring: slots are filled in the order in which they are read; `next` is the slot of the item that is read next.
struct Ring {
  u32 base, queries;
  int next;
  __device__ __forceinline__ u32 slot(int ahead) const {
    int i = next + ahead;
    return base + (i >= STAGES ? i - STAGES : i) * SLOT;
  }
  __device__ __forceinline__ void advance() { next = next + 1 == STAGES ? 0 : next + 1; }
};

template <int P> CONST int cost() {  // of a tile, about proportional to its time
  using S = Shape<P>;
  if (!S::KP && !S::VP) return 64 * D * 2;
  const int k = S::KP ? S::KCODES + 2 * S::KPARAM : 128 * D * 2, v = S::VP ? S::VCODES + 2 * S::VPARAM : 128 * D * 2;
  return S::KP && S::VP && S::KB == 2 && S::VB == 2 ? (k + v) * 4 / 3 : k + v;
}

template <int P> __device__ __forceinline__ int tiles_of(const Range &r) {
  using S = Shape<P>;
  if (r.count == 0) return 0;
  const int first = S::KP ? r.first_k & 127 : S::VP ? r.first_v & 127 : 0;
  return (first + r.count + S::TOKENS - 1) / S::TOKENS;
}

template <int P>
__device__ __forceinline__ void run(State &st, const Args &args, const Range &r, i64 bh, int begin, int end, Ring &ring, int row0) {
  using S = Shape<P>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int mine = end > begin + warp ? (end - begin - warp + WARPS - 1) / WARPS : 0;
  const Phase &ph = args.phase[P];
  const int into = S::KP ? r.first_k & 127 : S::VP ? r.first_v & 127 : 0;
  const u32 queries = ring.queries + (BF16 && !S::KP ? NT * KS * 256 : 0);
  constexpr bool LAST = P == NPHASES - 1;
  constexpr bool BOTH = S::KP && S::VP && HALVES == 2;
  auto load = [&](auto part, int j, int ahead) {
    constexpr int PART = decltype(part)::value;
    if (j < mine) issue<P, PART>(ph, r, bh, begin + warp + j * WARPS, ring.slot(ahead), lane);
    commit();
  };
  auto cover = [&](int tile, auto &s, int x0) {
    const int lo = into - tile * S::TOKENS, until = lo + r.count;
    if (lo > 0 || until < S::TOKENS || (LAST && args.qlen > 1)) {
      int hi[NT][NC];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int c = 0; c < NC; c++) {
          const int col = ONECOL ? (lane & 3) : 8 * n + 2 * (lane & 3) + c;
          hi[n][c] = LAST ? until - args.qlen + 1 + (row0 + col) % args.qlen : until;
        }
      hide(s, x0, lo, hi, lane);
    }
  };
  if constexpr (BOTH) {
    static_assert(STAGES == 4 || !BOTH, "keys and values of two tiles");
    load(Number<0>{}, 0, 0);
    load(Number<1>{}, 0, 1);
    for (int j = 0; j < mine; j++) {
      const int tile = begin + warp + j * WARPS;
      wait<0>();
      __syncwarp();
      load(Number<0>{}, j + 1, 2);
      load(Number<1>{}, j + 1, 3);
      auto half = [&](auto tag) {
        constexpr int H = decltype(tag)::value;
        float s[NT][4][4], shrink[NT][NC];
        u32 p[NT][4][2];
        packed_scores<P, H, 4>(s, ring.slot(0), queries, st, lane);
        cover(tile, s, 64 * H);
        weigh<false, 4>(st, s, p, shrink);
        packed_values<P, H, 4>(st, p, shrink, ring.slot(1), lane);
      };
      half(Number<0>{});
      half(Number<1>{});
      ring.advance();
      ring.advance();
    }
  } else {
    auto ahead = [&](auto tag) {  // item STAGES - 1 after this one, into the slot that was read last
      constexpr int I = decltype(tag)::value + STAGES - 1;
      return Number<I % S::ITEMS>{};
    };
    each<0, STAGES - 1>([&](auto tag) {
      constexpr int I = decltype(tag)::value;
      load(Number<I % S::ITEMS>{}, I / S::ITEMS, I);
    });
    for (int j = 0; j < mine; j++) {
      const int tile = begin + warp + j * WARPS;
      auto turn = [&](auto tag) {
        constexpr int I = decltype(tag)::value;
        wait<STAGES - 2>();
        __syncwarp();
        load(ahead(tag), j + (I + STAGES - 1) / S::ITEMS, STAGES - 1);
      };
      float s[NT][S::MT][4], shrink[NT][NC];
      u32 p[NT][S::MT][2];
      each<0, S::KI>([&](auto tag) {
        constexpr int I = decltype(tag)::value;
        turn(tag);
        if constexpr (S::KP) packed_scores<P, 0, S::MT>(s, ring.slot(0), queries, st, lane);
        else exact_scores<2 * I, S::MT>(s, ring.slot(0), queries, st, lane);
        ring.advance();
      });
      cover(tile, s, 0);
      weigh<!S::VP, S::MT>(st, s, p, shrink);
      each<S::KI, S::ITEMS>([&](auto tag) {
        constexpr int I = decltype(tag)::value - S::KI;
        turn(tag);
        if constexpr (S::VP) packed_values<P, 0, S::MT>(st, p, shrink, ring.slot(0), lane);
        else exact_values<2 * I, S::MT>(st, p, shrink, ring.slot(0), lane);
        ring.advance();
      });
    }
  }
  wait<0>();
  __syncwarp();
}

template <int P> __device__ __forceinline__ int total_cost(const Range (&ranges)[NPHASES]) {
  if constexpr (P == NPHASES) return 0;
  else return tiles_of<P>(ranges[P]) * cost<P>() + total_cost<P + 1>(ranges);
}

template <int P>
__device__ __forceinline__ void run_all(State &st, const Args &args, const Range (&ranges)[NPHASES], i64 bh, int before,
                                        int lo, int hi, Ring &ring, int row0) {
  if constexpr (P < NPHASES) {
    constexpr int W = cost<P>();
    const int n = tiles_of<P>(ranges[P]);
    const int begin = lo > before ? (lo - before + W - 1) / W : 0;
    const int stop = hi > before ? min(n, (hi - before + W - 1) / W) : 0;
    if (begin < stop) run<P>(st, args, ranges[P], bh, begin, stop, ring, row0);
    run_all<P + 1>(st, args, ranges, bh, before + n * W, lo, hi, ring, row0);
  }
}

// ---- the kernel: grid (splits, B * H, blocks of 8 NT rows) -----------------------------------------------------------
extern "C" __global__ void __launch_bounds__(WARPS * 32, MINB) decode(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ float tops[WARPS][8 * NT], totals[WARPS][8 * NT];
  __shared__ int last;
  constexpr int ROWS = ONECOL ? 4 : 8 * NT;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, g = lane >> 2;
  const int split = blockIdx.x, bh = blockIdx.y, b = bh / args.heads, head = bh % args.heads, row0 = blockIdx.z * ROWS;
  const int rows = min(ROWS, args.group * args.qlen - row0);
  const u32 base = (u32)__cvta_generic_to_shared(memory);

  State st;
  Ring ring{base + (BF16 ? 2 : 1) * NT * KS * 256 + warp * STAGES * SLOT, base, 0};
  // queries: normalised by a power of two to at most 1, so that no product with a scale leaves fp16
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const int col = 8 * n + g, r = ONECOL ? (g & 1 ? ROWS : g >> 1) : col;
    u32 x[KS][2];
    float most = 0.f;
    const bool there = r < rows;
    const u16 *q = args.query;
    if (there) q += b * args.stride_b + (head * args.group + (row0 + r) / args.qlen) * args.stride_h + (row0 + r) % args.qlen * args.stride_q;
#pragma unroll
    for (int a = 0; a < KS; a++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        x[a][j] = there ? *(const u32 *)(q + 16 * a + 8 * j + 2 * t) : 0u;
        most = fmaxf(most, fmaxf(fabsf(float_of_exact(x[a][j])), fabsf(float_of_exact(x[a][j] >> 16))));
      }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    int exponent = (int)((__float_as_uint(most) >> 23) & 255) - 126;  // most < 2^exponent
    exponent = max(-40, min(exponent, 100));
    const float shrink = __uint_as_float((u32)(127 - exponent) << 23), grow = __uint_as_float((u32)(127 + exponent) << 23);
    if (warp == 0) {
#pragma unroll
      for (int a = 0; a < KS; a++) {
        u32 y[2], z[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float low = float_of_exact(x[a][j]) * shrink, high = float_of_exact(x[a][j] >> 16) * shrink;
          y[j] = half2_of(low, high);
          z[j] = exact2_of(low, high);
        }
        *(uint2 *)(memory + ((n * KS + a) * 32 + lane) * 8) = make_uint2(y[0], y[1]);
        if (BF16) *(uint2 *)(memory + ((NT * KS + n * KS + a) * 32 + lane) * 8) = make_uint2(z[0], z[1]);
      }
    }
#pragma unroll
    for (int c = 0; c < NC; c++) {
      st.sl[n][c] = __shfl_sync(~0u, grow, (2 * t + c) * 4) * args.scale;
      st.top[n][c] = -1e30f;
      st.total[n][c] = st.low[n][c] = 0.f;
    }
#pragma unroll
    for (int a = 0; a < KS; a++) st.acc[n][a][0] = st.acc[n][a][1] = st.acc[n][a][2] = st.acc[n][a][3] = 0.f;
  }
  __syncthreads();

  Range ranges[NPHASES];
#pragma unroll
  for (int i = 0; i < NPHASES; i++) {
    const int *line = args.table + (b * NPHASES + i) * 3;
    ranges[i] = {line[0], line[1], line[2]};
  }
  const i64 all = total_cost<0>(ranges);
  run_all<0>(st, args, ranges, bh, 0, (int)(all * split / args.splits), (int)(all * (split + 1) / args.splits), ring, row0);

  // merge the warps
  __syncthreads();
  float *merged = (float *)memory;  // [WARPS][ROWS][D]
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < NC; c++) {
      const int r = ONECOL ? t : 8 * n + 2 * t + c;
      if (g == 0) tops[warp][r] = st.top[n][c], totals[warp][r] = st.total[n][c];
      float *to = merged + (warp * ROWS + r) * D;
#pragma unroll
      for (int a = 0; a < KS; a++) {
        const float low = __shfl_sync(~0u, st.low[n][c], (a * LOWS / KS) * 4 + t);
        if (r < rows) {
          to[16 * a + g] = st.acc[n][a][c] * pow2(24) + low;
          to[16 * a + 8 + g] = st.acc[n][a][c + 2] * pow2(24) + low;
        }
      }
    }
  __syncthreads();
  const int blocks = gridDim.z, splits = args.splits;
  const i64 group_of = (i64)bh * blocks + blockIdx.z;
  float *partial = args.partial + group_of * splits * ROWS * (D + 2);  // outputs, then (top, total)
  float *sums = partial + (i64)splits * ROWS * D;
  const int heads_q = args.heads * args.group;
  auto write = [&](int r, int d, float x) {
    const i64 at = (((i64)b * args.qlen + (row0 + r) % args.qlen) * heads_q + head * args.group + (row0 + r) / args.qlen) * D + d;
    args.out[at] = (u16)exact2_of(x, 0.f);
  };
  for (int i = threadIdx.x; i < rows * D; i += WARPS * 32) {
    const int r = i / D, d = i % D;
    float top = tops[0][r], x = 0.f, total = 0.f;
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, tops[w][r]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float f = exp2_of(tops[w][r] - top);
      x += merged[(w * ROWS + r) * D + d] * f;
      total += totals[w][r] * f;
    }
    if (splits == 1) {
      write(r, d, x / total);
    } else {
      partial[(split * ROWS + r) * D + d] = x;
      if (d == 0) sums[(split * ROWS + r) * 2] = top, sums[(split * ROWS + r) * 2 + 1] = total;
    }
  }
  if (splits == 1) return;
  // the CTA that comes last merges the splits
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(args.counter + group_of, 1) == splits - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  float *weights = (float *)memory;  // [ROWS][splits], then 1 / total
  float *inverse = weights + ROWS * splits;
  for (int r = warp; r < rows; r += WARPS) {
    float top = -1e30f, total = 0.f;
    for (int s = lane; s < splits; s += 32) top = fmaxf(top, __ldcg(sums + (s * ROWS + r) * 2));
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    for (int s = lane; s < splits; s += 32) {
      const float f = exp2_of(__ldcg(sums + (s * ROWS + r) * 2) - top);
      weights[r * splits + s] = f;
      total += f * __ldcg(sums + (s * ROWS + r) * 2 + 1);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) total += __shfl_xor_sync(~0u, total, lanes);
    if (lane == 0) inverse[r] = 1.f / total;
  }
  if (threadIdx.x == 0) args.counter[group_of] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < rows * D / 4; i += WARPS * 32) {
    const int r = i / (D / 4), d = i % (D / 4) * 4;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int s = 0; s < splits; s++) {
      const float4 y = __ldcg((const float4 *)(partial + (s * ROWS + r) * D + d));
      const float f = weights[r * splits + s];
      x.x += y.x * f, x.y += y.y * f, x.z += y.z * f, x.w += y.w * f;
    }
    const float f = inverse[r];
    write(r, d, x.x * f), write(r, d + 1, x.y * f), write(r, d + 2, x.z * f), write(r, d + 3, x.w * f);
  }
}
