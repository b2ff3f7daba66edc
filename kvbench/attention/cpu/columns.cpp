// The attention that each token of a prompt receives from all queries: column sums of the probabilities, which are
// computed a second time, from the log-sum-exp of each query, and stored nowhere.
//
// A thread has a tile of keys and passes all queries that see it; lanes are tokens, so nothing is added across lanes.

#include <atomic>
#include <memory>

#include "tiles.hpp"

namespace kvbench {

constexpr int BATCHED = 96;  // queries that are converted at a time

struct ColumnsArgs {
    const void *query, *key;
    const float *lse;         // [B, Hq, q], natural logarithms
    float *sums;              // [B, Hq, n], to which this adds
    const int32_t *starts;    // [B]: first token that is no padding
    int64_t query_stride[3], key_stride[3], lse_stride[2], sums_stride[2];  // of row, head, token
    int32_t batch, heads, group, queries, tokens, dim, query_type, key_type, threads;
    float scale;
    Parallel parallel;        // or null
};

struct Columns {
    const ColumnsArgs &args;
    std::atomic<int64_t> next{0};
};

struct alignas(64) ColumnScratch {
    float keys[TILE * WIDEST], turned[PAIR_LANES * WIDEST], query[BATCHED * WIDEST], offset[BATCHED];
};

// Add to sums[v] the probabilities of `rows` queries for the two vectors of tokens of `keys`, from token `first` on;
// `column` is that of the first query.
template <int R>
inline void add_received(const float *query, const float *offset, const float *keys, int dim, int64_t column,
                         int64_t first, F *sums) {
    F scores[R][2] = {};
    for (int i = 0; i < dim; i++, keys += PAIR_LANES) {
        const F x = load<F>(keys), y = load<F>(keys + L);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const F q = splat(query[r * dim + i]);
            scores[r][0] += q * x;
            scores[r][1] += q * y;
        }
    }
    const bool whole = column >= first + PAIR_LANES - 1;  // every query sees every token
    I lane;
    for (int i = 0; i < L; i++) lane[i] = i;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2; v++) {
            F p = exp2_of(scores[r][v] - offset[r]);
            if (!whole) p = lane <= (int32_t)(column + r - first - v * L) ? p : F{};
            sums[v] += p;
        }
}

void add_columns(const ColumnsArgs &args, ColumnScratch &scratch, int row, int head, int tile) {
    const int dim = args.dim, first = tile * TILE, last = first + TILE < args.tokens ? first + TILE : args.tokens;
    const int64_t offset = args.tokens - args.queries;  // column of the first query
    const int start = args.starts[row];
    if (last <= start) return;
    for (int t = first; t < last; t += PAIR_LANES) {
        for (int i = 0; i < PAIR_LANES; i++) {
            float *to = scratch.turned + i * dim;
            const int64_t at = row * args.key_stride[0] + head * args.key_stride[1] + (t + i) * args.key_stride[2];
            if (t + i < start || t + i >= last) std::memset(to, 0, sizeof(float) * dim);
            else
                for (int c = 0; c < dim; c += L) store(to + c, elements(args.key, (Type)args.key_type, at + c));
        }
        transpose((const uint32_t *)scratch.turned, dim, PAIR_LANES, dim,
                  (uint32_t *)key_at(scratch.keys, dim, t - first), PAIR_LANES);
    }
    const float factor = args.scale * 1.44269504f;
    for (int member = 0; member < args.group; member++) {
        const int64_t query_head = head * args.group + member;
        F sums[TILE / PAIR_LANES][2] = {};
        int64_t from = (first > start ? first : start) - offset;
        for (int64_t begin = from < 0 ? 0 : from; begin < args.queries; begin += BATCHED) {
            const int some = args.queries - begin < BATCHED ? (int)(args.queries - begin) : BATCHED;
            for (int r = 0; r < some; r++) {
                const int64_t at = row * args.query_stride[0] + query_head * args.query_stride[1] +
                                   (begin + r) * args.query_stride[2];
                for (int c = 0; c < dim; c += L)
                    store(scratch.query + r * dim + c, elements(args.query, (Type)args.query_type, at + c) * factor);
                scratch.offset[r] = args.lse[row * args.lse_stride[0] + query_head * args.lse_stride[1] + begin + r] *
                                    1.44269504f;
            }
            for (int s = 0; s * PAIR_LANES < last - first; s++) {
                const float *keys = key_at(scratch.keys, dim, s * PAIR_LANES);
                const int64_t token = first + s * PAIR_LANES;
                int r = 0;
                for (; r + TALL <= some; r += TALL)
                    add_received<TALL>(scratch.query + r * dim, scratch.offset + r, keys, dim, offset + begin + r, token,
                                       sums[s]);
                for (; r < some; r++)
                    add_received<1>(scratch.query + r * dim, scratch.offset + r, keys, dim, offset + begin + r, token,
                                    sums[s]);
            }
        }
        float *to = args.sums + row * args.sums_stride[0] + query_head * args.sums_stride[1];
        for (int t = first > start ? first : start; t < last; t++)
            to[t] += sums[(t - first) / PAIR_LANES][(t - first) % PAIR_LANES / L][(t - first) % L];
    }
}

void work_on_columns(void *columns_) {
    Columns &columns = *(Columns *)columns_;
    const ColumnsArgs &args = columns.args;
    static thread_local std::unique_ptr<ColumnScratch> scratch(new ColumnScratch);
    const int64_t tiles = (args.tokens + TILE - 1) / TILE, items = tiles * args.batch * args.heads;
    for (int64_t item; (item = columns.next++) < items;)  // tiles that most queries see come first
        add_columns(args, *scratch, (int)(item / args.heads % args.batch), (int)(item % args.heads),
                    (int)(item / args.heads / args.batch));
}

}  // namespace kvbench

extern "C" void kvbench_columns(const kvbench::ColumnsArgs *args) {
    kvbench::Columns columns{*args};
    const int64_t items = (int64_t)(args->tokens + kvbench::TILE - 1) / kvbench::TILE * args->batch * args->heads;
    const unsigned threads = (unsigned)(args->threads < items ? args->threads : items);
    kvbench::in_threads(args->parallel, threads, kvbench::work_on_columns, &columns);
}
