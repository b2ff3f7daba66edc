"""Properties of a method that caches, attention and the runner read."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvbench.methods.speculation import Speculation


class Traits:
    """Properties of a method and their defaults.

    A subclass overrides them with a class attribute or a property.
    """

    #: to be increased when a change of the code changes the method's outputs, so that new runs do not reuse old results
    version: ClassVar[int] = 1
    #: the method packs in the formats of a quantizer (conf/quantizer) and cannot run without one
    needs_quantizer: ClassVar[bool] = False
    #: the method's own keys that set its bits, for the message about a quantizer that it does not take
    widths: ClassVar[tuple[str, ...]] = ()
    #: a cache can only be made for known prompts (``new_cache(model, prompts)`` with their ids and text)
    needs_prompts: ClassVar[bool] = False
    #: the method packs or drops tokens of the prompt only, so a text that is fed token by token stays exact
    prompt_only: ClassVar[bool] = False
    #: the prompt attention that ``place`` receives: 0: none; n: of the last n queries; -1: column sums over all queries
    observe_prompt: ClassVar[int] = 0
    #: ``observe`` is called with the attention of every decode step
    observe_steps: ClassVar[bool] = False
    #: what ``observe`` needs of the query heads that share a KV head, so that kernels can sum up for it: their
    #: ``mean``, their ``sum``, or each ``apart``; None: all probabilities, which no kernel returns. The last segment of
    #: the keys must then be a :class:`kvbench.cache.segments.scored.ScoredSegment`
    observe_group: Literal["mean", "sum", "apart"] | None = None
    #: a token's stored form depends only on that token and its position, so any number of tokens can be rolled back
    by_token: ClassVar[bool] = False
    #: the exact tails hold the newest tokens without a gap, and all of these can be rolled back, even those of the
    #: prompt (transformers' assisted generation verifies its first drafts together with the prompt). The keys are then
    #: as if those tokens had never come, so no key has left for the sake of the newest ones: a method whose window
    #: slides over the keys, or evicts, must not claim it. Values that a shorter prompt keeps exact may be packed
    gives_tail: ClassVar[bool] = False
    #: number of layers, counted from the first, that hold everything in full precision
    exact_layers = 0

    @property
    def packs_together(self) -> bool:
        """True if the packing in ``settle`` may be deferred, so that one kernel launch packs the tokens of all layers.

        The deferred launch reads the tokens from the last, full-precision segments when ``settle`` has run for every
        layer. Such a ``settle`` may therefore drop tokens at the front of these segments, but must not move the others,
        unless :meth:`kvbench.cache.segments.packed.PackedSegment.thin` does it, which is deferred too.
        Base classes return True only if a subclass does not override their ``settle``.
        ``tests/contract/test_deferred.py`` finds out, on a CPU, if a method wrongly returns True.
        """
        return False

    @property
    def drops_tokens(self) -> bool:
        """True if the method evicts tokens, apart from those that a model's sliding window hides."""
        return False

    @property
    def keys_before_rope(self) -> bool:
        """True if the cache holds pre-RoPE keys; attention then applies RoPE whenever it reads them."""
        return False

    @property
    def quantized_prefill(self) -> bool:
        """True if prompt tokens attend to the stored (quantized) keys and values, not to full-precision ones."""
        return False

    @property
    def eager(self) -> bool:
        """True if the new tokens of a decode step are stored, and packed, before any token attends to them.

        Usually a step attends to its new tokens in full precision, and they are packed later. True requires
        :attr:`by_token`.
        """
        return False

    @property
    def meaningless(self) -> str | None:
        """Dotted key of the setting that makes the generated text meaningless, so that only times count; or None."""
        return None

    @property
    def speculation(self) -> Speculation | None:
        """Settings of speculative decoding; None for plain decoding with one token per step."""
        return None
