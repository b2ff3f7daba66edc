// Tiles of tokens, written out in fp32 into a few dozen KiB from where a product reads them many times.
//
// Decode attention (decode.cpp) multiplies codes as they are, because it has few query rows. With many, unpacking a tile
// once costs little: one tile at a time stands in full precision, in the processor's caches, and never a layer.

#pragma once

#include "params.hpp"

namespace kvbench {

constexpr int PAIR_LANES = 2 * L;  // lanes that are multiplied together: tokens of keys, channels of values
constexpr int CODEBOOK = 8;        // a kind of Part beside those of layout.hpp
constexpr int MOST_BLOCKS_OF_TOKEN = 16, WIDEST = 256;

// KVQuant's tables of one segment: value = level[code] * scale + offset, and exact elements besides.
struct Book {
    const float *levels;            // [B, 2^bits]
    const void *scale, *offset;     // of keys [B, C], of values [B, capacity]
    const void *outliers;           // values of the outliers of a row, [B, room]; null if there are none
    const uint16_t *indices;        // token within the block * C + channel, [B, room]
    const int32_t *ends;            // where the entries of each block and head end, [B, blocks, heads]
    int64_t row;                    // elements of `scale` and `offset` from one row to the next
    int64_t room, blocks;
    int32_t type, outlier_type, block, width;  // of scale and offset, and of outliers; tokens of a block; channels C
};

// A segment of keys or of values.
struct Source {
    Part part;
    Book book;
    int32_t first_row;  // its row of the first row of the call
    int32_t padding;
};

// The model's rotation of keys that are stored before RoPE (kvbench.attention.rope.rotation_tables).
struct Rotation {
    const float *fine, *coarse;  // cosines, then sines: of positions 0 to 127, and of multiples of 128
};

struct alignas(64) TileScratch {
    uint32_t words[TILE / 2 * WIDEST], planes[TILE / 2 * WIDEST];
    float keys[TILE * WIDEST], values[TILE * WIDEST], turned[PAIR_LANES * WIDEST];
    float step[MOST_BLOCKS_OF_TOKEN * TILE], base[MOST_BLOCKS_OF_TOKEN * TILE], raw[MOST_BLOCKS_OF_TOKEN * TILE];
};

// Where the tokens from `t` on, a multiple of L, stand in a tile of keys: [strips of tokens][channels][PAIR_LANES].
inline float *key_at(float *keys, int channels, int t) {
    return keys + (int64_t)(t / PAIR_LANES) * channels * PAIR_LANES + t % PAIR_LANES;
}

// Where a token's channels from `c` on, a multiple of L, stand in a tile of values: [strips of channels][TILE][PAIR_LANES].
inline float *value_at(float *values, int t, int c) {
    return values + ((int64_t)(c / PAIR_LANES) * TILE + t) * PAIR_LANES + c % PAIR_LANES;
}

inline F level_of(const float *levels, int bits, I codes) {
#if defined(__AVX512BW__)
    const __m512 table = _mm512_maskz_loadu_ps((__mmask16)((1u << (1 << bits)) - 1), levels);
    return (F)_mm512_permutexvar_ps((__m512i)codes, table);
#elif defined(__AVX2__)
    float padded[16] = {};
    std::memcpy(padded, levels, sizeof(float) << bits);
    const __m256i at = (__m256i)codes;
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(padded), at);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(padded + 8), at);
    return (F)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
#else
    F x;
    for (int i = 0; i < L; i++) x[i] = levels[codes[i]];
    return x;
#endif
}

// Calls f(token of the tile, channel, exact value) for the outliers of tokens [first, last) of a tile.
template <class Each>
inline void each_outlier(const Source &source, int row, int head, int heads, int tile, int first, int last, int channels,
                         Each &&f) {
    const Book &book = source.book;
    if (!book.outliers) return;
    const int64_t line = source.first_row + row;
    const int32_t *ends = book.ends + line * book.blocks * heads;
    const uint16_t *indices = book.indices + line * book.room;
    // x / width = x * inverse / 2^32 for x < 2^16, which is faster than a division
    const uint64_t inverse = (1ull << 32) / book.width + ((1ull << 32) % book.width != 0);
    for (int block = first / book.block; block * book.block < last; block++) {
        const int64_t at = ((int64_t)tile * TILE / book.block + block) * heads + head;
        for (int64_t i = at ? ends[at - 1] : 0; i < ends[at]; i++) {
            const int inside = (int)(indices[i] * inverse >> 32), token = block * book.block + inside;
            if (token >= first && token < last)
                f(token, indices[i] - inside * book.width - head * channels,
                  element(book.outliers, (Type)book.outlier_type, line * book.room + i));
        }
    }
}

// -- keys -----------------------------------------------------------------------------------------------------------

inline void exact_keys(TileScratch &scratch, const Source &source, int64_t line, int64_t origin, int first, int last,
                       int channels) {
    const Part &part = source.part;
    for (int t = first / PAIR_LANES * PAIR_LANES; t < last; t += PAIR_LANES) {
        for (int i = 0; i < PAIR_LANES; i++) {
            float *to = scratch.turned + i * channels;
            const int64_t from = (line * part.capacity + origin + t + i) * channels;
            if (t + i < first || t + i >= last) std::memset(to, 0, sizeof(float) * channels);
            else
                for (int c = 0; c < channels; c += L) store(to + c, elements(part.buffer, (Type)part.type, from + c));
        }
        transpose((const uint32_t *)scratch.turned, channels, PAIR_LANES, channels,
                  (uint32_t *)key_at(scratch.keys, channels, t), PAIR_LANES);
    }
}

// f(vector of codes, channel) -> values, for the tokens [first, last) of a tile, from whole vectors of tokens.
template <class Value>
inline void unpack_keys(float *keys, const Words &words, int t, int channels, Value &&f) {
    const uint32_t *from = words.data + t % words.lanes;
    const int shift = t / words.lanes * words.width, mask = (1 << words.width) - 1;
    float *to = key_at(keys, channels, t);
    for (int c = 0; c < channels; c += 2, from += words.lanes, to += 2 * PAIR_LANES) {
        const I codes = field(load<I>(from), shift, mask);
        f(to, codes & 0xffff, c);
        f(to + PAIR_LANES, codes >> 16, c + 1);
    }
}

inline void packed_keys(TileScratch &scratch, const Source &source, int64_t line, int row, int head, int heads, int tile,
                        int first, int last, int channels) {
    const Part &part = source.part;
    Words words = {scratch.words, scratch.planes};
    words.read(part, line, tile, channels, true);
    float *keys = scratch.keys, *step = scratch.step, *base = scratch.base;
    if (part.kind == CODEBOOK) {
        const Book &book = source.book;
        const int64_t at = (source.first_row + row) * book.row + head * channels;
        for (int c = 0; c < channels; c += L) {
            store(step + c, elements(book.scale, (Type)book.type, at + c));
            store(base + c, elements(book.offset, (Type)book.type, at + c));
        }
        const float *levels = book.levels + ((int64_t)(source.first_row + row) << part.bits);
        for (int t = first / L * L; t < last; t += L)
            unpack_keys(keys, words, t, channels, [&](float *to, I codes, int c) {
                store(to, level_of(levels, part.bits, codes) * step[c] + base[c]);
            });
        each_outlier(source, row, head, heads, tile, first, last, channels, [&](int t, int c, float x) {
            key_at(keys, channels, t / L * L)[c * PAIR_LANES + t % L] = x;
        });
        return;
    }
    if (part.by_token) {
        TokenParams{step, base}.read(part, line, tile, channels / part.group, scratch.raw);
        for (int t = first / L * L; t < last; t += L)
            unpack_keys(keys, words, t, channels, [&](float *to, I codes, int c) {
                const int at = c / part.group * TILE + t;
                store(to, to_float(codes) * load<F>(step + at) + load<F>(base + at));
            });
    } else {
        const int64_t origin = (int64_t)tile * TILE;
        int64_t group = -1, end = 0;
        for (int t = first / L * L; t < last; t += L)
            // a vector whose tokens are of several groups is unpacked once for each, which keeps its lanes from `lane` on
            for (int lane = t < first ? first - t : 0; lane < L && t + lane < last; lane = (int)(end - origin) - t) {
                int64_t next;
                const int64_t found = group_of(part, origin + t + lane, next);
                if (found != group)
                    for (int c = 0; c < channels; c += L) {
                        const Affine both = of_channels(part, line, found, c);
                        store(step + c, both.step), store(base + c, both.base);
                    }
                group = found, end = next;
                I lanes;
                for (int i = 0; i < L; i++) lanes[i] = i >= lane ? -1 : 0;
                const bool whole = lane == 0;
                unpack_keys(keys, words, t, channels, [&](float *to, I codes, int c) {
                    const F x = to_float(codes) * step[c] + base[c];
                    store(to, whole ? x : lanes ? x : load<F>(to));
                });
            }
    }
    if (part.cross_tile)
        for (int t = first / L * L; t < last; t += L) {
            const int64_t at = line * part.param_head[2] + (int64_t)tile * TILE + t;
            const F factor = elements(part.params[2], (Type)part.param_type, at);
            float *to = key_at(keys, channels, t);
            for (int c = 0; c < channels; c++, to += PAIR_LANES) store(to, load<F>(to) * factor);
        }
}

// q . R(p + t) k = R(-p) q . R(t) k: keys are turned by their place in the tile, and queries back by the position of its
// token 0. `turns` has the cosines, then the sines, of places: [channels][TILE].
inline void rotate_keys(TileScratch &scratch, const float *turns, int first, int last, int channels) {
    const int half = channels / 2;
    for (int t = first / L * L; t < last; t += L) {
        float *one = key_at(scratch.keys, channels, t), *other = one + half * PAIR_LANES;
        for (int j = 0; j < half; j++, one += PAIR_LANES, other += PAIR_LANES) {
            const F cos = load<F>(turns + j * TILE + t), sin = load<F>(turns + (j + half) * TILE + t);
            const F a = load<F>(one), b = load<F>(other);
            store(one, a * cos - b * sin), store(other, b * cos + a * sin);
        }
    }
}

inline void rotate_queries(const Rotation &rotation, int64_t position, int rows, int channels, const float *from,
                           float *to) {
    const int half = channels / 2;
    // token 0 of a tile may lie before the text, if the tile's first tokens are not read
    const int64_t size = position < 0 ? -position : position;
    const float sign = position < 0 ? -1.f : 1.f;
    const float *fine = rotation.fine + size % TILE * channels, *coarse = rotation.coarse + size / TILE * channels;
    for (int j = 0; j < half; j += L) {
        const F c = load<F>(fine + j), s = load<F>(fine + j + half), C = load<F>(coarse + j), S = load<F>(coarse + j + half);
        const F cos = C * c - S * s, sin = (S * c + C * s) * sign;
        for (int r = 0; r < rows; r++) {
            const F a = load<F>(from + r * channels + j), b = load<F>(from + r * channels + j + half);
            store(to + r * channels + j, a * cos + b * sin), store(to + r * channels + j + half, b * cos - a * sin);
        }
    }
}

// -- values ---------------------------------------------------------------------------------------------------------

inline void exact_values_of(TileScratch &scratch, const Source &source, int64_t line, int64_t from, int to, int count,
                            int channels) {
    const Part &part = source.part;
    for (int t = 0; t < count; t++) {
        const int64_t at = (line * part.capacity + from + t) * channels;
        for (int c = 0; c < channels; c += L)
            store(value_at(scratch.values, to + t, c), elements(part.buffer, (Type)part.type, at + c));
    }
}

// Write tokens [first, last) of a tile of codes to the place `to`.
inline void packed_values_of(TileScratch &scratch, const Source &source, int64_t line, int row, int head, int heads,
                             int tile, int first, int last, int to, int channels) {
    const Part &part = source.part;
    Words words = {scratch.words, scratch.planes};
    words.read(part, line, tile, channels, false);
    const int rows = 8 * words.width, mask = (1 << words.width) - 1, book = part.kind == CODEBOOK;
    const int group = book ? channels : part.group;
    float *step = scratch.step, *base = scratch.base;
    const float *levels = nullptr;
    if (book) {
        const int64_t at = (source.first_row + row) * source.book.row + (int64_t)tile * TILE;
        levels = source.book.levels + ((int64_t)(source.first_row + row) << part.bits);
        for (int t = first; t < last; t++) {
            step[t] = element(source.book.scale, (Type)source.book.type, at + t);
            base[t] = element(source.book.offset, (Type)source.book.type, at + t);
        }
    } else {
        TokenParams{step, base}.read(part, line, tile, channels / part.group, scratch.raw);
    }
    for (int t = first / 2 * 2; t < last; t += 2) {
        const uint32_t *from = words.data + t % rows / 2 * words.lanes;
        for (int c = 0; c < channels; c += L) {
            const I codes = field(load<I>(from + c), t / rows * words.width, mask);
            F cross = splat(1.f);
            if (part.cross_tile) {
                const int64_t at = line * part.param_head[2] + c +
                                   ((int64_t)tile * TILE + t) / part.cross_tile * part.param_row[2];
                cross = elements(part.params[2], (Type)part.param_type, at);
            }
            for (int i = 0; i < 2; i++) {
                if (t + i < first || t + i >= last) continue;
                const I code = i ? codes >> 16 : codes & 0xffff;
                const int at = c / group * TILE + t + i;
                const F x = (book ? level_of(levels, part.bits, code) : to_float(code)) * step[at] + base[at];
                store(value_at(scratch.values, to + t + i - first, c), x * cross);
            }
        }
    }
    if (book)
        each_outlier(source, row, head, heads, tile, first, last, channels, [&](int t, int c, float x) {
            value_at(scratch.values, to + t - first, c / L * L)[c % L] = x;
        });
}

// -- products -------------------------------------------------------------------------------------------------------

#if defined(__AVX512BW__)
constexpr int TALL = 12;  // rows that are multiplied at a time, as registers allow
#elif defined(__AVX2__)
constexpr int TALL = 6;
#else
constexpr int TALL = 4;
#endif

// sums[row][v] += sum over i of left[row][i] * right[i][v], where a row of `right` is PAIR_LANES numbers.
template <int R>
inline void add_products(const float *left, int64_t pitch, const float *right, int count, F (*sums)[2]) {
    F kept[R][2];
    for (int r = 0; r < R; r++) kept[r][0] = sums[r][0], kept[r][1] = sums[r][1];
    for (int i = 0; i < count; i++, right += PAIR_LANES) {
        const F x = load<F>(right), y = load<F>(right + L);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const F weight = splat(left[r * pitch + i]);
            kept[r][0] += weight * x;
            kept[r][1] += weight * y;
        }
    }
    for (int r = 0; r < R; r++) sums[r][0] = kept[r][0], sums[r][1] = kept[r][1];
}

__attribute__((noinline)) inline void add_rows(int rows, const float *left, int64_t pitch, const float *right, int count,
                                               F (*sums)[2]) {
    switch (rows) {
        case 1: return add_products<1>(left, pitch, right, count, sums);
        case 2: return add_products<2>(left, pitch, right, count, sums);
        case 3: return add_products<3>(left, pitch, right, count, sums);
        case 4: return add_products<4>(left, pitch, right, count, sums);
#if defined(__AVX2__)
        case 5: return add_products<5>(left, pitch, right, count, sums);
        case 6: return add_products<6>(left, pitch, right, count, sums);
#endif
#if defined(__AVX512BW__)
        case 7: return add_products<7>(left, pitch, right, count, sums);
        case 8: return add_products<8>(left, pitch, right, count, sums);
        case 9: return add_products<9>(left, pitch, right, count, sums);
        case 10: return add_products<10>(left, pitch, right, count, sums);
        case 11: return add_products<11>(left, pitch, right, count, sums);
        case 12: return add_products<12>(left, pitch, right, count, sums);
#endif
    }
}

}  // namespace kvbench
