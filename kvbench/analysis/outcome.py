"""Outcome of an analysis: one row per prompt and method, arrays by layer, head and bin in a folder, and tables.

A table has one line per method with standard errors, and says which methods the analysis distinguishes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.analysis.bins import Bins
from kvbench.errors import DataError
from kvbench.util import atomic
from kvbench.util.table import size

#: arrays of each method: ``[L, Hq, K]``, of ``output`` ``[L, Hq]`` (:class:`kvbench.analysis.compare.Errors`)
ERRORS = ("mass", "l1", "kl", "lost", "coverage", "full", "output", "parts")
ROWS, ARRAYS, ABOUT = "rows.jsonl", "arrays.npz", "about.json"


@dataclass(frozen=True)
class Shape:
    """Numbers of layers and of query heads per layer of the analysed model."""

    layers: int
    heads: int


@dataclass
class Outcome:
    """Result of an analysis over all prompts.

    Unless stated otherwise, arrays are means over decode steps and have the shape ``[N, L, Hq, K]`` for N prompts, L
    layers, Hq query heads and K bins of tokens.

    Args:
        model: name of the model.
        shape: numbers of layers and query heads.
        settings: settings of the methods, such as ``kivi:int4``, which are used as keys below.

    Attributes:
        rows: one dict for each pair of prompt and method: the scalar figures that :meth:`row` describes, ``kv_bytes``,
            ``fp16_bytes``, and the prompt's ``id``, ``prompt_tokens`` and ``steps`` and the method's ``setting``.
        prompts: ``id``, ``prompt_tokens`` and ``steps`` (number of decode steps) of each prompt.
        exact: arrays of exact attention by name: ``mass``, ``spikes`` and ``visible`` (``[N, L, K]``). Names that begin
            with ``prompt_`` are for the prompt's queries instead of the decode steps.
        errors: for each setting, one array for each field of :class:`kvbench.analysis.compare.Errors`; ``output`` is
            ``[N, L, Hq]``.
        positions: under ``highest`` and under ``mean``, one array ``[steps, n]`` per prompt, by its id: the probability
            of each of n positions at each decode step; 0 for tokens that did not exist yet.
    """

    model: str
    shape: Shape
    bins: Bins
    settings: tuple[str, ...]
    rows: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[dict[str, Any]] = field(default_factory=list)
    exact: dict[str, np.ndarray] = field(default_factory=dict)
    errors: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    positions: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        prompt_tokens: int,
        steps: int,
        exact: Mapping[str, np.ndarray],
        errors: Mapping[str, Mapping[str, np.ndarray]],
        bills: Mapping[str, tuple[int, int]],
        positions: Mapping[str, Sequence[np.ndarray]],
    ) -> None:
        """Append the results of one prompt, whose id is `name`, and compute its rows.

        Args:
            exact: arrays of exact attention by name, without the dimension N.
            errors: for each setting, the arrays that :data:`ERRORS` names, without the dimension N.
            bills: for each setting, the bytes that its cache uses and the bytes of the same tokens in fp16.
            positions: ``highest`` and ``mean``, each with one array ``[n]`` per decode step; empty unless requested.
        """
        self.prompts.append({"id": name, "prompt_tokens": prompt_tokens, "steps": steps})
        for part, array in exact.items():
            self.exact[part] = _stacked(self.exact.get(part), array)
        for setting, parts in errors.items():
            mine = self.errors.setdefault(setting, {})
            for part, array in parts.items():
                mine[part] = _stacked(mine.get(part), array)
            head = {**self.prompts[-1], "setting": setting}
            used, equivalent = bills[setting]
            self.rows.append(head | self.row(parts) | {"kv_bytes": used, "fp16_bytes": equivalent})
        for part, of_steps in positions.items():
            longest = max(map(len, of_steps))
            padded = [np.pad(step, (0, longest - len(step))) for step in of_steps]
            self.positions.setdefault(part, {})[name] = np.stack(padded)

    def row(self, parts: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Reduce a method's arrays for one prompt to scalar figures, which :mod:`kvbench.analysis.compare` defines.

        The arrays, named by :data:`ERRORS`, lack the dimension N.

        Returns:
            ``l1`` is the L1 error summed over layers and heads; ``l1_share`` is ``l1`` divided by its largest possible
            value, 2 per layer and head. The other figures are means over layers and heads: ``kl``, the KL divergence;
            ``lost``, the probability of dropped tokens; ``output_error``; ``coverage``, the probability of tokens in
            full precision, without the first :attr:`Bins.sinks` tokens as in LogQuant's Figure 4; ``full_tokens``, the
            number of these tokens; and ``coverage_per_token``, the quotient of the last two.
        """
        heads = self.shape.layers * self.shape.heads
        behind = slice(self.bins.sinks, None)
        coverage = float(parts["coverage"][..., behind].sum() / heads)
        full = float(parts["full"][..., behind].sum() / heads)
        l1 = float(parts["l1"].sum())
        return {
            "l1": l1,
            "l1_share": l1 / (2 * heads),
            "kl": float(parts["kl"].sum() / heads),
            "lost": float(parts["lost"].sum() / heads),
            "output_error": float(parts["output"].mean()),
            "coverage": coverage,
            "full_tokens": full,
            "coverage_per_token": coverage / full if full else 0.0,
        }

    def figures(self, setting: str, name: str) -> np.ndarray:
        """Return one figure of a method for every prompt, ``[N]``, in the order of the prompts.

        `name` is a key of the result of :meth:`row`, or ``kv_bytes`` or ``fp16_bytes``.
        """
        return np.array([row[name] for row in self.rows if row["setting"] == setting])

    def save(self, folder: Path, about: Mapping[str, Any] | None = None) -> None:
        """Write ``rows.jsonl``, ``arrays.npz`` and ``about.json`` to a folder, which need not exist.

        The names of arrays are like ``exact/mass``, ``errors/SETTING/l1`` and ``positions/highest/ID``. `about` has
        additional facts for ``about.json``, such as the command, the device and versions.
        """
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {f"exact/{part}": array for part, array in self.exact.items()}
        for setting, parts in self.errors.items():
            arrays |= {f"errors/{setting}/{part}": array for part, array in parts.items()}
        for part, by_id in self.positions.items():
            arrays |= {f"positions/{part}/{name}": array for name, array in by_id.items()}
        buffer = BytesIO()
        np.savez_compressed(buffer, **{name: array.astype(np.float32) for name, array in arrays.items()})  # type: ignore[arg-type]
        atomic.replace_file(folder / ARRAYS, buffer.getvalue())
        lines = "".join(json.dumps(row) + "\n" for row in self.rows)
        atomic.replace_file(folder / ROWS, lines.encode())
        facts = {
            "model": self.model,
            "shape": asdict(self.shape),
            "bins": asdict(self.bins),
            "names": self.bins.names(),
            "settings": list(self.settings),
            "prompts": self.prompts,
            **(about or {}),
        }
        atomic.replace_file(folder / ABOUT, (json.dumps(facts, indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path, *, arrays: bool = True) -> Outcome:
        """Read an outcome that :meth:`save` wrote, or without `arrays` only its rows and facts.

        Raises:
            DataError: a file is missing.
        """
        for name in (ABOUT, ROWS, ARRAYS) if arrays else (ABOUT, ROWS):
            if not (folder / name).is_file():
                raise DataError(
                    f"{folder} does not contain {name}.\n  hint: write an analysis with python -m "
                    f"kvbench.analysis --out {folder}"
                )
        facts = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        outcome = cls(facts["model"], Shape(**facts["shape"]), Bins(**facts["bins"]), tuple(facts["settings"]))
        outcome.prompts = facts["prompts"]
        outcome.rows = [json.loads(line) for line in (folder / ROWS).read_text(encoding="utf-8").splitlines()]
        if arrays:
            outcome._read_arrays(folder / ARRAYS)
        return outcome

    def _read_arrays(self, path: Path) -> None:
        with np.load(path) as file:
            for name in file.files:
                kind, rest = name.split("/", 1)
                if kind == "exact":
                    self.exact[rest] = file[name]
                elif kind == "errors":
                    setting, part = rest.rsplit("/", 1)
                    self.errors.setdefault(setting, {})[part] = file[name]
                else:
                    part, identifier = rest.split("/", 1)
                    self.positions.setdefault(part, {})[identifier] = file[name]


def _stacked(before: np.ndarray | None, array: np.ndarray) -> np.ndarray:
    """Append a prompt's array to those of the earlier prompts, ``[N, ...]``; None: there are none."""
    return array[None] if before is None else np.concatenate([before, array[None]])


#: figures of a row that are errors, with their headings
FIGURES = {
    "l1": "L1 error, summed over layers and heads",
    "l1_share": "of its maximum",
    "kl": "KL, nats",
    "output_error": "output error",
    "lost": "dropped attention",
    "coverage_per_token": "attention per exact token, 1e-3",
}
#: figures by which two methods are compared
COMPARED = ("l1", "kl", "output_error")
#: standard errors by which two methods must differ to be told apart
SIGNIFICANT = 2.0


def mean_and_error(numbers: np.ndarray) -> tuple[float, float]:
    """Return the mean of ``[N]`` numbers and its standard error; the error is NaN for fewer than two numbers."""
    error = float(numbers.std(ddof=1) / len(numbers) ** 0.5) if len(numbers) > 1 else float("nan")
    return float(numbers.mean()), error


def analysis_markdown(outcome: Outcome) -> str:
    """Format an analysis as a markdown table: a line per method, with means over prompts and their standard errors."""
    header = ["", *FIGURES.values(), "KV bytes"]
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join([":--"] + ["--:"] * (len(header) - 1)) + "|"]
    for setting in outcome.settings:
        cells = [_figure_cell(name, *mean_and_error(outcome.figures(setting, name))) for name in FIGURES]
        cells.append(size(float(outcome.figures(setting, "kv_bytes").mean())))
        lines.append("| " + " | ".join([setting, *cells]) + " |")
    return "\n".join(lines)


def told_apart(outcome: Outcome, names: Sequence[str] = COMPARED) -> list[tuple[str, str, float]]:
    """Compare each pair of methods over the same prompts, in units of the standard error of their difference.

    For each figure (:meth:`Outcome.row`), the difference of the two methods is taken prompt by prompt, and its mean is
    divided by its standard error, which requires at least two prompts. A pair counts as distinguished if the absolute
    value of this quotient exceeds :data:`SIGNIFICANT` for at least one figure.

    Returns:
        For each pair of methods: the two settings, and the largest absolute quotient over the figures. It is 0 if the
        two do not differ in any figure, and infinite if they differ by the same amount on every prompt.
    """
    pairs = []
    for first, second in combinations(outcome.settings, 2):
        scores = []
        for name in names:
            difference, error = mean_and_error(outcome.figures(first, name) - outcome.figures(second, name))
            scores.append(abs(difference) / error if error else float("inf") if difference else 0.0)
        pairs.append((first, second, max(scores)))
    return pairs


def findings(outcome: Outcome) -> str:
    """Return a text with the number of pairs of methods that the analysis distinguishes, and with all other pairs."""
    pairs = told_apart(outcome)
    alike = [f"{a} and {b}" for a, b, score in pairs if not score > SIGNIFICANT]
    count = len(outcome.prompts)
    line = (
        f"n = {count} prompts. {len(pairs) - len(alike)} of {len(pairs)} pairs of methods differ by more than "
        f"{SIGNIFICANT:g} standard errors of their paired difference in at least one of {', '.join(COMPARED)}."
    )
    return line + (f" Pairs without such a difference: {'; '.join(alike)}." if alike else "")


def page(outcome: Outcome, command: str) -> str:
    """Return the content of ``table.md``: the command, the table of methods, and the text of :func:`findings`."""
    return f"`{command}`\n\n{analysis_markdown(outcome)}\n\n{findings(outcome)}\n"


def _figure_cell(name: str, average: float, error: float) -> str:
    scale = {"l1_share": 100.0, "lost": 100.0, "output_error": 100.0, "coverage_per_token": 1000.0}.get(name, 1.0)
    percent = " %" if scale == 100.0 else ""
    return f"{average * scale:.3g}{percent} ±{error * scale:.2g}"
