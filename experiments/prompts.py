"""Prompts of the experiments (books, and the tasks of mini), and the models and caches that go on from them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvbench.cache import KVCache, Prompts
from kvbench.config.run_config import RuntimeConfig
from kvbench.models import by_name
from kvbench.models.load import LoadedModel, load_model
from kvbench.models.spec import ModelConfig
from kvbench.tasks import texts
from kvbench.tasks.mini import Mini
from kvbench.util.schema import build

#: tokens at a book's beginning that are left out (front matter and contents; MagicDec, QuantSpec)
SKIP = 8000
#: tasks of mini whose answers are long enough to be drafted
TASKS = ("key_value", "key_value_hex", "multi_value", "copy_long", "repeat", "code_line", "arithmetic")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        id: names it, the same whatever else is asked for.
        ids: token ids.
        span, query: context and question in it (Cocktail), or None: all but the last 64 tokens, and those.
        stop: whether a line's end ends the answer (tasks) or nothing does (books).
    """

    id: str
    ids: tuple[int, ...]
    span: tuple[int, int] | None
    query: str
    stop: bool


def books(tokenizer: Any, length: int, count: int, folder: str | None = None) -> list[Prompt]:
    """Return `count` prompts of `length` tokens from PG-19-like books in turn, each one further into its book.

    Without a folder (or ``KVBENCH_DATA/pg19``) the texts that come with Python stand in.
    """
    folder = folder or default_folder()
    documents = texts.local_texts(folder) if folder else texts.python()
    names = sorted(p.name.split(".")[0] for p in Path(folder).glob("*.txt*")) if folder else [""] * len(documents)
    encoded: list[list[int]] = [
        tokenizer(text[: 12 * (SKIP + length * (count // len(documents) + 1))], add_special_tokens=False)["input_ids"]
        for text in documents
    ]
    start = SKIP if folder else 0
    prompts: list[Prompt] = []
    turn = 0
    while len(prompts) < count:
        before = len(prompts)
        for name, ids in zip(names, encoded, strict=True):
            first = start + turn * length
            part = ids[first : first + length - 1]
            if len(part) == length - 1 and len(prompts) < count:
                whole = (
                    (tokenizer.bos_token_id, *part) if tokenizer.bos_token_id is not None else (ids[first - 1], *part)
                )
                prompts.append(Prompt(f"{name or 'python'}@{length}/{turn}", whole, None, "", stop=False))
        if len(prompts) == before:
            raise SystemExit(
                f"the texts are long enough for {len(prompts)} prompts of {length} tokens, but {count} are needed"
            )
        turn += 1
    return prompts


def tasks(tokenizer: Any, length: int, count: int, names: tuple[str, ...] = TASKS) -> list[Prompt]:
    """Return `count` prompts of mini's tasks in turn, of nominally `length` tokens."""
    mini = Mini(tasks=names, lengths=(length,), limit=-(-count // len(names)))
    prompts = []
    for index in range(mini.limit):
        for name in names[: count - len(prompts)]:
            sample = mini.sample(name, length, index)
            ids = tokenizer(sample.prompt)["input_ids"]
            begin, end = sample.context_span
            before = len(tokenizer(sample.prompt[:begin])["input_ids"])
            span = (before, len(tokenizer(sample.prompt[:end])["input_ids"]))
            prompts.append(Prompt(sample.id, tuple(ids), span, sample.query, stop=True))
    return prompts


def default_folder() -> str | None:
    """Return the folder of the books, None where there is none."""
    folder = Path(os.environ.get("KVBENCH_DATA", "")) / "pg19"
    return str(folder) if os.environ.get("KVBENCH_DATA") and folder.is_dir() else None


def loaded(name: str, runtime: RuntimeConfig, **changes: Any) -> LoadedModel:
    """Load a model by name, with some keys of its configuration changed."""
    return load_model(build(ModelConfig, {**by_name.group(name), **changes}, "model"), runtime)


def new_cache(method: Any, model: Any, tokenizer: Any, prompt: Prompt, count: int) -> tuple[KVCache, torch.Tensor]:
    """Return an empty cache for a prompt and `count` new tokens, and the prompt's ids ``[1, T]``."""
    ids = torch.tensor([prompt.ids], device=model.device)
    spans = [prompt.span] if prompt.span else None
    prompts = Prompts.from_batch(ids, None, context_spans=spans, queries=[prompt.query], decode=tokenizer.decode)
    return method.new_cache(model, prompts, max_length=len(prompt.ids) + count), ids
