"""From a sample's text to token ids: chat wrapper, spans in tokens, truncation in the middle, left-padded batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.cache.prompts import Prompts
from kvbench.errors import DataError, ModelError
from kvbench.tasks.base import Sample

_MARK = "\u2402kvbench\u2403"


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt in token ids.

    Attributes:
        ids: token ids, special tokens and chat wrapper included.
        context_span: half-open token range of the context, in full inside it; None where the sample has none.
        removed: tokens cut out of the middle (0: not truncated).
    """

    ids: tuple[int, ...]
    context_span: tuple[int, int] | None
    removed: int = 0


def encode(sample: Sample, tokenizer: Any, *, chat: str = "none", limit: int | None = None) -> EncodedPrompt:
    """Wrap, tokenize and, where it is longer than `limit` tokens, cut a sample's prompt.

    The cut takes tokens out of the middle of the sample's own text (as LongBench does); the chat wrapper stays whole
    and spans follow. A token on the border of the context counts as outside it, so that nothing of the question is
    ever in it.

    Args:
        sample: ``meta["chat"] is False`` switches the wrapper off for this sample.
        tokenizer: a fast Hugging Face tokenizer (offsets are needed).
        chat: ``none``, ``template`` (the tokenizer's own, one user turn), or a text with ``{prompt}`` in it.
        limit: most tokens that the prompt may have.

    Raises:
        DataError: the prompt is too long and its task refuses truncation, or the wrapper alone is too long.
        ModelError: the tokenizer has no offsets or no chat template.
    """
    before, after, special = wrapper(chat if sample.meta.get("chat", True) else "none", tokenizer)
    ids, offsets = _tokenize(tokenizer, before + sample.prompt + after, special)
    start, end = len(before), len(before) + len(sample.prompt)
    context = None
    if sample.context_span is not None:
        context = _inside(offsets, start + sample.context_span[0], start + sample.context_span[1])
    if limit is None or len(ids) <= limit:
        return EncodedPrompt(tuple(ids), context)
    if sample.truncation == "refuse":
        raise DataError(
            f"sample {sample.id}: the prompt has {len(ids)} tokens, the model takes {limit} beside the answer, and the"
            " task forbids cutting it.\n  hint: choose a model with a longer context or a shorter dataset.lengths"
        )
    body = _touching(offsets, start, end) or (0, len(ids))
    kept = limit - (len(ids) - (body[1] - body[0]))
    if kept < 2:
        raise DataError(f"sample {sample.id}: {limit} tokens do not even hold the chat wrapper (model.prompt_limit).")
    cut = (body[0] + kept // 2, body[1] - (kept - kept // 2))
    return EncodedPrompt(tuple(ids[: cut[0]] + ids[cut[1] :]), _follow(context, cut), removed=cut[1] - cut[0])


def wrapper(chat: str, tokenizer: Any) -> tuple[str, str, bool]:
    """Text before and after the prompt, and whether the tokenizer still has to add its special tokens.

    Raises:
        ModelError: ``template``, and the tokenizer has none or one that does not keep a user's turn.
    """
    if chat == "none":
        return "", "", True
    if chat != "template":
        before, after = chat.split("{prompt}", 1)
        return before, after, True
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError("model.chat=template: the tokenizer has no chat template.\n  hint: model.chat=none")
    # The prompt's place is found with a stand-in: a prompt may occur in its own wrapper, this mark does not.
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    before, found, after = rendered.partition(_MARK)
    if not found:
        raise ModelError("model.chat=template: the chat template does not keep a user's turn as it is")
    return before, after, False  # the template writes BOS itself


def pad(
    prompts: Sequence[EncodedPrompt],
    queries: Sequence[str],
    pad_id: int,
    device: torch.device | str,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, Prompts]:
    """Pad prompts on the left to the longest; `decode` (token ids to text) is told to the cache.

    Returns:
        ``input_ids`` ``[B, T]``; ``attention_mask`` ``[B, T]`` with 1 at real tokens, None where no row is padded; and
        what the cache is told about the prompts.
    """
    width = max(len(prompt.ids) for prompt in prompts)
    starts = [width - len(prompt.ids) for prompt in prompts]
    input_ids = torch.tensor([[pad_id] * start + list(p.ids) for p, start in zip(prompts, starts, strict=True)])
    mask = None
    if any(starts):
        mask = (torch.arange(width)[None, :] >= torch.tensor(starts)[:, None]).long().to(device)
    input_ids = input_ids.to(device)
    lengths = [len(prompt.ids) for prompt in prompts]
    spans = [p.context_span for p in prompts]
    return input_ids, mask, Prompts(starts, lengths, spans, list(queries), input_ids, decode)


def prompt_limit(configured: int | None, max_length: int | None, max_new_tokens: int) -> int | None:
    """Most prompt tokens: what the model's length leaves beside the answer, or fewer where configured."""
    limits = [max_length - max_new_tokens] if max_length else []
    if configured:
        limits.append(configured)
    return min(limits) if limits else None


def _tokenize(tokenizer: Any, text: str, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
    if not getattr(tokenizer, "is_fast", True):
        raise ModelError(f"{type(tokenizer).__name__} has no offsets; a fast tokenizer is needed to place the spans.")
    encoded = tokenizer(
        text, add_special_tokens=special, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    return list(encoded["input_ids"]), [tuple(pair) for pair in encoded["offset_mapping"]]


def _inside(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int] | None:
    """Tokens that lie wholly in the character range."""
    chosen = [i for i, (a, b) in enumerate(offsets) if a < b and start <= a and b <= end]
    return (chosen[0], chosen[-1] + 1) if chosen else None


def _touching(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int] | None:
    """Tokens that share a character with the range."""
    chosen = [i for i, (a, b) in enumerate(offsets) if a < b and a < end and start < b]
    return (chosen[0], chosen[-1] + 1) if chosen else None


def _follow(span: tuple[int, int] | None, cut: tuple[int, int]) -> tuple[int, int] | None:
    """A span after tokens ``[cut[0], cut[1])`` were taken out; None where nothing of it is left."""
    if span is None:
        return None
    start, end = (place if place <= cut[0] else max(cut[0], place - (cut[1] - cut[0])) for place in span)
    return (start, end) if start < end else None
