// What the host passes: the formats and buffers of a layer (kvbench/attention/cpu/decode.py writes the same structs).

#pragma once

#include <system_error>
#include <thread>
#include <vector>

#include "lanes.hpp"

namespace kvbench {

constexpr int TILE = 128;
constexpr int UNIT = 512;       // tokens whose partial result is computed at once, whatever the number of threads
constexpr int SLACK = 4;        // floats behind the last score that `exact_values` may read, times zeros
constexpr float HIDDEN = -1e30f;  // score of a token that is not seen

// TABLE: a code stands for a number of a table, which no step and minimum give (fp8, nvfp4, iq4_nl, octave, TurboQuant's levels).
enum Kind { FULL, AFFINE, ATOM, HIERARCHICAL, OFFSET, FOLDED, CROSS, TABLE };

// Runs a function in as many threads: GOMP_parallel of the OpenMP library that torch has loaded.
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

// Call `work` in `threads` threads, of which this one is the first; without OpenMP in threads of our own.
inline void in_threads(Parallel parallel, unsigned threads, void (*work)(void *), void *data) {
    if (threads < 2) return work(data);
    if (parallel) return parallel(work, data, threads, 0);
    std::vector<std::thread> others;
    try {
        for (unsigned i = 1; i < threads; i++) others.emplace_back(work, data);
    } catch (const std::system_error &) {  // no more threads: those that there are share the work
    }
    work(data);
    for (std::thread &other : others) other.join();
}

// One segment of keys or of values, for all rows and KV heads.
struct Part {
    const uint16_t *words[2];   // planes of codes, [B, H, tiles, ...]
    const void *params[3];      // scales, minima or zero points, cross factors
    const void *buffer;         // exact tokens, [B, H, capacity, D]
    int64_t param_head[3];      // elements from one head to the next in `params`
    int32_t param_row[3];       // elements from one group of tokens, or token, to the next
    int32_t kind, bits;
    int32_t by_token;           // 1 if a group is channels of one token, 0 if it is tokens of one channel
    int32_t group, window, cuts;  // kvbench.attention.work.Format; `cuts` is the number of groups of a window
    int32_t type, param_type;   // of exact elements, and of params
    int32_t capacity;           // in tiles, or in tokens if exact
    const float *table;         // of a code's number, [2^bits], if the kind is TABLE
    float factor;               // of all numbers, in addition to that of their group
    int32_t normed;             // 1: numbers are divided by the length of the vector of their token's numbers
    int32_t cross_tile;         // tokens that share the cross factors of their values; 1 for keys; 0: there are none
};

// True if products are of integers; else tokens are converted to fp32 first.
inline bool multiplies_codes(const Part &part) { return part.kind != FULL && part.kind != TABLE; }

struct Phase {
    Part key, value;
};

struct Args {
    const Phase *phases;
    const int32_t *table;       // [B, phases, 3]: first key, first value, tokens
    const void *query;
    void *out;                  // [B, count, Hq, value_dim], contiguous
    const float *sinks;         // [Hq] or null
    int64_t query_stride[3];    // of row, head, new token
    int32_t phase_count, batch, heads, group, count, key_dim, value_dim, type;  // type of queries and output
    int32_t threads;
    float scale, cap;           // factor on products; 0 for no softcap
    Parallel parallel;          // or null
};

}  // namespace kvbench
