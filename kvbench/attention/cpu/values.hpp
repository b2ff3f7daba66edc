// Weighted sums of values, which are added to the output of a unit, [rows][value_dim].

#pragma once

#include "scores.hpp"

namespace kvbench {

// Add tokens [first, last) of a tile of codes. `probabilities` are those of its token 0 on, [rows][UNIT]; 0 outside.
// sum p (step code + base) = sum (p step) (code - centre) + sum p (base + step centre), where only p step is rounded to
// 16 bits; around their centre, codes are half as large, and so is the error.
inline void packed_values(Scratch &scratch, const Part &part, int64_t head, int tile, int first, int last, int channels,
                          const float *probabilities) {
    Words words = {scratch.words, scratch.planes};
    words.read(part, head, tile, channels, false);
    const int blocks = channels / part.group, pairs = words.pairs, field_tokens = 2 * pairs;
    const float centre = middle(part);
    TokenParams{scratch.step, scratch.base}.read(part, head, tile, blocks, scratch.raw);
    const int span = part.cross_tile ? part.cross_tile : TILE;
    for (int begin = first / span * span; begin < last; begin += span) {  // tokens of one cross factor
        const int low = first > begin ? first : begin, high = last < begin + span ? last : begin + span;
        // whole fields are multiplied; tokens of them outside [low, high) have weight 0
        const int field = low / field_tokens, fields = (high + field_tokens - 1) / field_tokens - field;
        const int from = field * field_tokens, to = from + fields * field_tokens;
        for (int row = 0; row < scratch.rows; row += scratch.most_rows()) {
            const int rows = scratch.rows - row < scratch.most_rows() ? scratch.rows - row : scratch.most_rows();
            Weights weights[MOST_BLOCKS];
            for (int b = 0; b < blocks; b++) {
                weights[b] = {scratch.digits + (int64_t)b * ROWS * TILE, TILE, scratch.digit_count,
                              scratch.factor + b * ROWS};
                for (int r = 0; r < rows; r++) {
                    const float *p = probabilities + (int64_t)(row + r) * UNIT;
                    F most = {}, sum = {};
                    for (int t = from; t < to; t += L) {
                        const F weight = load<F>(p + t), step = load<F>(scratch.step + b * TILE + t);
                        const F x = weight * step;
                        store(scratch.product + t, x);
                        most = larger(most, magnitude(x));
                        sum += weight * (load<F>(scratch.base + b * TILE + t) + step * centre);
                    }
                    const float rounded = weights[b].round(r, scratch.product, from, to, most_of(most));
                    scratch.bias[b * ROWS + r] = sum_of(sum) - centre * rounded;
                }
            }
            I sums[ROWS][2];
            for (int c = 0; c < channels; c += PAIR) {
                Codes codes;
                codes.fields = fields;
                int block[2];
                const int vectors = c + L < channels ? 2 : 1;
                for (int v = 0; v < 2; v++) {
                    const int channel = v < vectors ? c + v * L : c;
                    block[v] = channel / part.group;
                    codes.words[v] = words.data + channel;
                    codes.shift[v] = field * words.width;
                    codes.weights[v] = (const int32_t *)weights[block[v]].digits + from / 2;
                }
                multiply_codes(words.width, rows * scratch.digit_count, codes, words.lanes, pairs, TILE / 2, sums);
                for (int v = 0; v < vectors; v++) {
                    F cross = splat(1.f);
                    if (part.cross_tile) {
                        const int64_t group = ((int64_t)tile * TILE + begin) / part.cross_tile;
                        const int64_t at = head * part.param_head[2] + group * part.param_row[2] + c + v * L;
                        cross = elements(part.params[2], (Type)part.param_type, at);
                    }
                    for (int r = 0; r < rows; r++) {
                        float *out = scratch.out + (int64_t)(row + r) * channels + c + v * L;
                        const F sum = scaled(weights[block[v]], r, sums, v) + scratch.bias[block[v] * ROWS + r];
                        store(out, load<F>(out) + sum * cross);
                    }
                }
            }
        }
    }
}

// Add `count` tokens from number `first` on, which are exact or looked up.
inline void exact_values(Scratch &scratch, const Part &part, int64_t head, int64_t first, int count, int channels,
                         const float *probabilities) {
    F sums[ROWS][2];
    for (int begin = 0; begin < count; begin += EXACT) {
        const int some = count - begin < EXACT ? count - begin : EXACT;
        convert(scratch, part, head, first + begin, some, channels, false);
        for (int row = 0; row < scratch.rows; row += ROWS) {
            const int rows = scratch.rows - row < ROWS ? scratch.rows - row : ROWS;
            const float *p = probabilities + (int64_t)row * UNIT + begin;
            for (int c = 0; c < channels; c += PAIR) {
                const int next = c + L < channels ? c + L : c;
                const Exact pair = {{scratch.exact + c, scratch.exact + next}, {p, p}, {}, 1};
                // a multiple of the chains of `multiply`: the tokens beyond are zeros (`convert`), their weights any
                multiply_exact(rows, pair, channels, (some + 3) / 4 * 4, UNIT, sums);
                for (int r = 0; r < rows; r++)
                    for (int v = 0; v < (next > c ? 2 : 1); v++) {
                        float *out = scratch.out + (int64_t)(row + r) * channels + c + v * L;
                        store(out, load<F>(out) + sums[r][v]);
                    }
            }
        }
    }
}

}  // namespace kvbench
