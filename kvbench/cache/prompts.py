"""Facts about the prompts that a cache may need before prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvbench.errors import CacheError

Span = tuple[int, int]


@dataclass
class Prompts:
    """A batch of left-padded prompts, with what a method may need to know about them before prefill.

    Args:
        starts: for each row, the column of its first real token, which is also the number of its padding tokens.
        lengths: for each row, the number of its real tokens; ``starts[b] + lengths[b]`` must be the same in all rows.
        context_spans: for each row, which tokens are the context (the text in place of ``{context}`` in the data set's
            template), as a pair (first, one past the last) counted from the row's first real token; None if unknown.
        queries: for each row, the question as text, which Cocktail compares with the chunks of the context; may be
            empty.
        input_ids: token ids of the padded batch, ``[B, T]``. Only methods that read the text of a prompt need them.
        decode: function from token ids to text, needed by the same methods.
        query_sources: for each row, what Cocktail compares with the chunks if the question is empty. ``template`` or
            None: the text of the prompt after its context. ``last_chunk``: the last chunk of the context.

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
                f"prompts with starts {list(self.starts)} and lengths {list(self.lengths)} are not padded on the left: "
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
        """Return the prompts of a tokenized batch, with their padding taken from the attention mask.

        The other arguments are those of :class:`Prompts`.

        Args:
            input_ids: token ids, padded on the left, ``[B, T]``.
            attention_mask: 1 for real tokens and 0 for padding, ``[B, T]``; None if there is no padding.

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
        """Return the prompts of a batch with `times` adjacent copies of each row, as beam search makes it."""

        def rows(values: Sequence | None) -> list | None:
            return None if values is None else [v for v in values for _ in range(times)]

        ids = None if self.input_ids is None else self.input_ids.repeat_interleave(times, 0)
        spans, queries = rows(self.context_spans), rows(self.queries)
        starts, lengths, sources = rows(self.starts) or [], rows(self.lengths) or [], rows(self.query_sources)
        return Prompts(starts, lengths, spans, queries, ids, self.decode, sources)

    def row_ids(self, row: int) -> list[int]:
        """Return the token ids of one row, without its padding. The prompts must have `input_ids`."""
        assert self.input_ids is not None
        return self.input_ids[row, self.starts[row] :].tolist()
