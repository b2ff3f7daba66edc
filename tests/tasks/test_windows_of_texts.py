"""Windows of texts: what stands first in them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.tasks.perplexity import Perplexity


class Letters(SimpleNamespace):
    """A tokenizer of one token a character."""

    def __call__(self, text: str, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": [ord(c) for c in text], "offset_mapping": [(i, i + 1) for i in range(len(text))]}


@pytest.mark.parametrize(("bos", "first"), [(0, [0, 0]), (1, [1, 1]), (None, [97, 105])])
def test_bos_replaces_the_first_token_where_there_is_one(tmp_path: Path, bos: int | None, first: list[int]) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklmnop")
    task = Perplexity(text="text", path=str(tmp_path / "a.txt"), window=8, bos=True)
    task.bind(Letters(bos_token_id=bos))
    assert [sample.meta["window"]["ids"][0] for sample in task.samples()] == first
