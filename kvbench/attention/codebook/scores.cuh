// ---- a tile of 128 packed tokens -------------------------------------------------------------------------------------
struct State {
  float top[ROWS], total[ROWS], bias[ROWS];  // total and bias: of the lane's tokens
  float extra[ROWS][OWN];                    // channels lane * OWN ...: outliers, tokens in full precision
  float acc[D / 16][ROWS == 1 ? 2 : 4];      // sums of weights times levels, as results of products
};
// Scores of the tile's tokens without outliers, times the query's power of two, to shared memory.
__device__ __forceinline__ void dense_scores(const u8* memory, u8* own, u32 own_at, int lane) {
  const Levels levels = of_thread(*(const Levels*)(memory + LEVELS_AT), ((const u32*)(own + SUMS_AT))[lane]);
  float s[8][4];
#pragma unroll
  for (int m = 0; m < 8; m++) s[m][0] = s[m][1] = s[m][2] = s[m][3] = 0.f;
  const int matrix = lane >> 3, r = lane & 7;
#pragma unroll 1
  for (int u = 0; u < STEPS; u++) {
    u32 x[12];
#pragma unroll
    for (int i = 0; i < 3; i++) {
      const uint4 y = *(const uint4*)(memory + ((u * 3 + i) * 32 + lane) * 16);
      x[4 * i] = y.x, x[4 * i + 1] = y.y, x[4 * i + 2] = y.z, x[4 * i + 3] = y.w;
    }
    u32 q[SETS][2];
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      const uint2 y = *(const uint2*)(own + TURNED_AT + ((set * (STEPS / 2) + u / 2) * 32 + lane) * 16 + (u & 1) * 8);
      q[set][0] = y.x, q[set][1] = y.y;
    }
    u32 single[4] = {0, 0, 0, 0};
    if constexpr (PLANES == 2) ldsm(single, own_at + KEYS_AT + KEY_PLANE + key_place(r, u + (matrix & 1) * STEPS));
#pragma unroll
    for (int part = 0; part < WORDROWS / 16; part++) {
      u32 words[4];  // rows g, g + 8 of the first half, then of the second
      ldsm(words, own_at + KEYS_AT + key_place(16 * part + r + (matrix & 1) * 8, u + (matrix >> 1) * STEPS));
      u32 first[2][FIELDS], second[2][FIELDS];
      if constexpr (BITS < 4) {
        const u32 one = interleaved(single[0]), two = interleaved(single[1]);
        unpack_interleaved<0>(levels, interleaved(words[0]), one, first[0]);
        unpack_interleaved<1>(levels, interleaved(words[1]), one, first[1]);
        unpack_interleaved<0>(levels, interleaved(words[2]), two, second[0]);
        unpack_interleaved<1>(levels, interleaved(words[3]), two, second[1]);
      } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          unpack_fields(levels, words[h], first[h]);
          unpack_fields(levels, words[2 + h], second[h]);
        }
      }
#pragma unroll
      for (int f = 0; f < FIELDS; f++) {
        u32 a[2], b[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          a[h] = fma2(first[h][f], x[6 * h], fma2(second[h][f], x[6 * h + 1], x[6 * h + 2]));
          b[h] = fma2(first[h][f], x[6 * h + 3], fma2(second[h][f], x[6 * h + 4], x[6 * h + 5]));
        }
        const int m = f * (WORDROWS / 16) + part;
        mma16(s[m], a[0], a[1], b[0], b[1], q[m * PACKS / 8][0], q[m * PACKS / 8][1]);
      }
    }
  }
  const int g = lane >> 2, t = lane & 3;
  float* scores = (float*)(own + SCORES_AT);
#pragma unroll
  for (int m = 0; m < 8; m++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int n = 2 * t + j, row = n % PACKS;
      if (n / PACKS == m % (8 / PACKS) && row < ROWS)
        scores[row * 128 + 16 * m + g] = s[m][j], scores[row * 128 + 16 * m + g + 8] = s[m][2 + j];
    }
}
