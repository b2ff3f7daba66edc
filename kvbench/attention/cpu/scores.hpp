// Scores of keys: the products of all query rows of a KV head with the tokens of a unit, [rows][UNIT].

#pragma once

#include <cmath>

#include "params.hpp"

namespace kvbench {

constexpr int PAIR = 2 * L;       // tokens, or channels, that are multiplied together
constexpr int EXACT = 32;         // exact tokens that are converted at a time
constexpr int MOST_GROUPS = 12;   // groups that a tile may meet
constexpr int MOST_BLOCKS = 16;   // groups of a token
constexpr int MOST_CHANNELS = 256;

// What a thread needs while it works on a unit.
struct alignas(64) Scratch {
    uint32_t words[TILE / 2 * MOST_CHANNELS], planes[TILE / 2 * MOST_CHANNELS];
    float exact[EXACT * MOST_CHANNELS], turned[EXACT * MOST_CHANNELS], block[EXACT * MOST_CHANNELS];
    float step[MOST_BLOCKS * TILE], base[MOST_BLOCKS * TILE], raw[MOST_BLOCKS * TILE];
    int16_t digits[(MOST_BLOCKS > MOST_GROUPS ? MOST_BLOCKS : MOST_GROUPS) * ROWS * MOST_CHANNELS];
    float factor[MOST_BLOCKS * ROWS], bias[MOST_BLOCKS * ROWS], sums[MOST_BLOCKS * ROWS];
    float product[MOST_CHANNELS];
    float *query, *scores, *out;   // [rows][key_dim], [rows][UNIT], [rows][value_dim]
    int rows, digit_count;

    int most_rows() const { return ROWS / digit_count; }
};

inline float middle(const Part &part) { return ((1 << part.bits) - 1) * 0.5f; }

// Keys whose groups are tokens of one channel: a row of weights is the query times the steps of a group.
// q . (step code + base) = (q step) . (code - centre) + q . (base + step centre). Only q step is rounded to 16 bits; in
// the bias, `round` returns the sum of the rounded weights, so that `centre` cancels exactly.
inline void scores_by_channel(Scratch &scratch, const Part &part, int64_t head, int tile, int first, int last,
                              int channels, const Words &words, int row, int rows, float *scores) {
    const float centre = middle(part);
    Weights weights[MOST_GROUPS];
    int64_t begins[MOST_GROUPS + 1];
    int groups = 0;
    const int64_t origin = (int64_t)tile * TILE;
    begins[0] = first;
    for (int64_t token = origin + first, end; token < origin + last; token = end, groups++) {
        const int64_t group = group_of(part, token, end);
        float *bias = scratch.bias + groups * ROWS;
        weights[groups] = {scratch.digits + (int64_t)groups * ROWS * channels, channels, scratch.digit_count,
                           scratch.factor + groups * ROWS};
        begins[groups + 1] = end - origin < last ? end - origin : last;
        for (int c = 0; c < channels; c += L) {
            const Affine both = of_channels(part, head, group, c);
            store(scratch.step + c, both.step), store(scratch.base + c, both.base + both.step * centre);
        }
        for (int r = 0; r < rows; r++) {
            const float *query = scratch.query + (int64_t)(row + r) * channels;
            F most = {}, sum = {};
            for (int c = 0; c < channels; c += L) {
                const F q = load<F>(query + c), x = q * load<F>(scratch.step + c);
                store(scratch.product + c, x);
                most = larger(most, magnitude(x));
                sum += q * load<F>(scratch.base + c);
            }
            bias[r] = sum_of(sum) - centre * weights[groups].round(r, scratch.product, 0, channels, most_of(most));
        }
    }
    const int weight_rows = rows * scratch.digit_count, pairs = channels / 2;
    I sums[ROWS][2];
    for (int start = first / PAIR * PAIR; start < last; start += PAIR) {
        int of[2], until[2], passes = 1;  // groups of the tokens of either vector: [of, until)
        // a vector whose tokens are of several groups is multiplied once for each, and keeps the lanes of that group
        for (int v = 0; v < 2; v++) {
            const int from = start + v * L;
            of[v] = 0;
            while (of[v] + 1 < groups && begins[of[v] + 1] <= from) of[v]++;
            until[v] = of[v] + 1;
            while (until[v] < groups && begins[until[v]] < from + L) until[v]++;
            if (until[v] - of[v] > passes) passes = until[v] - of[v];
        }
        for (int pass = 0; pass < passes; pass++) {
            Codes codes;
            int group[2];
            codes.fields = 1;
            for (int v = 0; v < 2; v++) {
                const int from = start + v * L;
                group[v] = of[v] + pass < until[v] ? of[v] + pass : until[v] - 1;
                codes.words[v] = words.data + from % words.lanes;
                codes.shift[v] = from / words.lanes * words.width;
                codes.weights[v] = (const int32_t *)weights[group[v]].digits;
            }
            multiply_codes(words.width, weight_rows, codes, words.lanes, pairs, pairs, sums);
            for (int v = 0; v < 2; v++) {
                const int from = start + v * L;
                for (int r = 0; r < rows; r++) {
                    const F score = scaled(weights[group[v]], r, sums, v) + scratch.bias[group[v] * ROWS + r];
                    float *to = scores + (int64_t)(row + r) * UNIT + from;
                    if (until[v] - of[v] == 1) {
                        store(to, score);
                        continue;
                    }
                    for (int i = 0; i < L; i++)
                        if (from + i >= begins[group[v]] && from + i < begins[group[v] + 1]) to[i] = score[i];
                }
            }
        }
    }
}

// Keys whose groups are channels of one token: steps and bases multiply the products with a block of channels.
inline void scores_by_token(Scratch &scratch, const Part &part, int first, int last, int channels, const Words &words,
                            int row, int rows, float *scores) {
    const float centre = middle(part);
    const int blocks = channels / part.group, pairs = part.group / 2;
    const Weights weights = {scratch.digits, channels, scratch.digit_count, scratch.factor};
    for (int r = 0; r < rows; r++) {
        const float *query = scratch.query + (int64_t)(row + r) * channels;
        F most = {};
        for (int c = 0; c < channels; c += L) most = larger(most, magnitude(load<F>(query + c)));
        for (int b = 0; b < blocks; b++) {
            F sum = {};
            const int from = b * part.group, to = from + part.group;
            for (int c = from; c < to; c += L) sum += load<F>(query + c);
            scratch.sums[b * ROWS + r] = sum_of(sum);
            scratch.bias[b * ROWS + r] = -centre * weights.round(r, query, from, to, most_of(most));
        }
    }
    I sums[ROWS][2];
    for (int start = first / PAIR * PAIR; start < last; start += PAIR)
        for (int b = 0; b < blocks; b++) {
            Codes codes;
            codes.fields = 1;
            for (int v = 0; v < 2; v++) {
                const int from = start + v * L;
                codes.words[v] = words.data + (int64_t)b * pairs * words.lanes + from % words.lanes;
                codes.shift[v] = from / words.lanes * words.width;
                codes.weights[v] = (const int32_t *)weights.digits + b * pairs;
            }
            multiply_codes(words.width, rows * scratch.digit_count, codes, words.lanes, pairs, channels / 2, sums);
            for (int v = 0; v < 2; v++) {
                const int at = b * TILE + start + v * L;
                const F step = load<F>(scratch.step + at), base = load<F>(scratch.base + at) + step * centre;
                for (int r = 0; r < rows; r++) {
                    float *to = scores + (int64_t)(row + r) * UNIT + start + v * L;
                    const F product = scaled(weights, r, sums, v) + scratch.bias[b * ROWS + r];
                    const F score = product * step + base * scratch.sums[b * ROWS + r];
                    store(to, b ? load<F>(to) + score : score);
                }
            }
        }
}

// Scores of the tokens [first, last) of a tile of codes; `scores` is where those of its token 0 go.
inline void packed_scores(Scratch &scratch, const Part &part, int64_t head, int tile, int first, int last, int channels,
                          float *scores) {
    Words words = {scratch.words, scratch.planes};
    words.read(part, head, tile, channels, true);
    if (part.by_token)
        TokenParams{scratch.step, scratch.base}.read(part, head, tile, channels / part.group, scratch.raw);
    for (int row = 0; row < scratch.rows; row += scratch.most_rows()) {
        const int rows = scratch.rows - row < scratch.most_rows() ? scratch.rows - row : scratch.most_rows();
        if (part.by_token) scores_by_token(scratch, part, first, last, channels, words, row, rows, scores);
        else scores_by_channel(scratch, part, head, tile, first, last, channels, words, row, rows, scores);
    }
    if (part.cross_tile)
        for (int t = first; t < last; t++) {
            const int64_t at = head * part.param_head[2] + (int64_t)tile * TILE + t;
            const float factor = element(part.params[2], (Type)part.param_type, at);
            for (int r = 0; r < scratch.rows; r++) scores[(int64_t)r * UNIT + t] *= factor;
        }
}

// L codes of tokens in words that lie side by side: of one token and L channels, or of one channel and L tokens.
struct CodeReader {
    const Part &part;
    int channels;
    bool keys;

    // Codes from channel `c` on (keys), or of channel `c` from token `token` on.
    I read(int64_t tile, int token, int c) const {
        const Planes planes = planes_of(part.bits);
        I codes = one(0, planes.upper, tile, token, c);
        return planes.lower ? (codes << planes.lower) | one(1, planes.lower, tile, token, c) : codes;
    }

    I one(int plane, int width, int64_t tile, int token, int c) const {
        const int rows = 8 * width, shift = token / rows * width, row = token % rows;
        const uint16_t *words = part.words[plane] + tile * rows * channels;
        return (shorts(words + (keys ? row * channels + c : c * rows + row)) >> shift) & ((1 << width) - 1);
    }
};

// The factor of a group of a token's numbers.
inline float factor_of(const Part &part, int64_t head, int64_t token, int group) {
    if (!part.params[0]) return part.factor;
    const int64_t at = head * part.param_head[0] + token * part.param_row[0] + group;
    return element(part.params[0], (Type)part.param_type, at) * part.factor;
}

// Look up EXACT keys from number `first` on, a multiple of EXACT; lanes are channels. `to` is [EXACT][channels].
inline void look_up_keys(const Part &part, int64_t head, int64_t first, int channels, float *to) {
    const CodeReader reader = {part, channels, true};
    const int64_t tile = head * part.capacity + first / TILE;
    for (int t = 0; t < EXACT; t++, to += channels) {
        F squares = {};
        for (int c = 0; c < channels; c += L) {
            const F number = gathered(part.table, reader.read(tile, (int)(first % TILE) + t, c));
            store(to + c, number);
            squares += number * number;
        }
        const float length = part.normed ? std::sqrt(sum_of(squares) + 1e-16f) : 1.f;
        for (int c = 0; c < channels; c += part.group) {
            const float factor = factor_of(part, head, first + t, c / part.group) / length;
            for (int i = c; i < c + part.group; i += L) store(to + i, load<F>(to + i) * factor);
        }
    }
}

// The same of values, whose codes have a plane of 4 bits or two: EXACT tokens are one field, and lanes are tokens.
// `spare` is [channels][EXACT].
inline void look_up_values(const Part &part, int64_t head, int64_t first, int channels, float *spare, float *to) {
    const CodeReader reader = {part, channels, false};
    const int64_t tile = head * part.capacity + first / TILE;
    float factors[EXACT];
    for (int c = 0; c < channels; c++) {
        if (c % part.group == 0)
            for (int t = 0; t < EXACT; t++) factors[t] = factor_of(part, head, first + t, c / part.group);
        for (int t = 0; t < EXACT; t += L)
            store(spare + c * EXACT + t, gathered(part.table, reader.read(tile, (int)(first % TILE) + t, c)) *
                                             load<F>(factors + t));
    }
    transpose((const uint32_t *)spare, EXACT, channels, EXACT, (uint32_t *)to, channels);
}

// Convert tokens to fp32 in scratch.exact, [EXACT][channels]; tokens behind the last one are 0.
inline void convert(Scratch &scratch, const Part &part, int64_t head, int64_t first, int count, int channels, bool keys) {
    float *to = scratch.exact;
    const int64_t from = (head * part.capacity + first) * channels;
    const int size = count * channels;
    if (part.kind == TABLE)
        for (int done = 0; done < count;) {  // a block of tokens that begins before the first one is looked up whole
            const int before = (int)((first + done) % EXACT);
            const int some = count - done < EXACT - before ? count - done : EXACT - before;
            const bool whole = some == EXACT;
            float *block = whole ? to : scratch.block;
            if (keys) look_up_keys(part, head, first + done - before, channels, block);
            else look_up_values(part, head, first + done - before, channels, scratch.turned, block);
            if (!whole) std::memcpy(to + done * channels, block + before * channels, sizeof(float) * some * channels);
            done += some;
        }
    else
        for (int i = 0; i < size; i += L) store(to + i, elements(part.buffer, (Type)part.type, from + i));
    std::memset(to + size, 0, sizeof(float) * (EXACT * channels - size));
}

// Scores of `count` tokens from number `first` on, which are exact or looked up.
inline void exact_scores(Scratch &scratch, const Part &part, int64_t head, int64_t first, int count, int channels,
                         float *scores) {
    F sums[ROWS][2];
    for (int begin = 0; begin < count; begin += EXACT) {
        const int some = count - begin < EXACT ? count - begin : EXACT;
        convert(scratch, part, head, first + begin, some, channels, true);
        transpose((const uint32_t *)scratch.exact, channels, EXACT, channels, (uint32_t *)scratch.turned, EXACT);
        for (int row = 0; row < scratch.rows; row += ROWS) {
            const int rows = scratch.rows - row < ROWS ? scratch.rows - row : ROWS;
            const float *query = scratch.query + (int64_t)row * channels;
            for (int start = 0; start < some; start += PAIR) {
                const Exact pair = {{scratch.turned + start, scratch.turned + start + L}, {query, query}, {}, 1};
                multiply_exact(rows, pair, EXACT, channels, channels, sums);
                for (int r = 0; r < rows; r++)
                    for (int i = 0; i < PAIR && start + i < some; i++)
                        scores[(int64_t)(row + r) * UNIT + begin + start + i] = sums[r][i / L][i % L];
            }
        }
    }
}

}  // namespace kvbench
