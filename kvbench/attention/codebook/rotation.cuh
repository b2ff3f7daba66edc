// ---- rotation --------------------------------------------------------------------------------------------------------
// Cosine and sine of frequency j at a position.
__device__ __forceinline__ void angle(const Args& args, int position, int j, float& cos, float& sin) {
  const float *near = args.fine + position % 128 * D + j, *far = args.coarse + (i64)(position / 128) * D + j;
  const float c = __ldg(near), s = __ldg(near + HALF), C = __ldg(far), S = __ldg(far + HALF);
  cos = C * c - S * s, sin = S * c + C * s;
}
// Constants by which levels become rotated keys: of step u, for word rows g and g + 8 of 16 tokens that begin at angle
// 0, six pairs each. first = L1 * A1 + L2 * B1 + C1, second = L1 * A2 + L2 * B2 + C2.
__device__ __forceinline__ void write_turns(const Args& args, u8* memory, i64 bh, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const u16 *scale = args.key_scale + bh * D, *offset = args.key_offset + bh * D;
  for (int u = warp; u < STEPS; u += WARPS) {
    u32 x[12];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float v[2][6];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int j = 8 * u + 2 * t + i;
        const float s1 = float_of_half(scale[j]), s2 = float_of_half(scale[j + HALF]),
                    o1 = float_of_half(offset[j]), o2 = float_of_half(offset[j + HALF]);
        float c = 1.f, s = 0.f;
        if (ROTATE) c = args.fine[(g + 8 * h) * D + j], s = args.fine[(g + 8 * h) * D + j + HALF];
        v[i][0] = s1 * c, v[i][1] = -s2 * s, v[i][2] = o1 * c - o2 * s;
        v[i][3] = s1 * s, v[i][4] = s2 * c, v[i][5] = o1 * s + o2 * c;
      }
#pragma unroll
      for (int i = 0; i < 6; i++) x[6 * h + i] = half2_of(v[0][i], v[1][i]);
    }
#pragma unroll
    for (int i = 0; i < 3; i++)
      *(uint4*)(memory + ((u * 3 + i) * 32 + lane) * 16) = make_uint4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }
  u32* small = (u32*)(memory + TURNS);  // [16][HALF] cosine and sine, for outliers
  for (int i = warp * 32 + lane; i < 16 * HALF; i += WARPS * 32)
    small[i] = ROTATE ? half2_of(args.fine[i / HALF * D + i % HALF], args.fine[i / HALF * D + i % HALF + HALF])
                      : half2_of(1.f, 0.f);
}
// Turns the queries back by the positions at which each 16 tokens of a tile begin, and stores them as second operands:
// column g of set s is row g % PACKS, for block s * 8 / PACKS + g / PACKS of 16 tokens.
__device__ __forceinline__ void turn_queries(const Args& args, const u8* memory, u8* own, int position, int lane) {
  const int g = lane >> 2, t = lane & 3, row = g % PACKS;
  const float* q = (const float*)(memory + QUERY_AT) + row * D;
#pragma unroll 1
  for (int set = 0; set < SETS; set++) {
    const int at = position + 16 * (set * (8 / PACKS) + g / PACKS);
    const float *near = args.fine + at % 128 * D + 2 * t, *far = args.coarse + (i64)(at / 128) * D + 2 * t;
#pragma unroll
    for (int u = 0; u < STEPS; u += 2) {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int j = 8 * (u + i);
        float2 first = make_float2(0.f, 0.f), second = first;
        if (row < ROWS) first = *(const float2*)(q + j + 2 * t), second = *(const float2*)(q + HALF + j + 2 * t);
        if (ROTATE) {
          const float2 c = __ldg((const float2*)(near + j)), s = __ldg((const float2*)(near + j + HALF)),
                       C = __ldg((const float2*)(far + j)), S = __ldg((const float2*)(far + j + HALF));
          const float2 cos = make_float2(C.x * c.x - S.x * s.x, C.y * c.y - S.y * s.y),
                       sin = make_float2(S.x * c.x + C.x * s.x, S.y * c.y + C.y * s.y);
          x[2 * i] = half2_of(first.x * cos.x + second.x * sin.x, first.y * cos.y + second.y * sin.y);
          x[2 * i + 1] = half2_of(second.x * cos.x - first.x * sin.x, second.y * cos.y - first.y * sin.y);
        } else {
          x[2 * i] = half2_of(first.x, first.y), x[2 * i + 1] = half2_of(second.x, second.y);
        }
      }
      *(uint4*)(own + TURNED_AT + ((set * (STEPS / 2) + u / 2) * 32 + lane) * 16) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}
// Channel d of the query of a row, turned back by the position of a token of the tile.
__device__ __forceinline__ float turned(const u8* memory, const u8* own, int row, int token, int d) {
  const int block = token >> 4, j = d % HALF, u = j >> 3;
  const int column = block % (8 / PACKS) * PACKS + row, set = block / (8 / PACKS);
  const u8* at = own + TURNED_AT + ((set * (STEPS / 2) + u / 2) * 32 + column * 4 + (j >> 1 & 3)) * 16 + (u & 1) * 8 +
                 (j & 1) * 2;
  const float first = float_of_half(*(const u16*)at), second = float_of_half(*(const u16*)(at + 4));
  const u32 x = ((const u32*)(memory + TURNS))[(token & 15) * HALF + j];
  const float c = float_of_half(x), s = float_of_half(x >> 16);
  return d < HALF ? first * c + second * s : second * c - first * s;
}
