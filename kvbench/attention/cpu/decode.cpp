// Decode attention over the formats of a layer: units of tokens are computed apart and merged in a fixed order.
//
// A unit is a run of at most UNIT tokens of one row, KV head and phase, cut at multiples of UNIT in the packed segment.
// So where units begin, and thus every sum, depends neither on threads nor on other rows.

#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "values.hpp"

namespace kvbench {

constexpr float LOG2E = 1.44269504f;

struct Unit {
    int row, phase;
    int64_t key, value;  // index of the first token in either segment
    int lead, count;     // tokens of its first tile that precede the unit (0 if nothing is packed); its tokens
    int64_t before;      // tokens of the row, over all phases, before the unit
};

struct Layer {
    const Args &args;
    std::vector<Unit> units;
    std::vector<int> begins;     // first unit of each row, and one past the last
    std::vector<int64_t> total;  // tokens of each row
    std::vector<float> partial;  // of each unit and KV head: [rows][value_dim + 2], the last two maximum and sum
    std::unique_ptr<std::atomic<int>[]> missing;  // of each row and KV head: units that are not computed yet
    std::atomic<int64_t> next{0};
    int rows;

    explicit Layer(const Args &args) : args(args), rows(args.group * args.count) {
        for (int b = 0; b < args.batch; b++) {
            begins.push_back((int)units.size());
            int64_t seen = 0;
            for (int i = 0; i < args.phase_count; i++) {
                const int32_t *line = args.table + ((int64_t)b * args.phase_count + i) * 3;
                const Phase &phase = args.phases[i];
                const bool packed = phase.key.kind || phase.value.kind;
                // packed keys and values begin at the same place in a tile (Work.table), so either gives the cuts
                const int64_t origin = !packed ? 0 : phase.key.kind ? line[0] : line[1];
                for (int64_t done = 0; done < line[2];) {
                    const int64_t at = origin + done, left = line[2] - done, room = UNIT - at % UNIT;
                    const int count = (int)(left < room ? left : room);
                    const int lead = packed ? (int)(at % TILE) : 0;
                    units.push_back({b, i, line[0] + done, line[1] + done, lead, count, seen + done});
                    done += count;
                }
                seen += line[2];
            }
            total.push_back(seen);
        }
        begins.push_back((int)units.size());
        partial.resize(units.size() * args.heads * rows * (args.value_dim + 2));
        missing.reset(new std::atomic<int>[args.batch * args.heads]);
        for (int b = 0; b < args.batch; b++)
            for (int h = 0; h < args.heads; h++) missing[b * args.heads + h] = begins[b + 1] - begins[b];
    }

    float *of(int unit, int head) {
        return partial.data() + ((int64_t)unit * args.heads + head) * rows * (args.value_dim + 2);
    }

    void compute(Scratch &scratch, int number, int head);
    void merge(int row, int head);
};

// Read the query rows of a KV head in fp32, times `factor`.
inline void read_queries(const Args &args, int row, int head, float factor, float *to) {
    for (int i = 0; i < args.group; i++)
        for (int j = 0; j < args.count; j++, to += args.key_dim) {
            const int64_t from = row * args.query_stride[0] + (head * args.group + i) * args.query_stride[1] +
                                 j * args.query_stride[2];
            for (int c = 0; c < args.key_dim; c += L)
                store(to + c, elements(args.query, (Type)args.type, from + c) * factor);
        }
}

// cap * tanh(x / cap), in bits; by (1 - e) / (1 + e) with e = exp(-2 |x| / cap).
inline F capped(F x, float cap) {
    const F e = exp2_of(larger(splat(-60.f * cap), -magnitude(x)) * (2 * LOG2E / cap));
    const F size = (1.f - e) / (1.f + e) * (cap * LOG2E);
    return x < 0.f ? -size : size;
}

void Layer::compute(Scratch &scratch, int number, int head) {
    const Unit &unit = units[number];
    const Phase &phase = args.phases[unit.phase];
    const int64_t line = (int64_t)unit.row * args.heads + head;
    const int first = unit.lead, last = unit.lead + unit.count, dim = args.value_dim;
    float *partial = of(number, head), *most = partial + rows * dim, *sum = most + rows;
    scratch.rows = rows, scratch.digit_count = 2;  // queries of any type
    scratch.out = partial;
    read_queries(args, unit.row, head, args.cap ? args.scale : args.scale * LOG2E, scratch.query);

    // scores are counted from the beginning of the unit's first tile: those of its tokens are [first, last)
    const int64_t key = unit.key, value = unit.value;
    if (multiplies_codes(phase.key))
        for (int at = 0; at < last; at += TILE)
            packed_scores(scratch, phase.key, line, (int)((key - first + at) / TILE), at > first ? 0 : first - at,
                          last - at < TILE ? last - at : TILE, args.key_dim, scratch.scores + at);
    else
        exact_scores(scratch, phase.key, line, key, unit.count, args.key_dim, scratch.scores + first);

    const int width = (last + L - 1) / L * L;
    for (int r = 0; r < rows; r++) {
        float *scores = scratch.scores + (int64_t)r * UNIT;
        // the newest tokens are the row's last ones; new token j sees all but the count - 1 - j after it
        const int64_t visible = total[unit.row] - args.count + r % args.count + 1 - unit.before;
        const int end = visible < unit.count ? (visible > 0 ? first + (int)visible : first) : last;
        if (args.cap)
            for (int i = 0; i < width; i += L) store(scores + i, capped(load<F>(scores + i), args.cap));
        for (int i = 0; i < first; i++) scores[i] = HIDDEN;
        for (int i = end; i < width; i++) scores[i] = HIDDEN;
        F top = splat(HIDDEN), weights = {};
        for (int i = 0; i < width; i += L) top = larger(top, load<F>(scores + i));
        most[r] = most_of(top);
        for (int i = 0; i < width; i += L) {
            const F weight = end > first ? exp2_of(load<F>(scores + i) - most[r]) : F{};
            store(scores + i, weight);
            weights += weight;
        }
        std::memset(scores + width, 0, sizeof(float) * (UNIT - width));
        sum[r] = sum_of(weights);
    }
    scratch.digit_count = args.type == BF16 ? 1 : 2;  // weights of values: 16 bits are finer than an output in bf16
    std::memset(partial, 0, sizeof(float) * rows * dim);
    if (multiplies_codes(phase.value))
        for (int at = 0; at < last; at += TILE)
            packed_values(scratch, phase.value, line, (int)((value - first + at) / TILE), at > first ? 0 : first - at,
                          last - at < TILE ? last - at : TILE, dim, scratch.scores + at);
    else
        exact_values(scratch, phase.value, line, value, unit.count, dim, scratch.scores + first);
}

// Merge the units of a row and KV head in the order of their tokens, and write the output.
void Layer::merge(int row, int head) {
    const int dim = args.value_dim;
    std::vector<float> out(dim);
    for (int r = 0; r < rows; r++) {
        const int64_t query_head = head * args.group + r / args.count;
        const float sink = args.sinks ? args.sinks[query_head] * LOG2E : HIDDEN;
        float top = sink, sum = 0;
        for (int u = begins[row]; u < begins[row + 1]; u++) top = std::fmax(top, of(u, head)[rows * dim + r]);
        if (args.sinks) sum = exp2f(sink - top);  // a sink has a weight, but no value
        std::fill(out.begin(), out.end(), 0.f);
        for (int u = begins[row]; u < begins[row + 1]; u++) {
            const float *partial = of(u, head), most = partial[rows * dim + r];
            const float weights = partial[rows * dim + rows + r];
            if (most <= HIDDEN && weights == weights) continue;  // it sees no token here; NaN goes on to the output
            const float share = exp2f(most - top);
            sum += share * weights;
            for (int c = 0; c < dim; c += L)
                store(out.data() + c, load<F>(out.data() + c) + load<F>(partial + r * dim + c) * share);
        }
        const int64_t to = (((int64_t)row * args.count + r % args.count) * args.heads * args.group + query_head) * dim;
        for (int c = 0; c < dim; c++) put(args.out, (Type)args.type, to + c, sum ? out[c] / sum : 0.f);
    }
}

static void work(void *layer_) {
    Layer &layer = *(Layer *)layer_;
    const Args &args = layer.args;
    thread_local std::unique_ptr<Scratch> scratch(new Scratch);
    thread_local std::vector<float> buffers;
    const size_t query = (size_t)layer.rows * args.key_dim, scores = (size_t)layer.rows * UNIT;
    if (buffers.size() < query + scores + SLACK) buffers.resize(query + scores + SLACK);
    scratch->query = buffers.data(), scratch->scores = buffers.data() + query;
    std::memset(scratch->scores + scores, 0, sizeof(float) * SLACK);
    const int64_t items = (int64_t)layer.units.size() * args.heads;
    for (int64_t item; (item = layer.next++) < items;) {
        // items: row by row, in a row KV head by KV head, in a KV head unit by unit
        int row = 0;
        while (item >= (int64_t)layer.begins[row + 1] * args.heads) row++;
        const int64_t inside = item - (int64_t)layer.begins[row] * args.heads;
        const int count = layer.begins[row + 1] - layer.begins[row], head = (int)(inside / count);
        layer.compute(*scratch, layer.begins[row] + (int)(inside % count), head);
        if (--layer.missing[row * args.heads + head] == 0) layer.merge(row, head);
    }
}

}  // namespace kvbench

extern "C" void kvbench_decode(const kvbench::Args *args) {
    kvbench::Layer layer(*args);
    const int64_t items = (int64_t)layer.units.size() * args->heads;
    const unsigned threads = (unsigned)(args->threads < items ? args->threads : items);
    kvbench::in_threads(args->parallel, threads, kvbench::work, &layer);
    for (int b = 0; b < args->batch; b++)  // no unit has written the output of a row without tokens
        if (layer.begins[b] == layer.begins[b + 1])
            for (int h = 0; h < args->heads; h++) layer.merge(b, h);
}
