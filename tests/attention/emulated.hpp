// The instructions of kvbench/attention/cuda/instructions.cuh in plain C++, and a runner of CTAs: each thread of a CTA is
// a coroutine, which runs until it waits for others. Copies into shared memory are made as late as wait() allows, so that
// a slot that is read too early shows its old contents; an address outside of the CTA's memory ends the program.
#define EMULATED
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>
using std::max;
using std::min;
#define __device__
#define __host__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __launch_bounds__(threads, blocks)
#define __grid_constant__
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
struct Index { int x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

// ---- threads
typedef std::vector<std::function<void()>> Copies;
struct Thread {
  Index index;
  bool done = false;
  Copies open;                // since the last commit()
  std::deque<Copies> groups;  // committed, not yet made
  ucontext_t context;
  std::unique_ptr<char[]> stack;
};
static std::vector<std::unique_ptr<Thread>> threads;
static Thread* self;
static ucontext_t runner;
static Index blockIdx, gridDim;
#define threadIdx (self->index)
static void others() { swapcontext(&self->context, &runner); }

struct Meeting {
  int count = 0, round = 0;
  void arrive(int all) {
    const int mine = round;
    if (++count == all) count = 0, round++;
    else while (round == mine) others();
  }
};
static Meeting warps[32], named[32], cta;
static void __syncwarp() { warps[threadIdx.x / 32].arrive(32); }
static void __syncthreads() { cta.arrive((int)threads.size()); }
template <int THREADS> static void barrier(int number) { named[number].arrive(THREADS); }

// Gives the warp's other lanes words of this one; returns those of all lanes. Two sets of places, used in turn, so that a
// fast lane does not overwrite what a slow one still reads.
struct Words { u32 word[6]; };
static Words given[2][1024];
static int turns[1024];
static const Words* exchange(std::initializer_list<u32> words) {
  const int me = threadIdx.x, turn = turns[me]++ & 1;
  std::copy(words.begin(), words.end(), given[turn][me].word);
  __syncwarp();
  return &given[turn][me & ~31];
}
static int lane_of() { return threadIdx.x & 31; }

// ---- numbers
static u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static int __popc(u32 x) { return __builtin_popcount(x); }
static float __int_as_float(u32 x) { return __uint_as_float(x); }
static int __float2int_rn(float x) { return (int)std::nearbyint(x); }
static float from_half(u32 x) {
  const int e = x >> 10 & 31, m = x & 1023;
  const float f = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024.f + m, e - 25) : std::ldexp((float)m, -24);
  return x & 0x8000 ? -f : f;
}
static u32 to_half(float f) {
  const u32 sign = __float_as_uint(f) >> 16 & 0x8000;
  const float x = std::fabs(f);
  if (std::isnan(f)) return 0x7e00;
  if (x < 6.103515625e-05f) return sign | (u32)std::nearbyint(std::ldexp(x, 24));
  const u32 u = __float_as_uint(x), y = (u + 0xfff + (u >> 13 & 1) - 0x38000000) >> 13;
  return sign | min(y, 0x7c00u);
}
static u32 to_bf16(float f) { const u32 u = __float_as_uint(f); return (u + 0x7fff + (u >> 16 & 1)) >> 16; }
static float from_exact(u32 x) { return BF16 ? __uint_as_float(x << 16) : from_half(x & 0xffff); }
static float float_of_half(u32 x) { return from_half(x & 0xffff); }
static float float_of_upper(u32 x) { return from_half(x >> 16); }
static float float_of_exact(u32 x) { return from_exact(x & 0xffff); }
static u32 half2_of(float low, float high) { return to_half(low) | to_half(high) << 16; }
static u32 exact2_of(float low, float high) { return BF16 ? to_bf16(low) | to_bf16(high) << 16 : half2_of(low, high); }
static u32 mul2(u32 a, u32 b) {
  return half2_of(float_of_half(a) * float_of_half(b), float_of_half(a >> 16) * float_of_half(b >> 16));
}
static u32 fma2(u32 a, u32 b, u32 c) {
  return half2_of(float_of_half(a) * float_of_half(b) + float_of_half(c),
                  float_of_half(a >> 16) * float_of_half(b >> 16) + float_of_half(c >> 16));
}
static u32 most_of(u32 a, u32 b) {
  return half2_of(max(float_of_half(a), std::fabs(float_of_half(b))),
                  max(float_of_half(a >> 16), std::fabs(float_of_half(b >> 16))));
}
static u32 halves_of_bytes(u32 x) {
  auto half = [](u32 byte) {
    const int e = byte >> 3 & 15, m = byte & 7;
    const float f = e ? std::ldexp(8.f + m, e - 10) : std::ldexp((float)m, -9);
    return to_half((byte & 127) == 127 ? NAN : byte & 128 ? -f : f);
  };
  return half(x & 255) | half(x >> 8 & 255) << 16;
}
template <bool UPPER> static u32 halves_of_e4m3(u32 x) { return halves_of_bytes(UPPER ? x >> 16 : x); }
template <int N> static u32 divided(u32 x) { return x >> N; }
static float pow2_of(int x) { return __uint_as_float((u32)(127 + x) << 23); }
static int in_order(float x) {
  const int y = (int)__float_as_uint(x);
  return y ^ (y >> 31 & 0x7fffffff);
}
static float float_in_order(int x) { return __uint_as_float((u32)(x ^ (x >> 31 & 0x7fffffff))); }
static u32 chosen(u32 mask, u32 a, u32 b) { return (mask & a) | (~mask & b); }
static float exp2_of(float x) { return std::exp2(x); }
static float inverse_of(float x) { return 1.f / x; }
static float rsqrt_of(float x) { return 1.f / std::sqrt(x); }
static u32 __byte_perm(u32 a, u32 b, u32 selector) {
  u32 x = 0;
  for (int i = 0; i < 4; i++) {
    const int byte = selector >> (4 * i) & 7;
    x |= ((byte < 4 ? a : b) >> (8 * (byte & 3)) & 255) << (8 * i);
  }
  return x;
}
// prmt, which takes a nibble of 8 or more for the sign of a byte: none may be
static u32 chosen_bytes(u32 a, u32 b, u32 selector) {
  for (int i = 0; i < 4; i++)
    if (selector >> (4 * i) & 8) abort();
  return __byte_perm(a, b, selector);
}

// ---- instructions of a warp
static float __shfl_xor_sync(u32, float x, int mask) {
  return __uint_as_float(exchange({__float_as_uint(x)})[lane_of() ^ mask].word[0]);
}
static float __shfl_sync(u32, float x, int lane) {
  return __uint_as_float(exchange({__float_as_uint(x)})[lane & 31].word[0]);
}
// so that no integer loses bits on its way through a float
static float __shfl_sync(u32, u32 x, int lane) = delete;
static bool __any_sync(u32, u32 x) {
  const Words* all = exchange({x});
  return std::any_of(all, all + 32, [](const Words& w) { return w.word[0] != 0; });
}
static u32 __ballot_sync(u32, u32 x) {
  const Words* all = exchange({x});
  u32 y = 0;
  for (int i = 0; i < 32; i++) y |= (u32)(all[i].word[0] != 0) << i;
  return y;
}
static int __shfl_up_sync(u32, int x, int by) {
  const Words* all = exchange({(u32)x});
  return lane_of() >= by ? (int)all[lane_of() - by].word[0] : x;
}
static int __shfl_sync(u32, int x, int lane) { return (int)exchange({(u32)x})[lane & 31].word[0]; }
static int __reduce_add_sync(u32, int x) {
  const Words* all = exchange({(u32)x});
  int y = 0;
  for (int i = 0; i < 32; i++) y += (int)all[i].word[0];
  return y;
}
// The fragments of mma.m16n8k16, as the manual of PTX defines them.
template <class Number>
static void mma(float (&c)[4], const Words* all, Number number) {
  for (int i = 0; i < 4; i++) {
    const int row = lane_of() / 4 + 8 * (i / 2), column = lane_of() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      const u32 a = all[row % 8 * 4 + k % 8 / 2].word[row / 8 + 2 * (k / 8)];
      const u32 b = all[column * 4 + k % 8 / 2].word[4 + k / 8];
      c[i] += number(k % 2 ? a >> 16 : a & 0xffff) * number(k % 2 ? b >> 16 : b & 0xffff);
    }
  }
}
template <bool NEW = false>
static void mma16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (NEW) c[0] = c[1] = c[2] = c[3] = 0.f;
  mma(c, exchange({a0, a1, a2, a3, b0, b1}), from_half);
}
template <bool NEW = false>
static void mma_exact(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (NEW) c[0] = c[1] = c[2] = c[3] = 0.f;
  mma(c, exchange({a0, a1, a2, a3, b0, b1}), from_exact);
}
// The fragments of mma.m16n8k32 with bytes: A and B are their types.
template <class A, class B>
static void mma_of_bytes(int (&c)[4], const Words* all) {
  for (int i = 0; i < 4; i++) {
    const int row = lane_of() / 4 + 8 * (i / 2), column = lane_of() % 4 * 2 + i % 2;
    for (int k = 0; k < 32; k++) {
      const u32 a = all[row % 8 * 4 + k % 16 / 4].word[row / 8 + 2 * (k / 16)] >> (k % 4 * 8) & 255;
      const u32 b = all[column * 4 + k % 16 / 4].word[4 + k / 16] >> (k % 4 * 8) & 255;
      c[i] += (int)(A)a * (int)(B)b;
    }
  }
}
template <bool NEW = false>
static void mma_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (NEW) c[0] = c[1] = c[2] = c[3] = 0;
  mma_of_bytes<u8, signed char>(c, exchange({a0, a1, a2, a3, b0, b1}));
}
static void mma_signed(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma_of_bytes<signed char, u8>(c, exchange({a0, a1, a2, a3, b0, b1}));
}
static void mma_unsigned(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma_of_bytes<u8, u8>(c, exchange({a0, a1, a2, a3, b0, b1}));
}
static int largest(int x) {
  const Words* all = exchange({(u32)x});
  for (int i = 0; i < 32; i++) x = max(x, (int)all[i].word[0]);
  return x;
}
static int __reduce_max_sync(u32, int x) { return largest(x); }
static int __reduce_min_sync(u32, int x) { return ~largest(~x); }
static u32 transposed(u32 x) {
  const Words* all = exchange({x});
  const int row = lane_of() / 4, column = lane_of() % 4 * 2;
  auto at = [&](int r, int c) { return all[r * 4 + c / 2].word[0] >> (c % 2 * 16) & 0xffff; };
  return at(column, row) | at(column + 1, row) << 16;
}

// ---- shared memory
alignas(128) static u8 bytes[256 * 1024];
static int size;  // of the CTA's
static u8* shared_memory() { return bytes; }
static u32 __cvta_generic_to_shared(const void* p) { return (u32)((const u8*)p - bytes); }
static u8* place(u32 address, int width) {
  if (address % width || (int)address + width > size) {
    fprintf(stderr, "%d bytes at %u of %d\n", width, address, size);
    abort();
  }
  return bytes + address;
}
static u32 load_u32(u32 a) { u32 x; memcpy(&x, place(a, 4), 4); return x; }
static u32 load_u16(u32 a) { u16 x; memcpy(&x, place(a, 2), 2); return x; }
static u32 load_u8(u32 a) { return *place(a, 1); }
static void load64(u32& x, u32& y, u32 a) { memcpy(&x, place(a, 8), 4), memcpy(&y, bytes + a + 4, 4); }
static void store_float(u32 a, float x) { memcpy(place(a, 4), &x, 4); }
static void store_u16(u32 a, u32 x) { const u16 half = (u16)x; memcpy(place(a, 2), &half, 2); }
static void load128(u32 (&x)[4], u32 a) { memcpy(x, place(a, 16), 16); }
static void load_words(u32 (&x)[1], u32 a) { x[0] = load_u32(a); }
static void load_words(u32 (&x)[2], u32 a) { load64(x[0], x[1], a); }
static void load_words(u32 (&x)[4], u32 a) { load128(x, a); }
static void store64(u32 a, u32 x, u32 y) { memcpy(place(a, 8), &x, 4), memcpy(bytes + a + 4, &y, 4); }
static void store128(u32 a, u32 x, u32 y, u32 z, u32 w) { place(a, 16), store64(a, x, y), store64(a + 8, z, w); }
static void ldsm(u32 (&r)[4], u32 a) {
  place(a, 16);
  const Words* all = exchange({a});
  for (int i = 0; i < 4; i++) memcpy(&r[i], bytes + all[8 * i + lane_of() / 4].word[0] + lane_of() % 4 * 4, 4);
}
static void ldsm_t(u32 (&r)[4], u32 a) {
  place(a, 16);
  const Words* all = exchange({a});
  const int row = lane_of() % 4 * 2, column = lane_of() / 4 * 2;
  for (int i = 0; i < 4; i++)
    r[i] = load_u16(all[8 * i + row].word[0] + column) | load_u16(all[8 * i + row + 1].word[0] + column) << 16;
}
static const u8* opaque(const u8* p) { return p; }
static u32 opaque(u32 x) { return x; }
static void copy16(u32 to, const u8* from) { self->open.push_back([=] { memcpy(place(to, 16), from, 16); }); }
static void copy16_if(u32 to, const u8* from, bool there) {
  self->open.push_back([=] { there ? memcpy(place(to, 16), from, 16) : memset(place(to, 16), 0, 16); });
}
static void commit() { self->groups.push_back(std::move(self->open)), self->open.clear(); }
template <int N> static void wait() {
  for (; self->groups.size() > N; self->groups.pop_front())
    for (const auto& copy : self->groups.front()) copy();
}

// ---- device memory
static void wait_for_previous() {}
static void admit_next() {}
static int atomicAdd(int* to, int x) { const int before = *to; *to += x; return before; }
static int atomicMin(int* to, int x) { const int before = *to; *to = min(before, x); return before; }
static int atomicCAS(int* to, int wanted, int x) { const int before = *to; if (before == wanted) *to = x; return before; }
static void __threadfence() {}
template <class T> static T __ldcg(const T* from) { return *from; }
template <class T> static T __ldg(const T* from) { return *from; }
