"""``python -m experiments.mini.chunks``: what Cocktail's search finds in mini's one-hop tasks; no model is run.

A sample counts as found where the chunk that holds the queried key lies above INT2. A chunk's border may cut the key:
then ``key`` asks for one of the chunks that hold a part of it, ``whole key`` for all of them. ``answer begins`` is the
chunk in which the answer begins. Where a task has several places (multi_value), a sample's figure is the share of them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.measured import command_line, keep_file
from experiments.mini.fold import score_stderr
from experiments.place import choice
from experiments.stored import markdown_table
from kvbench.models import by_name
from kvbench.models.load import load_tokenizer
from kvbench.models.spec import ModelConfig
from kvbench.retrieval.chunks import Chunked, Widths, by_threshold, cut_chunks
from kvbench.retrieval.encoders import encoder
from kvbench.runner.prompting import encode_prompt
from kvbench.tasks.base import Sample
from kvbench.tasks.mini import Mini
from kvbench.util.schema import build

#: the queried key in a question, by task
KEYS = {
    "passkey": r"the (pass key)",
    "needle": r"for (\S+)\?",
    "needle_words": r"for (\S+)\?",
    "multi_value": r"for (\S+),",
    "key_value": r"key (\S+)\?",
    "key_value_hex": r"key (\S+)\?",
    "facts": r"(?:does|was|of) ([A-Z]\w+ [A-Z]\w+)",
}
COLUMNS = ("key", "whole key", "answer", "cut")


def held(offsets: Sequence[tuple[int, int]], chunks: Chunked, start: int, stop: int) -> list[int]:
    """Return the chunks that hold tokens of the characters ``[start, stop)``; the exact remainder is the last."""
    tokens = [i for i, (a, b) in enumerate(offsets) if a < stop and start < b]
    return sorted({min((token - chunks.first) // chunks.size, len(chunks.texts)) for token in tokens})


def places(sample: Sample) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the characters of the queried key and of its value, for each place that the question asks about."""
    match = re.search(KEYS[sample.task], sample.query)
    assert match is not None, sample.query
    key = match.group(1)
    spans = sample.meta["answer_spans"]
    if sample.task == "passkey":  # said twice in one record, with one key before the first
        spans = spans[:1]
    pairs = []
    for start, stop in spans:
        at = sample.prompt.rindex(key, 0, start)
        pairs.append(((at, at + len(key)), (start, stop)))
    return pairs


def judge(sample: Sample, offsets: Sequence[tuple[int, int]], chunks: Chunked, widths: Widths) -> dict[str, float]:
    """Return the figures of one sample (:data:`COLUMNS`), and the share of chunks of each width."""

    def above(chunk: int) -> bool:
        return chunk == len(widths.bits) or widths.bits[chunk] > 2

    sums = dict.fromkeys(COLUMNS, 0.0)
    pairs = places(sample)
    for key, answer in pairs:
        parts = held(offsets, chunks, *key)
        sums["key"] += any(map(above, parts))
        sums["whole key"] += all(map(above, parts))
        sums["cut"] += len(parts) > 1
        sums["answer"] += above(held(offsets, chunks, *answer)[0])
    shares = {f"{bits}": widths.count(bits) / max(1, len(widths.bits)) for bits in (2, 4, 16)}
    return {name: value / len(pairs) for name, value in sums.items()} | shares


def chunk_figures(
    task: str, arguments: argparse.Namespace, tokenizer: Any, whole_words: bool
) -> list[dict[str, float]]:
    """Return the figures of all samples of one task."""
    figures = []
    for sample in Mini(tasks=(task,), lengths=(arguments.length,), limit=arguments.limit).samples():
        prompt = encode_prompt(sample, tokenizer)
        offsets = tokenizer(sample.prompt, return_offsets_mapping=True)["offset_mapping"]
        assert len(offsets) == len(prompt.ids)
        size = arguments.chunk_size
        chunks = cut_chunks(prompt.ids, tokenizer.decode, size, prompt.context_span, sample.query, None, whole_words)
        scores = encoder(arguments.encoder).scores(chunks.query, chunks.texts)
        figures.append(judge(sample, offsets, chunks, by_threshold(scores, arguments.alpha, arguments.beta)))
    return figures


def chunk_markdown(results: Mapping[tuple[str, bool], Sequence[Mapping[str, float]]]) -> str:
    """Return a line for each task and each way to read a chunk's text."""
    lines = []
    for (task, whole_words), samples in results.items():
        values = {column: [sample[column] for sample in samples] for column in (*COLUMNS, "2", "4", "16")}
        means = {column: sum(own) / len(own) for column, own in values.items()}
        figures = [f"{means[column]:.3f} ±{score_stderr(values[column]):.3f}" for column in COLUMNS]
        shares = " / ".join(f"{100 * means[bits]:.1f} %" for bits in ("2", "4", "16"))
        lines.append([task, "whole words" if whole_words else "tokens, decoded", *figures, shares])
    head = ["task", "chunk's text", "key", "whole key", "answer begins", "keys cut by a border", "INT2 / INT4 / FP16"]
    return "\n".join(markdown_table(head, lines, "-")) + "\n"


def main() -> int:
    """Measure all tasks with both ways to read a chunk's text."""
    parser = command_line("experiments.mini.chunks", __doc__, "results/mini/chunks.md")
    parser.add_argument("--limit", type=int, default=200, help="samples per task")
    parser.add_argument("--length", type=int, default=4096, help="prompt length in tokens")
    parser.add_argument("--tasks", nargs="+", choices=tuple(KEYS), default=tuple(KEYS))
    parser.add_argument("--encoder", default="bm25")
    parser.add_argument("--alpha", type=float, default=0.6)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--chunk-size", type=int, default=32)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(build(ModelConfig, by_name.group("tiny"), "model"))
    results = {
        (task, whole_words): chunk_figures(task, arguments, tokenizer, whole_words)
        for task in arguments.tasks
        for whole_words in (True, False)
    }
    note = (
        f"{arguments.encoder}, alpha {arguments.alpha}, beta {arguments.beta}, chunks of {arguments.chunk_size} tokens,"
        f" prompts of {arguments.length} tokens, n = {arguments.limit} a task; ± standard error over samples.\n"
    )
    text = chunk_markdown(results) + "\n" + note
    old = arguments.out.read_text(encoding="utf-8") if arguments.out.exists() else ""
    counts = {"samples": int(found[1])} if (found := re.search(r"n = (\d+) a task", old)) else None
    print(text)
    return keep_file(text, arguments.out, choice(arguments), {"samples": arguments.limit}, counts)


if __name__ == "__main__":
    raise SystemExit(main())
