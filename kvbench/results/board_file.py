"""Files of the leaderboard's rows, as they come from unknown people.

:func:`read_row` checks a file's size, shape and digest, the id of the run (a hash of its settings), and the figures,
which follow from the samples; :mod:`kvbench.submit.check` checks bytes. A digest shows accidents, no more: who forges
figures can compute another one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from kvbench.results import typed
from kvbench.results.board import KIND, MEASURES, VERSION, BoardRow, RowError, board_figures
from kvbench.results.identity import full_digest, run_id
from kvbench.util.table import printable

#: limits of a file: bytes, nested levels, samples, characters of a text
MOST_BYTES, MOST_DEPTH, MOST_SAMPLES, LONGEST = 1 << 20, 12, 10_000, 4000
#: limits of the names that people choose
LONGEST_NAME, LONGEST_LINK = 80, 200
#: largest number
MOST = 1e15
#: beginnings of a path, and a way out of a folder
_PATH = re.compile(r"[/~\\]|[A-Za-z]:[/\\]|(.*/)?\.\.(/|$)")
_HEX = re.compile(r"[0-9a-f]{64}")
_LINK = re.compile(r"https://[A-Za-z0-9.-]+(/[\w./~%#?=&+:@-]*)?", re.ASCII)
_KEY = re.compile(r"[\w.:+-]+(@[0-9][0-9k+-]*)?")
_NAME = re.compile(r"[0-9a-f]{12}(~[0-9]{1,4})?")


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
        RowError: a part is too large, unprintable or a path, or contradicts another.
        ShapeError: a key is missing or unknown, or its value has the wrong type.
    """
    for key, value, depth in leaves(content):
        if depth > MOST_DEPTH:
            raise RowError(f"{key[:LONGEST_NAME]}: nested more than {MOST_DEPTH} levels")
        if isinstance(value, str) and (len(value) > LONGEST or printable(value) != value):
            raise RowError(f"{key}: a text must be printable, of at most {LONGEST} characters")
        if isinstance(value, str) and key not in ("who", "link") and is_path(value):
            raise RowError(f"{key}={value[:LONGEST_NAME]}: a row must not tell a path")
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


def is_path(text: str) -> bool:
    """Return True if a text names a file or folder of a machine."""
    return _PATH.match(text) is not None


def leaves(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Any, int]]:
    """Yield dotted key, value and level of every text and number; keys of objects count as texts."""
    if depth > MOST_DEPTH or not isinstance(value, (dict, list)):
        yield key, value, depth
        return
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(name, str):
            yield key or "the content", name, depth
        yield from leaves(inner, f"{key}.{name}" if key else str(name), depth + 1)


def _problems(row: BoardRow) -> Iterator[str]:
    """Yield each part of a row that makes no sense or contradicts another."""
    if row.measure not in MEASURES:
        yield f"measure={row.measure}: expected one of {', '.join(MEASURES)}"
    if not row.who.isprintable() or row.who != row.who.strip() or not 0 < len(row.who) <= LONGEST_NAME:
        yield f"who: expected a name of 1 to {LONGEST_NAME} visible characters, without spaces around it"
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
    for key in ("model", "data", "device"):
        if not 0 < len(value := getattr(row, key)) <= LONGEST_NAME:
            yield f"{key}={value[:LONGEST_NAME]}: expected a name of 1 to {LONGEST_NAME} characters"
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
