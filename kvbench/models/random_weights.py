"""Real architectures without their weights: seeded random parameters, and a tokenizer of bytes.

Memory and time of a cache do not depend on a model's answers, so a 7B model can be measured without its weights. Scores
of such a model mean nothing, and its rows say `weights: random`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbench.errors import ModelError
from kvbench.models.spec import Architecture, ModelConfig

if TYPE_CHECKING:
    import torch

#: ids of the byte tokenizer: pad, begin, end, then the 256 bytes
SPECIALS = ("<pad>", "<s>", "</s>")


def hf_config(model: ModelConfig) -> Any:
    """Return the transformers config of `model`: its folder's config.json, or its `architecture`.

    Raises:
        ModelError: transformers does not know the architecture, or its numbers do not fit together.
    """
    from transformers import AutoConfig

    folder = model.folder()
    try:
        if folder is not None:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=model.trust_remote_code)
        assert model.architecture is not None  # ModelConfig.check
        return _from_architecture(model.architecture)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {model.name}: transformers refuses its architecture: {error}") from error


def _from_architecture(numbers: Architecture) -> Any:
    from transformers import AutoConfig

    named = {name: value for name, value in vars(numbers).items() if value is not None}
    for name in ("model_type", "parameters", "rope"):
        named.pop(name, None)
    # Token ids of the real tokenizers; they only have to lie inside the vocabulary here.
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(numbers.model_type, rope_parameters=dict(numbers.rope), **named, **ids)


def random_model(config: Any, dtype: torch.dtype, device: torch.device | str, seed: int) -> Any:
    """Return a causal LM of `config` with parameters drawn on `device` from `seed`; the caller's random state is kept.

    Drawing 7B parameters takes seconds on a GPU; a GPU and a CPU draw different numbers from the same seed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    place = torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(seed)
        with place:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def byte_tokenizer() -> Any:
    """Return a fast tokenizer whose tokens are UTF-8 bytes: no download, exact offsets, any text.

    Ids above 258, which a random model emits freely, decode to nothing. It has no EOS for generation: a random model
    would end by chance.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # sorted: the library's own order is not fixed
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *alphabet))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
