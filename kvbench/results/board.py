"""A row of the leaderboard: a finished run as one JSON file, with the samples from which its figures follow.

:func:`read_row` takes files of unknown people. It checks their size, shape and digest, the id of the run (a hash of its
settings), and the figures, which follow from the samples; :mod:`kvbench.submit.check` checks bytes. A digest shows
accidents, no more: who forges figures can compute another one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from kvbench.errors import KvbenchError
from kvbench.results import aggregate, typed
from kvbench.results.identity import content_digest, full_digest, run_id
from kvbench.results.typed import typed_key
from kvbench.util.table import printable

#: version of the files
VERSION = 1
KIND = "row"
#: folder of the rows in the repository
FOLDER = Path("leaderboard")
#: limits of a file: bytes, nested levels, samples, characters of a text
MOST_BYTES, MOST_DEPTH, MOST_SAMPLES, LONGEST = 1 << 20, 12, 10_000, 1000
#: limits of the names that people choose
LONGEST_NAME, LONGEST_LINK = 80, 200
#: largest number
MOST = 1e15
#: standard errors within which a rerun agrees
AGREE = 3.0
_HEX = re.compile(r"[0-9a-f]{64}")
_LINK = re.compile(r"https://[A-Za-z0-9.-]+(/[\w./~%#?=&+:@-]*)?", re.ASCII)
_KEY = re.compile(r"[\w.:+-]+(@[0-9][0-9k+-]*)?")
_NAME = re.compile(r"[0-9a-f]{12}")

Measure = Literal["score", "perplexity", "kl"]
#: measures, and whether more is better
MEASURES: Mapping[Measure, bool] = {"score": True, "perplexity": False, "kl": False}
#: one sample: digest of its id, value (score, mean NLL per token, mean KL divergence), tokens of its prompt, tokens in
#: the cache at its end, and their bytes
Sample = list[Any]


class RowError(KvbenchError):
    """Error for a file that is no row of the leaderboard, or whose parts contradict each other."""


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


def figure(measure: Measure, values: Sequence[float]) -> BoardFigure:
    """Return the figure of one task: the mean of the samples' values, for perplexity its exponential."""
    mean, error = aggregate.mean_error(values)
    assert mean is not None
    if measure == "perplexity":
        mean = math.exp(mean)
        error = None if error is None else mean * error
    return BoardFigure(value=mean, stderr=error, n=len(values))


def board_figures(
    measure: Measure, samples: Mapping[str, Sequence[Sample]]
) -> tuple[dict[str, BoardFigure], BoardFigure]:
    """Return the figure of each task, and their mean with equal weights."""
    scores = {key: figure(measure, [sample[1] for sample in group]) for key, group in samples.items()}
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
    mean, error = aggregate.mean_error([mine[name] - others[name] for name in names])
    assert mean is not None
    if row.measure == "perplexity":
        value = math.exp(fmean(mine[name] for name in names))
        mean, error = value - math.exp(fmean(others[name] for name in names)), error and value * error
    return BoardDifference(key, mean, error, len(names), True)


def mean_difference(row: BoardRow, other: BoardRow) -> BoardDifference | None:
    """Return the mean of the paired differences of all tasks; None unless both have the same tasks and samples."""
    parts = differences(row, other)
    if row.samples.keys() != other.samples.keys() or not all(part.paired for part in parts):
        return None
    spread = aggregate.root_mean(part.stderr for part in parts)
    return BoardDifference("mean", fmean(part.value for part in parts), spread, sum(part.n for part in parts), True)


def row_text(content: Mapping[str, Any]) -> str:
    """Return the text of a row's file: `content` with its digest, a line for each key."""
    content = {**content, "digest": full_digest({key: value for key, value in content.items() if key != "digest"})}
    lines = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def row_files(folder: Path) -> list[Path]:
    """Return the files of a leaderboard's rows in the order of their names."""
    return sorted(path for path in folder.glob("*.json") if path.is_file())


def read_row(path: Path) -> BoardRow:
    """Read a row's file and check it, but for its bytes.

    Raises:
        RowError: the file is no row; the message names the file and the key.
    """
    try:
        row = parse_row(_content(path))
    except (RowError, typed.ShapeError) as error:
        raise RowError(f"{path.name}: {error}") from None
    if path.name != row.file:
        raise RowError(f"{path.name}: is the row {row.file}; rename the file")
    return row


def _content(path: Path) -> Any:
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8") if size <= MOST_BYTES else ""
    except (OSError, UnicodeDecodeError) as error:
        raise RowError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if size > MOST_BYTES:
        raise RowError(f"has {size:,} bytes; at most {MOST_BYTES:,} are read")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError:
        raise RowError("is nested too deeply") from None
    except ValueError as error:
        raise RowError(f"is not JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("an object has a key twice")
    return dict(pairs)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def parse_row(content: Any) -> BoardRow:
    """Check the content of a row's file, and return it as a row.

    Raises:
        RowError: a part is too large or unprintable, or contradicts another.
        ShapeError: a key is missing or unknown, or its value has the wrong type.
    """
    for key, value, depth in _leaves(content):
        if depth > MOST_DEPTH:
            raise RowError(f"{key[:LONGEST_NAME]}: nested more than {MOST_DEPTH} levels")
        if isinstance(value, str) and (len(value) > LONGEST or printable(value) != value):
            raise RowError(f"{key}: a text must be printable, of at most {LONGEST} characters")
        if isinstance(value, (int, float)) and not abs(value) <= MOST:
            raise RowError(f"{key}: a number is larger than {MOST:g}")
    row = typed.read_typed(BoardRow, content, strict=True)
    if row.kvbench != VERSION or row.kind != KIND:
        raise RowError(f"kvbench={row.kvbench}, kind={row.kind}: expected {VERSION} and {KIND}")
    expected = full_digest({key: value for key, value in content.items() if key != "digest"})
    if row.digest != expected:
        raise RowError(f"digest={row.digest[:12]}: its content has {expected[:12]}; it was edited or damaged")
    for problem in _problems(row):
        raise RowError(problem)
    return row


def _leaves(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Any, int]]:
    """Yield dotted key, value and level of every text and number; keys of objects count as texts."""
    if depth > MOST_DEPTH or not isinstance(value, (dict, list)):
        yield key, value, depth
        return
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(name, str):
            yield key or "the content", name, depth
        yield from _leaves(inner, f"{key}.{name}" if key else str(name), depth + 1)


def _problems(row: BoardRow) -> Iterator[str]:
    """Yield in what a row contradicts itself."""
    if row.measure not in MEASURES:
        yield f"measure={row.measure}: expected one of {', '.join(MEASURES)}"
    if not row.who.strip() or len(row.who) > LONGEST_NAME:
        yield f"who: a name of 1 to {LONGEST_NAME} characters"
    if row.link is not None and (len(row.link) > LONGEST_LINK or not _LINK.fullmatch(row.link)):
        yield "link: an address that begins with https://, of ordinary characters"
    for key in ("outputs", "again"):
        if (value := getattr(row, key)) is not None and not _HEX.fullmatch(value):
            yield f"{key}: expected 64 hexadecimal digits"
    try:
        date.fromisoformat(row.date)
    except ValueError:
        yield f"date={row.date}: expected YYYY-MM-DD"
    setting, method = row.identity.get("setting"), row.identity.get("method")
    model, data = (setting.get(key) if isinstance(setting, dict) else None for key in ("model", "data"))
    given = data.get("identity") if isinstance(data, dict) else None
    if not (isinstance(model, dict) and isinstance(given, dict) and isinstance(method, dict)):
        yield "identity: expected setting, with model and data, and method"
        return
    if run_id(row.identity) != row.run:
        yield f"run={row.run}: its settings have the id {run_id(row.identity)}"
    if str(model.get("weights")).startswith("random"):
        yield f"model.weights={model['weights']}: answers of random weights are no result"
    if model.get("name") != row.model:
        yield f"model={row.model}: its settings name {model.get('name')}"
    yield from _sample_problems(row)


def _sample_problems(row: BoardRow) -> Iterator[str]:
    count = sum(len(group) for group in row.samples.values())
    if not 0 < count <= MOST_SAMPLES or not all(row.samples.values()):
        yield f"samples: {count}; expected 1 to {MOST_SAMPLES:,}, and no task without one"
        return
    for key, group in row.samples.items():
        if not _KEY.fullmatch(key):
            yield f"samples.{key}: expected TASK or TASK@LENGTH"
        wrong = next((number for number, sample in enumerate(group) if not _well_formed(row.measure, sample)), None)
        if wrong is not None:
            yield f"samples.{key}.{wrong}: expected [id, value, prompt, tokens, bytes] in their ranges"
            return
    names = [sample[0] for group in row.samples.values() for sample in group]
    if len({*names}) < count:
        yield f"samples: {count - len({*names})} of them stand there twice"
    scores, mean = board_figures(row.measure, row.samples)
    if row.scores.keys() != scores.keys():
        yield "scores: expected one for each task of samples"
        return
    for key, ours, theirs in [*((f"scores.{k}", scores[k], row.scores[k]) for k in scores), ("mean", mean, row.mean)]:
        same = _near(ours.value, theirs.value) and ours.n == theirs.n and _near(ours.stderr, theirs.stderr)
        if not same:
            yield f"{key}: {theirs.value:g} with n={theirs.n}; its samples give {ours.value:g} with n={ours.n}"


def _well_formed(measure: str, sample: Any) -> bool:
    if len(sample) != 5 or not isinstance(sample[0], str) or not _NAME.fullmatch(sample[0]):
        return False
    numbers, counts = sample[1], sample[2:]
    if isinstance(numbers, bool) or not isinstance(numbers, (int, float)) or not -1e-3 <= numbers <= 100:
        return False
    whole = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts)
    return whole and sample[2] <= sample[3] and (measure != "score" or 0 <= numbers <= 1)


def _near(ours: float | None, theirs: float | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12)
