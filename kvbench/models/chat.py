"""The wrapper that a chat model expects around a prompt, by the rules that the benchmarks were published with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.errors import ModelError
from kvbench.models.spec import ChatRule

#: LongBench's wrapper for Llama-2-chat (no spaces, no system prompt)
LLAMA2 = ("[INST]", "[/INST]")
#: FastChat's "vicuna" conversation with one turn (LongChat in LongBench, KIVI and Cocktail)
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. USER: ",
    " ASSISTANT:",
)


@dataclass(frozen=True)
class Wrapped:
    """A prompt inside its wrapper.

    Args:
        text: what the model sees.
        offset: character at which the prompt begins in `text`; spans of the prompt move by it.
        add_special_tokens: whether the tokenizer must still add BOS (a chat template brings its own).
    """

    text: str
    offset: int
    add_special_tokens: bool


def wrap(prompt: str, rule: ChatRule, tokenizer: Any) -> Wrapped:
    """`prompt` in the wrapper that `rule` names.

    Args:
        prompt: the whole prompt, already cut to length.
        rule: ``none``, ``llama2``, ``vicuna``, or ``template`` (the tokenizer's own, with one user turn).
        tokenizer: only asked with ``template``.

    Raises:
        ModelError: ``template`` with a tokenizer that has none, or one that changes the prompt.
    """
    if rule == "none":
        return Wrapped(prompt, 0, True)
    if rule in ("llama2", "vicuna"):
        before, after = LLAMA2 if rule == "llama2" else VICUNA
        return Wrapped(before + prompt + after, len(before), True)
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError("model.chat=template: this tokenizer has no chat template.\n  hint: model.chat=none")
    # The prompt's place is found with a short stand-in: a prompt may occur twice in its own wrapper, a mark does not.
    # Templates may strip a turn's outer white space, which moves the prompt's begin but nothing else.
    mark = "\u2402kvbench\u2403"
    frame = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    if frame.count(mark) != 1:
        raise ModelError("model.chat=template: this tokenizer's template does not keep a user's turn as it is")
    before, after = frame.split(mark)
    return Wrapped(before + prompt + after, len(before), False)
