"""Time and memory over a grid of prompt lengths and batch sizes: one sample is one point of the grid.

No answers are scored. A point that does not fit into memory is a result too; larger batches of the same prompt length
are then not tried. The next point thus depends on the points before it, so :meth:`Efficiency.next_samples` receives
the stored rows. ``python -m kvbench.bench tpot | prefill | memory`` measures the same points; its defaults are the
presets ``dataset=efficiency/tpot``, ``/prefill`` and ``/memory``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvbench.errors import ConfigError
from kvbench.tasks.base import Row, Sample, Setup, Task
from kvbench.tasks.work import MeasurePoint
from kvbench.util.schema import MOST, MOST_ROWS, MOST_TOKENS, bounded

#: minimum number of prompt tokens
SHORTEST = 16
#: keys of the runtime group left out of the identity: they do not change the figures, or are recorded elsewhere
_ELSEWHERE = (
    *("results_dir", "retry", "batch_size", "workers", "seed", "device"),
    *("span_rows", "shared_prefill", "arithmetic"),
)
#: keys that only say which stored rows are taken; run ids hold their defaults
_STORED = {"rerun": False, "mix_code": False}

#: settings that all points of a run share
SETTINGS = ("repeats", "warm_up", "seed", "untimed", "fill", "compare", "stock")
#: settings added later, with their defaults: part of a run's identity only if they differ, so older run ids stay valid
LATER = {"untimed": 0, "fill": "prefill", "compare": 0, "stock": ()}
#: caches of stock transformers (:data:`kvbench.measure.stock.BASELINES`)
STOCK = ("dynamic", "static", "static-compiled", "quanto4", "quanto2", "hqq4")


@dataclass(frozen=True, kw_only=True)
class Efficiency(Task):
    """Measurement of time and memory over a grid of points; a point is one prompt length with one batch size.

    Args:
        prompts: prompt lengths in tokens.
        batches: batch sizes, or ``grow`` for 1, 2, 4, ... until memory runs out.
        max_batch: largest batch size that ``grow`` tries.
        bisect: maximum number of further batch sizes to try after memory has run out; they bisect the range between the
            largest batch size that fitted and the smallest that did not.
        new_tokens: number of tokens generated for every sequence; generation never ends early.
        repeats: number of prefills timed for TTFT; their median is reported. Decoding follows the last prefill.
        untimed: number of prefills at each point that run before the timed ones and are not timed.
        warm_up: number of tokens that are generated once per run before anything is timed.
        fill: ``prefill`` runs the prompt through the model; ``random`` fills the cache with random keys and values
            instead, and no prefill is timed.
        compare: number of tokens to generate a second time without CUDA graphs, to check that both ways give the same
            tokens; 0 for no comparison.
        stock: caches of unmodified transformers to measure at each point as well (:data:`STOCK`).
        seed: seed of the random words in the prompts.
    """

    version = 1
    scorer_version = 1
    adaptive = True
    single_process = True
    times_only = True

    name: str = "efficiency"
    prompts: tuple[int, ...] = bounded((128, 512), minimum=SHORTEST, maximum=MOST_TOKENS)
    batches: tuple[int, ...] | Literal["grow"] = bounded((1, 2, 4), minimum=1, maximum=MOST_ROWS)
    max_batch: int = bounded(4096, minimum=1, maximum=MOST_ROWS)
    bisect: int = bounded(0, minimum=0, maximum=32)
    new_tokens: int = bounded(32, minimum=2, maximum=MOST_TOKENS)
    repeats: int = bounded(3, minimum=1, maximum=1000)
    untimed: int = bounded(0, minimum=0, maximum=1000)
    warm_up: int = bounded(8, minimum=2, maximum=MOST_TOKENS)
    fill: Literal["prefill", "random"] = "prefill"
    compare: int = bounded(0, minimum=0, maximum=MOST_TOKENS)
    stock: tuple[Literal["dynamic", "static", "static-compiled", "quanto4", "quanto2", "hqq4"], ...] = ()
    seed: int = bounded(0, minimum=0, maximum=MOST)

    def check(self) -> None:
        """Raise ConfigError if no prompt length or no batch size is given."""
        if not self.prompts:
            raise ConfigError(
                "dataset.prompts", "[]", "does not contain a prompt length", hint="dataset.prompts=[4096]"
            )
        if not self.batches:
            raise ConfigError(
                "dataset.batches",
                "[]",
                "does not contain a batch size",
                hint="set dataset.batches=[1,2,4] or dataset.batches=grow",
            )

    def fits(self, config: Setup) -> None:
        """Raise ConfigError if the points of the grid cannot be measured with the rest of the configuration.

        For example, a prompt may exceed the model's limit, or ``runtime.batch_size`` may be set, although the grid
        defines the batch sizes.
        """
        new, longest = config.decoding.max_new_tokens or self.new_tokens, max(self.prompts)
        if new < 2:
            raise ConfigError("decoding.max_new_tokens", new, "leaves no decode step to time", allowed="2 or more")
        if not config.model.random and longest + new > config.model.max_length:
            room = config.model.max_length - new
            raise ConfigError(
                "dataset.prompts",
                list(self.prompts),
                f"do not fit the model together with {new} new tokens (model.max_length={config.model.max_length})",
                allowed=f"at most {room} tokens per prompt"
                if room >= SHORTEST
                else "shorter prompts and fewer new tokens",
                hint="set shorter dataset.prompts, or model.weights=random, which has no limit on positions",
            )
        if config.runtime.batch_size != 1:
            raise ConfigError(
                "runtime.batch_size",
                config.runtime.batch_size,
                "cannot be set with dataset=efficiency, which measures several batch sizes",
                hint=f"dataset.batches=[{config.runtime.batch_size}]",
            )
        if config.decoding.stop:
            raise ConfigError(
                "decoding.stop",
                list(config.decoding.stop),
                "has no effect with dataset=efficiency, which always generates exactly dataset.new_tokens tokens",
            )

    def samples(self) -> Iterator[Sample]:
        """Yield a sample for every measurement point that is known before any measurement has run."""
        return self.next_samples({})

    def next_samples(self, rows: Mapping[str, Row]) -> Iterator[Sample]:
        """Yield a sample for every measurement point that is known so far, including those already measured.

        Batch sizes may depend on earlier measurements: after one that ran out of memory, larger ones are left out, and
        `bisect` adds sizes in between. With ``batches=grow``, each size is known only once the previous one has been
        measured.
        """
        for prompt in dict.fromkeys(self.prompts):
            for batch in self._batches(prompt, rows):
                yield self._sample(prompt, batch)

    def identity(self) -> dict[str, Any]:
        """Return the options that affect the figures of a point.

        Prompt lengths and batch sizes are left out, so that a larger grid adds points to the same run.
        """
        settings = {key: getattr(self, key) for key in ("new_tokens", *SETTINGS)}
        settings = {key: value for key, value in settings.items() if key not in LATER or value != LATER[key]}
        return {"target": "efficiency", "version": self.version, **settings}

    def machine_identity(self, runtime: Any, device: Callable[[], str]) -> dict[str, Any]:
        """Return the device's name and the runtime options that affect time or memory, for the run id."""
        options = {key: value for key, value in dataclasses.asdict(runtime).items() if key not in _ELSEWHERE}
        return {"device": device(), **options, **_STORED}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return no scores, because the content of the generated tokens does not matter."""
        return {}

    def _batches(self, prompt: int, rows: Mapping[str, Row]) -> list[int]:
        """Return the batch sizes known so far for one prompt length, in ascending order."""
        grow = self.batches == "grow"
        fits, ends, batches = 0, 0, []
        for batch in doubling(self.max_batch) if isinstance(self.batches, str) else sorted(set(self.batches)):
            batches.append(batch)
            status = _status(rows, prompt, batch)
            if status == "oom":
                ends = batch
                break
            if status is None and grow:
                return batches
            fits = batch
        for _ in range(self.bisect if ends else 0):
            batch = (fits + ends) // 2
            if batch in (fits, ends):
                break
            batches.append(batch)
            status = _status(rows, prompt, batch)
            if status is None:
                break
            fits, ends = (fits, batch) if status == "oom" else (batch, ends)
        return sorted(batches)

    def _sample(self, prompt: int, batch: int) -> Sample:
        return Sample(
            id=point_id(prompt, batch),
            task="efficiency",
            length=prompt,
            prompt="",
            answers=(),
            max_new_tokens=self.new_tokens,
            work=MeasurePoint(prompt=prompt, batch=batch, **{key: getattr(self, key) for key in SETTINGS}),
        )


def point_id(prompt: int, batch: int) -> str:
    """Return the sample id of a point, for example ``efficiency@4096/b8``."""
    return f"efficiency@{prompt}/b{batch}"


def doubling(most: int) -> Iterator[int]:
    """Yield the batch sizes 1, 2, 4, ... that are below `most`, then `most` itself."""
    batch = 1
    while batch < most:
        yield batch
        batch *= 2
    yield most


def _status(rows: Mapping[str, Row], prompt: int, batch: int) -> str | None:
    row = rows.get(point_id(prompt, batch))
    return None if row is None else str(row["status"])
