"""Generated files in each benchmark's own layout, to try an item's format where the data is missing.

Their texts mean nothing and neither do scores on them: tables of them are marked "format only".
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: records of a test split; GSM8K's script of LogQuant shows training records up to number 94
RECORDS, TRAINING = 4, 96
#: words of a text for perplexity and for going on with
LONG = 6000
_WORDS = "the old river house stood near a quiet road where people walked home late in winter with their bread".split()


def random_sentences(rng: random.Random, words: int) -> str:
    """Return sentences of `words` words."""
    picked = [rng.choice(_WORDS) for _ in range(words)]
    return " ".join(f"{word}." if n % 12 == 11 else word for n, word in enumerate(picked))


def longbench(folder: Path, task: str, words: int) -> Path:
    """Write ``<task>.jsonl`` with LongBench's fields."""
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
    return _write_json_lines(folder / f"{task}.jsonl", records)


def gsm8k(folder: Path, task: str, words: int) -> Path:
    """Write ``train.jsonl`` and ``test.jsonl`` with GSM8K's fields."""
    rng = random.Random("gsm8k")
    for split, count in (("train", TRAINING), ("test", RECORDS)):
        sums = [(rng.randrange(2, 9), rng.randrange(2, 9)) for _ in range(count)]
        records = [
            {
                "question": f"{random_sentences(rng, 6)} What is {a} plus {b}?",
                "answer": f"It is {a} + {b} = {a + b}.\n#### {a + b}",
            }
            for a, b in sums
        ]
        _write_json_lines(folder / f"{split}.jsonl", records)
    return folder


def openbookqa(folder: Path, task: str, words: int) -> Path:
    """Write ``train.jsonl`` and ``test.jsonl`` with OpenBookQA's fields, as its authors' files have them."""
    rng = random.Random("openbookqa")
    for split in ("train", "test"):
        records = []
        for number in range(8):
            choices = [{"text": random_sentences(rng, 2), "label": label} for label in "ABCD"]
            question = {"stem": random_sentences(rng, 8), "choices": choices}
            records.append({"id": str(number), "question": question, "answerKey": rng.choice("ABCD")})
        _write_json_lines(folder / f"{split}.jsonl", records)
    return folder


def summaries(folder: Path, task: str, words: int) -> Path:
    """Write records with ``sources`` and ``summary/short``, as Multi-LexSum has them."""
    rng = random.Random("multi_lexsum")
    records = [
        {"sources": [random_sentences(rng, LONG)], "summary/short": random_sentences(rng, 30)} for _ in range(RECORDS)
    ]
    return _write_json_lines(folder / "test.jsonl", records)


def book_summaries(folder: Path, task: str, words: int) -> Path:
    """Write records with ``context`` and ``answer``, as InfiniteBench has them."""
    rng = random.Random("infinitebench_sum")
    records = [
        {"id": n, "context": random_sentences(rng, LONG), "answer": [random_sentences(rng, 30)]} for n in range(RECORDS)
    ]
    return _write_json_lines(folder / "longbook_sum_eng.jsonl", records)


def books(folder: Path, task: str, words: int) -> Path:
    """Write a folder of books, one text file each."""
    rng = random.Random("books")
    for number in range(RECORDS):
        _write_once(folder / f"book-{number}.txt", random_sentences(rng, 2 * LONG))
    return folder


def article(folder: Path, task: str, words: int) -> Path:
    """Write one text of lines, as WikiText-2's raw test split has them."""
    rng = random.Random("article")
    return _write_once(folder / "test.txt", "\n".join(random_sentences(rng, 60) for _ in range(LONG // 60)) + "\n")


def write_c4_documents(folder: Path, task: str, words: int) -> Path:
    """Write records with ``text``, as C4 has them."""
    rng = random.Random("documents")
    return _write_json_lines(
        folder / "documents.jsonl", [{"text": random_sentences(rng, LONG)} for _ in range(RECORDS)]
    )


def _write_json_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    return _write_once(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def _write_once(path: Path, content: str) -> Path:
    """Write a file unless it exists with this content; several processes may write it at once."""
    if not path.is_file() or path.read_text(encoding="utf-8") != content:
        from kvbench.util import atomic

        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.replace_file(path, content.encode())
    return path


#: choice of ``conf/dataset`` -> the function that writes its files and returns the value of ``dataset.path``
LAYOUTS: dict[str, Callable[[Path, str, int], Path]] = {
    "longbench": longbench,
    "longbench_cocktail": longbench,
    "longbench_en": longbench,
    "longbench_logquant": longbench,
    "gsm8k": gsm8k,
    "gsm8k_logquant": gsm8k,
    "openbookqa": openbookqa,
    "multi_lexsum": summaries,
    "infinitebench_sum": book_summaries,
    "pg19": books,
    "perplexity/pg19": books,
    "perplexity/wikitext2": article,
    "perplexity/c4": write_c4_documents,
    "perplexity/c4_new": write_c4_documents,
}


def path(data: str, task: str, runs: Path, context: int) -> Path:
    """Write the stand-in of a data set and return the value of ``dataset.path``.

    Args:
        data: choice of ``conf/dataset``; a key of :data:`LAYOUTS`.
        task: its task, or empty.
        runs: folder of the runs; the files go into its subfolder ``standin``.
        context: tokens of the model's context; records of LongBench take a quarter of it.
    """
    words = min(1000, max(32, context // 16))
    return LAYOUTS[data](runs / "standin" / f"{data.replace('/', '-')}-{words}", task, words)
