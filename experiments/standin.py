"""Generated files in each benchmark's own layout, to try an item's format where the data is missing.

Their texts mean nothing and neither do scores on them: tables of them are marked "format only".
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

#: records of a test split; GSM8K's script of LogQuant shows training records up to number 94
RECORDS, TRAINING = 4, 96
#: words of a text for perplexity and for going on with
LONG = 6000
_WORDS = "the old river house stood near a quiet road where people walked home late in winter with their bread".split()
#: names of files, each with its text or its records
Files = Iterator[tuple[str, str | list[dict[str, Any]]]]


def random_sentences(rng: random.Random, words: int) -> str:
    """Return sentences of `words` words."""
    picked = [rng.choice(_WORDS) for _ in range(words)]
    return " ".join(f"{word}." if n % 12 == 11 else word for n, word in enumerate(picked))


def longbench(task: str, words: int) -> Files:
    """Yield ``<task>.jsonl`` with LongBench's fields."""
    rng = random.Random(f"longbench {task}")
    classes = ["place", "person", "number"] if task in ("trec", "lsht") else None
    records = []
    for _ in range(RECORDS):
        context, answer = random_sentences(rng, words), classes[0] if classes else random_sentences(rng, 4)
        if task.startswith("passage_"):
            context = f"Paragraph 1: {context}"
            answer = "1" if task == "passage_count" else "段落1" if task.endswith("zh") else "Paragraph 1"
        record = {
            "input": random_sentences(rng, 8),
            "context": context,
            "answers": [answer],
            "length": words,
            "dataset": task,
        }
        records.append(record | {"language": "en", "all_classes": classes, "_id": f"{rng.getrandbits(128):032x}"})
    yield f"{task}.jsonl", records


def gsm8k(task: str, words: int) -> Files:
    """Yield ``train.jsonl`` and ``test.jsonl`` with GSM8K's fields."""
    rng = random.Random("gsm8k")
    for split, count in (("train", TRAINING), ("test", RECORDS)):
        sums = [(rng.randrange(2, 9), rng.randrange(2, 9)) for _ in range(count)]
        yield (
            f"{split}.jsonl",
            [
                {
                    "question": f"{random_sentences(rng, 6)} What is {a} plus {b}?",
                    "answer": f"It is {a} + {b} = {a + b}.\n#### {a + b}",
                }
                for a, b in sums
            ],
        )


def openbookqa(task: str, words: int) -> Files:
    """Yield ``train.jsonl`` and ``test.jsonl`` with OpenBookQA's fields, as its authors' files have them."""
    rng = random.Random("openbookqa")
    for split in ("train", "test"):
        records = []
        for number in range(8):
            choices = [{"text": random_sentences(rng, 2), "label": label} for label in "ABCD"]
            question = {"stem": random_sentences(rng, 8), "choices": choices}
            records.append({"id": str(number), "question": question, "answerKey": rng.choice("ABCD")})
        yield f"{split}.jsonl", records


def book_texts(task: str, words: int) -> Files:
    """Yield the files of a folder of books."""
    rng = random.Random("books")
    yield from [(f"book-{number}.txt", random_sentences(rng, 2 * LONG)) for number in range(RECORDS)]


def article(task: str, words: int) -> Files:
    """Yield one text of lines, as WikiText-2's raw test split has them."""
    rng = random.Random("article")
    yield "test.txt", "\n".join(random_sentences(rng, 60) for _ in range(LONG // 60)) + "\n"


def records(seed: str, name: str, record: Callable[[random.Random, int], dict[str, Any]]) -> Callable[..., Files]:
    """Return a layout of one file whose records are made from a source of random numbers and their number."""

    def layout(task: str, words: int) -> Files:
        rng = random.Random(seed)
        yield name, [record(rng, number) for number in range(RECORDS)]

    return layout


def _summary(rng: random.Random, number: int) -> dict[str, Any]:
    return {"sources": [random_sentences(rng, LONG)], "summary/short": random_sentences(rng, 30)}


def _book_summary(rng: random.Random, number: int) -> dict[str, Any]:
    return {"id": number, "context": random_sentences(rng, LONG), "answer": [random_sentences(rng, 30)]}


_DOCUMENTS = records("documents", "documents.jsonl", lambda rng, _: {"text": random_sentences(rng, LONG)})
#: choice of ``conf/dataset`` -> function from a task and the words of a context to its files
LAYOUTS: dict[str, Callable[[str, int], Files]] = {
    "longbench": longbench,
    "longbench_cocktail": longbench,
    "longbench_en": longbench,
    "longbench_logquant": longbench,
    "gsm8k": gsm8k,
    "gsm8k_logquant": gsm8k,
    "openbookqa": openbookqa,
    "multi_lexsum": records("multi_lexsum", "test.jsonl", _summary),
    "infinitebench_sum": records("infinitebench_sum", "longbook_sum_eng.jsonl", _book_summary),
    "pg19": book_texts,
    "perplexity/pg19": book_texts,
    "perplexity/wikitext2": article,
    "perplexity/c4": _DOCUMENTS,
    "perplexity/c4_new": _DOCUMENTS,
}


def path(data: str, task: str, runs: Path, context: int) -> Path:
    """Write the stand-in of a data set and return the value of ``dataset.path``: its file, or the folder of several.

    Args:
        data: choice of ``conf/dataset``; a key of :data:`LAYOUTS`.
        task: its task, or empty.
        runs: folder of the runs; the files go into its subfolder ``standin``.
        context: tokens of the model's context; records of LongBench take a quarter of it.
    """
    words = min(1000, max(32, context // 16))
    folder = runs / "standin" / f"{data.replace('/', '-')}-{words}"
    files = dict(LAYOUTS[data](task, words))
    for name, content in files.items():
        _write_once(folder / name, content if isinstance(content, str) else "".join(map(_line, content)))
    return folder / next(iter(files)) if len(files) == 1 else folder


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _write_once(path: Path, content: str) -> None:
    """Write a file unless it exists with this content; several processes may write it at once."""
    if not path.is_file() or path.read_text(encoding="utf-8") != content:
        from kvbench.util import atomic

        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.replace_file(path, content.encode())
