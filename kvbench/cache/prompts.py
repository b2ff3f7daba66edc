"""Facts about the prompts that a cache may need before they are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvbench.errors import CacheError

Span = tuple[int, int]


@dataclass
class Prompts:
    """A batch of prompts, row by row.

    Spans count a row's own tokens: 0 is its first real token, whatever its left padding.

    Args:
        starts: left padding of each row: the column of its first real token.
        lengths: real tokens of each row; ``starts[b] + lengths[b]`` is the same for all rows (left padding).
        context_spans: half-open token range of what the template's ``{context}`` produced, or None.
        queries: the question's text of each row (Cocktail searches with it); may be empty.
        input_ids: the padded batch ``[B, T]``, where a method needs the text of its chunks.
        decode: token ids to text, likewise.
        query_sources: what stands for an empty query of each row (:func:`kvbench.retrieval.chunks.cut`), or None.
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
                "every row must end at the last column and hold a token; set tokenizer.padding_side='left'"
            )

    @property
    def width(self) -> int:
        """Columns of the padded batch, T."""
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
        """Make prompts from a tokenizer's output: ``input_ids`` and ``attention_mask`` ``[B, T]``, padded on the left.

        Raises:
            CacheError: padding on the right or holes in the mask.
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
        """Repeat each row `times` times in a run, as beam search and ``num_return_sequences`` expand a batch."""

        def rows(values: Sequence | None) -> list | None:
            return None if values is None else [v for v in values for _ in range(times)]

        ids = None if self.input_ids is None else self.input_ids.repeat_interleave(times, 0)
        spans, queries = rows(self.context_spans), rows(self.queries)
        starts, lengths, sources = rows(self.starts) or [], rows(self.lengths) or [], rows(self.query_sources)
        return Prompts(starts, lengths, spans, queries, ids, self.decode, sources)

    def row_ids(self, row: int) -> list[int]:
        """Return the token ids of one row without its padding (needs `input_ids`)."""
        assert self.input_ids is not None
        return self.input_ids[row, self.starts[row] :].tolist()
