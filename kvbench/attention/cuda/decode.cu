// ---- the kernel: grid (splits, B * H, blocks of ROWS query rows)
extern "C" __global__ void __launch_bounds__(WARPS * 32, MINB) decode(const __grid_constant__ Args args) {
  wait_for_previous();
  u8* memory = shared_memory();  // queries, then the rings
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, team = warp / TEAM, rank = warp % TEAM,
            part = SHARES == 1 ? 0 : rank % SHARES, stream = team * SHARES + part;
  const int bh = blockIdx.y, b = bh / args.heads, head = bh % args.heads, all_rows = args.group * args.qlen;
  // a query row takes SLOTS columns; column0 is the first of the CTA and block0 its first row
  const int column0 = blockIdx.z * ROWS, first = 8 * NT * (rank / SHARES), block0 = blockIdx.z * (ROWS / SLOTS),
            rows = min(ROWS / SLOTS, all_rows - block0);
  const u32 base = (u32)__cvta_generic_to_shared(memory);

  u32 x[NT][KS][2];
#pragma unroll
  for (int n = 0; n < NT; n++)  // on its way while the tiles are dealt out
    fetch_queries(x[n], args, b, head, column0 + first + 8 * n, all_rows, lane);
  Job job;
  job.bh = bh, job.id = rank * 32 + lane, job.team = team;
#pragma unroll
  for (int i = 0; i < NPHASES; i++) {
    const int* line = args.table + (b * NPHASES + i) * 3;
    job.range[i] = {line[0], line[1], line[2]};
  }
  job.step = args.splits * TEAMS;
  deal<0>(job, blockIdx.x * TEAMS + team);
  Ring ring{base + TEAM / SHARES * NT * QUERIES + team * STAGES * SLOT, 0};
  each<0, STAGES - 1>([&](auto tag) {
    begin_after<-1, decltype(tag)::value>(args, job, ring.slot(decltype(tag)::value));
    commit();
  });
  State st;
  const int own = rank / SHARES * NT * QUERIES;  // offset of the warp's queries
  each<0, NT>([&](auto tag) {
    constexpr int N = decltype(tag)::value;
    take_queries<N>(st, x[N], args, memory + own + N * QUERIES, team == 0 && part == 0, lane);
  });
  __syncthreads();
  run_all<0>(st, args, job, ring, base + own, column0 + first, part, lane);
  wait<0>();
  admit_next();
  merge(st, args, memory, first, block0, rows, stream);
}
