"""Analysis of a model's attention on texts, with any number of methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvbench.analysis.observe import Observation, Options
from kvbench.analysis.outcome import ERRORS, Outcome, Shape
from kvbench.cache import KVCache, Prompts
from kvbench.cache.prompts import Span
from kvbench.decoding.passes import forward, prefill
from kvbench.errors import ConfigError, NonFiniteError
from kvbench.methods import Method, load_method
from kvbench.models.load import LoadedModel
from kvbench.models.spec import ModelConfig
from kvbench.runner.prompting import encode_prompt, own_limit, prompt_limit
from kvbench.tasks.base import Sample


@dataclass(frozen=True)
class Text:
    """A prompt to analyse, with its token ids.

    Args:
        id: id of the sample.
        context: half-open token range ``(start, stop)`` of the prompt's long document or documents. The method Cocktail
            ranks pieces of it by their similarity to the question. None if the prompt has no such part.
        query: text of the question; may be empty.
        query_source: text that takes the place of the question if `query` is empty, for example ``last_chunk`` for the
            last chunk of the context (:class:`kvbench.cache.Prompts`).
    """

    id: str
    ids: tuple[int, ...]
    context: Span | None = None
    query: str = ""
    query_source: str | None = None


def texts(samples: Iterable[Sample], loaded: LoadedModel, model: ModelConfig, steps: int) -> list[Text]:
    """Tokenize the prompts of samples, with the same chat template and the same truncation as in a benchmark run.

    Prompt and decode steps together must fit into the model's maximum length.

    Raises:
        DataError: a prompt is too long, and its task does not allow truncation.
    """
    room = prompt_limit(None, loaded.max_length, steps)
    encoded = []
    for sample in samples:
        limit = prompt_limit(own_limit(sample, model), loaded.max_length, steps)
        prompt = encode_prompt(sample, loaded.tokenizer, chat=model.chat, limit=limit, room=room)
        encoded.append(Text(sample.id, prompt.ids, prompt.context_span, sample.query, sample.query_source))
    return encoded


def analyse(
    loaded: LoadedModel,
    prompts: Sequence[Text],
    methods: Mapping[str, Method],
    options: Options | None = None,
    report: Callable[[str], None] | None = None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Measure how far attention over each method's cache deviates from exact attention, while a model answers prompts.

    The model decodes greedily from an uncompressed cache, one prompt at a time, until it ends its answer, or for
    ``options.steps`` steps. Each method's cache receives the same keys and values in parallel, so all caches must fit
    into memory together.

    Args:
        methods: the methods to compare, by setting (such as ``kivi:int4:residual=64``). The caller must have called
            ``Method.check`` on each. For a method with speculative decoding, only the target's cache is analysed.
        options: options of the analysis; None for the defaults.
        report: progress callback, called after each prompt with the id of its sample.
        outcome: outcome of an earlier call with the same model, methods and options. It is extended in place and
            returned, and prompts that it already contains are skipped. None starts an empty one.

    Raises:
        ConfigError: `prompts` is empty, or the model's heads are split over several processes.
        NonFiniteError: attention is NaN or infinite, because the model's queries, keys or values are NaN or infinite.
    """
    options = options or Options()
    if not prompts:
        raise ConfigError(
            "prompts",
            None,
            "there must be at least one prompt to analyse",
            hint="choose a data set that has samples, and a dataset.limit of at least 1",
        )
    if loaded.layout == "tensor_parallel":
        raise ConfigError(
            "runtime.tensor_parallel",
            "auto",
            "splits the heads over processes, and an analysis needs all of them in one",
            hint="runtime.tensor_parallel=null, with runtime.device_map=auto for several GPUs",
        )
    shape = loaded.architecture
    if outcome is None:
        outcome = Outcome(loaded.name, Shape(shape.layers, shape.heads), options.bins, tuple(methods))
    done = {prompt["id"] for prompt in outcome.prompts}
    for text in prompts:
        if text.id in done:
            continue
        observation, bills = observed(loaded, text, methods, options)
        append_prompt(outcome, text, observation, bills)
        if report is not None:
            report(text.id)
    return outcome


@torch.inference_mode()
def observed(
    loaded: LoadedModel, text: Text, methods: Mapping[str, Method], options: Options
) -> tuple[Observation, dict[str, tuple[int, int]]]:
    """Run the model on one prompt, and record exact attention and the errors of each method's cache.

    Returns:
        The filled recorder; and for each setting the bytes of keys and values that its cache uses, and the bytes of the
        same tokens in fp16.
    """
    model, device = loaded.model, loaded.device
    ids = torch.tensor([text.ids], device=device)
    length = len(text.ids) + options.steps
    alone = {name: method.alone() for name, method in methods.items()}
    caches: dict[str, KVCache] = {}
    baseline = load_method("fp16")
    try:
        for name, method in alone.items():
            caches[name] = method.new_cache(model, _prompt(text, ids, loaded), max_length=length)
        exact = baseline.new_cache(model, _prompt(text, ids, loaded), max_length=length)
        observation = Observation(caches, options)
        observation.attach(model)
        logits = prefill(model, exact, ids, None)
        for cache in caches.values():
            cache.finalize()
        for column in range(ids.shape[1], length):
            token = logits.argmax(-1)
            if column > ids.shape[1] and int(token) in loaded.eos_token_ids:
                break
            logits = forward(model, exact, token[:, None], None, torch.tensor([[column]], device=device))[:, -1]
        bills = {name: cache.bill() for name, cache in caches.items()}  # also raises for NaN that kernels recorded
    finally:
        for method in (*alone.values(), baseline):
            method.detach(model)
    return observation, {name: (bill.used.total, bill.fp16_equivalent) for name, bill in bills.items()}


def append_prompt(outcome: Outcome, text: Text, observation: Observation, bills: Mapping[str, tuple[int, int]]) -> None:
    """Average what :func:`observed` returned for one prompt over its decode steps, and append it to an outcome.

    Raises:
        NonFiniteError: attention is NaN or infinite.
    """
    steps = len(observation.steps)
    exact = {name: _mean_over_steps(observation.steps, name) for name in ("mass", "spikes", "visible")}
    if observation.prompt:
        sums = torch.stack([(sums / count).cpu() for sums, _, count in observation.prompt]).numpy()
        exact |= {"prompt_mass": sums[:, 0], "prompt_spikes": sums[:, 1]}
        exact["prompt_visible"] = torch.stack([(seen / count).cpu() for _, seen, count in observation.prompt]).numpy()
    errors = {
        name: {part: _mean_over_steps(of_steps, part) for part in ERRORS}
        for name, of_steps in observation.errors.items()
    }
    for name, parts in {"exact attention": exact, **errors}.items():
        broken = [part for part, array in parts.items() if not np.isfinite(array).all()]
        if broken:
            layer = int(np.argwhere(~np.isfinite(parts[broken[0]]))[0, 0])
            raise NonFiniteError(
                f"{text.id}: the {broken[0]} of {name} is NaN or infinite in layer {layer}, because the model's "
                "queries, keys or values in this layer are NaN or infinite.\n  hint: set model.dtype=float32; "
                "if the error remains, the weights are damaged"
            )
    positions = {
        name: [x.cpu().numpy() for x in getattr(observation, name)]
        for name in ("highest", "mean")
        if observation.options.positions
    }
    outcome.add(text.id, len(text.ids), steps, exact, errors, bills, positions)


def _mean_over_steps(steps: Sequence[Sequence[object]], name: str) -> np.ndarray:
    """Return the field `name` of ``steps[step][layer]``, averaged over the steps: ``[L, Hq, K]`` or ``[L, Hq]``."""
    layers = []
    for layer in zip(*steps, strict=True):
        fields: list[Tensor] = [getattr(of_step, name) for of_step in layer]
        dimension = 0 if name == "visible" else 1
        layers.append(torch.cat(fields, dimension).mean(dimension).float().cpu())
    return torch.stack(layers).numpy()


def _prompt(text: Text, ids: Tensor, loaded: LoadedModel) -> Prompts:
    """Return a new description of the prompt for a cache; caches must not share one."""
    return Prompts(
        [0],
        [len(text.ids)],
        [text.context],
        [text.query],
        ids,
        loaded.tokenizer.decode if loaded.tokenizer is not None else None,
        [text.query_source],
    )
