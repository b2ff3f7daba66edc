"""QuantSpec's analytic items: intensities, ridge points, bytes and roofline times of a model, without a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

from experiments import published
from experiments.data import Plan
from experiments.fold.cells import Cell, Folded, Heading, Verdict
from experiments.fold.claims import decided, unit_of
from experiments.item import Computed, Model
from kvbench.bench.choices import method_of, shape_of
from kvbench.bench.prediction import draft_weights
from kvbench.methods.byte_parts import View
from kvbench.methods.bytes import kv_bytes
from kvbench.profiling.intensity import Intensity, asymptote, best_gamma, decode_work, prefill_work, table_1
from kvbench.profiling.roofline import Gpu, Shape, gpu_named, predict

PARTS = ("linear", "attention", "aggregate")


def verdict(claim: str, model: str, ours: float, low: float, high: float, unit: str = "factor") -> Verdict:
    """Return what a computed number says to a claim; it has no error."""
    return decided(claim, model, ours, low, high, unit=unit, computed=True)


def length(tokens: int) -> str:
    """Return a number of tokens as text: 65536 as ``64k``."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def asymptotics(item: Computed, plan: Plan) -> Folded:
    """Return Table 1 evaluated, with the limits of its last rows."""
    options = item.options
    columns = [(batch, tokens) for tokens in options["contexts"] for batch in options["batches"]]
    headings, cells, verdicts = [], [], []
    for batch, tokens in columns:
        for kind in ("evaluated", "limit"):
            headings.append(Heading(f"B = {batch}, S = {length(tokens)}: {kind}", digits=1))
    for model in plan.models_of(item):
        d = shape_of(model.preset).hidden
        worst, least = 0.0, float("inf")
        for batch, tokens in columns:
            values = {}
            for phase in ("prefill", "decode"):
                for part in PARTS:
                    value = table_1(phase, part, batch, tokens, d, options["new_tokens"]).value  # type: ignore[arg-type]
                    limit = asymptote(phase, part, batch, tokens, d)  # type: ignore[arg-type]
                    values[phase, part] = value
                    worst = max(worst, value / limit, limit / value)
                    for kind, number in (("evaluated", value), ("limit", float(limit))):
                        name = f"B = {batch}, S = {length(tokens)}: {kind}"
                        cells.append(Cell(model.title, f"{phase}, {part}", name, ours=number))
            least = min(least, values["prefill", "aggregate"] / values["decode", "aggregate"])
        verdicts += [
            verdict("the limits are of the right order: within a factor", model.title, worst, 1, 4),
            verdict("prefill is far more intense than decoding", model.title, least, 10, float("inf")),
        ]
    rows = [f"{phase}, {part}" for phase in ("prefill", "decode") for part in PARTS]
    return Folded(headings, rows, _titles(item, plan), cells, verdicts=verdicts)


def decoding(item: Computed, plan: Plan) -> Folded:
    """Return Figure 2: the intensity of decoding by context and batch, with attention's share of the time."""

    def work(shape: Shape, batch: int, context: int) -> dict[Any, Intensity]:
        return decode_work(shape, batch, context, item.options["new_tokens"])

    folded = _intensities(item, plan, work)
    gpu = gpu_named(item.options["gpu"])
    by_batch = []
    for model, batch in product(plan.models_of(item), item.options["batches"]):
        shares = []
        for context in item.options["contexts"]:
            done = work(shape_of(model.preset), batch, context)
            seconds = {part: max(w.mops / gpu.bandwidth, w.flops / gpu.flops) for part, w in done.items()}
            share = 100 * seconds["attention"] / (seconds["linear"] + seconds["attention"])
            shares.append(f"{share:.0f} % at {length(context)}")
        by_batch.append(f"{model.title}, batch {batch}: {', '.join(shares)}")
    note = f"Attention's share of the time of a step on an {gpu.name.upper()} (roofline): {'; '.join(by_batch)}."
    claim = "all decoding is memory-bound: the largest intensity"
    return replace(folded, verdicts=_sides(folded, gpu.ridge, claim, max), notes=[note])


def prefill(item: Computed, plan: Plan) -> Folded:
    """Return Figure 6: the intensity of reading prompts by context and batch."""
    folded = _intensities(item, plan, prefill_work)
    limit = gpu_named(item.options["gpu"]).ridge
    return replace(folded, verdicts=_sides(folded, limit, "all prefill is compute-bound: the smallest intensity", min))


def _intensities(item: Computed, plan: Plan, work: Callable[[Shape, int, int], dict[Any, Intensity]]) -> Folded:
    """Return intensities with a row per batch, a column per part and context, and the ridge point as a row."""
    gpu, batches, contexts = (item.options[name] for name in ("gpu", "batches", "contexts"))
    ridge = f"ridge point, {gpu.upper()}"
    limit = gpu_named(gpu).ridge
    headings = [
        Heading(f"{part}, {length(context)}", digits=1, x=float(context), panel=f"{part}: FLOPs per byte")
        for part in PARTS
        for context in contexts
    ]
    cells = []
    for model in plan.models_of(item):
        shape = shape_of(model.preset)
        for context in contexts:
            for batch in batches:
                for part, done in work(shape, batch, context).items():
                    name = f"{part}, {length(context)}"
                    cells.append(Cell(model.title, f"batch {batch}", name, ours=done.value))
            for part in PARTS:
                cells.append(Cell(model=model.title, row=ridge, column=f"{part}, {length(context)}", ours=limit))
    rows = [*(f"batch {batch}" for batch in batches), ridge]
    return Folded(headings, rows, _titles(item, plan), cells)


def _sides(folded: Folded, limit: float, claim: str, pick: Callable[[Sequence[float]], float]) -> list[Verdict]:
    """Return for each model whether all of its intensities lie on one side of the ridge point."""
    low, high = (0.0, limit) if pick is max else (limit, float("inf"))
    by_model = {
        model: [c.ours for c in folded.cells if c.model == model and c.row.startswith("batch") and c.ours is not None]
        for model in folded.models
    }
    return [verdict(claim, model, pick(values), low, high, "FLOPs per byte") for model, values in by_model.items()]


def cache_against_weights(item: Computed, plan: Plan) -> Folded:
    """Return Figure 7: the bytes of keys and values against those of the weights, by context and batch."""
    options = item.options
    headings = [Heading(length(c), unit="GB", digits=1, x=float(c)) for c in options["contexts"]]
    cells, verdicts, notes = [], [], []
    for model in plan.models_of(item):
        shape = shape_of(model.preset)
        weights = shape.weight_bytes()
        for context in options["contexts"]:
            for batch in options["batches"]:
                size = batch * shape.kv_bytes(context) / 1e9
                cells.append(Cell(model.title, f"batch {batch}", length(context), ours=size))
            for name, size in (("weights", weights), *((g, gpu_named(g).memory) for g in options["gpus"])):
                row = name if name == "weights" else _eight(name)
                count = 1 if name == "weights" else 8
                cells.append(Cell(model.title, row, length(context), ours=count * size / 1e9))
        batch, context = options["batches"][-1], options["contexts"][-1]
        ratio = batch * shape.kv_bytes(context) / weights
        claim = f"at batch {batch} and {length(context)} tokens keys and values take 160 times as much as the weights"
        verdicts.append(verdict(claim, model.title, ratio, 152, 168))
        most = 8 * gpu_named(options["gpus"][0]).memory
        over = batch * shape.kv_bytes(context) / most
        claim = f"and more than {_eight(options['gpus'][0])} of 80 GB have"
        verdicts.append(verdict(claim, model.title, over, 1, float("inf")))
        notes.append(f"{model.title}: weights {weights / 1e9:.2f} GB, {shape.kv_bytes(1) / 2**20:g} MiB per token.")
    rows = [*(f"batch {batch}" for batch in options["batches"]), "weights", *map(_eight, options["gpus"])]
    return Folded(headings, rows, _titles(item, plan), cells, verdicts=verdicts, notes=notes)


def weights_or_kv(item: Computed, plan: Plan) -> Folded:
    """Return Figure 5 by a roofline: QuantSpec's speed-up with quantized keys and values, weights, or both."""
    options = item.options
    gpu = gpu_named(options["gpu"])
    lines = [line for line in published.published_lines("quantspec_table4") if line["method"] == "QuantSpec"]
    acceptance = fmean(float(rate) for line in lines if (rate := line["acceptance_rate_pct"])) / 100
    headings = [Heading(length(c), unit="x", x=float(c)) for c in options["contexts"]]
    cells, verdicts = [], []
    for model in plan.models_of(item):
        table = {}
        for context in options["contexts"]:
            for row in SHARES:
                gamma, factor = _best_speed_up(shape_of(model.preset), context, gpu, row, acceptance)
                table[row, context] = factor
                note = f"best gamma: {gamma}"
                cells.append(Cell(model.title, row, length(context), ours=factor, note=note))
        verdicts += shares(model, table, options["contexts"])
    notes = [
        f"Acceptance {acceptance:.3f}: the mean of QuantSpec's published rates (Table 4). Predicted by a roofline on "
        f"an {gpu.name.upper()}; each cell has its best gamma of 1 to 8."
    ]
    return Folded(headings, list(SHARES), _titles(item, plan), cells, verdicts=verdicts, notes=notes)


def _eight(gpu: str) -> str:
    return f"eight {gpu.upper()}"


#: row -> the draft's weights (of ``draft_weights`` of QuantSpec), and the setting whose cache both read
SHARES = {
    "KV cache only": ("same", "quantspec"),
    "weights only": ("int4_all", "fp16"),
    "both": ("int4_all", "quantspec"),
}


def _best_speed_up(shape: Shape, context: int, gpu: Gpu, row: str, acceptance: float) -> tuple[int, float]:
    """Return the best gamma and its speed-up over plain decoding with weights and cache in 16 bits."""
    which, setting = SHARES[row]
    weights = shape.weight_bytes()

    def step(cache: str, view: View, q_len: int = 1, weight_bytes: int = weights) -> float:
        sizes = {name: getattr(shape, name) for name in ("layers", "query_heads", "heads", "channels")}
        size = kv_bytes(method_of(cache), context, **sizes, view=view)
        return predict(shape, size.total, weight_bytes, 1, context, gpu, q_len=q_len).expected_tpot_s

    light = draft_weights(shape, weights, which)[0]
    draft, verify = step(setting, "draft", weight_bytes=light), step(setting, "target", q_len=5)
    return best_gamma(acceptance, step("fp16", "all"), draft, verify)


def shares(
    model: Model, table: dict[tuple[str, int], float], contexts: Sequence[int], *, computed: bool = True
) -> list[Verdict]:
    """Return Figure 5's claims, judged at the shortest and the longest of `contexts`, and at all of them.

    `table` has the speed-ups by row and context; they are measured unless `computed`.
    """
    first, last = contexts[0], contexts[-1]
    short = table["weights only", first] - table["KV cache only", first]
    long = table["KV cache only", last] - table["weights only", last]
    both = min(table["both", c] - max(table["KV cache only", c], table["weights only", c]) for c in contexts)
    gains = {
        f"at {length(first)} weights bring more than the cache": short,
        f"at {length(last)} the cache brings more than weights": long,
        "both together bring most at every length: least gain": both,
    }
    more = {"n": 0 if computed else 1, "unit": unit_of("x"), "computed": computed}
    return [decided(text, model.title, gain, 0.0, float("inf"), **more) for text, gain in gains.items()]


def _titles(item: Computed, plan: Plan) -> list[str]:
    return [model.title for model in plan.models_of(item)]
