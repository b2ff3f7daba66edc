// Quantization and packing of tokens whose groups are channels of one token, bit for bit as torch does it
// (kvbench/quantizers/affine.py, atom.py; the place of a code in its word: kvbench/cache/segments/layout.py).
//
// Arithmetic is fp32. No product is followed by a sum, so no compiler can join two roundings into one.

#include <atomic>
#include <cmath>

#include "codes.hpp"

namespace kvbench {

constexpr int MOST_PACKED = 1024;  // channels of a token
constexpr float MOST_HALF = 65504.f;

// A segment, and tokens to append to it (kvbench/attention/cpu/pack.py writes the same struct).
struct Packing {
    uint16_t *words[2];    // planes of codes, [B, H, tiles, ...]
    void *params[2];       // scales, minima or zero points, [B, H, tiles * TILE, channels / group]
    const void *tokens;    // [rows, H, count, channels], channels contiguous
    int64_t stride[3];     // of row, head, token
    int32_t kind, bits, group, channels, heads, tiles;
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

inline Group group_of(const Packing &packing, float low, float high) {
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

// Codes of a group, whole numbers.
inline void encode(const Packing &packing, Group group, const float *x, int32_t *codes) {
    const F levels = splat((float)((1 << packing.bits) - 1)), step = splat(group.step), second = splat(group.second);
    for (int i = 0; i < packing.group; i += L) {
        F code;
        if (packing.kind == AFFINE) code = group.step == 0 ? F{} : (load<F>(x + i) - second) / step;
        else code = to_float(rounded(larger(splat(-1e6f), -larger(splat(-1e6f), -(load<F>(x + i) / step))))) + second;
        code = larger(F{}, code);
        code = code > levels ? levels : code;
        store(codes + i, rounded(code));
    }
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
    std::atomic<int> failed{0};

    // Pack the tokens of one row, head and tile.
    void tile(int row, int head, int tile) {
        alignas(64) float x[MOST_PACKED];
        alignas(64) int32_t codes[MOST_PACKED];
        const int64_t line = (int64_t)(packing.row + row) * packing.heads + head;
        const int channels = packing.channels, blocks = channels / packing.group;
        const int end = packing.start + packing.count, last = (tile + 1) * TILE < end ? (tile + 1) * TILE : end;
        for (int token = tile * TILE > packing.start ? tile * TILE : packing.start; token < last; token++) {
            const int64_t from = row * packing.stride[0] + head * packing.stride[1] +
                                 (token - packing.start) * packing.stride[2];
            for (int c = 0; c < channels; c += L) store(x + c, elements(packing.tokens, (Type)packing.type, from + c));
            for (int b = 0; b < blocks; b++) {
                const float *mine = x + b * packing.group;
                F low = load<F>(mine), high = low, finite = {};
                for (int i = 0; i < packing.group; i += L) {
                    const F some = load<F>(mine + i);
                    low = low < some ? low : some, high = larger(high, some), finite += some - some;
                }
                const Group group = group_of(packing, -most_of(-low) + 0.f, most_of(high) + 0.f);
                if (sum_of(finite) != 0 || !std::isfinite(group.step)) {
                    failed = 1;  // NaN and infinity, or a scale beyond the largest number: torch says where
                    return;
                }
                const int64_t at = (line * packing.tiles * TILE + token) * blocks + b;
                const Type type = packing.type == FP32 ? FP32 : FP16;
                put(packing.params[0], type, at, group.step), put(packing.params[1], type, at, group.second);
                encode(packing, group, mine, codes + b * packing.group);
            }
            put_codes(packing, line, tile, token % TILE, codes);
        }
    }

    static void work(void *queue_) {
        Queue &queue = *(Queue *)queue_;
        const Packing &packing = queue.packing;
        const int64_t items = (int64_t)packing.rows * packing.heads * queue.tiles;
        for (int64_t item; (item = queue.next++) < items;) {
            const int64_t line = item / queue.tiles;
            queue.tile((int)(line / packing.heads), (int)(line % packing.heads),
                       packing.start / TILE + (int)(item % queue.tiles));
        }
    }
};

}  // namespace kvbench

// Return 0, or 1 if a token has no finite scale; what was written then lies behind the segment's tokens.
extern "C" int kvbench_pack(const kvbench::Packing *packing) {
    using kvbench::TILE;
    const int tiles = (packing->start + packing->count - 1) / TILE - packing->start / TILE + 1;
    kvbench::Queue queue{*packing, tiles};
    const int64_t items = (int64_t)packing->rows * packing->heads * tiles;
    const bool few = items * packing->channels < 1024;  // a token of a step takes less time than starting a thread
    const unsigned threads = few ? 1 : (unsigned)(packing->threads < items ? packing->threads : items);
    kvbench::in_threads(packing->parallel, threads, kvbench::Queue::work, &queue);
    return queue.failed;
}
