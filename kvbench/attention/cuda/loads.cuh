// ---- loads: global memory to a slot of the ring, 16 bytes a thread of the team at a time -------------------------
// Copies UNITS units of 16 bytes from `from`: unit c, the i-th of this thread, goes to place(i, c). A thread `id` of
// the team takes every (32 TEAM)-th.
template <int UNITS, class Fn>
__device__ __forceinline__ void spread(const u8* from, int id, Fn&& place) {
  const u8* mine = opaque(from + id * 16);
#pragma unroll
  for (int i = 0; i < (UNITS + 32 * TEAM - 1) / (32 * TEAM); i++) {
    const int c = i * 32 * TEAM + id;
    if (UNITS % (32 * TEAM) == 0 || c < UNITS) copy16(place(i, c), mine + i * 512 * TEAM);
  }
}

// Copies BYTES contiguous bytes (parameters) as they are.
template <int BYTES>
__device__ __forceinline__ void copy_run(u32 to, const u8* from, int id) {
  spread<BYTES / 16>(from, id, [&](int i, int c) { return to + c * 16; });
}

// Copies 32 exact tokens from token `begin` of a phase of `count` on; those outside of the phase become zeros (a NaN
// times the weight 0 of a hidden token would be NaN).
__device__ __forceinline__ void copy_exact(u32 slot, const u8* from, int begin, int count, int id) {
  constexpr int UNITS = D / 8;
#pragma unroll
  for (int i = 0; i < (UNITS + TEAM - 1) / TEAM; i++) {
    const int c = i * 32 * TEAM + id, token = begin + c / UNITS;
    const bool there = token >= 0 && token < count;
    if (UNITS % TEAM == 0 || c < 32 * UNITS)
      copy16_if(slot + wide(c / UNITS, c % UNITS), from + (there ? (i64)token * (2 * D) + c % UNITS * 16 : 0), there);
  }
}

// Copies ROWS rows of a plane of key words (2 D bytes each) or D rows of a plane of value words (2 ROWS bytes each),
// permuted for ldmatrix; rows of 16 bytes need no permutation.
template <bool KEYS, int BITS, int ROWS>
__device__ __forceinline__ void copy_plane(u32 slot, const u8* from, int id) {
  constexpr int UNITS = KEYS ? D / 8 : ROWS / 8, BYTES = ROWS * D * 2;  // UNITS: of 16 bytes in a row
  if constexpr (UNITS == 1) {
    copy_run<BYTES>(slot, from, id);
  } else if constexpr (TEAM == 1 && 32 % UNITS == 0 && (PERMUTED || !KEYS)) {
    // the swizzle of a thread's units: constant for values, and for keys it changes by a constant from unit to unit
    const u32 first = slot + (KEYS ? wide(id / UNITS, id % UNITS) : narrow<BITS>(id / UNITS, id % UNITS));
    constexpr int STEP = 32 / UNITS;  // rows from one unit of a thread to its next
    u32 turned[KEYS ? 8 / STEP : 1];
#pragma unroll
    for (int i = 0; i < (KEYS ? 8 / STEP : 1); i++)
      turned[i] = slot + (KEYS ? (first - slot) ^ ((i * STEP) << 4) : first - slot);
    spread<BYTES / 16>(from, id, [&](int i, int c) { return turned[KEYS ? i % (8 / STEP) : 0] + i * 512; });
  } else {
    spread<BYTES / 16>(from, id, [&](int i, int c) {
      return slot + (KEYS ? wide(c / UNITS, c % UNITS) : narrow<BITS>(c / UNITS, c % UNITS));
    });
  }
}

// Copies the planes of a tile's words.
template <bool KEYS, int BITS>
__device__ __forceinline__ void copy_codes(u32 slot, const u8* first, const u8* second, i64 tile, int id) {
  copy_plane<KEYS, BITS, rows_of(BITS)>(slot, first + tile * plane_bytes(BITS), id);
  constexpr int SECOND = second_bytes(BITS);
  if constexpr (SECOND > 0)
    copy_plane<KEYS, BITS, SECOND / (2 * D)>(slot + first_room(KEYS, BITS), second + tile * SECOND, id);
}

// Starts the copies of item PART of a tile of phase P: its keys (one item, or runs of 32 exact ones), then its values.
// ph, r: the phase's buffers and line of the table; bh: (row, KV head); tile: counted from the phase's first; slot:
// where to; id: thread of the team.
template <int P, int PART>
__device__ __forceinline__ void issue(const Phase& ph, const Range& r, i64 bh, int tile, u32 slot, int id) {
  using S = Shape<P>;
  if constexpr (PART < S::KI) {
    if constexpr (S::KP) {
      const i64 t = bh * ph.kcap + r.first_k / 128 + tile;
      copy_codes<true, S::KB>(slot, ph.kw, ph.kw2, t, id);
      if constexpr (WINDOWS[P] > 0) {
        const int number = Window<P>::holding((r.first_k / 128 + tile) * 128);
        const i64 head = bh * ph.kgroups * (2 * D);
        copy_groups(slot + S::KCODES, ph.ks + head, number, ph.kgroups, id);
        copy_groups(slot + S::KCODES + S::KPARAM, ph.km + head, number, ph.kgroups, id);
      } else {
        copy_run<S::KPARAM>(slot + S::KCODES, ph.ks + t * S::KPARAM, id);
        if constexpr (!S::KF) copy_run<S::KPARAM>(slot + S::KCODES + S::KPARAM, ph.km + t * S::KPARAM, id);
        if constexpr (S::KX) copy_run<S::KCROSS>(slot + S::KCODES + 2 * S::KPARAM, ph.kx + t * S::KCROSS, id);
      }
    } else {
      const int begin = S::VP ? tile * 128 + PART * 32 - (r.first_v & 127) : tile * 32;
      copy_exact(slot, ph.kw + (bh * ph.kcap + r.first_k) * (2 * D), begin, r.count, id);
    }
  } else {
    if constexpr (S::VP) {
      const i64 t = bh * ph.vcap + r.first_v / 128 + tile;
      copy_codes<false, S::VB>(slot, ph.vw, ph.vw2, t, id);
      copy_run<S::VPARAM>(slot + S::VCODES, ph.vs + t * S::VPARAM, id);
      if constexpr (!S::VF) copy_run<S::VPARAM>(slot + S::VCODES + S::VPARAM, ph.vm + t * S::VPARAM, id);
      if constexpr (S::VX) copy_run<S::VCROSS>(slot + S::VCODES + 2 * S::VPARAM, ph.vx + t * S::VCROSS, id);
    } else {
      const int begin = S::KP ? tile * 128 + (PART - S::KI) * 32 - (r.first_k & 127) : tile * 32;
      copy_exact(slot, ph.vw + (bh * ph.vcap + r.first_v) * (2 * D), begin, r.count, id);
    }
  }
}
