// Quantizes one new token per row in KVQuant's format and stores codes, ranges and outliers, for sm_80 and later.
//
// Grid: (rows, 2 sides, 1 + PARTS). CTAs with 0 in the last dimension store outliers; each of the others the codes of a
// part of the channels. All work out the token's range and outliers for themselves, from 8 KB: a CTA that waited for
// another would take longer. Order statistics are exact: numbers become 16-bit integers in the same order, of which a
// histogram of the upper 12 bits and one of the lower 4 find the elements of three ranks.
//
// Compiled by nvrtc with these macros (TokenBuild of kvbench/cache/kernels/nuq.py):
//   D         channels of a head
//   HEADS     KV heads
//   BITS      bits of a code: 2, 3 or 4
//   TABLES    codebooks of a row, of which the first is used
//   BF16      1: tokens are bf16; 0: fp16
//   OUTLIERS  1: there are outliers of keys and of values
//   WATCHED   1: NaN and Inf are recorded (kvbench/cache/watch.py)
//   BLOCK     tokens of a block of outliers
//   PER       neighbouring elements of a thread
//   WARPS     warps of a CTA, which takes a whole token
//   PARTS     CTAs among which the codes of a token are divided
#ifndef EMULATED
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
__device__ __forceinline__ float float_of_half(u32 x) {
  float y;
  asm("{.reg .b16 h, t; mov.b32 {h, t}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(x));
  return y;
}
// Two floats as a pair of fp16 numbers, the first in the low half.
__device__ __forceinline__ u32 half2_of(float low, float high) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
// Waits for the kernel before this one, should this one have been launched early (sm_90 and later).
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel be launched early, if it waits likewise.
__device__ __forceinline__ void admit_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
#endif
typedef long long i64;
constexpr int WIDTH = HEADS * D, THREADS = WARPS * 32, LANES = D / PER, LEVELS = 1 << BITS, BINS = 4096;
constexpr int ABOVE = 65535;
static_assert(THREADS * PER >= WIDTH && LANES <= 32 && PER % 4 == 0 && WARPS <= 32);
struct Side {
  const u16* x;           // [B, H, 1, D] with strides
  i64 stride_b, stride_h;
  u16 *words, *words2;    // planes, int16 [B, H, tiles, ...]
  i64 tiles;
  const float* levels;    // [B, TABLES, LEVELS], of which the first is used
  u16 *values, *indices;  // outliers [B, room]
  int* ends;              // [B, blocks, H]
  i64 room, blocks;
  i64 tag;                // of the segment in the record
};
struct Args {
  Side side[2];                      // keys, values
  const int* places;                 // [B, 2]
  const u16 *scale, *offset;         // of the channels of keys, fp16 [B, C]
  const u16* thresholds;             // fp16 [B, 2, C]
  u16 *value_scale, *value_offset;   // of the tokens of values, fp16 [B, tiles * 128]
  int* record;
  int ranks[4];                      // low, high, that of the median; 0
  float weights[2];
};
#if BF16
__device__ __forceinline__ float float_of(u32 x) { return __uint_as_float(x << 16); }
#else
__device__ __forceinline__ float float_of(u32 x) { return float_of_half(x); }
#endif
// Integers, 0 to 65535, in the order of 16-bit numbers, and back.
__device__ __forceinline__ int order_of(u32 bits) { return bits & 0x8000 ? 65535 - (int)bits : (int)bits + 32768; }
__device__ __forceinline__ float number_of(int key) { return float_of(key >= 32768 ? key - 32768 : 65535 - key); }
// Interpolates as torch.lerp does.
__device__ __forceinline__ float between(float low, float high, float weight) {
  const float range = __fsub_rn(high, low);
  return weight < 0.5f ? __fadd_rn(low, __fmul_rn(weight, range))
                       : __fsub_rn(high, __fmul_rn(range, __fsub_rn(1.f, weight)));
}
// Reads PER fp16 numbers, which begin at a multiple of 8 bytes.
__device__ __forceinline__ void read_halves(float (&to)[PER], const u16* from) {
#pragma unroll
  for (int i = 0; i < PER / 4; i++) {
    const uint2 x = ((const uint2*)from)[i];
    to[4 * i] = float_of_half(x.x), to[4 * i + 1] = float_of_half(x.x >> 16);
    to[4 * i + 2] = float_of_half(x.y), to[4 * i + 3] = float_of_half(x.y >> 16);
  }
}
// The first of the levels that are nearest to a number.
__device__ __forceinline__ int nearest(float x, const float (&levels)[LEVELS]) {
  float best = fabsf(__fsub_rn(x, levels[0]));
  int code = 0;
#pragma unroll
  for (int i = 1; i < LEVELS; i++) {
    const float distance = fabsf(__fsub_rn(x, levels[i]));
    code = distance < best ? i : code;
    best = fminf(best, distance);
  }
  return code;
}
// Words of a plane that have a code of the thread's elements: where they lie, and their contents before.
template <int BITS_>
struct Plane {
  static constexpr int ROWS_ = 8 * BITS_;
  u16* at;
  int shift, step;
  u16 old[PER];
  __device__ __forceinline__ void read(u16* words, i64 head_tile, int token, int d, bool keys) {
    const int field = token % 128 / ROWS_, row = token % 128 % ROWS_;
    at = words + head_tile * (ROWS_ * D) + (keys ? row * D + d : d * ROWS_ + row);
    step = keys ? 1 : ROWS_, shift = field * BITS_;
#pragma unroll
    for (int i = 0; i < PER; i++) old[i] = at[i * step];
  }
  __device__ __forceinline__ void write(const int (&codes)[PER], int right) {
#pragma unroll
    for (int i = 0; i < PER; i++) {
      const u32 mask = (1u << BITS_) - 1;
      at[i * step] = (u16)((old[i] & ~(mask << shift)) | ((u32)(codes[i] >> right) & mask) << shift);
    }
  }
};
// What CTAs share.
struct Memory {
  int bins[BINS];
  int fine[3][16];             // of the bins in which the ranks lie
  int warps[32];               // sums of warps, or least of warps
  int most[32];
  int bin[3], left[3];         // bin of each rank, and the rank within it
  int following[2];            // least key above those of the first two ranks
  int ends[HEADS], counts[HEADS], before[HEADS];  // entries of the block's heads: ends, new ones, new ones before
  int first;                   // channel of the first NaN or Inf
};
// Sort keys of the elements with three ranks, and of the elements that follow the first two.
__device__ __forceinline__ void statistics(Memory& m, const Args& args, const int (&keys)[PER], int (&at_rank)[3],
                                           int (&next)[2]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int i = 0; i < PER; i++) atomicAdd(&m.bins[keys[i] >> 4], 1);
  __syncthreads();
  constexpr int OWN = (BINS + THREADS - 1) / THREADS;  // bins of a thread
  int counts[OWN], sum = 0;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int bin = threadIdx.x * OWN + i;
    counts[i] = bin < BINS ? m.bins[bin] : 0, sum += counts[i];
  }
  int upto = sum;
#pragma unroll
  for (int by = 1; by < 32; by <<= 1) {
    const int other = __shfl_up_sync(~0u, upto, by);
    if (lane >= by) upto += other;
  }
  if (lane == 31) m.warps[warp] = upto;
  __syncthreads();
  upto += __reduce_add_sync(~0u, lane < warp ? m.warps[lane] : 0) - sum;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
#pragma unroll
    for (int r = 0; r < 3; r++)
      if (upto <= args.ranks[r] && args.ranks[r] < upto + counts[i])
        m.bin[r] = threadIdx.x * OWN + i, m.left[r] = args.ranks[r] - upto;
    upto += counts[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < PER; i++)
#pragma unroll
    for (int r = 0; r < 3; r++)
      if (keys[i] >> 4 == m.bin[r]) atomicAdd(&m.fine[r][keys[i] & 15], 1);
  __syncthreads();
  int again[2];
#pragma unroll
  for (int r = 0; r < 3; r++) {
    int here = 0, before = 0, key = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int count = m.fine[r][i];
      if (before <= m.left[r]) key = i, here = before + count;
      before += count;
    }
    at_rank[r] = m.bin[r] * 16 + key;
    if (r < 2) again[r] = here > m.left[r] + 1;  // the next element is equal
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int least = ABOVE;
#pragma unroll
    for (int i = 0; i < PER; i++)
      if (keys[i] > at_rank[r]) least = min(least, keys[i]);
    least = __reduce_min_sync(~0u, least);
    if (lane == 0) atomicMin(&m.following[r], least);
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; r++) next[r] = again[r] ? at_rank[r] : m.following[r];
}
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) quantize_token(const __grid_constant__ Args args) {
  __shared__ Memory m;
  const int row = blockIdx.x, value = blockIdx.y, part = (int)blockIdx.z - 1;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Side& side = args.side[value];
  for (int i = threadIdx.x; i < BINS; i += THREADS) m.bins[i] = 0;
  if (threadIdx.x < 48) m.fine[threadIdx.x / 16][threadIdx.x % 16] = 0;
  if (threadIdx.x < 2) m.following[threadIdx.x] = ABOVE;
  if (threadIdx.x == 0) m.first = WIDTH;
  wait_for_previous();
  admit_next();
  const int token = args.places[2 * row + value];
  if (token < 0) return;  // a pass that is only rehearsed
  const int element = threadIdx.x * PER, head = min(element / D, HEADS - 1), d = element % D;
  const bool there = element < WIDTH;
  alignas(16) u16 x[PER] = {};
  if (there) {
    const uint2* from = (const uint2*)(side.x + row * side.stride_b + head * side.stride_h + d);
#pragma unroll
    for (int i = 0; i < PER / 4; i++) ((uint2*)x)[i] = from[i];
  }
  // what does not depend on the token's elements is read before anything waits for them
  const bool writes = there && part >= 0 && (int)threadIdx.x * PARTS / ((WIDTH + PER - 1) / PER) == part;
  Plane<BITS == 3 ? 2 : BITS> plane;
  Plane<1> single;
  float levels[LEVELS];
  if (writes) {
    const i64 at = ((i64)row * HEADS + head) * side.tiles + token / 128;
    plane.read(side.words, at, token, d, !value);
    if (BITS == 3) single.read(side.words2, at, token, d, !value);
#pragma unroll
    for (int i = 0; i < LEVELS; i++) levels[i] = side.levels[row * TABLES * LEVELS + i];
  }
  float scales[PER], offsets[PER], uppers[PER], lowers[PER];
  if (!value && there) {
    const i64 at = (i64)row * WIDTH + element, border = (i64)row * 2 * WIDTH + element;
    read_halves(scales, args.scale + at), read_halves(offsets, args.offset + at);
    if (OUTLIERS) read_halves(uppers, args.thresholds + border), read_halves(lowers, args.thresholds + border + WIDTH);
  }
  const int block = token / BLOCK;
  int* ends = side.ends + ((i64)row * side.blocks + block) * HEADS;
  u16 *values = side.values + row * side.room, *indices = side.indices + row * side.room;
  int begin = 0, chunks = 0, stop = 0;
  u16 entry = 0, exact = 0;
  if (OUTLIERS && part < 0) {
    // the table of a block is first written with its first token: until then, its runs are empty
    const bool open = token % BLOCK > 0;
    if (block > 0) begin = ends[-1];
    stop = open ? ends[HEADS - 1] : begin;
    for (int h = threadIdx.x; h < HEADS; h += THREADS) m.ends[h] = open ? ends[h] : begin;
    chunks = (stop - begin + THREADS - 1) / THREADS;
    const int at = begin + (chunks - 1) * THREADS + (int)threadIdx.x;
    if (chunks > 0 && at < stop) entry = indices[at], exact = values[at];
  }
  float number[PER];
  int keys[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) {
    number[i] = there ? float_of(x[i]) : 0.f;
    keys[i] = there ? order_of(x[i]) : ABOVE;
  }
  __syncthreads();
  if (WATCHED && part < 0) {
#pragma unroll
    for (int i = PER - 1; i >= 0; i--)
      if (!(fabsf(number[i]) < __int_as_float(0x7f800000))) atomicMin(&m.first, element + i);
  }
  u32 marks = 0;  // a bit for each outlier
  float scale = 1.f, offset = 0.f;
  if (value) {
    int least = there ? 65535 : ABOVE, most = 0;
    if (OUTLIERS) {
      int at_rank[3], next[2];
      statistics(m, args, keys, at_rank, next);
      const float lower = between(number_of(at_rank[0]), number_of(next[0]), args.weights[0]);
      const float upper = between(number_of(at_rank[1]), number_of(next[1]), args.weights[1]);
#pragma unroll
      for (int i = 0; i < PER; i++)
        if (there && (number[i] <= lower || number[i] >= upper)) marks |= 1u << i;
#pragma unroll
      for (int i = 0; i < PER; i++)
        if (there) {
          // an outlier counts as the token's median, so that a token of outliers alone has an offset
          const int key = marks >> i & 1 ? at_rank[2] : keys[i];
          least = min(least, key), most = max(most, key);
        }
    } else {
#pragma unroll
      for (int i = 0; i < PER; i++)
        if (there) least = min(least, keys[i]), most = max(most, keys[i]);
    }
    least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
    // all have read the sums of warps: there are two barriers since
    if (lane == 0) m.warps[warp] = least, m.most[warp] = most;
    __syncthreads();
    least = __reduce_min_sync(~0u, lane < WARPS ? m.warps[lane] : 65535);
    most = __reduce_max_sync(~0u, lane < WARPS ? m.most[lane] : 0);
    const float smallest = number_of(least), largest = number_of(most);
    const u32 half = half2_of(fminf(__fmul_rn(__fsub_rn(largest, smallest), 0.5f), 65504.f), 0.f) & 0xffff;
    const u32 middle =
        half2_of(fminf(fmaxf(__fmul_rn(__fadd_rn(largest, smallest), 0.5f), -65504.f), 65504.f), 0.f) & 0xffff;
    scale = float_of_half(half), offset = float_of_half(middle);
    if (part <= 0 && threadIdx.x == 0) {
      const i64 at = (i64)row * side.tiles * 128 + token;
      args.value_scale[at] = (u16)half, args.value_offset[at] = (u16)middle;
    }
  } else if (OUTLIERS) {
#pragma unroll
    for (int i = 0; i < PER; i++)
      if (there && (number[i] < lowers[i] || number[i] > uppers[i])) marks |= 1u << i;
  }
  if (writes) {
    int codes[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
      const float by = value ? scale : scales[i];
      const float normal = marks >> i & 1 ? 0.f : __fsub_rn(number[i], value ? offset : offsets[i]);
      codes[i] = nearest(__fdiv_rn(normal, by == 0.f ? 1.f : by), levels);
    }
    plane.write(codes, BITS == 3 ? 1 : 0);
    if (BITS == 3) single.write(codes, 0);
  }
  if (part >= 0) return;
  if (OUTLIERS) {
    // a head's elements are those of LANES threads of a warp
    const u32 heads_lanes = (LANES == 32 ? ~0u : (1u << LANES % 32) - 1) << lane / LANES * LANES;
    const u32 below = heads_lanes & ((1u << lane) - 1);
    int rank = 0, count = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
      const u32 all = __ballot_sync(~0u, marks >> i & 1);
      rank += __popc(all & below), count += __popc(all & heads_lanes);
    }
    if (there && lane % LANES == 0) m.counts[head] = count;
    __syncthreads();
    if (warp == 0) {
      int upto = 0;
      for (int first = 0; first < HEADS; first += 32) {
        const int h = first + lane, own = h < HEADS ? m.counts[h] : 0;
        int sum = own;
#pragma unroll
        for (int by = 1; by < 32; by <<= 1) {
          const int other = __shfl_up_sync(~0u, sum, by);
          if (lane >= by) sum += other;
        }
        if (h < HEADS) {
          m.before[h] = upto + sum - own;
          ends[h] = m.ends[h] + upto + sum;  // the old ones were read before the last barrier
        }
        upto += __shfl_sync(~0u, sum, 31);
      }
    }
    __syncthreads();
    // the entries of later heads first, so that none is overwritten before it has moved
    for (int c = chunks - 1; c >= 0; c--) {
      const int at = begin + c * THREADS + (int)threadIdx.x;
      const bool here = at < stop;
      const int to = here ? at + m.before[entry % WIDTH / D] : 0;
      const u16 own_entry = entry, own_exact = exact;
      if (c > 0) entry = indices[at - THREADS], exact = values[at - THREADS];
      __syncthreads();
      if (here) indices[to] = own_entry, values[to] = own_exact;
    }
    if (chunks == 0) __syncthreads();
    int to = m.ends[head] + m.before[head] + rank;
#pragma unroll
    for (int i = 0; i < PER; i++)
      if (marks >> i & 1) {
        indices[to] = (u16)(token % BLOCK * WIDTH + element + i), values[to] = x[i];
        to++;
      }
  }
  if (WATCHED) {
    __syncthreads();
    if (threadIdx.x == 0 && m.first < WIDTH && atomicCAS(args.record, 0, 1) == 0) {
      args.record[1] = (int)side.tag, args.record[2] = row, args.record[3] = m.first / D;
      args.record[4] = token, args.record[5] = m.first % D;
    }
  }
}
