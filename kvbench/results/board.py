"""A row of the leaderboard: a finished run with the samples from which its figures follow, and differences of rows.

:mod:`kvbench.results.board_file` reads and writes the files, :mod:`kvbench.submit` makes and checks them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from kvbench.errors import KvbenchError
from kvbench.results import aggregate
from kvbench.results.identity import content_digest
from kvbench.results.typed import typed_key

#: version of the files
VERSION = 1
KIND = "row"
#: folder of the rows in the repository
FOLDER = Path("leaderboard")
#: standard errors within which a rerun agrees, and the share of a row's samples that it must have
AGREE, FEWEST = 3.0, 0.5

#: longest message about a row, in characters
LONGEST_MESSAGE = 500

Measure = Literal["score", "perplexity", "kl"]
#: measures, and whether more is better
MEASURES: Mapping[Measure, bool] = {"score": True, "perplexity": False, "kl": False}
#: one sample: digest of its id (of several answers to a problem: of the problem's, with ~0, ~1, ... after it), value
#: (score, mean NLL per token, mean KL divergence), tokens of its prompt, tokens in the cache at its end, their bytes
Sample = list[Any]


class RowError(KvbenchError):
    """Error for a file that is no row of the leaderboard, or whose parts contradict each other; long values are cut."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]} ...")


@dataclass(frozen=True, kw_only=True)
class BoardCache:
    """Dimensions of a model's cache: those of :class:`kvbench.bench.prediction.CacheShape`, and bytes of a number.

    `windows` has the sliding window of each layer in tokens, None for a layer without one.
    """

    layers: int
    query_heads: int
    heads: int
    channels: int
    windows: list[int | None]
    state: int
    width: int


@dataclass(frozen=True, kw_only=True)
class BoardFigure:
    """The figure of one task, or the mean of all; `stderr` is None for one sample."""

    value: float
    stderr: float | None
    n: int


@dataclass(frozen=True, kw_only=True)
class BoardBytes:
    """Bytes of a sequence at the end of its sample, averaged over the samples, by part.

    Args:
        fp16: bytes of the same tokens in 16 bits.
        bits: bits per element, ``16 * total / fp16``.
        per_token: bytes per token.
    """

    total: int
    codes: int
    scales: int
    window: int
    index: int
    state: int
    fp16: int
    bits: float
    per_token: float


@dataclass(frozen=True, kw_only=True)
class BoardRow:
    """One finished run.

    Args:
        run: id of the run.
        identity: everything that determines its outputs, of which `run` is a hash
            (:func:`kvbench.results.identity.identity`): model with its digest, data set, decoding, method, formats.
        quantizer: name of the quantizer.
        layers: map of formats by layer, as it is typed; None without one.
        samples: by task, one list for each sample (:data:`Sample`).
        outputs: digest of the answers.
        code: digest of each part of the code that made the samples.
        again: digest of the row whose run this one repeats; None for a row of its own.
        digest: digest of all other keys.
    """

    kvbench: int
    kind: str
    run: str
    name: str
    model: str
    identity: dict[str, Any]
    quantizer: str
    layers: str | None
    cache: BoardCache
    measure: Measure
    samples: dict[str, list[list[Any]]]
    scores: dict[str, BoardFigure]
    mean: BoardFigure
    bytes: BoardBytes
    outputs: str
    device: str
    dtype: str
    attention: str | None
    versions: dict[str, str | None]
    commit: str | None
    code: dict[str, str | None]
    who: str
    link: str | None = typed_key(default=None)
    date: str
    again: str | None = typed_key(default=None)
    digest: str

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.run}-{self.digest[:8]}.json"

    @property
    def data(self) -> str:
        """Name of the data set, with the one whose answers or texts it compares."""
        data = self.identity["setting"]["data"]["identity"]
        over = data.get("over") if isinstance(data.get("over"), dict) else {}
        names = (data.get("target"), over.get("text") or over.get("target"))
        return " over ".join(str(name) for name in names if name)

    @property
    def model_digest(self) -> str:
        """Digest of the model's files, or of the GGUF file that they were converted from; "random" without weights."""
        model = self.identity["setting"]["model"]
        return str(model.get("gguf") or model.get("files") or "random")

    @property
    def group(self) -> str:
        """Digest that rows share whose samples can be compared: model, data, decoding and seed are the same."""
        return content_digest([comparable(self.identity["setting"]), self.measure])

    def again_of(self, other: BoardRow) -> bool:
        """Return True if this row repeats the run of another one: the same settings in the same group."""
        return self.group == other.group and self.identity["method"] == other.identity["method"]


def comparable(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an identity that comparable runs share.

    The digest of files that were converted from a GGUF file is left out: it depends on the version of transformers.
    """
    model = setting["model"]
    return {**setting, "model": {**model, "files": None}} if model.get("gguf") else dict(setting)


def figure(measure: Measure, samples: Sequence[Sample]) -> BoardFigure:
    """Return the figure of one task: the mean of the samples' values, for perplexity its exponential."""
    values = _problem_means({sample[0]: sample[1] for sample in samples})
    mean, error = aggregate.mean_error(values)
    assert mean is not None
    if measure == "perplexity":
        mean = math.exp(mean)
        error = None if error is None else mean * error
    return BoardFigure(value=mean, stderr=error, n=len(values))


def _problem_means(values: Mapping[str, float]) -> list[float]:
    """Return the mean value of each problem's answers, whose names differ after ``~``; errors are by problem."""
    by_problem: dict[str, list[float]] = {}
    for name, value in values.items():
        by_problem.setdefault(name.partition("~")[0], []).append(value)
    return [fmean(several) for several in by_problem.values()]


def board_figures(
    measure: Measure, samples: Mapping[str, Sequence[Sample]]
) -> tuple[dict[str, BoardFigure], BoardFigure]:
    """Return the figure of each task, and their mean with equal weights."""
    scores = {key: figure(measure, group) for key, group in samples.items()}
    spread = aggregate.root_mean(one.stderr for one in scores.values())
    count = sum(one.n for one in scores.values())
    return scores, BoardFigure(value=fmean(one.value for one in scores.values()), stderr=spread, n=count)


@dataclass(frozen=True)
class BoardDifference:
    """The difference of two rows in one task, with its standard error; `paired`: over the samples that both have."""

    key: str
    value: float
    stderr: float | None
    n: int
    paired: bool

    @property
    def agrees(self) -> bool:
        """True if it is within :data:`AGREE` standard errors; equal figures of single samples agree too."""
        return abs(self.value) <= AGREE * (self.stderr or 0.0) + 1e-9


def differences(row: BoardRow, other: BoardRow) -> list[BoardDifference]:
    """Return `row` - `other` for each task that both have: over the samples that both have, else of the means."""
    return [_difference(row, other, key) for key in row.samples if key in other.samples]


def _difference(row: BoardRow, other: BoardRow, key: str) -> BoardDifference:
    mine, others = ({sample[0]: sample[1] for sample in one.samples[key]} for one in (row, other))
    names = [name for name in mine if name in others]
    if not names:
        one, two = row.scores[key], other.scores[key]
        spread = None if one.stderr is None or two.stderr is None else math.hypot(one.stderr, two.stderr)
        return BoardDifference(key, one.value - two.value, spread, min(one.n, two.n), False)
    changes = _problem_means({name: mine[name] - others[name] for name in names})
    mean, error = aggregate.mean_error(changes)
    assert mean is not None
    if row.measure == "perplexity":
        value = math.exp(fmean(mine[name] for name in names))
        mean, error = value - math.exp(fmean(others[name] for name in names)), error and value * error
    return BoardDifference(key, mean, error, len(changes), True)


def mean_difference(row: BoardRow, other: BoardRow) -> BoardDifference | None:
    """Return the mean of the paired differences of all tasks; None unless both have the same tasks and samples."""
    parts = differences(row, other)
    if row.samples.keys() != other.samples.keys() or not all(part.paired for part in parts):
        return None
    spread = aggregate.root_mean(part.stderr for part in parts)
    return BoardDifference("mean", fmean(part.value for part in parts), spread, sum(part.n for part in parts), True)


def from_exact(row: BoardRow, rows: Sequence[BoardRow]) -> BoardDifference | None:
    """Return the difference of a row from an fp16 row with the same samples; None if there is none among `rows`.

    An fp16 row by the same name comes before those of others. A KL divergence is a difference from fp16 already.
    """
    exact = [one for one in rows if one.name == "fp16" and one.again is None and one.group == row.group]
    others = [] if row.measure == "kl" or row in exact else sorted(exact, key=lambda one: one.who != row.who)
    return next((pair for one in others if (pair := mean_difference(row, one))), None)


def disagreement(row: BoardRow, other: BoardRow) -> str | None:
    """Return why `row` does not reproduce `other`; None if it does."""
    if row.who == other.who:
        return f"{row.who} cannot reproduce a row of their own; another --who is needed"
    if not row.again_of(other):
        return f"its settings are not those of {other.file}"
    parts = differences(row, other)
    if (count := sum(part.n for part in parts)) < FEWEST * other.mean.n:
        return f"has {count} of the {other.mean.n} samples of {other.file}; at least {FEWEST:.0%} are needed"
    wrong = next((part for part in parts if not part.agrees), None)
    if wrong is None:
        return None
    kind = "paired" if wrong.paired else "independent"
    error = "unknown" if wrong.stderr is None else f"{wrong.stderr:.3g}"
    return f"{wrong.key} differs from {other.file} by {wrong.value:+.3g}, {kind} standard error {error}, n={wrong.n}"


def row_status(row: BoardRow, rows: Sequence[BoardRow]) -> str:
    """Return by whom among the authors of `rows` a row was reproduced, or that it is self-reported or a rerun."""
    if row.again is not None:
        return "a rerun"
    names = dict.fromkeys(one.who for one in rows if one.again == row.digest and disagreement(one, row) is None)
    return f"reproduced by {', '.join(names)}" if names else "self-reported"
