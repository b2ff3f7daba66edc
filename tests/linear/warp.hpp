// The instructions of kvbench/linear/cuda/instructions.cuh in plain C++: a thread of the machine for each of a CTA's.
// Copies into shared memory are made as late as the kernel allows, by arrive(), so that one awaited too late shows.
#include <barrier>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct int3_ { int x, y, z; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
using std::min;

alignas(1024) static char memory[256 * 1024];
static int3_ gridDim;
thread_local int3_ blockIdx, threadIdx;
struct Copy { u32 to; const void* from; };
thread_local std::vector<Copy> open_group;
thread_local std::deque<std::vector<Copy>> groups_;

static std::unique_ptr<std::barrier<>> cta_barrier;
static std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
static void __syncthreads() { cta_barrier->arrive_and_wait(); }
static void __syncwarp() { warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }

static u32 address(const void* at) { return (u32)((const char*)at - memory); }
static float as_float(u32 bits) { float f; memcpy(&f, &bits, 4); return f; }
static u64 read_once() { return 0; }
static void wait_for_previous() {}
static void copy16(u32 to, const void* from) { open_group.push_back({to, from}); }
static void copy_weights(u32 to, const void* from, u64) { open_group.push_back({to, from}); }
static uint4 load_weights16(const void* from, u64) { uint4 v; memcpy(&v, from, 16); return v; }
static void commit() { groups_.push_back(open_group); open_group.clear(); }
template <int N> static void arrive() {
    while (groups_.size() > N) {
        for (const Copy& c : groups_.front()) memcpy(memory + c.to, c.from, 16);
        groups_.pop_front();
    }
}
static uint4 load16(u32 at) { uint4 v; memcpy(&v, memory + at, 16); return v; }
static uint2 load8(u32 at) { uint2 v; memcpy(&v, memory + at, 8); return v; }

static float half_number(u16 h) {
    const int e = h >> 10 & 31, m = h & 1023;
    const float f = e ? std::ldexp(1024.f + m, e - 25) : std::ldexp((float)m, -24);
    return h & 0x8000 ? -f : f;
}
static float from_half(u32 bits) { return half_number((u16)bits); }
#if BF16
static float number(u16 bits) { return as_float((u32)bits << 16); }
static u16 rounded(float f) { u32 u; memcpy(&u, &f, 4); return (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16); }
#define MAGIC 0x43004300u
#define ONES 0x3f803f80u
#define MORE 0.0f
#else
static float number(u16 bits) { return half_number(bits); }
static u16 rounded(float f) {  // to normal numbers
    u32 u; memcpy(&u, &f, 4);
    const u32 sign = u >> 16 & 0x8000;
    u = (u & 0x7fffffff) + 0xfff + (u >> 13 & 1);
    return (u16)(sign | (u < 0x38800000 ? 0 : (u - 0x38000000) >> 13));
}
#define MAGIC 0x64006400u
#define ONES 0x3c003c00u
#define MORE 896.0f
#endif
static u32 two_codes(u32 word) { return (word & 0x000f000f) | MAGIC; }

struct Fragments { u32 a[32][4], b[32][2]; };
static std::vector<Fragments> exchange;
// As the manual of PTX defines the fragments of mma.m16n8k16.
static void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const int lane = threadIdx.x % 32;
    Fragments& f = exchange[threadIdx.x / 32];
    const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    memcpy(f.a[lane], a, 16);
    memcpy(f.b[lane], b, 8);
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const u32 x = f.a[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)], y = f.b[column * 4 + k % 8 / 2][k / 8];
            c[i] += number((u16)(k % 2 ? x >> 16 : x)) * number((u16)(k % 2 ? y >> 16 : y));
        }
    }
    __syncwarp();
}
