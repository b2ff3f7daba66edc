"""The trainer's configuration: typed, read from YAML, with ``key.sub=value`` overrides from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from kvbench.errors import ConfigError
from kvbench.util.schema import bounded, build


@dataclass(frozen=True)
class ModelShape:
    """A Llama's sizes (grouped-query attention, SwiGLU, tied embeddings, no biases)."""

    vocabulary: int = bounded(4096, minimum=8)
    width: int = bounded(384, minimum=8)
    layers: int = bounded(8, minimum=1)
    heads: int = bounded(6, minimum=1)
    kv_heads: int = bounded(2, minimum=1)
    head_dim: int = bounded(64, minimum=2)
    hidden: int = bounded(832, minimum=8)
    rope_theta: float = bounded(1e5, above=0)
    eps: float = bounded(1e-5, above=0)
    context: int = bounded(4096, minimum=16)

    def check(self) -> None:
        """Raise ConfigError where the query heads cannot share the KV heads evenly."""
        if self.heads % self.kv_heads:
            raise ConfigError("model.kv_heads", self.kv_heads, f"does not divide model.heads={self.heads}")


@dataclass(frozen=True)
class CorpusConfig:
    """Sources of the text.

    Args:
        path: folder of ``*.txt``, ``*.txt.gz`` or ``*.txt.xz`` files (see :mod:`experiments.tiny.corpus`).
        code: name patterns of the files that hold code.
        tokenizer: a ``tokenizer.json``.
        cache: file that keeps the tokens; null: tokenized at every start.
    """

    path: str
    code: tuple[str, ...] = ("python*",)
    tokenizer: str = "kvbench/models/tiny/tokenizer.json"
    cache: str | None = None


@dataclass(frozen=True)
class Phase:
    """A stretch of the training at one row length; `share` is its part of the whole."""

    length: int = bounded(minimum=16)
    share: float = bounded(above=0)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; the rate rises over `warmup` steps, stays until `hold` of the training, then falls linearly to `final`."""

    rate: float = bounded(3e-3, above=0)
    beta1: float = bounded(0.9, minimum=0, maximum=1)
    beta2: float = bounded(0.95, minimum=0, maximum=1)
    decay: float = bounded(0.1, minimum=0)
    clip: float = bounded(1.0, above=0)
    warmup: int = bounded(150, minimum=1)
    hold: float = bounded(0.45, minimum=0, maximum=1)
    final: float = bounded(0.02, minimum=0, maximum=1)


@dataclass(frozen=True)
class MixConfig:
    """Contents of the training rows; every number is a share in [0, 1] unless said otherwise.

    Args:
        text: rows of plain corpus text.
        code: of them, rows of code.
        packs: task rows of 1024 tokens and more that hold several shorter samples.
        grammar: samples whose filler is `mini`'s own; the others have corpus text.
        own_wording: samples in `mini`'s own wrapper; the others have a variant.
        vary: samples with random counts and sizes; the others have those of the evaluation.
        tasks: weights of the tasks.
        early: weights that replace `tasks` for rows shorter than 1024 tokens.
    """

    tasks: dict[str, float]
    early: dict[str, float] = field(default_factory=dict)
    text: float = bounded(0.22, minimum=0, maximum=1)
    code: float = bounded(0.2, minimum=0, maximum=1)
    packs: float = bounded(0.35, minimum=0, maximum=1)
    grammar: float = bounded(0.5, minimum=0, maximum=1)
    own_wording: float = bounded(0.7, minimum=0, maximum=1)
    vary: float = bounded(0.6, minimum=0, maximum=1)


@dataclass(frozen=True)
class ReasonConfig:
    """Programs of tiny-reason's training rows (:mod:`experiments.tiny.reason`).

    Args:
        lines: most lines of a program.
        filled: largest share of a row that the program takes; the trace has the rest.
        least: fewest lines, as a share of the most that a row can have; long rows have at least as many as keep their
            traces from repeating. Few lines teach little: their jumps can be copied from the trace.
        circuits: the network starts with heads that look words up (:mod:`experiments.tiny.circuits`).
    """

    lines: int = bounded(160, minimum=2, maximum=240)
    filled: float = bounded(0.7, above=0, maximum=0.9)
    least: float = bounded(0.4, minimum=0, maximum=1)
    circuits: bool = True


@dataclass(frozen=True)
class RunConfig:
    """One run.

    Args:
        dir: where log, checkpoint and model go.
        seconds: the training's length in seconds; everything is keyed to it. Exactly one of it and `steps` is given.
        steps: its length in steps instead: with one seed, the same rows in the same order.
        batch_tokens: tokens a step, whatever the row length.
        workers: processes that make rows.
        compute: dtype of activations; auto: bfloat16 on a GPU, float32 on a CPU.
        noise: most noise of a row's keys and values, in standard deviations of each channel; a row has any share of it.
            4 bits have about .08, and 2 bits .4. With it the model learns to read what a cache has rounded.
        quiet: share of the run without noise, which then rises over a tenth of the run: looking up is learned first.
    """

    dir: str
    seconds: float | None = bounded(None, above=0)
    steps: int | None = bounded(None, minimum=1)
    seed: int = bounded(0, minimum=0)
    device: str = "auto"
    compile: bool = True
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    noise: float = bounded(0.0, minimum=0, maximum=1)
    quiet: float = bounded(0.5, minimum=0, maximum=1)
    batch_tokens: int = bounded(98304, minimum=16)
    workers: int = bounded(13, minimum=1)
    log_every: int = bounded(25, minimum=1)
    checkpoint_every: float = bounded(60.0, above=0)

    def check(self) -> None:
        """Raise ConfigError unless exactly one of seconds and steps is given."""
        if (self.seconds is None) == (self.steps is None):
            raise ConfigError("run.seconds", self.seconds, "exactly one of run.seconds and run.steps must be given")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that determines a training.

    Rows are either text and tasks, from `corpus` and `mix`, or programs, from `reason`.
    """

    run: RunConfig
    phases: tuple[Phase, ...]
    corpus: CorpusConfig | None = None
    mix: MixConfig | None = None
    reason: ReasonConfig | None = None
    model: ModelShape = field(default_factory=ModelShape)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def check(self) -> None:
        """Raise ConfigError for combinations that cannot be trained."""
        self.model.check()
        self.run.check()
        if (self.corpus is None, self.mix is None) != (self.reason is not None,) * 2:
            raise ConfigError("reason", self.reason, "rows need either reason, or both corpus and mix")
        for i, phase in enumerate(self.phases):
            if self.run.batch_tokens % phase.length or phase.length > self.model.context:
                raise ConfigError(
                    f"phases[{i}].length",
                    phase.length,
                    f"must divide run.batch_tokens={self.run.batch_tokens} and fit the model's context",
                )


def read_train_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the configuration of a YAML file with ``key.sub=value`` overrides (values in YAML).

    Raises:
        ConfigError: an unknown key, a wrong value, an override without ``=``.
    """
    data = yaml.safe_load(path.read_text())
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(override, None, "is not an override of the form key.sub=value")
        *groups, last = key.split(".")
        place = data
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = yaml.safe_load(value)
    config = build(TrainConfig, data)
    config.check()
    return config


def length_at(phases: Sequence[Phase], progress: float) -> int:
    """Return the row length in tokens at `progress` in [0, 1]."""
    total = sum(phase.share for phase in phases)
    end = 0.0
    for phase in phases:
        end += phase.share / total
        if progress < end:
            return phase.length
    return phases[-1].length


def rate_at(config: OptimizerConfig, step: int, progress: float) -> float:
    """Return the learning rate of step `step` (from 0)."""
    if progress <= config.hold or config.hold >= 1.0:
        rate = config.rate
    else:
        left = max(0.0, (1.0 - progress) / (1.0 - config.hold))
        rate = config.rate * (config.final + (1.0 - config.final) * left)
    return rate * min(1.0, (step + 1) / config.warmup)
