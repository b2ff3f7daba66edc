"""The similarity of queries to the chunks of a context, and the bits that Cocktail's thresholds give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from experiments.data import Plan, data_overrides
from experiments.fold.cells import FORMAT_ONLY, Cell, Folded, Heading
from experiments.item import Computed, Model
from experiments.real.files import file_notes
from experiments.runs import composed, run_of
from kvbench.config.run_config import checked_config
from kvbench.errors import KvbenchError
from kvbench.models.load import load_tokenizer
from kvbench.models.spec import ModelConfig
from kvbench.retrieval.chunks import by_threshold, cut_chunks
from kvbench.retrieval.encoders import encoder
from kvbench.runner.prompting import encode_prompt
from kvbench.tasks.base import Sample
from kvbench.tasks.mini import Mini
from kvbench.tasks.work import AskQuestions
from kvbench.util.schema import build

#: Cocktail's thresholds (sec. IV-A)
ALPHA, BETA = 0.6, 0.1
#: characters of a token of English
CHARACTERS = 4
#: the bundled task whose documents hold many records
TASK = "several"


def heat(item: Computed, plan: Plan) -> Folded:
    """Return the share of chunks of each width by query, and the similarities as ``arrays["heat"]``, 0 to 1 by row."""
    from experiments.data import choice_data

    options = item.options
    name = options[{"paper": "encoder", "real": "real"}.get(plan.data, "small")]
    chosen_model = plan.models[0] if plan.data == "real" else "tiny"
    rows = [f"query {number + 1}" for number in range(options["queries"])]
    headings = [Heading(text, "% of chunks", 1) for text in ("FP16", "INT4", "INT2")]
    tokenizer = load_tokenizer(build(ModelConfig, choice_data("model", chosen_model), "model"))
    try:
        make = meeting if plan.data == "real" else document
        context, queries = make(options, plan)
    except KvbenchError as problem:
        cells = [Cell(name, row, heading.name, reason=str(problem)) for row in rows for heading in headings]
        return Folded(headings, rows, [name], cells)
    rows = rows[: len(queries)]
    prompt = encode_prompt(context, tokenizer)
    cells: list[Cell] = []
    similarities: list[list[float]] = []
    for row, query in zip(rows, queries, strict=True):
        try:
            scorer = encoder(name)
            size, span = options["chunk_size"], prompt.context_span
            chunks = cut_chunks(prompt.ids, tokenizer.decode, size, span, query, None, scorer.whole_words)
            scores = scorer.scores(query, chunks.texts)
        except KvbenchError as problem:
            cells += [Cell(name, row, h.name, reason=str(problem)) for h in headings]
            continue
        widths = by_threshold(scores, ALPHA, BETA)
        low, high = min(scores), max(scores)
        similarities.append([(score - low) / (high - low) if high > low else 0.0 for score in scores])
        for heading, bits in zip(headings, (16, 4, 2), strict=True):
            share = 100 * widths.count(bits) / len(widths.bits)
            cells.append(Cell(name, row, heading.name, ours=share, n=len(widths.bits)))
    full = [cell.ours for cell in cells if cell.column == "FP16" and cell.ours is not None]
    source = "QMSum" if plan.data == "real" else "mini"
    notes = (
        [f"{context.id} of {source}, {name}: on average {fmean(full):.1f} % of the chunks are FP16."] if full else []
    )
    notes += file_notes([options["passage"]], plan) if plan.data == "real" else []
    return Folded(
        headings,
        rows,
        [name],
        cells,
        notes=notes,
        marks=[FORMAT_ONLY] if plan.data == "standin" else [],
        arrays={"heat": similarities, "label": "similarity, scaled per query", "rows": rows} if similarities else {},
    )


def document(options: Mapping[str, Any], plan: Plan) -> tuple[Sample, Sequence[str]]:
    """Return a generated document with several records, and questions about them."""
    samples = Mini(tasks=(TASK,), lengths=(options["length"],), limit=1).samples()
    sample = next(iter(samples))
    assert isinstance(sample.work, AskQuestions)
    queries = [question.query for question in sample.work.questions]
    return sample, queries[: options["queries"]]


def meeting(options: Mapping[str, Any], plan: Plan) -> tuple[Sample, Sequence[str]]:
    """Return the meeting of QMSum with most questions, up to a document's length, and its questions.

    Raises:
        KvbenchError: the records cannot be read.
    """
    texts = data_overrides(options["passage"], replace(plan, limit=None), Model("tiny"))
    task = checked_config(composed(run_of("fp16", "tiny", texts, plan).overrides)).task
    asked: dict[str, list[Sample]] = {}
    for sample in task.samples():
        begin, end = sample.context_span or (0, 0)
        asked.setdefault(sample.prompt[begin:end], []).append(sample)
    context, samples = max(asked.items(), key=lambda pair: len(pair[1]))
    text = context[: CHARACTERS * options["length"]]
    whole = replace(samples[0], prompt=text, context_span=(0, len(text)))
    return whole, [sample.query for sample in samples[: options["queries"]]]
