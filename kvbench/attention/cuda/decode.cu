// ---- the kernel: grid (splits, B * H, blocks of ROWS query rows)
extern "C" __global__ void __launch_bounds__(WARPS * 32, MINB) decode(const __grid_constant__ Args args) {
  constexpr int BLOCKS = ROWS < 8 ? 1 : ROWS / 8;  // of eight columns
  __shared__ float grows[8 * BLOCKS];
  wait_for_previous();
  u8* memory = shared_memory();  // queries, then the rings, then the warps' scratch memory
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, team = warp / TEAM, rank = warp % TEAM,
            part = SHARES == 1 ? 0 : rank % SHARES, stream = team * SHARES + part;
  // a query row takes SLOTS columns; column0 is the first of the CTA and block0 its first row
  const int column0 = blockIdx.z * ROWS, first = 8 * NT * (rank / SHARES), block0 = blockIdx.z * (ROWS / SLOTS),
            rows = min(ROWS / SLOTS, args.group * args.qlen - block0);
  const u32 base = (u32)__cvta_generic_to_shared(memory);

  u32 x[KS][2];
  if (warp < BLOCKS) fetch_queries(x, args, column0 + 8 * warp, lane);  // on its way while the tiles are dealt out
  Job job;
  job.bh = blockIdx.y, job.id = rank * 32 + lane, job.team = team;
  job.table = base + BLOCKS * QUERIES + TEAMS * STAGES * SLOT + warp * SCRATCH;
#pragma unroll
  for (int i = 0; i < NPHASES; i++) {
    const int* line = args.table + (blockIdx.y / args.heads * NPHASES + i) * 3;
    job.range[i] = {line[0], line[1], line[2]};
  }
  job.step = args.splits * TEAMS;
  deal<0>(job, blockIdx.x * TEAMS + team);
  Ring ring{base + BLOCKS * QUERIES + team * STAGES * SLOT, 0};
  each<0, STAGES - 1>([&](auto tag) {
    begin_after<-1, decltype(tag)::value>(args, job, ring.slot(decltype(tag)::value));
    commit();
  });
  for (int i = warp; i < BLOCKS; i += WARPS) {
    if (i >= WARPS) fetch_queries(x, args, column0 + 8 * i, lane);
    store_queries(x, memory + i * QUERIES, grows + 8 * i, lane);
    if constexpr (DIGIT_BYTES > 0) store_digits(memory + i * QUERIES, lane);
  }
  __syncthreads();
  State st;
  begin(st, args, grows + first, lane);
  run_all<0>(st, args, job, ring, base + first / 8 * QUERIES, column0 + first, part, lane);
  wait<0>();
  admit_next();
  merge(st, args, memory, first, block0, rows, stream);
}
