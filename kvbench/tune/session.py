"""A model with windows to search on and windows to test on, and the evaluations of recipes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.config.run_config import RunConfig
from kvbench.decoding.shared_prefill import sharing_refusal
from kvbench.errors import ConfigError, DataError
from kvbench.methods.engine import Engine, rope_share
from kvbench.models.endpoint_config import EndpointModel
from kvbench.models.load import hf_config, load_model, shape_of
from kvbench.profiling.device import device_name
from kvbench.results import code as codes
from kvbench.results.environment import cpu_name
from kvbench.results.identity import run_id
from kvbench.runner import resolve, sources
from kvbench.tune.aim import Aim, Scored, standard_error
from kvbench.tune.evaluations import Evaluations
from kvbench.tune.measure import ChunkScore, Evaluator
from kvbench.tune.space import Recipe, Space, layer_map, sides_of, tied_layers


class Tuning:
    """A loaded model whose windows are prefilled: the first ones for searches, the others to test what they found.

    Args:
        config: a checked configuration with ``method=engine`` and ``dataset=fidelity``.
        windows: number of windows that searches evaluate.
        held_out: number of windows after these that no search sees.
        size: windows that are scored together, after which a search may stop a recipe.
        path: file of the evaluations.

    Attributes:
        evaluated: number of recipes of which a window has been scored by this object.

    Raises:
        ConfigError: the method is not ``engine``, or the data set not ``fidelity`` in its mode ``decode``.
        DataError: the data set has too few windows.
        ModelError: kvbench does not serve the model.
    """

    def __init__(self, config: RunConfig, windows: int, held_out: int, size: int, path: Path) -> None:
        check_setting(config)
        self.config, self.windows, self.held_out = config, windows, held_out
        loaded = load_model(config.model, config.runtime)
        self.name = loaded.name
        if config.task.needs_tokenizer:
            config.task.bind(loaded.tokenizer)
        samples = [sample for sample in config.task.samples() if not sample.warm_up][: windows + held_out]
        if len(samples) < windows + held_out:
            raise DataError(
                f"dataset: there are {len(samples)} windows or prompts, and --windows {windows} "
                f"--held-out {held_out} need {windows + held_out}.\n  hint: use --windows with a smaller number"
            )
        # neighbours may be of one document; in random order, the first ones stand for all
        order = np.random.default_rng(0).permutation(windows)
        parts = [[samples[place] for place in order], samples[windows:]]
        self.evaluators = [Evaluator(config, loaded, part, size) for part in parts if part]
        numbers = loaded.model.config.get_text_config(decoder=True).to_dict()
        self.channels = self.evaluators[0].channels
        self.rope = int(self.channels * rope_share(numbers))
        device = device_name(loaded.device) or cpu_name()
        names = [
            part.batch.name(row)
            for evaluator in self.evaluators
            for part in evaluator.chunks
            for row in range(len(part.targets))
        ]
        code = codes.used(sources.shared_code(), None, on_gpu=loaded.device.type == "cuda")
        self.store = Evaluations(
            path,
            {
                "model": self.name,
                "settings": run_id(resolve.material(config)),
                "texts": hashlib.sha256(json.dumps([names, windows, size]).encode()).hexdigest()[:16],
                "machine": [device, *loaded.dtypes.names().values()],
                "code": codes.code_digest(code),
            },
        )
        self.evaluated = 0

    def space(self, formats: Sequence[str], tie: int = 1) -> Space:
        """Return the recipes of the model's layers from these formats, `tie` consecutive layers tied together."""
        heads = self.evaluators[0].heads
        names = tuple(dict.fromkeys(formats))
        return Space(heads, self.channels, self.rope, names, tied_layers(len(heads), -(-len(heads) // tie)))

    def _score(self, recipe: Recipe, part: int, chunk: int) -> ChunkScore:
        text, number = layer_map(recipe), chunk + part * len(self.evaluators[0].chunks)
        score = self.store.find(text, number)
        if score is None:
            score = self.evaluators[part].score(recipe, chunk)
            self.store.add(text, number, score)
            self.evaluated += chunk == 0 and not part
        return score

    def evaluate(self, aim: Aim, recipe: Recipe, best: Scored | None) -> Scored:
        """Return the score of a recipe on the search's windows; stop early if it will not be better than `best`."""
        layers, looks = aim.space.expand(recipe), len(self.evaluators[0].chunks) - 1
        scores: list[ChunkScore] = []
        kl = np.zeros(0)
        for chunk in range(looks + 1):
            if aim.hopeless(recipe, kl, best, looks):
                return Scored(recipe, kl, float("nan"), stopped=True)
            scores.append(self._score(layers, 0, chunk))
            kl = np.concatenate([kl, scores[-1].kl])
        return Scored(recipe, kl, percentile(scores))

    def test(self, layers: Recipe) -> tuple[NDArray[np.float64], float]:
        """Return the KL divergence of single layers' forms on the held-out windows: of each, and 99 % of predictions.

        Without held-out windows it is that of the search's.
        """
        part = len(self.evaluators) - 1
        scores = [self._score(layers, part, chunk) for chunk in range(len(self.evaluators[part].chunks))]
        return np.concatenate([score.kl for score in scores]), percentile(scores)


def planned_space(config: RunConfig, formats: Sequence[str]) -> Space:
    """Return the recipes of a model as its configuration says, without its weights; heads are those of its first layer.

    Raises:
        ConfigError: a format does not fit the heads.
        ModelError: transformers does not know the architecture.
    """
    loaded = hf_config(config.model)
    shape = shape_of(loaded)
    rope = int(shape.head_dim * rope_share(loaded.get_text_config(decoder=True).to_dict()))
    return Space((shape.kv_heads,) * shape.layers, shape.head_dim, rope, tuple(formats), (1,) * shape.layers)


def check_setting(config: RunConfig) -> None:
    """Raise ConfigError unless the configuration is of ``method=engine`` and ``dataset=fidelity``, token by token."""
    if not isinstance(config.method, Engine):
        name, problem = type(config.method).__name__.lower(), "has no format per layer that tune could choose"
        raise ConfigError("method", name, problem, hint="method=engine")
    if isinstance(config.model, EndpointModel):
        problem = "has its caches in a server, where tune cannot place keys and values"
        raise ConfigError("model", "endpoint", problem, hint="tune the model itself, and serve it with --export")
    if config.method.layers is not None:
        raise ConfigError("method.layers", config.method.layers, "is what tune looks for", hint="leave it out")
    for name, plain in (("sinks", 0), ("window", 0), ("own", "stored")):
        if getattr(config.method, name) != plain:
            raise ConfigError(
                f"method.{name}", getattr(config.method, name),
                "is not supported by tune, whose bits are those of every token", hint=f"method.{name}={plain}",
            )  # fmt: skip
    if reason := sharing_refusal(config.method):
        raise ConfigError(
            "method.prefill", config.method.prefill, f"cannot be tuned: {reason}", hint="method.prefill=exact"
        )
    mode = getattr(config.task, "mode", None)
    if mode != "decode":
        raise ConfigError(
            "dataset",
            config.dataset.get("name"),
            "is not one of fidelity, token by token",
            hint="dataset=fidelity dataset.over=NAME",
        )


def percentile(scores: Sequence[ChunkScore]) -> float:
    """Return the 99 % percentile of all predictions, interpolated linearly, from the largest of each batch."""
    top = np.sort(np.concatenate([score.top for score in scores]))[::-1]
    place = (sum(score.count for score in scores) - 1) * 0.01
    below, above = int(np.floor(place)), int(np.ceil(place))
    return float(top[below] + (top[above] - top[below]) * (place - below))


def recipe_record(
    tuning: Tuning, aim: Aim, best: Scored, evaluations: int, search: str, tested: tuple[NDArray[np.float64], float]
) -> dict[str, Any]:
    """Return the content of ``recipe.json``.

    ``kl`` is that of the held-out windows, of which no search has seen any, or of the search's if there are none
    (``held_out``); ``search_kl`` is that of the search's.
    """
    return {
        "kvbench": 1,
        "kind": "recipe",
        "model": tuning.name,
        "budget_bits": aim.bits,
        "budget_kl": aim.kl,
        "bits": aim.space.bits(best.recipe),
        "kl": {**_figures(*tested), "held_out": tuning.held_out > 0},
        "search_kl": _figures(best.kl, best.p99),
        "evaluations": evaluations,
        "search": search,
        "layers": [
            dict(zip(("keys", "values"), sides_of(form), strict=True)) for form in aim.space.expand(best.recipe)
        ],
    }


def _figures(kl: NDArray[np.float64], p99: float) -> dict[str, Any]:
    error = standard_error(kl)
    return {"mean": float(kl.mean()), "se": None if np.isnan(error) else error, "p99": p99, "windows": len(kl)}
