// Scales and minima of the groups of a tile, and rows of 16-bit weights.
//
// In all kinds of codes a value is step * code + base, with both numbers those of its group.

#pragma once

#include "codes.hpp"

namespace kvbench {

struct Affine {
    F step, base;
};

// Turn what is stored for a group into step and base.
inline Affine affine(int kind, int bits, F first, F second) {
    switch (kind) {
        case ATOM: return {first, -second * first};
        // scale / 16 * (code - 8) + minimum
        case HIERARCHICAL: return {first * 0.0625f, second - first * 0.5f};
        case OFFSET: return {first, first * -(float)(1 << (bits - 1))};
        case FOLDED: {  // the 4 lowest bits of the factor are the zero point, and count as 0 in it
            const F step = (F)((I)first & -16);
            return {step, -to_float((I)first & 15) * step};
        }
        default: return {first, second};
    }
}

// Step and base of L channels of a group of tokens.
inline Affine of_channels(const Part &part, int64_t head, int64_t group, int channel) {
    const int64_t at = group * part.param_row[0] + channel;
    const Type type = (Type)part.param_type;
    return affine(part.kind, part.bits, elements(part.params[0], type, head * part.param_head[0] + at),
                  elements(part.params[1], type, head * part.param_head[1] + at));
}

// The group of a token, and the first token behind it. A format has `group`, `window` and `cuts` as a Part does.
template <class Format>
inline int64_t group_of(const Format &part, int64_t token, int64_t &end) {
    if (!part.window) {
        const int64_t group = token / part.group;
        end = (group + 1) * part.group;
        return group;
    }
    // a window is cut into groups of which the first ones have one token more
    const int64_t window = token / part.window, inside = token % part.window;
    const int least = part.window / part.cuts, longer = part.window % part.cuts, border = longer * (least + 1);
    const int64_t cut = inside < border ? inside / (least + 1) : longer + (inside - border) / least;
    end = window * part.window + (cut < longer ? (cut + 1) * (least + 1) : border + (cut + 1 - longer) * least);
    return window * part.cuts + cut;
}

// Steps and bases of the tokens of a tile, [blocks][TILE], with a block of channels for each group of a token.
struct TokenParams {
    float *step, *base;

    void read(const Part &part, int64_t head, int tile, int blocks, float *spare) const {
        column(part, 0, head, tile, blocks, spare, step);
        if (part.kind == OFFSET || part.kind == FOLDED) std::memset(base, 0, sizeof(float) * blocks * TILE);
        else column(part, 1, head, tile, blocks, spare, base);
        for (int i = 0; i < blocks * TILE; i += L) {
            const Affine both = affine(part.kind, part.bits, load<F>(step + i), load<F>(base + i));
            store(step + i, both.step), store(base + i, both.base);
        }
    }

    static void column(const Part &part, int which, int64_t head, int tile, int blocks, float *spare, float *to) {
        const int row = part.param_row[which];
        const int64_t from = head * part.param_head[which] + (int64_t)tile * TILE * row;
        const Type type = (Type)part.param_type;
        float *raw = blocks == 1 && row == 1 ? to : spare;
        for (int i = 0; i < TILE * row; i += L) store(raw + i, elements(part.params[which], type, from + i));
        if (raw == to) return;
        if (row % 4 == 0) transpose((const uint32_t *)raw, row, TILE, row, (uint32_t *)to, TILE);
        else
            for (int b = 0; b < blocks; b++)
                for (int t = 0; t < TILE; t++) to[b * TILE + t] = raw[t * row + b];
    }
};

// Rows of weights in 16 bits, of one factor each: weight = factor * (digit + next / 65534). Codes are whole numbers, so
// the products are exact. Queries in 16 bits have one digit, which is 256 times as fine as bf16 for the largest weight
// of a row; those in 32 bits two.
struct Weights {
    int16_t *digits;  // [rows][count][length]
    int length, count;
    float *factor;  // [rows]

    int16_t *row(int r, int digit) const { return digits + ((int64_t)r * count + digit) * length; }

    // Round the numbers x[from, to) of a row whose largest magnitude is `most`; return the sum of the rounded ones.
    float round(int r, const float *x, int from, int to, float most) const {
        if (!(most > 1e-30f)) {
            factor[r] = 0;
            for (int d = 0; d < count; d++) std::memset(row(r, d) + from, 0, 2 * (to - from));
            return 0;
        }
        const float unit = 32767.f / most;
        factor[r] = most / 32767.f;
        I sum = {}, rest_sum = {};
        for (int i = from; i < to; i += L) {
            const F scaled = load<F>(x + i) * unit;
            const I digit = rounded(scaled);
            store_short(row(r, 0) + i, digit);
            sum += digit;
            if (count == 2) {
                const I rest = rounded((scaled - to_float(digit)) * 65534.f);
                store_short(row(r, 1) + i, rest);
                rest_sum += rest;
            }
        }
        return factor[r] * (sum_of(to_float(sum)) + sum_of(to_float(rest_sum)) / 65534.f);
    }
};

// The product with row r, of which `sums` has those with each digit.
inline F scaled(const Weights &weights, int r, const I (*sums)[2], int v) {
    F sum = to_float(sums[r * weights.count][v]);
    if (weights.count == 2) sum += to_float(sums[r * 2 + 1][v]) * (1 / 65534.f);
    return sum * weights.factor[r];
}

}  // namespace kvbench
