// ---- a team's walk over its tiles ----------------------------------------------------------------------------------
// Waits for the warps of a team (barrier team + 1; barrier 0 is the CTA's).
__device__ __forceinline__ void team_sync(int team) {
  if (TEAM == 1) __syncwarp();
  else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM * 32) : "memory");
}

// Slots are filled in the order in which they are read; `next` is the slot of the item that is read next.
struct Ring {
  u32 base;
  int next;
  __device__ __forceinline__ u32 slot(int ahead) const {
    const int i = next + ahead;
    return base + (i >= STAGES ? i - STAGES : i) * SLOT;
  }
  __device__ __forceinline__ void advance() { next = next + 1 == STAGES ? 0 : next + 1; }
};

// What a team does: in each phase `count` tiles, every step-th from `first` on.
struct Job {
  Range range[NPHASES];
  int first[NPHASES], count[NPHASES];
  i64 bh;
  int step;      // teams of a head
  int id, team;  // thread within the team; team within the CTA
};

// Token of a phase's first tile with which the phase begins.
template <int P>
__device__ __forceinline__ int into(const Range& r) {
  using S = Shape<P>;
  return S::KP ? r.first_k & 127 : S::VP ? r.first_v & 127 : 0;
}

// Tiles are dealt out in turn, phase after phase, so that at any time the teams of a head read neighbouring tiles (with
// one run of tiles per team they would contend for the same memory channels) and no team has two more than another.
template <int P>
__device__ __forceinline__ void deal(Job& job, int turn) {
  if constexpr (P < NPHASES) {
    constexpr int TOKENS = Shape<P>::TOKENS;
    const Range& r = job.range[P];
    const int n = r.count == 0 ? 0 : (into<P>(r) + r.count + TOKENS - 1) / TOKENS;
    job.first[P] = turn;
    job.count[P] = n > turn ? (n - turn + job.step - 1) / job.step : 0;
    const int left = (turn - n) % job.step;
    deal<P + 1>(job, left < 0 ? left + job.step : left);
  }
}

// Item K of the first tile of the next phase that has any: keeps the ring full across phases.
template <int P, int K>
__device__ __forceinline__ void begin_after(const Args& args, const Job& job, u32 slot) {
  if constexpr (P + 1 < NPHASES) {
    if (job.count[P + 1] > 0)
      issue<P + 1, K>(args.phase[P + 1], job.range[P + 1], job.bh, job.first[P + 1], slot, job.id);
    else begin_after<P + 1, K>(args, job, slot);
  }
}

// Walks this team's tiles of phase P: for each, scores of its key items, softmax, products of its value items.
//   st       the warp's running softmax
//   ring     slots of the team; on entry the first STAGES - 1 items of the first tile are on their way
//   queries  the warp's queries in shared memory
//   row0     first query row of the warp
template <int P>
__device__ __forceinline__ void run(State& st, const Args& args, const Job& job, Ring& ring, u32 queries, int row0,
                                    int lane) {
  using S = Shape<P>;
  static_assert(STAGES == 2 && S::ITEMS >= 2, "begin_after starts with the items of one tile");
  const Range& r = job.range[P];
  constexpr bool LAST = P == NPHASES - 1;
  for (int j = 0; j < job.count[P]; j++) {
    const int tile = job.first[P] + j * job.step;
    auto turn = [&](auto tag) {  // waits for this item, and has the one STAGES - 1 later loaded into the slot read last
      constexpr int AHEAD = decltype(tag)::value + STAGES - 1;
      wait<STAGES - 2>();
      team_sync(job.team);
      if (AHEAD < S::ITEMS || j + 1 < job.count[P])
        issue<P, AHEAD % S::ITEMS>(args.phase[P], r, job.bh, tile + AHEAD / S::ITEMS * job.step, ring.slot(STAGES - 1),
                                   job.id);
      else if constexpr (AHEAD >= S::ITEMS) begin_after<P, AHEAD - S::ITEMS>(args, job, ring.slot(STAGES - 1));
      commit();
    };
    float s[S::MT][4], shrink[NC];
    u32 p[S::MT][2];
    each<0, S::KI>([&](auto tag) {
      turn(tag);
      if constexpr (S::KP) packed_scores<P, S::MT>(s, ring.slot(0), queries, st, lane);
      else exact_scores<2 * decltype(tag)::value, S::MT>(s, ring.slot(0), queries + (BF16 ? QUERY : 0), st, lane);
      ring.advance();
    });
    if constexpr (SOFTCAP) capped(s, args.cap);
    // only the ends of a phase, and the newest tokens of a step of several, need a mask
    const int lo = into<P>(r) - tile * S::TOKENS, until = lo + r.count;
    if (lo > 0 || until < S::TOKENS || (LAST && args.qlen > 1)) {
      int hi[NC];
#pragma unroll
      for (int c = 0; c < NC; c++)
        hi[c] = LAST ? until - args.qlen + 1 + (row0 + (ONECOL ? lane & 3 : 2 * (lane & 3) + c)) % args.qlen : until;
      hide(s, lo, hi, lane);
    }
    weigh<!S::VP, S::MT>(st, s, p, shrink);
    each<S::KI, S::ITEMS>([&](auto tag) {
      turn(tag);
      if constexpr (S::VP) packed_values<P, S::MT>(st, p, shrink, ring.slot(0), lane);
      else exact_values<2 * (decltype(tag)::value - S::KI), S::MT>(st, p, shrink, ring.slot(0), lane);
      ring.advance();
    });
  }
}

// run() for phase P and those after it: a loop over constants.
template <int P>
__device__ __forceinline__ void run_all(State& st, const Args& args, const Job& job, Ring& ring, u32 queries, int row0,
                                        int lane) {
  if constexpr (P < NPHASES) {
    run<P>(st, args, job, ring, queries, row0, lane);
    run_all<P + 1>(st, args, job, ring, queries, row0, lane);
  }
}

// The 8 query rows of a warp as a second operand: lane (g, t) holds channels 16 a + 8 j + {2t, 2t + 1} of row g.
__device__ __forceinline__ void fetch_queries(u32 (&x)[KS][2], const Args& args, int b, int head, int row0, int rows,
                                              int lane) {
  const int t = lane & 3, g = lane >> 2, r = row0 + (ONECOL ? g >> 1 : g);
  const bool there = ONECOL ? !(g & 1) && r < rows : r < rows;
  const u16* q = args.query;
  if (there)
    q += b * args.stride_b + (head * args.group + r / args.qlen) * args.stride_h + r % args.qlen * args.stride_q;
#pragma unroll
  for (int a = 0; a < KS; a++)
#pragma unroll
    for (int j = 0; j < 2; j++) x[a][j] = there ? *(const u32*)(q + 16 * a + 8 * j + 2 * t) : 0u;
}

// Normalises them by a power of two to at most 1, so that no product with a scale leaves fp16, and stores them as fp16
// and (for exact bf16 keys) as bf16.
__device__ __forceinline__ void take_queries(State& st, const u32 (&x)[KS][2], const Args& args, u8* to, bool store,
                                             int lane) {
  const int t = lane & 3;
  float most = 0.f;
#pragma unroll
  for (int a = 0; a < KS; a++)
#pragma unroll
    for (int j = 0; j < 2; j++)
      most = fmaxf(most, fmaxf(fabsf(float_of_exact(x[a][j])), fabsf(float_of_exact(x[a][j] >> 16))));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  int exponent = (int)((__float_as_uint(most) >> 23) & 255) - 126;  // most < 2^exponent
  exponent = max(-40, min(exponent, 100));
  const float shrink = __uint_as_float((u32)(127 - exponent) << 23),
              grow = __uint_as_float((u32)(127 + exponent) << 23);
  if (store) {
#pragma unroll
    for (int a = 0; a < KS; a++) {
      u32 y[2], z[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float low = float_of_exact(x[a][j]) * shrink, high = float_of_exact(x[a][j] >> 16) * shrink;
        y[j] = half2_of(low, high);
        z[j] = exact2_of(low, high);
      }
      *(uint2*)(to + (a * 32 + lane) * 8) = make_uint2(y[0], y[1]);
      if (BF16) *(uint2*)(to + QUERY + (a * 32 + lane) * 8) = make_uint2(z[0], z[1]);
    }
  }
#pragma unroll
  for (int c = 0; c < NC; c++) {
    st.sl[c] = __shfl_sync(~0u, grow, (2 * t + c) * 4) * args.scale;
    st.top[c] = -1e30f;
    st.total[c] = st.low[c] = 0.f;
  }
#pragma unroll
  for (int a = 0; a < KS; a++) st.acc[a][0] = st.acc[a][1] = st.acc[a][2] = st.acc[a][3] = 0.f;
}

// ---- the kernel: grid (splits, B * H, blocks of ROWS query rows)
// -----------------------------------------------------
extern "C" __global__ void __launch_bounds__(WARPS * 32, MINB) decode(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) u8 memory[];  // queries of each warp of a team, then the rings
  __shared__ float tops[TEAMS][8 * TEAM], totals[TEAMS][8 * TEAM];
  __shared__ int last;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, team = warp / TEAM, rank = warp % TEAM, t = lane & 3,
            g = lane >> 2;
  const int bh = blockIdx.y, b = bh / args.heads, head = bh % args.heads, all_rows = args.group * args.qlen;
  const int block0 = blockIdx.z * ROWS, row0 = block0 + 8 * rank, rows = min(ROWS, all_rows - block0);
  const u32 base = (u32)__cvta_generic_to_shared(memory);
  constexpr int QUERIES = (BF16 ? 2 : 1) * QUERY;

  u32 x[KS][2];
  fetch_queries(x, args, b, head, row0, all_rows, lane);  // on its way while the tiles are dealt out
  Job job;
  job.bh = bh, job.id = rank * 32 + lane, job.team = team;
#pragma unroll
  for (int i = 0; i < NPHASES; i++) {
    const int* line = args.table + (b * NPHASES + i) * 3;
    job.range[i] = {line[0], line[1], line[2]};
  }
  job.step = args.splits * TEAMS;
  deal<0>(job, blockIdx.x * TEAMS + team);
  Ring ring{base + TEAM * QUERIES + team * STAGES * SLOT, 0};
  each<0, STAGES - 1>([&](auto tag) {
    begin_after<-1, decltype(tag)::value>(args, job, ring.slot(decltype(tag)::value));
    commit();
  });
  State st;
  take_queries(st, x, args, memory + rank * QUERIES, team == 0, lane);
  __syncthreads();
  run_all<0>(st, args, job, ring, base + rank * QUERIES, row0, lane);
  wait<0>();

  // merge the teams
  __syncthreads();
  float* merged = (float*)memory;  // [TEAMS][ROWS][D]
#pragma unroll
  for (int c = 0; c < NC; c++) {
    const int r = ONECOL ? t : 8 * rank + 2 * t + c;
    if (g == 0) tops[team][r] = st.top[c], totals[team][r] = st.total[c];
    float* to = merged + (team * ROWS + r) * D;
#pragma unroll
    for (int a = 0; a < KS; a++) {
      const float low = __shfl_sync(~0u, st.low[c], (a * LOWS / KS) * 4 + t);
      to[16 * a + g] = st.acc[a][c] * pow2(24) + low;
      to[16 * a + 8 + g] = st.acc[a][c + 2] * pow2(24) + low;
    }
  }
  __syncthreads();
  const int blocks = gridDim.z, splits = args.splits, split = blockIdx.x;
  const i64 line = (i64)bh * blocks + blockIdx.z;
  float* partial = args.partial + line * splits * ROWS * (D + 2);  // outputs, then (top, total)
  float* sums = partial + (i64)splits * ROWS * D;
  auto write = [&](int r, int d, float x) {
    const i64 token = (i64)b * args.qlen + (block0 + r) % args.qlen;
    const i64 at = (token * args.heads * args.group + head * args.group + (block0 + r) / args.qlen) * D + d;
    args.out[at] = (u16)exact2_of(x, 0.f);
  };
  for (int i = threadIdx.x; i < rows * D; i += WARPS * 32) {
    const int r = i / D, d = i % D;
    float top = tops[0][r], x = 0.f, total = 0.f;
#pragma unroll
    for (int w = 1; w < TEAMS; w++) top = fmaxf(top, tops[w][r]);
#pragma unroll
    for (int w = 0; w < TEAMS; w++) {
      const float f = exp2_of(tops[w][r] - top);
      x += merged[(w * ROWS + r) * D + d] * f;
      total += totals[w][r] * f;
    }
    if (splits == 1) {
      if constexpr (SINKS) total += exp2_of(sink_of(args, head * args.group + (block0 + r) / args.qlen) - top + OFFSET);
      write(r, d, x / total);
    } else {
      partial[(split * ROWS + r) * D + d] = x;
      if (d == 0) sums[(split * ROWS + r) * 2] = top, sums[(split * ROWS + r) * 2 + 1] = total;
    }
  }
  if (splits == 1) return;
  // the last CTA to finish merges the splits
  __threadfence();  // what this CTA wrote must be visible before its arrival is
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(args.counter + line, 1) == splits - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  float* weights = (float*)memory;  // [ROWS][splits], then 1 / total
  float* inverse = weights + ROWS * splits;
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
    if constexpr (SINKS) total += exp2_of(sink_of(args, head * args.group + (block0 + r) / args.qlen) - top + OFFSET);
    if (lane == 0) inverse[r] = 1.f / total;
  }
  if (threadIdx.x == 0) args.counter[line] = 0;  // reset for the next step, as a captured graph does not zero it
  __syncthreads();
  for (int i = threadIdx.x; i < rows * D / 4; i += WARPS * 32) {
    const int r = i / (D / 4), d = i % (D / 4) * 4;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int s = 0; s < splits; s++) {
      const float4 y = __ldcg((const float4*)(partial + (s * ROWS + r) * D + d));
      const float f = weights[r * splits + s];
      x.x += y.x * f, x.y += y.y * f, x.z += y.z * f, x.w += y.w * f;
    }
    const float f = inverse[r];
    write(r, d, x.x * f), write(r, d + 1, x.y * f), write(r, d + 2, x.z * f), write(r, d + 3, x.w * f);
  }
}
