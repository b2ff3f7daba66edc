// ---- loads: words of a tile to the warp's shared memory, permuted for ldmatrix ---------------------------------------
// Where 16-byte unit u of row r lies, in bytes: rows of keys have 2 D bytes, those of values 2 WORDROWS.
__device__ __forceinline__ int key_place(int r, int u) { return r * (2 * D) + ((u ^ (r & 7)) << 4); }
__device__ __forceinline__ int value_place(int r, int u) {
  constexpr int UNITS = WORDROWS / 8;  // 2 or 4
  return r * (2 * WORDROWS) + ((u ^ (UNITS == 2 ? r >> 2 & 1 : r >> 1 & 3)) << 4);
}
template <int ROWS_, int UNITS, class Place>
__device__ __forceinline__ void copy_rows(u32 to, const u8* from, int lane, Place&& place) {
#pragma unroll
  for (int i = 0; i < ROWS_ * UNITS / 32; i++) {
    const int c = i * 32 + lane;
    copy16(to + place(c / UNITS, c % UNITS), from + c * 16);
  }
}
__device__ __forceinline__ void copy_keys(const Args& args, u32 warp, i64 bh, int tile, int lane) {
  const i64 at = bh * args.key_tiles + tile;
  copy_rows<WORDROWS, D / 8>(warp + KEYS_AT, args.kw + at * KEY_PLANE, lane, key_place);
  if constexpr (PLANES == 2) copy_rows<8, D / 8>(warp + KEYS_AT + KEY_PLANE, args.kw2 + at * SECOND, lane, key_place);
}
__device__ __forceinline__ void copy_values(const Args& args, u32 warp, i64 b, i64 bh, int tile, int lane) {
  const i64 at = bh * args.value_tiles + tile, token = (b * args.value_tiles + tile) * 128;
  copy_rows<D, WORDROWS / 8>(warp + VALUES_AT, args.vw + at * VALUE_PLANE, lane, value_place);
  if constexpr (PLANES == 2)
    copy_rows<D, 1>(warp + VALUES_AT + VALUE_PLANE, args.vw2 + at * SECOND, lane, [](int r, int) { return r * 16; });
  copy16(warp + PARAMS_AT + lane * 16,
         (const u8*)((lane < 16 ? args.value_scale : args.value_offset) + token) + (lane & 15) * 16);
}
