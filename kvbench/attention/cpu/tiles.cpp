// Attention of many queries over runs of tokens in any formats, each query seeing each token for some of its turns.
//
// Tokens are read in blocks that lie in one tile of keys. Splits of blocks are computed apart and merged in a fixed
// order, so threads change no sum. A call can leave its sums to the next one, which then reads further runs: that is
// how a pass sees tokens before and after they are packed.

#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "tiles.hpp"

namespace kvbench {

constexpr int QUERY_ROWS = 192;    // query rows for which a tile is unpacked once
constexpr int SPLIT = 8;          // blocks whose partial result is computed at once
constexpr float BITS = 1.44269504f;  // log2 e

// Consecutive tokens with one segment of keys and one of values.
struct Run {
    int32_t key_source, value_source, key, value, count, slot;  // `slot`: that of the first token, for RoPE
};

struct TilesArgs {
    const Source *keys, *values;
    const Run *runs;
    const int32_t *begins, *ends;  // of each token of the runs: the new tokens [begin, end) see it
    const void *query;
    float *state;                  // [B, Hq, count, value_dim + 2]: output, maximum, sum; not divided
    void *out;                     // [B, count, Hq, value_dim]; null if another call follows
    const float *sinks;            // [Hq] or null
    const int32_t *positions;      // [B]: RoPE position of slot 0; null: keys are stored after RoPE
    Rotation rotation;
    int64_t query_stride[3];       // of row, head, new token
    int32_t run_count, batch, heads, group, count, key_dim, value_dim, type, threads;
    int32_t later;                 // 1 if `state` holds the sums of an earlier call
    float scale, cap;
    Parallel parallel;             // or null
};

struct Piece {
    int key, count, value_source, value;  // first token within the tile of keys, tokens, and where their values are
};

struct Block {
    int key_source, first, last;  // tokens [first, last) of the tile
    int64_t origin, slot;         // of token 0 of the tile: its index in the segment, its slot
    int from_begin, to_begin, from_end, to_end;  // least and largest of the tokens' turns
    std::vector<Piece> pieces;
    int32_t begins[TILE], ends[TILE];
};

struct Tiles {
    const TilesArgs &args;
    std::vector<Block> blocks;
    // of each split and part of the query rows, until they are merged: value_dim + 2 numbers of each row. With all at
    // once, those of a long prompt would take more memory than its keys and values.
    std::vector<std::unique_ptr<float[]>> partial;
    std::vector<float> turns;    // rotations of the places in a tile (rotate_keys)
    std::unique_ptr<std::atomic<int>[]> missing;  // of each row, KV head and part of the query rows
    std::atomic<int64_t> next{0};
    int rows, parts, splits, width;

    explicit Tiles(const TilesArgs &args)
        : args(args), rows(args.group * args.count), parts((rows + QUERY_ROWS - 1) / QUERY_ROWS),
          width(args.value_dim + 2) {
        int64_t column = 0;
        for (int i = 0; i < args.run_count; i++) {
            const Run &run = args.runs[i];
            const Part &value = args.values[run.value_source].part;
            for (int done = 0; done < run.count;) {
                const int at = run.key + done, other = run.value + done;
                int count = run.count - done;
                if (TILE - at % TILE < count) count = TILE - at % TILE;
                if (value.kind && TILE - other % TILE < count) count = TILE - other % TILE;
                add(run, at, other, count, run.slot + done, column + done);
                done += count;
            }
            column += run.count;
        }
        splits = ((int)blocks.size() + SPLIT - 1) / SPLIT;
        partial.resize((size_t)args.batch * args.heads * parts * splits);
        missing.reset(new std::atomic<int>[args.batch * args.heads * parts]);
        for (int i = 0; i < args.batch * args.heads * parts; i++) missing[i] = splits;
        if (args.positions) {
            turns.resize((size_t)args.key_dim * TILE);
            transpose((const uint32_t *)args.rotation.fine, args.key_dim, TILE, args.key_dim, (uint32_t *)turns.data(), TILE);
        }
    }

    void add(const Run &run, int key, int value, int count, int64_t slot, int64_t column) {
        const int inside = key % TILE;
        const int64_t origin = key - inside;
        bool fits = false;
        if (!blocks.empty()) {
            const Block &last = blocks.back();
            fits = last.key_source == run.key_source && last.origin == origin && last.last <= inside &&
                   last.slot == slot - inside;
        }
        if (!fits) {
            Block block = {run.key_source, inside, inside, origin, slot - inside, INT32_MAX, -1, INT32_MAX, -1, {}, {}, {}};
            blocks.push_back(block);  // tokens of the tile that are in no piece: seen at no turn, as begins and ends are 0
        }
        Block &block = blocks.back();
        block.last = inside + count;
        block.pieces.push_back({inside, count, run.value_source, value});
        for (int i = 0; i < count; i++) {
            const int begin = args.begins[column + i], end = args.ends[column + i];
            block.begins[inside + i] = begin, block.ends[inside + i] = end;
            if (begin < block.from_begin) block.from_begin = begin;
            if (begin > block.to_begin) block.to_begin = begin;
            if (end < block.from_end) block.from_end = end;
            if (end > block.to_end) block.to_end = end;
        }
    }

    std::unique_ptr<float[]> &of(int split, int row, int head, int part) {
        return partial[(((int64_t)row * args.heads + head) * parts + part) * splits + split];
    }

    void compute(TileScratch &scratch, int row, int head, int part, int split);
    void read(TileScratch &scratch, const Block &block, int row, int head);
    void merge(int row, int head, int part);
};

// Unpack a block's keys and values.
void Tiles::read(TileScratch &scratch, const Block &block, int row, int head) {
    const Source &source = args.keys[block.key_source];
    const int64_t line = (int64_t)(source.first_row + row) * args.heads + head;
    const int tile = (int)(block.origin / TILE);
    if (source.part.kind)
        packed_keys(scratch, source, line, row, head, args.heads, tile, block.first, block.last, args.key_dim);
    else exact_keys(scratch, source, line, block.origin, block.first, block.last, args.key_dim);
    if (args.positions) rotate_keys(scratch, turns.data(), block.first, block.last, args.key_dim);
    int done = block.first;
    for (const Piece &piece : block.pieces) {
        const Source &from = args.values[piece.value_source];
        const int64_t at = (int64_t)(from.first_row + row) * args.heads + head;
        for (; done < piece.key; done++)  // tokens in no piece have weight 0, which must not meet infinity
            for (int c = 0; c < args.value_dim; c += L) store(value_at(scratch.values, done, c), F{});
        if (from.part.kind) {
            const int first = piece.value % TILE;
            packed_values_of(scratch, from, at, row, head, args.heads, piece.value / TILE, first, first + piece.count,
                             piece.key, args.value_dim);
        } else {
            exact_values_of(scratch, from, at, piece.value, piece.key, piece.count, args.value_dim);
        }
        done = piece.key + piece.count;
    }
}

// cap * tanh(x / cap), in bits; x is not. By (1 - e) / (1 + e) with e = exp(-2 |x| / cap).
inline F soft_capped(F x, float cap) {
    const F e = exp2_of(larger(splat(-60.f * cap), -magnitude(x)) * (2 * BITS / cap));
    const F size = (1.f - e) / (1.f + e) * (cap * BITS);
    return x < 0.f ? -size : size;
}

inline void sum_rows(int rows, const float *left, int64_t pitch, const float *right, int count, F (*sums)[2]) {
    for (int r = 0; r < rows; r++) sums[r][0] = F{}, sums[r][1] = F{};
    add_rows(rows, left, pitch, right, count, sums);
}

// Compute a split's result for up to QUERY_ROWS query rows of a KV head; row r is new token r / group, head r % group.
void Tiles::compute(TileScratch &scratch, int row, int head, int part, int split) {
    alignas(64) static thread_local float query[QUERY_ROWS * WIDEST], turned[QUERY_ROWS * WIDEST];
    alignas(64) static thread_local float scores[QUERY_ROWS * TILE], out[QUERY_ROWS * WIDEST];
    const int begin = part * QUERY_ROWS, count = rows - begin < QUERY_ROWS ? rows - begin : QUERY_ROWS;
    const int dim = args.value_dim, first_turn = begin / args.group, last_turn = (begin + count - 1) / args.group;
    float top[QUERY_ROWS], total[QUERY_ROWS], shrink[QUERY_ROWS];
    const float factor = args.cap ? args.scale : args.scale * BITS;
    for (int r = 0; r < count; r++) {
        const int64_t from = row * args.query_stride[0] +
                             (head * args.group + (begin + r) % args.group) * args.query_stride[1] +
                             (begin + r) / args.group * args.query_stride[2];
        for (int c = 0; c < args.key_dim; c += L)
            store(query + r * args.key_dim + c, elements(args.query, (Type)args.type, from + c) * factor);
        top[r] = HIDDEN, total[r] = 0;
    }
    std::memset(out, 0, sizeof(float) * count * dim);
    F sums[TALL][2];
    const int end = (split + 1) * SPLIT < (int)blocks.size() ? (split + 1) * SPLIT : (int)blocks.size();
    for (int i = split * SPLIT; i < end; i++) {
        const Block &block = blocks[i];
        if (block.from_begin > last_turn || block.to_end <= first_turn) continue;  // seen at none of these turns
        read(scratch, block, row, head);
        const bool masked = block.to_begin > first_turn || block.from_end <= last_turn;
        const int low = block.first / L * L, high = (block.last + L - 1) / L * L;
        const float *asked = query;
        if (args.positions) {
            rotate_queries(args.rotation, args.positions[row] + block.slot, count, args.key_dim, query, turned);
            asked = turned;
        }
        for (int r = 0; r < count; r += TALL) {
            const int some = count - r < TALL ? count - r : TALL;
            for (int t = low / PAIR_LANES * PAIR_LANES; t < high; t += PAIR_LANES) {
                sum_rows(some, asked + r * args.key_dim, args.key_dim, key_at(scratch.keys, args.key_dim, t),
                         args.key_dim, sums);
                for (int j = 0; j < some; j++)
                    store(scores + (r + j) * TILE + t, sums[j][0]), store(scores + (r + j) * TILE + t + L, sums[j][1]);
            }
        }
        for (int r = 0; r < count; r++) {
            float *own = scores + r * TILE;
            const int turn = (begin + r) / args.group;
            if (args.cap)
                for (int t = low; t < high; t += L) store(own + t, soft_capped(load<F>(own + t), args.cap));
            if (masked || low < block.first || high > block.last || block.pieces.size() > 1)
                for (int t = low; t < high; t += L) {
                    const I seen = (load<I>(block.begins + t) <= turn) & (load<I>(block.ends + t) > turn);
                    store(own + t, seen ? load<F>(own + t) : splat(HIDDEN));
                }
            F most = splat(top[r]), weights = {};
            for (int t = low; t < high; t += L) most = larger(most, load<F>(own + t));
            const float highest = most_of(most);
            shrink[r] = exp2f(top[r] - highest);
            const bool any = !(highest <= HIDDEN);  // also for NaN
            for (int t = low; t < high; t += L) {
                const F weight = any ? exp2_of(load<F>(own + t) - highest) : F{};
                store(own + t, weight);
                weights += weight;
            }
            top[r] = highest, total[r] = total[r] * shrink[r] + sum_of(weights);
        }
        for (int r = 0; r < count; r += TALL) {
            const int some = count - r < TALL ? count - r : TALL;
            for (int c = 0; c < dim; c += PAIR_LANES) {
                const int vectors = c + L < dim ? 2 : 1;
                for (int j = 0; j < some; j++)
                    for (int v = 0; v < 2; v++)
                        sums[j][v] = v < vectors ? load<F>(out + (r + j) * dim + c + v * L) * shrink[r + j] : F{};
                add_rows(some, scores + r * TILE + block.first, TILE, value_at(scratch.values, block.first, c),
                         block.last - block.first, sums);
                for (int j = 0; j < some; j++)
                    for (int v = 0; v < vectors; v++) store(out + (r + j) * dim + c + v * L, sums[j][v]);
            }
        }
    }
    float *to = new float[(int64_t)count * width];
    of(split, row, head, part).reset(to);
    for (int r = 0; r < count; r++, to += width) {
        std::memcpy(to, out + r * dim, sizeof(float) * dim);
        to[dim] = top[r], to[dim + 1] = total[r];
    }
}

// Merge the splits of some query rows in their order, with the sums of an earlier call before them.
void Tiles::merge(int row, int head, int part) {
    const int dim = args.value_dim, begin = part * QUERY_ROWS, end = begin + QUERY_ROWS < rows ? begin + QUERY_ROWS : rows;
    std::vector<float> sum(dim);
    for (int r = begin; r < end; r++) {
        const int turn = r / args.group, query_head = head * args.group + r % args.group;
        float *state = args.state ? args.state + (((int64_t)row * args.heads * args.group + query_head) * args.count + turn) * width
                                  : nullptr;
        float top = HIDDEN, total = 0;
        if (args.out && args.sinks) top = args.sinks[query_head] * BITS;
        const float sink = top;
        if (args.later) top = std::fmax(top, state[dim]);
        const int64_t at = (int64_t)(r - begin) * width;
        for (int s = 0; s < splits; s++) top = std::fmax(top, of(s, row, head, part)[at + dim]);
        if (args.out && args.sinks) total = exp2f(sink - top);  // a sink has a weight, but no value
        std::fill(sum.begin(), sum.end(), 0.f);
        for (int s = args.later ? -1 : 0; s < splits; s++) {
            const float *from = s < 0 ? state : of(s, row, head, part).get() + at;
            if (from[dim] <= HIDDEN && from[dim + 1] == from[dim + 1]) continue;  // sees no token; NaN goes on
            const float share = exp2f(from[dim] - top);
            total += share * from[dim + 1];
            for (int c = 0; c < dim; c += L) store(&sum[c], load<F>(&sum[c]) + load<F>(from + c) * share);
        }
        if (args.out) {
            const int64_t to = (((int64_t)row * args.count + turn) * args.heads * args.group + query_head) * dim;
            for (int c = 0; c < dim; c++) put(args.out, (Type)args.type, to + c, total ? sum[c] / total : 0.f);
        } else {
            std::memcpy(state, sum.data(), sizeof(float) * dim);
            state[dim] = top, state[dim + 1] = total;
        }
    }
    for (int s = 0; s < splits; s++) of(s, row, head, part).reset();
}

void work_on_tiles(void *tiles_) {
    Tiles &tiles = *(Tiles *)tiles_;
    const TilesArgs &args = tiles.args;
    static thread_local std::unique_ptr<TileScratch> scratch(new TileScratch);
    const int64_t items = (int64_t)args.batch * args.heads * tiles.parts * tiles.splits;
    for (int64_t item; (item = tiles.next++) < items;) {
        const int split = (int)(item % tiles.splits);
        const int64_t group = item / tiles.splits;  // of row, KV head and part of the query rows
        const int part = (int)(group % tiles.parts), head = (int)(group / tiles.parts % args.heads);
        const int row = (int)(group / tiles.parts / args.heads);
        tiles.compute(*scratch, row, head, part, split);
        if (--tiles.missing[group] == 0) tiles.merge(row, head, part);
    }
}

}  // namespace kvbench

extern "C" void kvbench_tiles(const kvbench::TilesArgs *args) {
    kvbench::Tiles tiles(*args);
    const int64_t items = (int64_t)args->batch * args->heads * tiles.parts * tiles.splits;
    const unsigned threads = (unsigned)(args->threads < items ? args->threads : items);
    kvbench::in_threads(args->parallel, threads, kvbench::work_on_tiles, &tiles);
    if (!tiles.splits)  // nothing was stored: zeros, or what an earlier call has found
        for (int b = 0; b < args->batch; b++)
            for (int h = 0; h < args->heads; h++)
                for (int p = 0; p < tiles.parts; p++) tiles.merge(b, h, p);
}
