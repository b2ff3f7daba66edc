// Quantization and packing of tokens, bit for bit as torch does it (kvbench/quantizers/affine.py, atom.py, windowed.py;
// the place of a code in its word: kvbench/cache/segments/layout.py).
//
// Arithmetic is fp32. No product is followed by a sum, so no compiler can join two roundings into one.

#include <atomic>
#include <cmath>

#include "params.hpp"

namespace kvbench {

constexpr int MOST_PACKED = 1024;  // channels of a token
constexpr float MOST_HALF = 65504.f;

// A segment, and tokens to append to it (kvbench/attention/cpu/pack.py writes the same struct).
struct Packing {
    uint16_t *words[2];    // planes of codes, [B, H, tiles, ...]
    void *params[2];       // scales, minima or zero points, [B, H, tokens, channels / group] or [B, H, groups, channels]
    const void *tokens;    // [rows, H, count, channels], channels contiguous
    int64_t stride[3];     // of row, head, token
    int64_t param_head;    // elements from one head to the next in `params`
    int32_t kind, bits, group, channels, heads, tiles;
    int32_t by_token, window, cuts;  // as in Part
    int32_t keys;          // 1: words of a tile are [N, channels]; 0: [channels, N]
    int32_t type;          // of tokens: BF16, with params in fp16, or FP32, with params in fp32
    int32_t row, rows;     // first row of the batch
    int32_t start, count;  // first token of the segment to write
    int32_t threads;
    Parallel parallel;
};

struct Group {
    float step, second;  // as stored: scale, and minimum or zero point
};

inline float half(float x) {
    uint16_t bits;
    put(&bits, FP16, 0, x);
    return widened(bits);
}

inline float within(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

inline Group parameters_of(const Packing &packing, float low, float high) {
    const float levels = (float)((1 << packing.bits) - 1);
    const bool stored_half = packing.type == BF16;
    if (packing.kind == AFFINE) {
        if (!stored_half) return {(high - low) / levels, low};
        const float minimum = half(within(low, -MOST_HALF, MOST_HALF));
        return {half(within((high - minimum) / levels, 0.f, MOST_HALF)), minimum};
    }
    const float span = high - low;
    float scale = (span < 1e-5f ? 1e-5f : span) / levels;
    if (stored_half) scale = half(within(scale, 5.9604644775390625e-8f, MOST_HALF));
    return {scale, std::fabs(within(std::nearbyint(-low / scale), 0.f, levels))};
}

// Codes of L elements, whole numbers, with the parameters of their groups.
inline I encoded(const Packing &packing, F x, F step, F second) {
    const F levels = splat((float)((1 << packing.bits) - 1));
    F code;
    if (packing.kind == AFFINE) code = step == 0.f ? F{} : (x - second) / step;
    else code = to_float(rounded(larger(splat(-1e6f), -larger(splat(-1e6f), -(x / step))))) + second;
    code = larger(F{}, code);
    return rounded(code > levels ? levels : code);
}

// Write the codes of one token of a tile into its words.
inline void put_codes(const Packing &packing, int64_t line, int tile, int token, const int32_t *codes) {
    const Planes planes = planes_of(packing.bits);
    const int widths[2] = {planes.upper, planes.lower};
    int below = packing.bits;
    for (int plane = 0; plane < 2 && widths[plane]; plane++) {
        const int width = widths[plane], rows = 8 * width, shift = token / rows * width, row = token % rows;
        const uint16_t mask = (uint16_t)((1 << width) - 1);
        below -= width;
        uint16_t *words = packing.words[plane] + (line * packing.tiles + tile) * rows * packing.channels;
        const int from = packing.keys ? row * packing.channels : row, step = packing.keys ? 1 : rows;
        for (int c = 0; c < packing.channels; c++) {
            uint16_t &word = words[from + c * step];
            word = (uint16_t)((word & ~(mask << shift)) | ((codes[c] >> below) & mask) << shift);
        }
    }
}

struct Queue {
    const Packing &packing;
    int tiles;  // that the tokens are in
    std::atomic<int64_t> next{0};
    std::atomic<int> failed{0};  // NaN or infinity, or a scale beyond the largest number: torch says where

    F elements_of(int row, int head, int token, int channel) const {
        const int64_t from = row * packing.stride[0] + head * packing.stride[1] +
                             (token - packing.start) * packing.stride[2] + channel;
        return elements(packing.tokens, (Type)packing.type, from);
    }

    void put_group(int64_t at, Group group) const {
        const Type type = packing.type == FP32 ? FP32 : FP16;
        put(packing.params[0], type, at, group.step), put(packing.params[1], type, at, group.second);
    }

    // Pack the tokens of one row, head and tile, whose groups are channels.
    void tile(int row, int head, int tile) {
        alignas(64) float x[MOST_PACKED];
        alignas(64) int32_t codes[MOST_PACKED];
        const int64_t line = (int64_t)(packing.row + row) * packing.heads + head;
        const int channels = packing.channels, end = packing.start + packing.count;
        const int last = (tile + 1) * TILE < end ? (tile + 1) * TILE : end;
        for (int token = tile * TILE > packing.start ? tile * TILE : packing.start; token < last; token++) {
            for (int c = 0; c < channels; c += L) store(x + c, elements_of(row, head, token, c));
            for (int c = 0; c < channels; c += packing.group) {
                F low = load<F>(x + c), high = low, finite = {};
                for (int i = c; i < c + packing.group; i += L) {
                    const F some = load<F>(x + i);
                    low = low < some ? low : some, high = larger(high, some), finite += some - some;
                }
                const Group group = parameters_of(packing, -most_of(-low) + 0.f, most_of(high) + 0.f);
                if (sum_of(finite) != 0 || !std::isfinite(group.step)) {
                    failed = 1;
                    return;
                }
                put_group(line * packing.param_head + (int64_t)token * (channels / packing.group) + c / packing.group,
                          group);
                for (int i = c; i < c + packing.group; i += L)
                    store(codes + i, encoded(packing, load<F>(x + i), splat(group.step), splat(group.second)));
            }
            put_codes(packing, line, tile, token % TILE, codes);
        }
    }

    // Pack the tokens of one row and head, whose groups are tokens: those of a tile may share words, so by one thread.
    void head(int row, int head) {
        alignas(64) float step[MOST_PACKED], second[MOST_PACKED];
        alignas(64) int32_t codes[MOST_PACKED];
        const int64_t line = (int64_t)(packing.row + row) * packing.heads + head;
        const int channels = packing.channels, end = packing.start + packing.count;
        for (int64_t token = packing.start, stop; token < end; token = stop) {
            const int64_t number = group_of(packing, token, stop);
            for (int c = 0; c < channels; c += L) {
                F low = elements_of(row, head, (int)token, c), high = low, finite = {};
                for (int t = (int)token; t < stop; t++) {
                    const F some = elements_of(row, head, t, c);
                    low = low < some ? low : some, high = larger(high, some), finite += some - some;
                }
                for (int i = 0; i < L; i++) {
                    const Group group = parameters_of(packing, low[i] + 0.f, high[i] + 0.f);
                    if (finite[i] != 0 || !std::isfinite(group.step)) {
                        failed = 1;
                        return;
                    }
                    step[c + i] = group.step, second[c + i] = group.second;
                    put_group(line * packing.param_head + number * channels + c + i, group);
                }
            }
            for (int t = (int)token; t < stop; t++) {
                for (int c = 0; c < channels; c += L)
                    store(codes + c, encoded(packing, elements_of(row, head, t, c), load<F>(step + c),
                                             load<F>(second + c)));
                put_codes(packing, line, t / TILE, t % TILE, codes);
            }
        }
    }

    int64_t items() const { return (int64_t)packing.rows * packing.heads * (packing.by_token ? tiles : 1); }

    static void work(void *queue_) {
        Queue &queue = *(Queue *)queue_;
        const Packing &packing = queue.packing;
        const int64_t count = queue.items(), parts = packing.by_token ? queue.tiles : 1;
        for (int64_t item; (item = queue.next++) < count;) {
            const int row = (int)(item / parts / packing.heads), head = (int)(item / parts % packing.heads);
            if (packing.by_token) queue.tile(row, head, packing.start / TILE + (int)(item % parts));
            else queue.head(row, head);
        }
    }
};

}  // namespace kvbench

// Return 0, or 1 if a token has no finite scale; what was written then lies behind the segment's tokens.
extern "C" int kvbench_pack(const kvbench::Packing *packing) {
    using kvbench::TILE;
    const int tiles = (packing->start + packing->count - 1) / TILE - packing->start / TILE + 1;
    kvbench::Queue queue{*packing, tiles};
    // a token of a step takes less time than starting a thread
    const bool few = (int64_t)packing->rows * packing->heads * packing->count * packing->channels < 16384;
    const unsigned threads = few ? 1 : (unsigned)(packing->threads < queue.items() ? packing->threads : queue.items());
    kvbench::in_threads(packing->parallel, threads, kvbench::Queue::work, &queue);
    return queue.failed;
}
