// ---- a team's walk over its tiles ----------------------------------------------------------------------------------
// Waits for the warps of a team (barrier team + 1; barrier 0 is the CTA's).
__device__ __forceinline__ void team_sync(int team) {
  if (TEAM == 1) __syncwarp();
  else barrier<TEAM * 32>(team + 1);
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
  u32 table;     // the warp's scratch memory
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

// Waits for item I of a tile of phase P, and has the one STAGES - 1 later loaded into the slot read last.
//   more  the team has a tile after this one in the phase
template <int P, int I>
__device__ __forceinline__ void arrive(const Args& args, const Job& job, const Ring& ring, int tile, bool more) {
  constexpr int ITEMS = Shape<P>::ITEMS, AHEAD = I + STAGES - 1;
  wait<STAGES - 2>();
  team_sync(job.team);
  if (AHEAD < ITEMS || more)
    issue<P, AHEAD % ITEMS>(args.phase[P], job.range[P], job.bh, tile + AHEAD / ITEMS * job.step,
                            ring.slot(STAGES - 1), job.id);
  else if constexpr (AHEAD >= ITEMS) begin_after<P, AHEAD - ITEMS>(args, job, ring.slot(STAGES - 1));
  commit();
}

// run() for a phase of 2-bit codes and one query row (integer.cuh).
template <int P>
__device__ __forceinline__ void run_integer(State& st, const Args& args, const Job& job, Ring& ring, u32 queries,
                                            int lane) {
  if (job.count[P] == 0) return;
  const Range& r = job.range[P];
  const float sl = __shfl_sync(~0u, st.sl[0][0], 0);  // of the first row
  Parts<P> parts;
  parts.top = -1e30f, parts.total = 0.f;
#pragma unroll
  for (int k = 0; k < Parts<P>::VG; k++) parts.low[k] = 0.f;
#pragma unroll
  for (int a = 0; a < KS; a++) parts.acc[a][0] = parts.acc[a][1] = 0.f;
  for (int j = 0; j < job.count[P]; j++) {
    const int tile = job.first[P] + j * job.step;
    const bool more = j + 1 < job.count[P];
    float s[Plan<P>::COUNT], p[8], shrink;
    arrive<P, 0>(args, job, ring, tile, more);
    const u32 own = integer_scores<P>(s, ring.slot(0), queries, sl, (r.first_k / 128 + tile) * 128, lane);
    const int lo = into<P>(r) - tile * 128, until = lo + r.count;
    if (lo > 0 || until < 128) {
#pragma unroll
      for (int i = 0; i < Plan<P>::COUNT; i++) {
        const int token = Plan<P>::token(i, lane);
        if (token < lo || token >= until) s[i] = __int_as_float(0xff800000);
      }
    }
    integer_weights<P>(parts, s, own, p, shrink, ring.slot(0), lane);
    ring.advance();
    arrive<P, 1>(args, job, ring, tile, more);
    integer_values<P>(parts, p, shrink, ring.slot(0), lane);
    ring.advance();
  }
  fold<P>(st, parts, lane);
}

// run() for a phase of e2m1 codes and one query row (columns.cuh).
template <int P>
__device__ __forceinline__ void run_columns(State& st, const Args& args, const Job& job, Ring& ring, u32 queries,
                                            int part, int lane) {
  if (job.count[P] == 0) return;
  constexpr int MT = Shape<P>::MT;
  const Range& r = job.range[P];
  const int g = lane >> 2, t = lane & 3;
  const float by = __shfl_sync(~0u, st.sl[0][0], 0) * args.phase[P].kfactor * pow2(-unit_of(FLOAT, 4, 0));
  u32 q[KS][2], own_step[2];  // a lane has column g, thus the channels of step g
  load64(own_step[0], own_step[1], queries + (min(g, KS - 1) * 32 + t) * 8);
#pragma unroll
  for (int a = 0; a < KS; a++)
#pragma unroll
    for (int i = 0; i < 2; i++) q[a][i] = opaque(a == g ? own_step[i] : 0);
  Column own = {-1e30f, 0.f, {0.f, 0.f, 0.f, 0.f}};
  for (int j = 0; j < job.count[P]; j++) {
    const int tile = job.first[P] + j * job.step;
    const bool more = j + 1 < job.count[P];
    float s[MT / 4][2], shrink;
    u32 p[MT][2];
    arrive<P, 0>(args, job, ring, tile, more);
    column_scores<P, MT>(s, ring.slot(0), q, by, part, lane);
    const int lo = into<P>(r) - tile * 128, until = lo + r.count;
    if (lo > 0 || until < 128) {
#pragma unroll
      for (int h = 0; h < MT / 4; h++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int token = 16 * (SHARES * (4 * h + t) + part) + g + 8 * i;
          if (token < lo || token >= until) s[h][i] = __int_as_float(0xff800000);
        }
    }
    column_weights<MT>(own, s, p, shrink, job.table, lane);
    ring.advance();
    arrive<P, 1>(args, job, ring, tile, more);
    column_values<P, MT>(own, p, shrink, ring.slot(0), part, lane);
    ring.advance();
  }
  fold(st, own, args.phase[P].vfactor, lane);
}

// Walks this team's tiles of phase P: for each, scores of its key items, softmax, products of its value items.
//   st       the warp's running softmax
//   ring     slots of the team; on entry the first STAGES - 1 items of the first tile are on their way
//   queries  the warp's queries in shared memory
//   row0     first query row of the warp, or first column (SLOTS of each row)
//   part     which blocks of 16 tokens of a tile are the warp's
template <int P>
__device__ __forceinline__ void run(State& st, const Args& args, const Job& job, Ring& ring, u32 queries, int row0,
                                    int part, int lane) {
  using S = Shape<P>;
  static_assert(STAGES >= 2 && STAGES <= 3 && S::ITEMS >= 2, "begin_after starts with the items of one tile");
  const Range& r = job.range[P];
  constexpr bool LAST = P == NPHASES - 1;
  for (int j = 0; j < job.count[P]; j++) {
    const int tile = job.first[P] + j * job.step;
    auto turn = [&](auto tag) { arrive<P, decltype(tag)::value>(args, job, ring, tile, j + 1 < job.count[P]); };
    float s[NT][S::MT][4], shrink[NT][NC];
    u32 p[NT][S::MT][2];
    Linear linear;
    each<0, S::KI>([&](auto tag) {
      turn(tag);
      if constexpr (WINDOWS[P] > 0) window_scores<P, S::MT>(s, ring.slot(0), queries, st, part, lane);
      else if constexpr (S::BYTES) byte_level_scores<P, S::MT>(s, ring.slot(0), queries, st, lane);
      else if constexpr (S::BOOK) level_scores<P, S::MT>(s, ring.slot(0), queries, st, part, lane);
      else if constexpr (S::KF)
        factored_scores<P, S::MT>(s, ring.slot(0), job.table, queries, st, args.phase[P].kfactor, part, lane);
      else if constexpr (S::KP) packed_scores<P, S::MT>(s, linear, ring.slot(0), queries, st, part, lane);
      else
        exact_scores<2 / SHARES * decltype(tag)::value, S::MT>(s, ring.slot(0), queries + (BF16 ? QUERY : 0), st, part,
                                                               lane);
      ring.advance();
    });
    if constexpr (SOFTCAP) capped<S::MT>(s, args.cap);
    // only the ends of a phase, and the newest tokens of a step of several, need a mask
    const int lo = into<P>(r) - tile * S::TOKENS, until = lo + r.count;
    if (lo > 0 || until < S::TOKENS || (LAST && args.qlen > 1)) {
      int hi[NT][NC];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int c = 0; c < NC; c++) {
          const int r = row0 + 8 * n + (ONECOL ? lane & 3 : 2 * (lane & 3) + c);
          hi[n][c] = LAST ? until - args.qlen + 1 + r / SLOTS % args.qlen : until;
        }
      hide<S::MT>(s, lo, hi, part, lane);
    }
    if constexpr (SLOTS > 1) hide_other_groups<P, S::MT>(s, (r.first_k / 128 + tile) * 128, part, lane);
    weigh<P, S::MT>(st, s, linear, p, shrink);
    each<S::KI, S::ITEMS>([&](auto tag) {
      turn(tag);
      if constexpr (S::VF)
        factored_values<P, S::MT>(st, p, shrink, ring.slot(0), job.table, args.phase[P].vfactor, part, lane);
      else if constexpr (S::VP) packed_values<P, S::MT>(st, p, shrink, ring.slot(0), part, lane);
      else
        exact_values<2 / SHARES * (decltype(tag)::value - S::KI), S::MT>(st, p, shrink, ring.slot(0), part, lane);
      ring.advance();
    });
  }
}

// run() for phase P and those after it: a loop over constants.
template <int P>
__device__ __forceinline__ void run_all(State& st, const Args& args, const Job& job, Ring& ring, u32 queries, int row0,
                                        int part, int lane) {
  if constexpr (P < NPHASES) {
    if constexpr (Shape<P>::INT) run_integer<P>(st, args, job, ring, queries, lane);
    else if constexpr (Shape<P>::COLUMNS) run_columns<P>(st, args, job, ring, queries, part, lane);
    else run<P>(st, args, job, ring, queries, row0, part, lane);
    run_all<P + 1>(st, args, job, ring, queries, row0, part, lane);
  }
}

