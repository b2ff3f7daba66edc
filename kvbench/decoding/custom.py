"""kvbench's loops inside transformers' own ``generate``: ``model.generate(..., custom_generate=custom_generate)``.

    method = kvbench.load_method("quantspec", gamma=4)
    cache = method.new_cache(model)
    model.generate(input_ids, past_key_values=cache, custom_generate=custom_generate, max_new_tokens=90)

Tokens are chosen according to the generation config (``do_sample``, ``temperature``, ``top_k``, ``top_p``,
``eos_token_id``, ``max_new_tokens``). Settings that would change the logits in any other way raise an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.autoregressive import Generation, generate
from kvbench.decoding.sampling import Sampling
from kvbench.errors import ModelError

#: logits processors that :class:`Sampling` covers
COVERED = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    generation_config: GenerationConfig,
    logits_processor: Any = (),
    seed: int = 0,
    report: list[Generation] | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Generate with kvbench's decoding loops; pass this function to transformers' ``generate`` as ``custom_generate``.

    Args:
        input_ids: prompts ``[B, T]``, padded on the left.
        logits_processor: the processors that ``generate`` passes; only checked, to refuse unsupported ones.
        seed: seed of the random draws if ``do_sample`` is set.
        report: a list to which a :class:`Generation` with times and rounds of speculation is appended.
        **model_kwargs: ``past_key_values``: an empty cache of a kvbench method, which also decides whether decoding is
            speculative; ``attention_mask`` ``[B, T]``; ``stopping_criteria``; others are ignored. The three are not
            named parameters, because transformers itself does not use an argument that this function names.

    Returns:
        Prompts and new tokens ``[B, T + n]``, padded on the right with the pad token.

    Raises:
        ModelError: ``past_key_values`` is not a kvbench cache, there are several beams, or kvbench's loops do not
            support a logits processor or a stopping criterion.
    """
    cache = model_kwargs.get("past_key_values")
    if not isinstance(cache, KVCache):
        raise ModelError(
            "custom_generate needs a kvbench cache: generate(..., past_key_values=method.new_cache(model))"
        )
    names = [type(processor).__name__ for processor in logits_processor]
    unknown = [name for name in names if name not in COVERED]
    if unknown or (generation_config.num_beams or 1) > 1:
        what = ", ".join(unknown) or f"num_beams={generation_config.num_beams}"
        raise ModelError(
            f"custom_generate supports greedy decoding and sampling with temperature, top_k and top_p, but not {what}"
        )
    ending = [type(criterion).__name__ for criterion in model_kwargs.get("stopping_criteria") or ()]
    ending = [name for name in ending if name not in ("MaxLengthCriteria", "EosTokenCriteria")]
    if ending:
        raise ModelError(
            f"custom_generate stops only at max_new_tokens and EOS tokens; it does not support {', '.join(ending)}"
        )
    sampling = Sampling()
    if generation_config.do_sample:
        # generate() itself sets top_k to 50 if it is not given
        sampling = Sampling(
            generation_config.temperature or 1.0, generation_config.top_p or 1.0, seed, generation_config.top_k
        )
    ends = generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else [int(e) for e in ends]
    pad = generation_config.pad_token_id
    pad = int(pad) if pad is not None else (ends[0] if ends else 0)
    generation = generate(
        model,
        cache,
        input_ids,
        model_kwargs.get("attention_mask"),
        max_new_tokens=int(generation_config.max_length) - input_ids.shape[1],
        sampling=sampling,
        eos_token_ids=ends,
        pad_token_id=pad,
    )
    if report is not None:
        report.append(generation)
    return with_prompts(input_ids, generation, ends, pad)


def with_prompts(input_ids: Tensor, generation: Generation, ends: list[int], pad: int) -> Tensor:
    """Return prompts and new tokens, ``[B, T + n]``, padded on the right, as transformers' ``generate`` returns them.

    The first of the end-of-sequence tokens `ends` is appended to each row that ended with any of them.
    """
    answers = [
        [*tokens, *(ends[:1] if finish == "eos" else [])]
        for tokens, finish in zip(generation.tokens, generation.finish, strict=True)
    ]
    longest = max(map(len, answers))
    rows = [answer + [pad] * (longest - len(answer)) for answer in answers]
    return torch.cat([input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)], 1)
