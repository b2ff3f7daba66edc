"""Prompts in token ids: chat wrapper, token spans, truncation in the middle, and batches padded on the left."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvbench.cache.prompts import Prompts
from kvbench.errors import DataError, ModelError
from kvbench.metrics.reasoning import OPENED
from kvbench.models.outliers import base_name
from kvbench.models.spec import ModelConfig
from kvbench.tasks.base import Sample

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

_MARK = "\u2402kvbench\u2403"


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt in token ids.

    Attributes:
        ids: token ids, including special tokens and the chat wrapper.
        context_span: half-open token range of the context. A token that is only partly inside the context is left out.
            None if there is no context.
        removed: number of tokens that truncation has removed.
        thinking: True if the chat template has already begun the answer's thinking (``<think>``).
    """

    ids: tuple[int, ...]
    context_span: tuple[int, int] | None
    removed: int = 0
    thinking: bool = False


def encode_prompt(
    sample: Sample, tokenizer: Any, *, chat: str = "none", limit: int | None = None, room: int | None = None
) -> EncodedPrompt:
    """Convert a sample's prompt to token ids, with its chat wrapper, and truncate it if it exceeds `limit`.

    With the sample's ``truncation="middle"``, tokens are removed from the middle of its own text, never from the
    wrapper. With ``longbench``, the text is cut by :func:`longbench_cut` before it is wrapped. With ``refuse``
    and ``leave_out``, an error is raised; :mod:`kvbench.runner.fitting` leaves samples out before.

    The context span of the result takes the wrapper and the removed tokens into account. A token that crosses the
    border of the context counts as outside, so that no part of the question is inside.

    Args:
        sample: its `rules` may omit the wrapper, add a system turn, or give the prompt in token ids.
        tokenizer: a fast Hugging Face tokenizer, which can return character offsets.
        chat: the chat wrapper: ``none``, ``template`` (the tokenizer's own template with one user turn), or a text that
            contains ``{prompt}``.
        limit: maximum number of prompt tokens; None for no limit. The wrapper is counted, except with
            ``truncation="longbench"``.
        room: number of prompt tokens that fit into the model together with the answer; None for no limit. It replaces
            `limit` for a prompt given in token ids. With ``truncation="longbench"``, the text is cut further until the
            wrapped prompt fits.

    Raises:
        DataError: the prompt is too long and must not be truncated, or the wrapper leaves no space for the text.
        ModelError: the tokenizer returns no offsets, or has no suitable chat template.
    """
    if sample.rules.ids is not None:
        return _as_given(sample, sample.rules.ids, limit if room is None else room)
    if sample.truncation == "longbench" and limit is not None:
        return _longbench(sample, tokenizer, chat, limit, room)
    before, after, special = wrapper(
        chat if sample.rules.chat else "none", tokenizer, sample.rules.system, sample.rules.history
    )
    ids, offsets = _tokenize(tokenizer, before + sample.prompt + after, special)
    thinking = after.rstrip().endswith(OPENED)
    start, end = len(before), len(before) + len(sample.prompt)
    context = None
    if sample.context_span is not None:
        context = _inside(offsets, start + sample.context_span[0], start + sample.context_span[1])
    if limit is None or len(ids) <= limit:
        return EncodedPrompt(tuple(ids), context, thinking=thinking)
    if sample.truncation in ("refuse", "leave_out"):
        raise DataError(
            f"sample {sample.id}: the prompt has {len(ids)} tokens, but at most {limit} are allowed, and the task "
            "does not allow the prompt to be cut.\n  hint: choose a model with a longer context, or "
            "reduce dataset.lengths"
        )
    body = _touching(offsets, start, end) or (0, len(ids))
    room_for_body = limit - (len(ids) - (body[1] - body[0]))
    if room_for_body < 2:
        raise DataError(
            f"sample {sample.id}: a prompt limit of {limit} tokens is too small even for the chat "
            "template.\n  hint: increase model.prompt_limit"
        )
    half = room_for_body // 2
    cut = (body[0] + half, body[1] - (room_for_body - half))
    return EncodedPrompt(
        tuple(ids[: cut[0]] + ids[cut[1] :]), _follow(context, cut), removed=cut[1] - cut[0], thinking=thinking
    )


def _as_given(sample: Sample, ids: tuple[int, ...], room: int | None) -> EncodedPrompt:
    """Return a prompt given in token ids. Raises DataError if it has more than `room` tokens."""
    if room is not None and len(ids) > room:
        raise DataError(
            f"sample {sample.id}: the prompt has {len(ids)} tokens, but only {room} fit into the model together with "
            "the answer.\n"
            f"  hint: set dataset.lengths=[{room // 1024 * 1024 or room}], or choose a model with a longer context"
        )
    return EncodedPrompt(ids, sample.rules.ids_context)


def longbench_cut(prompt: str, tokenizer: Any, limit: int) -> tuple[str, int, int]:
    """Truncate a text by LongBench's rule (pred.py): keep the first and last ``limit // 2`` tokens, decoded to text.

    Special tokens count towards the limit but do not appear in the result. If the result is tokenized again, its length
    may differ slightly from `limit`.

    Returns:
        The truncated text, the number of its characters before the cut, and the number of tokens removed. A text of at
        most `limit` tokens is returned unchanged, with its own length and 0.
    """
    ids = tokenizer(prompt, truncation=False, verbose=False)["input_ids"]
    if len(ids) <= limit:
        return prompt, len(prompt), 0
    half = int(limit / 2)
    first, last = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
    return first + last, len(first), len(ids) - 2 * half


def _longbench(sample: Sample, tokenizer: Any, chat: str, limit: int, room: int | None) -> EncodedPrompt:
    """Truncate by LongBench's rule, then wrap; if the result has more than `room` tokens, repeat with a lower limit.

    LongBench's rule does not count the wrapper and so cannot ensure that the prompt fits.
    """
    while True:
        text, border, removed = longbench_cut(sample.prompt, tokenizer, limit)
        span = sample.context_span
        if removed and span is not None:
            # the text after the context is at the end of the last half, the text before it in the first half
            after = min(len(sample.prompt) - span[1], len(text) - border)
            span = (min(span[0], border), len(text) - after)
        cut = replace(sample, prompt=text, context_span=span, truncation="middle")
        prompt = encode_prompt(cut, tokenizer, chat=chat)
        over = len(prompt.ids) - room if room is not None else 0
        if over <= 0:
            return replace(prompt, removed=removed)
        limit -= over
        if limit < 2:
            raise DataError(
                f"sample {sample.id}: a prompt of {room} tokens is too small even for the chat template.\n"
                "  hint: increase model.prompt_limit, or reduce decoding.max_new_tokens"
            )


def wrapper(
    chat: str, tokenizer: Any, system: str | None = None, history: Sequence[tuple[str, str]] = ()
) -> tuple[str, str, bool]:
    """Return the text that a chat wrapper puts before a prompt, the text after it, and whether to add special tokens.

    Args:
        chat: as for :func:`encode_prompt`.
        system: text of a system turn before the user's turn; used only with ``chat="template"``. None for no such turn.
        history: turns before the user's, each a role and a text. With ``chat="none"`` they are paragraphs, and so is
            the prompt, each after the name of its role.

    Returns:
        The third value is False if the chat template already contains the tokenizer's special tokens.

    Raises:
        ModelError: with ``chat="template"``, the tokenizer has no template, or the template rejects a turn or changes
            the user's text; or the wrapper is a text, which has a place for one turn, and there are several.
    """
    if chat == "none":
        if not history:
            return "", "", True
        before = "".join(f"{role.capitalize()}: {text}\n\n" for role, text in history)
        return f"{before}User: ", "\n\nAssistant:", True
    if chat != "template":
        if history:
            raise ModelError(
                f"model.chat={chat!r} has a place for one turn, but the data set has conversations of several turns.\n"
                "  hint: set model.chat=template, or model.chat=none"
            )
        before, after = chat.split("{prompt}", 1)
        return before, after, True
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError("model.chat=template: the tokenizer has no chat template.\n  hint: set model.chat=none")
    # A mark stands in for the prompt, because a prompt may also occur in its own wrapper; the mark does not.
    turns = [{"role": "system", "content": system}] if system else []
    turns += [{"role": role, "content": text} for role, text in history]
    turns.append({"role": "user", "content": _MARK})
    try:
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise ModelError(
            f"model.chat=template: the chat template rejects {'a system turn' if system else 'the prompt'}: {error}"
            + ("\n  hint: set dataset.system=null" if system else "")
        ) from error
    before, mark, after = rendered.partition(_MARK)
    if not mark:
        raise ModelError(
            "model.chat=template: the chat template changes the text of a user's turn.\n"
            "  hint: set model.chat=none, or model.chat to a text that contains {prompt}"
        )
    return before, after, False  # the template writes BOS itself


def pad(
    prompts: Sequence[EncodedPrompt],
    queries: Sequence[str],
    pad_id: int,
    device: torch.device | str,
    decode: Callable[[Sequence[int]], str] | None = None,
    query_sources: Sequence[str | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, Prompts]:
    """Combine B prompts into a batch, padded on the left to the length of the longest.

    Args:
        queries: the question of each prompt, with which Cocktail searches the context; may be empty.
        decode: function that converts token ids to text, for methods that read the text of the context; None if the
            method does not.
        query_sources: for each prompt, what to search with if the question is empty (``Sample.query_source``).

    Returns:
        The token ids ``[B, T]``; the attention mask ``[B, T]``, 1 at real tokens, or None if no row is padded; and the
        facts about the prompts that ``method.new_cache`` takes.
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
    return input_ids, mask, Prompts(starts, lengths, spans, list(queries), input_ids, decode, query_sources)


def encode_batch(
    samples: Sequence[Sample], model: ModelConfig, loaded: LoadedModel, new_tokens: int
) -> tuple[list[EncodedPrompt], torch.Tensor, torch.Tensor | None, Prompts]:
    """Encode the prompts of a batch, each with room for `new_tokens` after it, and combine them (:func:`pad`)."""
    tokenizer, longest = loaded.tokenizer, loaded.max_length
    room = prompt_limit(None, longest, new_tokens)
    encoded = []
    for sample in samples:
        limit = prompt_limit(own_limit(sample, model), longest, new_tokens)
        encoded.append(encode_prompt(sample, tokenizer, chat=model.chat, limit=limit, room=room))
    queries, sources = [sample.query for sample in samples], [sample.query_source for sample in samples]
    padded = pad(encoded, queries, tokenizer.pad_token_id or 0, loaded.device, tokenizer.decode, sources)
    return encoded, *padded


def prompt_limit(configured: int | None, max_length: int | None, max_new_tokens: int) -> int | None:
    """Return the largest number of tokens that a prompt may have; None if there is no limit.

    `configured` and `max_length`, the number of tokens that the model accepts, prompt and answer together, are None
    without a limit. `max_new_tokens` tokens are reserved for the answer.
    """
    limits = [max_length - max_new_tokens] if max_length else []
    if configured:
        limits.append(configured)
    return min(limits) if limits else None


def own_limit(sample: Sample, model: ModelConfig) -> int | None:
    """Return the sample's own limit on prompt tokens, or else the model's ``prompt_limit``.

    It is None if neither is set, or if the sample is to fill the model's context.
    """
    by_model, rules = sample.rules.limits, sample.rules
    limit = by_model.get(base_name(model.name), by_model.get(model.preset or "", rules.limit))
    return None if limit == "fill" else limit or model.prompt_limit


def end_ids(sample: Sample, tokenizer: Any) -> list[int]:
    """Return the last token of a sample's `end_text`, which ends its answer too; empty if there is no such text."""
    if not sample.end_text:
        return []
    return list(tokenizer(sample.end_text, add_special_tokens=False)["input_ids"])[-1:]


def answer_ids(sample: Sample, tokenizer: Any) -> list[int]:
    """Return the token ids of a sample's first reference answer, as they would follow the prompt; empty without one."""
    if sample.answer_ids is not None:
        return list(sample.answer_ids)
    text = sample.continuation
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def system_turn(sample: Sample, model: ModelConfig) -> str | None:
    """Return the text of the system turn that a sample's prompt really has; None if its wrapper has no such turn."""
    return sample.rules.system if sample.rules.chat and model.chat == "template" else None


def sample_seed(seed: int, sample: Sample) -> int:
    """Return the seed for sampling the answer's tokens; it depends only on `seed` and the id of the sample."""
    return zlib.crc32(f"{seed}/{sample.id}".encode())


def _tokenize(tokenizer: Any, text: str, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
    if not getattr(tokenizer, "is_fast", True):
        raise ModelError(
            f"{type(tokenizer).__name__} does not return character offsets.\n  hint: use a model with a fast tokenizer"
        )
    encoded = tokenizer(
        text, add_special_tokens=special, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    return list(encoded["input_ids"]), [tuple(pair) for pair in encoded["offset_mapping"]]


def _inside(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int] | None:
    """Return the half-open range of the tokens that lie wholly inside a character range; None if there are none."""
    chosen = [i for i, (a, b) in enumerate(offsets) if a < b and start <= a and b <= end]
    return (chosen[0], chosen[-1] + 1) if chosen else None


def _touching(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int] | None:
    """Return the half-open range of the tokens that overlap a character range; None if there are none."""
    chosen = [i for i, (a, b) in enumerate(offsets) if a < b and a < end and start < b]
    return (chosen[0], chosen[-1] + 1) if chosen else None


def _follow(span: tuple[int, int] | None, cut: tuple[int, int]) -> tuple[int, int] | None:
    """Return a span's new place after tokens ``[cut[0], cut[1])`` were removed; None if nothing of it is left."""
    if span is None:
        return None
    start, end = (place if place <= cut[0] else max(cut[0], place - (cut[1] - cut[0])) for place in span)
    return (start, end) if start < end else None
