// ---- 2-bit codes and one query row: softmax and second product (integer.cuh) ---------------------------------------
// Softmax of a tile's scores: brings `parts` but acc to the new maximum.
//   own     which scores are of this lane's tokens (integer_scores)
//   place   640 bytes of shared memory that nobody needs any more
//   p       out: weights times 2^LIFT of the tokens of level g / 2 in words 2t, 2t + 1, 2t + 8, 2t + 9, of each the lower
//           byte's and the upper byte's
//   shrink  out: factor for what was summed before
template <int P>
__device__ __forceinline__ void integer_weights(Parts<P>& parts, const float (&s)[Plan<P>::COUNT], u32 own,
                                                float (&p)[8], float& shrink, u32 place, int lane) {
  using L = Plan<P>;
  constexpr int PITCH = 160;  // bytes from one level to the next: no bank conflicts
  const int g = lane >> 2, t = lane & 3;
  float most = s[0];
#pragma unroll
  for (int i = 1; i < L::COUNT; i++) most = fmaxf(most, s[i]);
  const float top = fmaxf(parts.top, float_in_order(largest(in_order(most))));
  shrink = exp2_of(parts.top - top);
  parts.top = top;
  __syncwarp();  // nobody reads codes any more
#pragma unroll
  for (int i = 0; i < L::COUNT; i++)
    if (!L::WINDOWED || own >> i & 1)
      store_float(place + L::level(i, t) * PITCH + (g + 8 * (i & 1)) * 8 + (t & 1) * 4, exp2_of(s[i] + (LIFT - top)));
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 x[4];
    load128(x, place + (g >> 1) * PITCH + t * 16 + i * 64);
#pragma unroll
    for (int j = 0; j < 4; j++) p[4 * i + j] = __uint_as_float(x[j]);
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += p[i];
  parts.total = parts.total * shrink + sum;
#pragma unroll
  for (int k = 0; k < Parts<P>::VG; k++) parts.low[k] *= shrink;
}

// Adds a tile's weighted values.
template <int P>
__device__ __forceinline__ void integer_values(Parts<P>& parts, const float (&p)[8], float shrink, u32 slot, int lane) {
  using S = Shape<P>;
  constexpr int VG = S::VGROUPS;
  const int g = lane >> 2, t = lane & 3, level = g >> 1;
  const Digits digits(g);
  // scales (0) and minima (1) of tokens with weights 2 i + byte and 2 i + byte + 2, VG of each token
  u32 params[2][4][VG];
#pragma unroll
  for (int second = 0; second < 2; second++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 at = slot + S::VCODES + second * S::VPARAM + ((level + 4 * (i & 1)) * 16 + 2 * t + 8 * (i >> 1)) * VG * 2;
      if constexpr (VG == 1) params[second][i][0] = load_u32(at);
      if constexpr (VG == 2) load64(params[second][i][0], params[second][i][VG - 1], at);
      if constexpr (VG == 4) {
        u32 x[4];
        load128(x, at);
#pragma unroll
        for (int k = 0; k < VG; k++) params[second][i][k] = x[k];
      }
    }
  // of the token with weight i, for group k of channels
  auto param = [&](int second, int i, int k) {
    const int j = (i >> 1 & 1) * VG + k;
    return float_of_half(params[second][(i & 1) + 2 * (i >> 2)][j >> 1] >> (16 * (j & 1)));
  };
#pragma unroll
  for (int k = 0; k < VG; k++) {
    float v[8], most = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      v[i] = p[i] * param(0, i, k);
      most = fmaxf(most, v[i]);
      parts.low[k] += p[i] * param(1, i, k);
    }
    most = fmaxf(__uint_as_float(largest((int)__float_as_uint(most))), 1e-30f);  // none is negative
    const float factor = MOST * inverse_of(most);
    u32 b[4][2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i++) v[i] = fmaf(v[i], factor, LOW_BITS);
      const u32 x = digits.four(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
#pragma unroll
      for (int i = 0; i < 4; i++) b[i][j] = level == i ? x : 0;
    }
    const float unit = most * (1.f / MOST) * (t & 2 ? 0.0625f : 1.f) * (t & 1 ? 0.25f : 1.f);
#pragma unroll
    for (int a = k * (KS / VG); a < (k + 1) * (KS / VG); a++) {
      u32 w[4];
      ldsm(w, slot + narrow<2>(16 * a + (lane & 15), lane >> 4));
      int sums[4];
      each<0, 4>([&](auto tag) {
        constexpr u32 mask = 0x03030303u << (2 * decltype(tag)::value);
        constexpr int i = decltype(tag)::value;
        mma_bytes<i == 0>(sums, w[0] & mask, w[1] & mask, w[2] & mask, w[3] & mask, b[i][0], b[i][1]);
      });
#pragma unroll
      for (int i = 0; i < 2; i++)
        parts.acc[a][i] = parts.acc[a][i] * shrink + (float)(sums[2 * i] * 256 + sums[2 * i + 1]) * unit;
    }
  }
}

// Adds what a phase has given to the warp's softmax of the first query row.
template <int P>
__device__ __forceinline__ void fold(State& st, Parts<P>& parts, int lane) {
  constexpr int VG = Parts<P>::VG;
  // both digits' lanes have the same weights, so bit 2 of the lane's number is left out
  auto all = [&](float x) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1)
      if (lanes != 4) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
  };
  const float top = fmaxf(st.top[0][0], parts.top), old = exp2_of(st.top[0][0] - top), by = exp2_of(parts.top - top);
  st.top[0][0] = top;
  st.total[0][0] = st.total[0][0] * old + all(parts.total) * by;
  st.low[0][0] *= old;
#pragma unroll
  for (int k = 0; k < VG; k++) {
    const float low = all(parts.low[k]) * by;
    if ((lane >> 2) * VG / LOWS == k) st.low[0][0] += low;
  }
#pragma unroll
  for (int a = 0; a < KS; a++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float x = parts.acc[a][i];
      x += __shfl_xor_sync(~0u, x, 1);
      x += __shfl_xor_sync(~0u, x, 2);
      st.acc[0][a][2 * i] = st.acc[0][a][2 * i] * old + x * (by * pow2(-24));
    }
}
