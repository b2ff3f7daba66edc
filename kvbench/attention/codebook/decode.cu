// ---- the kernel: grid (splits, B * H, blocks of ROWS query rows)
// Normalises the query rows by a power of two each to at most 1.
__device__ __forceinline__ void read_queries(const Args& args, u8* memory, int b, int head, int block0, int rows, int warp,
                                             int lane) {
  float* factors = (float*)(memory + FACTOR_AT);
  for (int row = warp; row < ROWS; row += WARPS) {
    float* to = (float*)(memory + QUERY_AT) + row * D;
    float x[OWN], most = 0.f;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      x[i] = 0.f;
      if (row < rows)
        x[i] = float_of_exact(args.query[b * args.stride_b + (head * args.group + block0 + row) * args.stride_h + lane * OWN + i]);
      most = fmaxf(most, fabsf(x[i]));
    }
    most = most_of_warp(most);
    const int e = max(64, min(190, (int)(__float_as_uint(most) >> 23)));
    const float shrink = __uint_as_float((u32)(253 - e) << 23);
#pragma unroll
    for (int i = 0; i < OWN; i++) to[lane * OWN + i] = x[i] * shrink;
    if (lane == 0) factors[row] = __uint_as_float((u32)(e + 1) << 23) * args.scale;
  }
}
extern "C" __global__ void __launch_bounds__(WARPS * 32, MINB) decode(const __grid_constant__ Args args) {
  __shared__ int last;
  wait_for_previous();
  u8* memory = shared_memory();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const i64 bh = blockIdx.y;
  const int b = blockIdx.y / HEADS, head = blockIdx.y % HEADS, block0 = blockIdx.z * ROWS,
            rows = min(ROWS, args.group - block0);
  u8* own = memory + CTA_BYTES + warp * WARP_BYTES;
  const u32 own_at = (u32)__cvta_generic_to_shared(own);

  const int* line = args.table + b * NPHASES * 3;
  const int before = PACKED ? (line[2] + 31) / 32 : 0, slot = PACKED ? line[2] : 0, count = line[PACKED * 3 + 2],
            tiles = (count + 127) / 128, behind = PACKED + 1 < NPHASES ? line[(NPHASES - 1) * 3 + 2] : 0,
            units = before + tiles + (behind + 31) / 32;
  const int begin = ROTATE ? args.starts[b] : 0, step = gridDim.x * WARPS;
  // exact blocks come last, so that a warp's tiles have no gap
  int tile = blockIdx.x * WARPS + warp;
  if (tile < tiles) copy_keys(args, own_at, bh, tile, lane);
  commit();
  write_levels(args.key_levels + b * (1 << BITS), memory + LEVELS_AT, 1);
  if constexpr (WHOLE) {
    if (threadIdx.x == 32 % (WARPS * 32))
      *(float*)(memory + LEVELS_AT + 2 * sizeof(Levels)) =
          write_integers(args.value_levels + b * (1 << BITS), memory + LEVELS_AT + sizeof(Levels));
  } else {
    write_levels(args.value_levels + b * (1 << BITS), memory + LEVELS_AT + sizeof(Levels), ROUNDINGS);
  }
  read_queries(args, memory, b, head, block0, rows, warp, lane);
  write_turns(args, memory, bh, warp, lane);
  float* stand = (float*)(memory + STAND_AT);
  if (OUTLIERS)
    for (int i = threadIdx.x; i < D; i += WARPS * 32) stand[i] = args.stand_in[bh * D + i];
  const float level = OUTLIERS ? args.level[b] : 0.f;
  int* sums = (int*)(own + SUMS_AT);
  for (int i = lane; i < 128; i += 32) sums[i] = 0;
  __syncthreads();
  const float* factors = (const float*)(memory + FACTOR_AT);
  float* scores = (float*)(own + SCORES_AT);

  State st;
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    st.top[row] = NOTHING, st.total[row] = st.bias[row] = 0.f;
#pragma unroll
    for (int i = 0; i < OWN; i++) st.extra[row][i] = 0.f;
  }
#pragma unroll
  for (int a = 0; a < D / 16; a++)
#pragma unroll
    for (int i = 0; i < (ROWS == 1 ? 2 : 4); i++) st.acc[a][i] = 0.f;
  if (!ROTATE) turn_queries(args, memory, own, 0, lane);
  Run keys{0, 0}, values{0, 0};
  if (OUTLIERS && tile < tiles) {
    keys = run_of(args.sparse[0], b, head, tile, count, lane);
    values = run_of(args.sparse[1], b, head, tile, count, lane);
  }
#pragma unroll 1
  for (; tile < tiles; tile += step) {
    const int next = tile + step;
    Entries entries;
    Run next_keys{0, 0}, next_values{0, 0};
    if (OUTLIERS) {
      read_entries(entries, args.sparse[0], b, keys, 0, lane);
      next_keys = run_of(args.sparse[0], b, head, next, count, lane);
      next_values = run_of(args.sparse[1], b, head, next, count, lane);
    }
    if (ROTATE) turn_queries(args, memory, own, begin + slot + tile * 128, lane);
    wait<0>();
    __syncwarp();
    dense_scores(memory, own, own_at, lane);
    __syncwarp();
    copy_values(args, own_at, b, bh, tile, lane);
    commit();
    if (OUTLIERS) {
      add_entries<true>(
          entries, args.sparse[0], b, head, keys, sums, lane,
          [&](float x, int token, int channel) { return x - stand[channel]; },
          [&](int row, int token, int channel) { return turned(memory, own, row, token, channel); },
          [&](int row, float by) {
#pragma unroll
            for (int i = 0; i < 4; i++)
              scores[row * 128 + i * 32 + lane] += (float)sums[i * 32 + lane] * by, sums[i * 32 + lane] = 0;
          });
      read_entries(entries, args.sparse[1], b, values, 0, lane);
    }
    wait<0>();
    __syncwarp();
    const float lowered = weigh(st, args, own, factors, count - tile * 128, lane);
    __syncwarp();
    dense_values(st, memory, own, own_at, lowered, lane);
    __syncwarp();
    if (next < tiles) copy_keys(args, own_at, bh, next, lane);
    commit();
    if (OUTLIERS) {
      const u16* params = (const u16*)(own + PARAMS_AT);
      add_entries<false>(
          entries, args.sparse[1], b, head, values, sums, lane,
          [&](float x, int token, int channel) {
            return x - (level * float_of_half(params[token]) + float_of_half(params[128 + token]));
          },
          [&](int row, int token, int channel) { return scores[row * 128 + token]; },
          [&](int row, float by) {
#pragma unroll
            for (int r = 0; r < ROWS; r++)
              if (r == row)
#pragma unroll
                for (int i = 0; i < OWN; i++) st.extra[r][i] += (float)sums[lane * OWN + i] * by;
            __syncwarp();
            for (int i = lane; i < D; i += 32) sums[i] = 0;
          });
    }
    __syncwarp();
    keys = next_keys, values = next_values;
  }
  wait<0>();
  for (int unit = tile; unit < units; unit += step) {
    int block = unit - tiles, phase = 0, at = 0, all = slot;
    if (block >= before) block -= before, phase = 1, at = slot + count, all = behind;
    const int* of = line + (phase ? NPHASES - 1 : 0) * 3;
    exact_tokens(st, args, memory, own, args.exact[phase], bh, of[0] + block * 32, of[1] + block * 32,
                 min(32, all - block * 32), begin + at + block * 32, lane);
  }
  admit_next();
  const int splits = args.splits;
  const i64 place = (i64)blockIdx.y * gridDim.z + blockIdx.z;
  float* partial = args.partial + place * splits * ROWS * PITCH;  // outputs, then (top, total): 16-byte aligned
  float* totals = partial + (i64)splits * ROWS * D;
  merge_warps(st, args, memory, block0, rows, partial + (i64)blockIdx.x * ROWS * D, totals + blockIdx.x * ROWS * 2, warp,
              lane);
  if (splits == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(args.counter + place, 1) == splits - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) args.counter[place] = 0;
  merge_splits(args, partial, totals, (float*)memory, block0, rows);
}
