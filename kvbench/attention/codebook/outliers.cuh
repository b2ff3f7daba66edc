// ---- outliers --------------------------------------------------------------------------------------------------------
// Entries of a tile: each block of tokens has its own lanes, and they take KEPT entries each at a time. Sums are of
// integers, scaled by a power of two, so that they do not depend on the order in which lanes add.
struct Run {
  int start, length;  // entries of the lane's block
};
__device__ __forceinline__ Run run_of(const Sparse& sparse, i64 b, int head, int tile, int count, int lane) {
  const int block = tile * SEGMENTS + lane / LANES, at = block * HEADS + head;
  Run run{0, 0};
  if (block * BLOCK < count) {
    const int* ends = sparse.ends + b * sparse.blocks * HEADS;
    run.start = at > 0 ? ends[at - 1] : 0;
    run.length = ends[at] - run.start;
  }
  return run;
}
// The next entries of a lane, on their way from device memory: without branches, so that all are at once.
struct Entries {
  u16 value[KEPT], index[KEPT];
};
// Reads the lane's entries from the `first` of its block on; where there are no more, it reads any.
__device__ __forceinline__ void read_entries(Entries& entries, const Sparse& sparse, i64 b, const Run& run, int first,
                                             int lane) {
  if (sparse.room == 0) return;
  const u16 *values = sparse.values + b * sparse.room, *indices = sparse.indices + b * sparse.room;
  // what lies behind a block's entries is read, but not used
  if (__any_sync(~0u, run.start + first + KEPT * LANES > (int)sparse.room) == 0) {
    const int at = run.start + first + lane % LANES;
    values += at, indices += at;
#pragma unroll
    for (int i = 0; i < KEPT; i++) entries.value[i] = values[i * LANES], entries.index[i] = indices[i * LANES];
    return;
  }
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    const int e = max(min(first + i * LANES + lane % LANES, run.length - 1), 0),
              at = min(run.start + e, (int)sparse.room - 1);
    entries.value[i] = values[at], entries.index[i] = indices[at];
  }
}
__device__ __forceinline__ float most_of_warp(float x) { return float_in_order(largest(in_order(x))); }
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes <<= 1) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}
// Power of two by which numbers up to `most` are scaled to at most 2^22, and its inverse.
__device__ __forceinline__ float2 scaled_by(float most) {
  const int e = max(30, min(250, (int)(__float_as_uint(most) >> 23)));
  return make_float2(__uint_as_float((u32)(275 - e) << 23), __uint_as_float((u32)(e - 21) << 23));
}
// Adds up what the entries of a tile add to 128 tokens (keys) or D channels (values) of each row.
//   entries     the first of them (read_entries)
//   sums        128 integers in shared memory, all zero
//   difference  (value, token of the tile, channel) -> difference to the stand-in
//   factor      (row, token, channel) -> factor on it
//   add         (row, factor on the sums): adds the sums, and zeroes them
template <bool KEYS, class Difference, class Factor, class Add>
__device__ __forceinline__ void add_entries(Entries& entries, const Sparse& sparse, i64 b, int head, const Run& run,
                                            int* sums, int lane, Difference&& difference, Factor&& factor, Add&& add) {
  for (int first = 0; __any_sync(~0u, first < run.length); first += KEPT * LANES) {
    if (first > 0) read_entries(entries, sparse, b, run, first, lane);
    float delta[KEPT];
    int token[KEPT], channel[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
      const bool there = first + i * LANES + lane % LANES < run.length;
      const int index = there ? entries.index[i] : head * D;
      token[i] = lane / LANES * BLOCK + index / WIDTH, channel[i] = index % WIDTH - head * D;
      const float x = difference(float_of_exact(entries.value[i]), token[i], channel[i]);
      delta[i] = there ? x : 0.f;
    }
#pragma unroll 1
    for (int row = 0; row < ROWS; row++) {
      float x[KEPT], most = 0.f;
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        const float by = factor(row, token[i], channel[i]);
        x[i] = delta[i] == 0.f ? 0.f : delta[i] * by;
        most = fmaxf(most, fabsf(x[i]));
      }
      const float2 scale = scaled_by(most_of_warp(most));
#pragma unroll
      for (int i = 0; i < KEPT; i++)
        if (x[i] != 0.f) atomicAdd(sums + (KEYS ? token[i] : channel[i]), __float2int_rn(x[i] * scale.x));
      __syncwarp();
      add(row, scale.y);
      __syncwarp();
    }
  }
}
