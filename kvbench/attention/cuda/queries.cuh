// ---- queries -------------------------------------------------------------------------------------------------------
// The query rows of eight columns as a second operand: lane (g, t) holds channels 16 a + 8 j + {2t, 2t + 1} of
// column g.
__device__ __forceinline__ void fetch_queries(u32 (&x)[KS][2], const Args& args, int column0, int lane) {
  const int b = blockIdx.y / args.heads, head = blockIdx.y % args.heads;
  const int t = lane & 3, g = lane >> 2, r = (column0 + (ONECOL ? g >> 1 : g)) / SLOTS;
  const bool there = (!ONECOL || !(g & 1)) && r < args.group * args.qlen;
  const u16* q = args.query;
  if (there)
    q += b * args.stride_b + (head * args.group + r / args.qlen) * args.stride_h + r % args.qlen * args.stride_q;
#pragma unroll
  for (int a = 0; a < KS; a++)
#pragma unroll
    for (int j = 0; j < 2; j++) x[a][j] = there ? *(const u32*)(q + 16 * a + 8 * j + 2 * t) : 0u;
}

// Normalises eight rows by a power of two each to at most 1, so that no product with a scale leaves fp16, and stores
// them as fp16 and (for exact bf16 keys) as bf16; `grows` gets the powers of two.
__device__ __forceinline__ void store_queries(const u32 (&x)[KS][2], u8* to, float* grows, int lane) {
  float most = 0.f;
#pragma unroll
  for (int a = 0; a < KS; a++)
#pragma unroll
    for (int j = 0; j < 2; j++)
      most = fmaxf(most, fmaxf(fabsf(float_of_exact(x[a][j])), fabsf(float_of_exact(x[a][j] >> 16))));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  int exponent = (int)((__float_as_uint(most) >> 23) & 255) - 126;  // most < 2^exponent
  exponent = max(-40, min(exponent, 100));
  const float shrink = __uint_as_float((u32)(127 - exponent) << 23);
  if ((lane & 3) == 0) grows[lane >> 2] = __uint_as_float((u32)(127 + exponent) << 23);
#pragma unroll
  for (int a = 0; a < KS; a++) {
    u32 y[2], z[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float low = float_of_exact(x[a][j]) * shrink, high = float_of_exact(x[a][j] >> 16) * shrink;
      y[j] = half2_of(low, high);
      z[j] = exact2_of(low, high);
    }
    *(uint2*)(to + (a * 32 + lane) * 8) = make_uint2(y[0], y[1]);
    if (BF16) *(uint2*)(to + QUERY + (a * 32 + lane) * 8) = make_uint2(z[0], z[1]);
  }
}

// A running softmax that has seen nothing. grows: of the warp's rows.
__device__ __forceinline__ void begin(State& st, const Args& args, const float* grows, int lane) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
#pragma unroll
    for (int c = 0; c < NC; c++) {
      st.sl[n][c] = grows[8 * n + 2 * (lane & 3) + c] * args.scale;
      st.top[n][c] = -1e30f;
      st.total[n][c] = st.low[n][c] = 0.f;
    }
#pragma unroll
    for (int a = 0; a < KS; a++) st.acc[n][a][0] = st.acc[n][a][1] = st.acc[n][a][2] = st.acc[n][a][3] = 0.f;
  }
}
