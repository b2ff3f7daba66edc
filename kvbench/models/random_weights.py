"""Models with seeded random weights, and a byte tokenizer.

The memory and time of a cache do not depend on the model's answers, so a 7B model can be measured without its weights.
The scores of such a model are meaningless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbench.errors import ModelError
from kvbench.models.spec import Architecture, ModelConfig

if TYPE_CHECKING:
    import torch

#: the first tokens of the byte tokenizer (padding, begin, end); the 256 bytes follow
SPECIALS = ("<pad>", "<s>", "</s>")


def hf_config(model: ModelConfig) -> Any:
    """Return the transformers config from which a model with random weights is built.

    It is the ``config.json`` in the model's folder. Without a folder, it is built from ``model.architecture``.

    Raises:
        ModelError: transformers does not support the architecture, or rejects its sizes.
    """
    from transformers import AutoConfig

    folder = model.folder()
    try:
        if folder is not None:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=model.trust_remote_code)
        assert model.architecture is not None  # ModelConfig.check
        return _from_architecture(model.architecture)
    except (OSError, ValueError, KeyError) as error:
        origin = "model.architecture" if folder is None else f"{folder / 'config.json'}"
        raise ModelError(
            f"model {model.name}: transformers does not accept its architecture: {error}\n  hint: correct {origin}"
        ) from error


def _from_architecture(numbers: Architecture) -> Any:
    from transformers import AutoConfig

    named = {name: value for name, value in vars(numbers).items() if value is not None}
    for name in ("model_type", "parameters", "rope"):
        named.pop(name, None)
    named["sliding_window"] = numbers.sliding_window  # None too: MistralConfig's default is a window of 4096 tokens
    # Any ids inside the vocabulary would do.
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(numbers.model_type, rope_parameters=dict(numbers.rope), **named, **ids)


def random_model(config: Any, dtype: torch.dtype, device: torch.device | str, seed: int) -> Any:
    """Return a causal language model with random parameters, drawn on `device`, in evaluation mode.

    The global random state is not changed. A GPU and a CPU draw different numbers from the same seed.
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
    """Return a fast tokenizer whose tokens are UTF-8 bytes; it needs no download and accepts any text.

    Ids above 258, which a random model may generate, decode to the empty string. The tokenizer has no EOS token,
    because a random model would generate it by chance.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # sorted, because the library's order varies
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
