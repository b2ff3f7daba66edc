"""Checks that a method fits its quantizer, the length of the text, and the spans of perplexity."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.errors import ConfigError
from kvbench.quantizers.spec import preset_name

if TYPE_CHECKING:
    from kvbench.cache.policy import Policy
    from kvbench.quantizers.spec import QuantizerSpec

#: perplexity: number of tokens right after a span's prompt that serve as the query for methods that need one
QUERY_TOKENS = 64


@dataclass(frozen=True)
class Reach:
    """The largest number of tokens that a method stores exactly, and the hyper-parameter that determines it.

    A run on shorter texts would not measure the method.

    Args:
        key: configuration key of that hyper-parameter, such as ``method.residual``; ``method`` if no single one
            determines the number.
        value: value of that hyper-parameter; the name of the method's class if `key` is ``method``.
        tokens: nothing is packed or dropped as long as at most this many tokens are cached.
        of_prompt: True if `tokens` counts only the tokens of the prompt.
    """

    key: str
    value: Any
    tokens: int
    of_prompt: bool = False

    def check(self, max_length: int) -> None:
        """Raise ConfigError if a sequence of `max_length` tokens is too short for any token to be packed or dropped."""
        if self.tokens >= max_length - 1:  # the last token is never cached
            raise ConfigError(
                self.key,
                self.value,
                f"nothing would be packed or dropped, because the first {self.tokens} tokens all stay "
                "in full precision, and "
                f"the model is limited to model.max_length={max_length}",
                hint=f"reduce {'the window' if self.key == 'method' else self.key}, or set method=fp16",
            )


def check_taken(
    method: str, takes: tuple[str, ...], quantizer: str, needed: bool, widths: tuple[str, ...] = ()
) -> None:
    """Raise ConfigError if a method does not accept the chosen quantizer, or needs a quantizer and has none.

    Args:
        widths: the method's own keys that set its bits, for the hint.
    """
    chosen = preset_name(quantizer)
    if needed and set(takes) <= {"none"}:  # no choice of a quantizer helps: the YAML must name those that it takes
        wanted = "int4_token" if chosen == "none" else chosen
        hint = f"add takes: [{wanted}, ...] to the YAML of method={method.lower()}"
        if chosen == "none":
            hint += f", and choose quantizer={wanted}"
        hint += f" (from Python: load_method(..., quantizer='{wanted}', takes=['{wanted}']))"
    elif takes:
        hint = f"quantizer={next(name for name in takes if not needed or name != 'none')}"
        if widths:
            hint += f"; the bits of method={method.lower()} are set by {', '.join(f'method.{key}' for key in widths)}"
    else:
        hint = f"add takes: [{chosen}] to the YAML of method={method.lower()}"
    if needed and chosen == "none" and chosen in takes:
        raise ConfigError("quantizer", "none", f"{method} packs keys and values, so it needs a quantizer", hint=hint)
    if chosen not in takes:
        raise ConfigError(
            "quantizer",
            quantizer,
            f"method {method.lower()} does not accept this quantizer",
            allowed=takes or "no quantizer, because the list 'takes' in the method's YAML is empty",
            hint=hint,
        )


def check_spans(method: Policy[Any], mode: str, prompt: int) -> None:
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


def for_python(error: ConfigError, quantizer: QuantizerSpec | None) -> ConfigError:
    """Return a copy of a configuration error with a hint for Python: arguments of ``kvbench.load_method``.

    Args:
        error: an error whose keys are those of the command line (``method.KEY``, ``quantizer.SIDE.KEY``).
        quantizer: the quantizer in use, or None. If the error is about one of its group sizes, the hint shows a dict to
            pass as ``quantizer``, with all of its formats and a group size that works.
    """
    side, _, last = error.key.removeprefix("quantizer.").partition(".")
    group = error.hint.partition("=")[2]
    if not error.key.startswith("quantizer.") or last != "group_size" or quantizer is None or not group:
        hint = re.sub(r"\b(?:method|quantizer)\.(\w+=)", r"\1", error.hint)
    else:
        forms = {}
        for name, form in (("key", quantizer.key), ("value", quantizer.value)):
            size = (int(group) if group.isdecimal() else group) if name == side else form.group_size
            forms[name] = {"bits": form.bits, "group_size": size, "axis": form.axis}
            if form.kind != "affine":
                forms[name]["kind"] = form.kind
        hint = f"{error.hint}; in Python, pass quantizer={forms}"
    return ConfigError(error.key, error.value, error.problem, allowed=error.allowed, hint=hint)
