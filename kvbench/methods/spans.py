"""Check that perplexity over spans of a text can be measured with a method."""

from __future__ import annotations

from kvbench.errors import ConfigError
from kvbench.methods.rules import QUERY_TOKENS
from kvbench.methods.traits import Traits


def check_spans(method: Traits, mode: str, prompt: int) -> None:
    """Raise ConfigError as :meth:`kvbench.methods.base.Method.check_windows` says."""
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
