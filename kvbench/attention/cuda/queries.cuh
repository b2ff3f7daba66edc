// ---- queries ---------------------------------------------------------------------------------------------------------
// Eight query rows as a second operand: lane (g, t) holds channels 16 a + 8 j + {2t, 2t + 1} of row g.
__device__ __forceinline__ void fetch_queries(u32 (&x)[KS][2], const Args& args, int b, int head, int row0, int rows,
                                              int lane) {
  const int t = lane & 3, g = lane >> 2, r = (row0 + (ONECOL ? g >> 1 : g)) / SLOTS;
  const bool there = ONECOL ? !(g & 1) && r < rows : r < rows;
  const u16* q = args.query;
  if (there)
    q += b * args.stride_b + (head * args.group + r / args.qlen) * args.stride_h + r % args.qlen * args.stride_q;
#pragma unroll
  for (int a = 0; a < KS; a++)
#pragma unroll
    for (int j = 0; j < 2; j++) x[a][j] = there ? *(const u32*)(q + 16 * a + 8 * j + 2 * t) : 0u;
}

// Normalises block N of 8 rows by a power of two to at most 1, so that no product with a scale leaves fp16, and stores them as fp16
// and (for exact bf16 keys) as bf16.
template <int N>
__device__ __forceinline__ void take_queries(State& st, const u32 (&x)[KS][2], const Args& args, u8* to, bool store,
                                             int lane) {
  const int t = lane & 3;
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
  const float shrink = __uint_as_float((u32)(127 - exponent) << 23),
              grow = __uint_as_float((u32)(127 + exponent) << 23);
  if (store) {
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
#pragma unroll
  for (int c = 0; c < NC; c++) {
    st.sl[N][c] = __shfl_sync(~0u, grow, (2 * t + c) * 4) * args.scale;
    st.top[N][c] = -1e30f;
    st.total[N][c] = st.low[N][c] = 0.f;
  }
#pragma unroll
  for (int a = 0; a < KS; a++) st.acc[N][a][0] = st.acc[N][a][1] = st.acc[N][a][2] = st.acc[N][a][3] = 0.f;
}

