// ---- windows: keys whose groups of tokens do not fit tiles (LogQuant's W of 42) ------------------------------------
// A tile then has tokens of several groups, at most MET, each with scales of its own. A query row takes SLOTS = MET columns
// of the products, one for each group: column j holds the query scaled for the tile's j-th group, and only that group's
// tokens are visible to it. The columns of a row are merged at the end, like the parts into which tokens are split.

// group of a token, and first token of a group, within the segment: the functions of
// kvbench/cache/kernels/pack_windows.py. The first LONGER groups of a window have LEAST + 1 tokens, the others LEAST.
template <int P>
struct Window {
  static constexpr int W = WINDOWS[P], MOST = PH[P][3] > 0 ? PH[P][3] : 1, COUNT = W > 0 ? (W + MOST - 1) / MOST : 1;
  static constexpr int LEAST = W > 0 ? W / COUNT : 1, LONGER = W > 0 ? W % COUNT : 0;
  static __device__ __forceinline__ int holding(int token) {
    const int window = token / (W > 0 ? W : 1), inside = token - window * W, behind = inside - LONGER * (LEAST + 1);
    return window * COUNT + (behind < 0 ? inside / (LEAST + 1) : LONGER + behind / LEAST);
  }
  static __device__ __forceinline__ int first(int group) {
    const int window = group / COUNT, inside = group - window * COUNT;
    return window * W + inside * LEAST + min(inside, LONGER);
  }
};

// Copies the scales (or minima) of the MET groups of a tile from group `number` on: rows of 2 D bytes, which in
// shared memory lie 2 D + 16 bytes apart, so that the same channels of different groups lie in different banks.
// groups: of the head's buffer, behind which nothing is read.
__device__ __forceinline__ void copy_groups(u32 to, const u8* from, int number, int groups, int id) {
  constexpr int UNITS = D / 8;
#pragma unroll
  for (int i = 0; i < (MET * UNITS + 32 * TEAM - 1) / (32 * TEAM); i++) {
    const int c = i * 32 * TEAM + id, j = c / UNITS, unit = c % UNITS;
    if (MET * UNITS % (32 * TEAM) == 0 || c < MET * UNITS)
      copy16(to + j * (2 * D + 16) + unit * 16, from + (i64)min(number + j, groups - 1) * (2 * D) + unit * 16);
  }
}
