"""Properties of a method that caches, attention and the runner ask for, with their defaults."""

from __future__ import annotations

from typing import ClassVar

from kvbench.methods.speculation import Speculation


class Traits:
    """Properties of a method; a subclass overrides them by a class attribute or a property."""

    #: raise it with a change of the method's outputs, to give them a run of their own besides that of the older code
    version: ClassVar[int] = 1
    #: the method packs in formats of conf/quantizer, and cannot do without one
    needs_quantizer: ClassVar[bool] = False
    #: a cache can only be made for known prompts (``new_cache(model, prompts)`` with their ids and text)
    needs_prompts: ClassVar[bool] = False
    #: the method acts on the prompt alone, so that a text that comes token by token would all be kept
    prompt_only: ClassVar[bool] = False
    #: prompt attention handed to ``place``: 0 none, n of the last n queries, -1 column sums over all queries
    observe_prompt: ClassVar[int] = 0
    #: ``observe`` is called with the attention of every decode step
    observe_steps: ClassVar[bool] = False
    #: a token's stored form depends on that token and its position alone, so that any number may be rolled back
    by_token: ClassVar[bool] = False
    #: the exact tails hold the newest tokens without a gap, and all of them may be rolled back, the prompt's included
    #: (transformers' assisted generation verifies its first drafts with the prompt); keys are then as if those tokens
    #: had never come; values may stay packed, and tokens evicted, that a shorter prompt would have left exact
    gives_tail: ClassVar[bool] = False
    #: the first layers that hold everything in full precision
    exact_layers = 0

    @property
    def packs_together(self) -> bool:
        """True if ``settle`` may be deferred and batched across layers.

        It may only read the tails and move their starts: a pack that is deferred reads the tail after every layer has
        settled. Bases that know their own ``settle`` answer for it; ``tests/contract/test_deferred.py`` catches a
        wrong True on a CPU.
        """
        return False

    @property
    def drops_tokens(self) -> bool:
        """True if tokens are evicted, whatever the model's attention."""
        return False

    @property
    def keys_before_rope(self) -> bool:
        """True if keys are stored before RoPE, which attention then applies as it reads them."""
        return False

    @property
    def quantized_prefill(self) -> bool:
        """True if the prompt's tokens attend to what is stored of them, not to exact keys and values."""
        return False

    @property
    def eager(self) -> bool:
        """True if a step's own tokens are stored before it attends to them (only with :attr:`by_token`)."""
        return False

    @property
    def speculation(self) -> Speculation | None:
        """Draft and depth of speculative decoding, or None: one token a step."""
        return None
