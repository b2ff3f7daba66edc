// ---- instructions --------------------------------------------------------------------------------------------------
// "exact" in a name: in the dtype of exact segments, bf16 where BF16, else fp16.

// c += a b: 16 x 16 of fp16 by 16 x 8, accumulated in fp32; with NEW c = a b.
#define MMA(TYPE)                                                                                                \
  if constexpr (NEW)                                                                                             \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                          \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"                                \
                 : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])                                                \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));                              \
  else                                                                                                           \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                          \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                    \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
template <bool NEW = false>
__device__ __forceinline__ void mma16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  MMA("f16");
}
// The same in the dtype of exact segments.
template <bool NEW = false>
__device__ __forceinline__ void mma_exact(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
  MMA("bf16");
#else
  MMA("f16");
#endif
}
// c += a b: 16 x 32 bytes by 32 x 8, accumulated in 32-bit integers.
#define MMA_BYTES(A, B)                                                                              \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." A "." B                                      \
               ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                          \
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                      \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
// Unsigned by signed; with NEW c = a b.
template <bool NEW = false>
__device__ __forceinline__ void mma_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (NEW) c[0] = c[1] = c[2] = c[3] = 0;
  MMA_BYTES("u8", "s8");
}
// Signed by unsigned, and both unsigned.
__device__ __forceinline__ void mma_signed(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  MMA_BYTES("s8", "u8");
}
__device__ __forceinline__ void mma_unsigned(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  MMA_BYTES("u8", "u8");
}
// Four 8 x 8 blocks of 16-bit numbers from shared memory; each lane gives the address of one row.
__device__ __forceinline__ void ldsm(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// The same, each block transposed.
__device__ __forceinline__ void ldsm_t(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// An 8 x 8 block that lies in the registers of the warp, transposed.
__device__ __forceinline__ u32 transposed(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// Two fp16 numbers an instruction: product, fused multiply-add, and two floats as a pair (low half first).
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 c;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// The larger of two pairs of magnitudes, of which the first are not negative.
__device__ __forceinline__ u32 most_of(u32 a, u32 b) {
  u32 c;
  asm("{.reg .b32 t; abs.f16x2 t, %2; max.f16x2 %0, %1, t;}" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
__device__ __forceinline__ u32 half2_of(float low, float high) {
  u32 c;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(high), "f"(low));
  return c;
}
// Two floats as a pair in the dtype of exact segments.
__device__ __forceinline__ u32 exact2_of(float low, float high) {
#if BF16
  u32 c;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(high), "f"(low));
  return c;
#else
  return half2_of(low, high);
#endif
}
// Bits of `a` where `mask` has ones, else of `b`, in one instruction, which the compiler does not take apart.
__device__ __forceinline__ u32 chosen(u32 mask, u32 a, u32 b) {
  u32 c;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(c) : "r"(mask), "r"(a), "r"(b));
  return c;
}
// Four bytes of a pair of registers, by nibbles of 0 to 7. (__byte_perm first clears the fourth bit of each nibble.)
__device__ __forceinline__ u32 chosen_bytes(u32 a, u32 b, u32 selector) {
  u32 c;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(selector));
  return c;
}
// Two e4m3 numbers, bytes 0 and 1 of a register or (UPPER) bytes 2 and 3, as fp16.
template <bool UPPER>
__device__ __forceinline__ u32 halves_of_e4m3(u32 x) {
#if __CUDA_ARCH__ >= 890
  u32 y;
  if constexpr (UPPER) asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, b;}" : "=r"(y) : "r"(x));
  else asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a;}" : "=r"(y) : "r"(x));
  return y;
#else
  // s eeee mmm in the upper byte of a half; one place to the right, it is the number times 2^-8
  const u32 y = __byte_perm(x, 0, UPPER ? 0x3424 : 0x1404);
  return mul2((y & 0x80008000u) | ((y >> 1) & 0x3f803f80u), 0x5c005c00u);
#endif
}
// 2^x of an integer.
__device__ __forceinline__ float pow2_of(int x) { return __uint_as_float((u32)(127 + x) << 23); }
// x >> N by a multiplication: for code that is bound by shifts and logic, which have a unit of their own. (This file is
// also part of the kernel for codebooks, where BITS is a macro.)
template <int N>
__device__ __forceinline__ u32 divided(u32 x) {
  u32 y;
  asm("mul.hi.u32 %0, %1, %2;" : "=r"(y) : "r"(x), "n"(1u << (32 - N)));
  return y;
}
// The low half of a register as a float, from fp16.
__device__ __forceinline__ float float_of_half(u32 x) {
  float y;
  asm("{.reg .b16 h, t; mov.b32 {h, t}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(x));
  return y;
}
// The upper half likewise, without a shift.
__device__ __forceinline__ float float_of_upper(u32 x) {
  float y;
  asm("{.reg .b16 t, h; mov.b32 {t, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(x));
  return y;
}
// The low half from the dtype of exact segments.
__device__ __forceinline__ float float_of_exact(u32 x) {
#if BF16
  return __uint_as_float(x << 16);
#else
  return float_of_half(x);
#endif
}
// 2^x, 1/x and 1/sqrt(x) by the special function unit, right to some 1e-7.
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float inverse_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rsqrt_of(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The largest integer of a warp's lanes; floats as integers in the same order, and back.
__device__ __forceinline__ int largest(int x) { return __reduce_max_sync(~0u, x); }
__device__ __forceinline__ int in_order(float x) {
  const int y = (int)__float_as_uint(x);
  return y ^ (y >> 31 & 0x7fffffff);
}
__device__ __forceinline__ float float_in_order(int x) { return __uint_as_float((u32)(x ^ (x >> 31 & 0x7fffffff))); }
// 16 bytes from global to shared memory without waiting; past L1, with a prefetch of 128 bytes into L2.
__device__ __forceinline__ void copy16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
// The same, or 16 zero bytes.
__device__ __forceinline__ void copy16_if(u32 to, const u8* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}
// Copies so far are a group; wait<N> waits until all but the newest N groups are here.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Loads from shared memory of 4, 2, 1, 8 and 16 bytes.
__device__ __forceinline__ u32 load_u32(u32 a) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(a));
  return x;
}
__device__ __forceinline__ u32 load_u16(u32 a) {
  u16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(a));
  return x;
}
__device__ __forceinline__ u32 load_u8(u32 a) {
  u32 x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(a));
  return x;
}
__device__ __forceinline__ void load64(u32& x, u32& y, u32 a) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "r"(a));
}
__device__ __forceinline__ void load128(u32 (&x)[4], u32 a) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(a));
}
// Of one word, the assembler neither joins several nor moves them to where registers are scarce.
__device__ __forceinline__ void load_words(u32 (&x)[1], u32 a) {
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x[0]) : "r"(a));
}
__device__ __forceinline__ void load_words(u32 (&x)[2], u32 a) { load64(x[0], x[1], a); }
__device__ __forceinline__ void load_words(u32 (&x)[4], u32 a) { load128(x, a); }
// Stores to shared memory.
__device__ __forceinline__ void store_float(u32 a, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory");
}
// The low half of a register.
__device__ __forceinline__ void store_u16(u32 a, u32 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"((u16)x) : "memory");
}
__device__ __forceinline__ void store64(u32 a, u32 x, u32 y) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store128(u32 a, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// Waits for the other warps of a group: a barrier of its own, numbered from 1 (0 is the CTA's).
template <int THREADS>
__device__ __forceinline__ void barrier(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}
// Hides from the compiler where an address comes from: it then keeps one for a thread's whole share, and each copy
// needs no arithmetic of its own.
__device__ __forceinline__ const u8* opaque(const u8* p) {
  asm volatile("" : "+l"(p));
  return p;
}
// The same for a number that is then kept, and not computed again for each use.
__device__ __forceinline__ u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
// Waits until the kernel before this one has ended, should this one have been launched early (sm_90 and later).
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
// The CTA's dynamic shared memory.
__device__ __forceinline__ u8* shared_memory() {
  extern __shared__ __align__(128) u8 memory[];
  return memory;
}
