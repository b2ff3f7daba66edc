"""The similarity of queries to the chunks of a context, and the bits that Cocktail's thresholds give them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from experiments.data import Plan
from experiments.fold.cells import FORMAT_ONLY, Cell, Folded, Heading
from experiments.item import Computed
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
#: the bundled task whose documents hold many records
TASK = "several"


def heat(item: Computed, plan: Plan) -> Folded:
    """Return the share of chunks of each width by query, and the similarities as ``arrays["heat"]``, 0 to 1 by row."""
    from experiments.data import choice_data

    options = item.options
    name = options[{"paper": "encoder", "real": "real"}.get(plan.data, "small")]
    rows = [f"query {number + 1}" for number in range(options["queries"])]
    headings = [Heading(text, "% of chunks", 1) for text in ("FP16", "INT4", "INT2")]
    tokenizer = load_tokenizer(build(ModelConfig, choice_data("model", "tiny"), "model"))
    context, queries = document(options["length"], options["queries"])
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
    notes = [f"{context.id} of mini, {name}: on average {fmean(full):.1f} % of the chunks are FP16."] if full else []
    return Folded(
        headings,
        rows,
        [name],
        cells,
        notes=notes,
        marks=[FORMAT_ONLY] if plan.data == "standin" else [],
        arrays={"heat": similarities, "label": "similarity, scaled per query", "rows": rows} if similarities else {},
    )


def document(length: int, count: int) -> tuple[Sample, Sequence[str]]:
    """Return a generated document with several records, and `count` questions about them."""
    samples = Mini(tasks=(TASK,), lengths=(length,), limit=1).samples()
    sample = next(iter(samples))
    assert isinstance(sample.work, AskQuestions)
    queries = [question.query for question in sample.work.questions]
    return sample, queries[:count]
