// Instructions of the GPU that CUDA C++ has no name for, and what they work on. tests/linear restates them in plain C++.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

extern __shared__ __align__(1024) char memory[];
__device__ __forceinline__ u32 address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }

// Weights are read once: they need not stay in the L2 cache.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// With a programmatic launch: wait until the kernel before has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Copies of 16 bytes into shared memory, in groups: arrive<N> waits until all but the last N groups are there.
__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_weights(u32 to, const void* from, u64 policy) {
#if HINT == 2
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
#elif HINT == 1
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void arrive() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Loads of weights from global memory.
#if HINT == 2
#define LOAD "ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B"
#else
#define LOAD "ld.global.nc.L1::no_allocate.L2::cache_hint"
#endif
__device__ __forceinline__ uint4 load_weights16(const void* from, u64 policy) {
    uint4 v;
    asm volatile(LOAD ".v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from), "l"(policy));
    return v;
}

__device__ __forceinline__ uint4 load16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

__device__ __forceinline__ uint2 load8(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}

// c += a b for 16 x 16 numbers of the weights and 16 x 8 of x; lane 4 g + t has rows g and g + 8 of c, columns 2 t and
// 2 t + 1.
__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float from_half(u32 bits) {
    float f;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(bits));
    return f;
}
__device__ __forceinline__ u16 rounded(float f) {
    u16 r;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(f));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(f));
#endif
    return r;
}
__device__ __forceinline__ float number(u16 bits) {
#if BF16
    return as_float((u32)bits << 16);
#else
    return from_half(bits);
#endif
}

#if BF16
#define MAGIC 0x43004300u  // two bf16 numbers 128
#define ONES 0x3f803f80u
#define MORE 0.0f          // what the numbers of the codes exceed 128 + code by
#else
#define MAGIC 0x64006400u  // two fp16 numbers 1024
#define ONES 0x3c003c00u
#define MORE 896.0f
#endif
__device__ __forceinline__ u32 two_codes(u32 word) {
    u32 pair;  // (word & 0x000f000f) | MAGIC
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(pair) : "r"(word), "n"(MAGIC));
    return pair;
}
