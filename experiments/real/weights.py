"""The stage ``weights``: KL divergence between two sets of weights of one model, beside which caches can be seen.

Both models read the windows of the stage ``kl``, each in one pass with its own output head and an exact cache, so that
the figures are those of the weights alone. The base are the weights that the other model's were rounded from.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments import measured
from experiments.place import choice
from experiments.real.files import MODEL
from experiments.real.fold import counts_before, fold_stage
from experiments.real.stages import STAGES, Stage
from experiments.runs import composed
from kvbench.config.run_config import RunConfig, checked_config
from kvbench.errors import ConfigError, DataError
from kvbench.models.locate import locate
from kvbench.results.samples import Row

#: models whose weights were rounded, and those of the hub that they come from
ROUNDED_FROM = {MODEL: "smollm2-135m"}
NAME = "weights"


def weights_stage(model: str, base: str | None) -> Stage:
    """Return the stage that compares the weights of a model with those of another one; None: by :data:`ROUNDED_FROM`.

    Raises:
        ConfigError: no other model is named or known.
    """
    base = base or ROUNDED_FROM.get(model)
    if base is None:
        raise ConfigError("--against", base, f"must name the model that {model} is compared with")
    row = measured.Setting(f"{model} against {base}", NAME, f"model={base}")
    return Stage(NAME, "KL divergence of two sets of weights, with exact caches", (row,), STAGES["kl"].data, 8)


def make_weights(
    stage: Stage, runs: Mapping[str, Sequence[str]], about: Mapping[str, Any], arguments: argparse.Namespace
) -> int:
    """Compare the weights over all windows, write the stage's file, and return the exit status.

    Raises:
        ModelError: the weights of one of the two are missing.
    """
    (row,) = stage.settings
    found, env = {}, {}
    for name, options in runs.items():
        both = [pass_config(model, [*options], arguments.device) for model in (row.setting, f"model={arguments.model}")]
        for config in both:
            locate(config.model)
        rows, env = weight_rows(*both)
        found[name] = {one["id"]: one for one in rows}
    folded = fold_stage({row.key: measured.Stored(found, env)}, stage, about)
    where = arguments.out / NAME
    return measured.keep_measured_table(folded, where, choice(arguments), counts_before, arguments.model)


def pass_config(model: str, options: Sequence[str], device: str) -> RunConfig:
    """Return the run in which a model (``model=NAME``) reads the windows of these options in one pass."""
    exact = ("method=fp16", model, *options, "dataset.mode=simulated", f"runtime.device={device}")
    return checked_config(composed(exact))


def weight_rows(base: RunConfig, other: RunConfig) -> tuple[list[Row], dict[str, Any]]:
    """Return a row of ``dataset=fidelity`` for each window, of `other`'s predictions against `base`'s, and the machine.

    Raises:
        DataError: the two models' tokenizers cut the text into other tokens.
    """
    from kvbench.models.load import load_model
    from kvbench.profiling.device import device_name
    from kvbench.results.environment import environment

    loaded = [load_model(config.model, config.runtime) for config in (base, other)]
    device = loaded[1].device
    known = {"arithmetic": str(loaded[1].dtype).removeprefix("torch."), "dequantized": loaded[1].dequantized}
    return list(_rows(list(zip((base, other), loaded, strict=True)))), environment(
        str(device), device_name(device), known
    )


def _rows(sides: Sequence[tuple[RunConfig, Any]]) -> Iterator[Row]:
    import torch

    from kvbench.cache.progress import Options
    from kvbench.decoding.head import compare_logits
    from kvbench.methods.fp16 import FP16
    from kvbench.runner.fidelity_batch import Passes, batch_of, work_of
    from kvbench.runner.fidelity_samples import fidelity_figures

    passes = [Passes(config.runtime, loaded, Options()) for config, loaded in sides]
    for config, loaded in sides:
        config.task.bind(loaded.tokenizer)
    for pair in zip(*(config.task.samples() for config, _ in sides), strict=True):
        works = [work_of(sample) for sample in pair]
        if works[0].ids != works[1].ids:
            names = " and ".join(config.model.name for config, _ in sides)
            raise DataError(f"{pair[0].id}: {names} cut the text into other tokens, so they cannot be compared")
        logits = []
        for sample, (config, loaded), own in zip(pair, sides, passes, strict=True):
            batch = batch_of([sample], config, loaded)
            states, _ = own.states(FP16(), batch, batch.tokens or (), work_of(sample), None, sample.id)
            logits.append(own.head.logits(states[0]))
        target = torch.tensor((works[0].ids or ())[works[0].prefill + 1 :])
        compared = compare_logits(*logits, target)
        yield {"id": pair[0].id, "fidelity": fidelity_figures(compared, works[0], works[0].prefill)}
