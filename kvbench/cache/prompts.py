"""Facts about the prompts that a cache may need before prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvbench.errors import CacheError

Span = tuple[int, int]


@dataclass
class Prompts:
    """A batch of left-padded prompts.

    Args:
        starts: for each row the column of its first real token, which equals its left padding.
        lengths: number of real tokens of each row; ``starts[b] + lengths[b]`` must be the same for all rows.
        context_spans: for each row the half-open range of the tokens that come from the template's ``{context}``, or
            None. Tokens are counted without padding: 0 is the row's first real token.
        queries: the text of each row's question, which Cocktail searches with; may be empty.
        input_ids: the padded batch ``[B, T]``; needed by methods that read the text of the prompt's chunks.
        decode: turns token ids into text; needed by the same methods.
        query_sources: for each row the text that replaces an empty query: ``template`` (the prompt after its context,
            also for None) or ``last_chunk`` (:func:`kvbench.retrieval.chunks.cut`).

    Raises:
        CacheError: the rows do not end at the same column, or a row is empty.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    context_spans: Sequence[Span | None] | None = None
    queries: Sequence[str] | None = None
    input_ids: Tensor | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    query_sources: Sequence[str | None] | None = None

    def __post_init__(self) -> None:
        ends = {start + length for start, length in zip(self.starts, self.lengths, strict=True)}
        if len(ends) != 1 or min(self.lengths) < 1 or min(self.starts) < 0:
            raise CacheError(
                f"prompts of starts {list(self.starts)} and lengths {list(self.lengths)} are not a left-padded batch: "
                "every row must end at the last column and contain at least one token; set "
                "tokenizer.padding_side='left'"
            )

    @property
    def width(self) -> int:
        """Number of columns of the padded batch, T."""
        return self.starts[0] + self.lengths[0]

    @classmethod
    def from_batch(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        context_spans: Sequence[Span | None] | None = None,
        queries: Sequence[str] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> Prompts:
        """Return the prompts of a tokenizer's output: `input_ids` and `attention_mask` ``[B, T]``, padded on the left.

        Raises:
            CacheError: the mask has padding on the right, or gaps.
        """
        batch, width = input_ids.shape
        if attention_mask is None:
            starts = [0] * batch
        else:
            real = attention_mask.bool()
            starts = (width - real.sum(-1)).tolist()
            for row, start in enumerate(starts):
                if not bool(real[row, start:].all()):
                    raise CacheError(
                        f"row {row} of the attention mask has padding after its first token: "
                        "pad on the left (tokenizer.padding_side='left')"
                    )
        return cls(starts, [width - s for s in starts], context_spans, queries, input_ids, decode)

    def repeat(self, times: int) -> Prompts:
        """Return prompts with each row repeated `times` times, adjacent, as beam search expands a batch."""

        def rows(values: Sequence | None) -> list | None:
            return None if values is None else [v for v in values for _ in range(times)]

        ids = None if self.input_ids is None else self.input_ids.repeat_interleave(times, 0)
        spans, queries = rows(self.context_spans), rows(self.queries)
        starts, lengths, sources = rows(self.starts) or [], rows(self.lengths) or [], rows(self.query_sources)
        return Prompts(starts, lengths, spans, queries, ids, self.decode, sources)

    def row_ids(self, row: int) -> list[int]:
        """Return the token ids of one row without its padding; requires `input_ids`."""
        assert self.input_ids is not None
        return self.input_ids[row, self.starts[row] :].tolist()
