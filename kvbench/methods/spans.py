"""Check that a method has an effect on perplexity over spans of a text, in a given mode."""

from __future__ import annotations

from kvbench.errors import ConfigError
from kvbench.methods.rules import QUERY_TOKENS
from kvbench.methods.traits import Traits


def check_spans(method: Traits, mode: str, prompt: int) -> None:
    """Raise ConfigError if perplexity cannot be measured with a method in a mode, or would show no effect.

    Args:
        method: the method.
        mode: how perplexity is measured, as for :meth:`kvbench.methods.base.Method.check_windows`.
        prompt: number of tokens at the start of each span of text that are read in one pass, as a prompt.
    """
    name = type(method).__name__.lower()
    if mode == "fp16" and type(method).__name__ != "FP16":
        raise ConfigError(
            "dataset.mode", mode, f"does not use a cache, so method={name} would have no effect", hint="method=fp16"
        )
    if mode == "simulated" and (method.needs_prompts or method.observe_prompt or method.drops_tokens):
        reason = "drops tokens" if method.drops_tokens else "depends on the prompt, which this mode does not have"
        raise ConfigError(
            "dataset.mode", mode, f"is not available for method={name}, which {reason}", hint="dataset.mode=decode"
        )
    if (method.needs_prompts or method.prompt_only) and prompt <= QUERY_TOKENS:
        raise ConfigError(
            "dataset.prefill",
            prompt,
            f"must be larger, because {name} quantizes or drops only tokens of a prompt",
            hint="dataset.prefill=1024",
        )
