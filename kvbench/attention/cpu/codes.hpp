// Tiles of codes: their words are transposed once, and then multiplied by rows of 16-bit weights.
//
// A tile of keys is [N, D] words, one of values [D, N]. In both, two neighbouring words are a 32-bit number that holds
// two elements of each field over which a product sums: two channels of a key, two tokens of a value. After the
// transposition, lanes are what a product does not sum over: tokens of keys, channels of values. So nothing is added
// across lanes, and codes are unpacked once for all query rows.

#pragma once

#include "layout.hpp"

namespace kvbench {

// The widths of the planes of codes, as in kvbench/quantizers/spec.py, and the width to which they are joined.
struct Planes {
    int upper, lower, joined;
};

inline Planes planes_of(int bits) {
    switch (bits) {
        case 2: return {2, 0, 2};
        case 3: return {2, 1, 4};
        case 4: return {4, 0, 4};
        case 5: return {4, 1, 8};
        case 6: return {4, 2, 8};
        default: return {4, 4, 8};
    }
}

// Words of one tile, transposed: [pairs][lanes] of 32 bits, with joined planes.
struct Words {
    uint32_t *data, *spare;  // room for a tile of 8-bit codes each
    int lanes, pairs, width;

    // `by_token`: true for keys, whose word rows are lanes; false for values, whose word rows are paired.
    void read(const Part &part, int64_t head, int tile, int channels, bool keys) {
        const Planes planes = planes_of(part.bits);
        width = planes.joined;
        const int rows = 8 * width;
        lanes = keys ? rows : channels;
        pairs = (keys ? channels : rows) / 2;
        if (!planes.lower) {
            turn(part.words[0], head, tile, part.capacity, planes.upper, channels, keys, data);
            return;
        }
        turn(part.words[0], head, tile, part.capacity, planes.upper, channels, keys, spare);
        uint32_t *low = spare + 4 * planes.upper * channels;
        turn(part.words[1], head, tile, part.capacity, planes.lower, channels, keys, low);
        join(spare, planes.upper, low, planes.lower, channels, keys);
    }

    static void turn(const uint16_t *words, int64_t head, int tile, int tiles, int width, int channels, bool keys,
                     uint32_t *to) {
        const int rows = 8 * width;
        const int64_t size = (int64_t)rows * channels;
        const uint16_t *from = words + (head * tiles + tile) * size;
        if (tile + 1 < tiles)
            for (int64_t i = 0; i < size; i += 32) __builtin_prefetch(from + size + i);
        if (keys) transpose((const uint32_t *)from, channels / 2, rows, channels / 2, to, rows);
        else transpose((const uint32_t *)from, rows / 2, channels, rows / 2, to, channels);
    }

    void join(const uint32_t *upper, int wide, const uint32_t *lower, int narrow, int channels, bool keys) {
        // runs of joined word rows whose codes lie in one field of either plane: bits `up` and `down` on
        const int rows = 8 * width, run = 8 * narrow;
        for (int first = 0; first < rows; first += run) {
            const int up = first / (8 * wide) * wide, down = first / run * narrow;
            const uint32_t high = fields(wide), low = fields(narrow);
            for (int p = 0; p < (keys ? pairs : run / 2); p++) {
                const int n = keys ? run : channels;
                const uint32_t *a = keys ? upper + p * 8 * wide + first % (8 * wide)
                                         : upper + (first % (8 * wide) / 2 + p) * channels;
                const uint32_t *b = keys ? lower + p * run : lower + p * channels;
                uint32_t *to = keys ? data + p * rows + first : data + (first / 2 + p) * channels;
                for (int i = 0; i < n; i++) to[i] = ((a[i] >> up) & high) << narrow | ((b[i] >> down) & low);
            }
        }
    }

    // The bits of codes of `narrow` bits in fields of the joined width, in both halves of a word pair.
    uint32_t fields(int narrow) const {
        uint32_t mask = 0;
        for (int at = 0; at < 32; at += width) mask |= ((1u << narrow) - 1) << at;
        return mask;
    }
};

// -- products -------------------------------------------------------------------------------------------------------

// Two vectors of lanes that are multiplied together: where their words and their weights are.
template <class T, class W>
struct Pair {
    const T *words[2];
    const W *weights[2];  // [rows][pairs of a field], those of further fields behind
    int shift[2];         // of the first field
    int fields;           // how many fields are summed
};

// out[row][v] = sum over fields and pairs of code * weight, for R rows of weights.
// WIDTH: bits of a code; 0: 32-bit numbers in place of words.
template <int WIDTH, int R, class V, class T, class W>
inline void multiply(const Pair<T, W> &pair, int pitch, int pairs, int64_t row, V (*out)[2]) {
    constexpr int CHAINS = R == 1 ? 4 : R == 2 ? 2 : 1;  // so many sums apart, lest each wait for the one before
    V sums[CHAINS][R][2] = {};
    const W *w0 = pair.weights[0], *w1 = pair.weights[1];
    for (int field_ = 0; field_ < pair.fields; field_++) {
        const T *a = pair.words[0], *b = pair.words[1];
        for (int j = 0; j < pairs; j += CHAINS)
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; c++) {
                V x = load<V>(a + (int64_t)(j + c) * pitch), y = load<V>(b + (int64_t)(j + c) * pitch);
                if constexpr (WIDTH != 0) {
                    x = field(x, pair.shift[0] + field_ * WIDTH, (1 << WIDTH) - 1);
                    y = field(y, pair.shift[1] + field_ * WIDTH, (1 << WIDTH) - 1);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    sums[c][r][0] = dot(sums[c][r][0], x, splat(w0[r * row + j + c]));
                    sums[c][r][1] = dot(sums[c][r][1], y, splat(w1[r * row + j + c]));
                }
            }
        w0 += pairs, w1 += pairs;
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2; v++) {
            V sum = sums[0][r][v];
            for (int c = 1; c < CHAINS; c++) sum += sums[c][r][v];
            out[r][v] = sum;
        }
}

template <int WIDTH, class V, class T, class W>
inline void multiply_rows(int rows, const Pair<T, W> &pair, int pitch, int pairs, int64_t row, V (*out)[2]) {
    switch (rows) {
        case 1: return multiply<WIDTH, 1>(pair, pitch, pairs, row, out);
        case 2: return multiply<WIDTH, 2>(pair, pitch, pairs, row, out);
        case 3: return multiply<WIDTH, 3>(pair, pitch, pairs, row, out);
        case 4: return multiply<WIDTH, 4>(pair, pitch, pairs, row, out);
#if defined(__AVX512BW__)
        case 5: return multiply<WIDTH, 5>(pair, pitch, pairs, row, out);
        case 6: return multiply<WIDTH, 6>(pair, pitch, pairs, row, out);
        case 7: return multiply<WIDTH, 7>(pair, pitch, pairs, row, out);
        case 8: return multiply<WIDTH, 8>(pair, pitch, pairs, row, out);
#endif
    }
}

typedef Pair<uint32_t, int32_t> Codes;
typedef Pair<float, float> Exact;

__attribute__((noinline)) inline void multiply_codes(int width, int rows, const Codes &codes, int pitch, int pairs,
                                                     int64_t row, I (*out)[2]) {
    if (width == 2) multiply_rows<2>(rows, codes, pitch, pairs, row, out);
    else if (width == 4) multiply_rows<4>(rows, codes, pitch, pairs, row, out);
    else multiply_rows<8>(rows, codes, pitch, pairs, row, out);
}

__attribute__((noinline)) inline void multiply_exact(int rows, const Exact &exact, int pitch, int pairs, int64_t row,
                                                     F (*out)[2]) {
    multiply_rows<0>(rows, exact, pitch, pairs, row, out);
}

}  // namespace kvbench
