"""One window of tokens through llama.cpp and through kvbench, in every format: KL divergences in nats a token."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.methods.load import load_method

#: formats of the tables; each for keys and values
FORMATS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
#: kvbench's name of a format, where llama.cpp's CPU back end rounds in another way than its reference code
ON_CPU = {"q8_0": "q8_0_cpu"}
#: computed columns: column -> options of ``method=engine``
PARTS: Mapping[str, Mapping[str, Any]] = {
    "exact": {},
    "queries": {"attention": "engine", "rotation.key": "hadamard"},
    "engine": {"attention": "engine"},
}


class Twin:
    """llama.cpp in another process, which answers requests in their order.

    Args:
        python: the Python that has llama-cpp-python.
        threads: number of llama.cpp's threads.

    Attributes:
        about: versions and instruction set, as llama.cpp names them.
        seconds: processor time of the answers so far.
    """

    def __init__(self, python: str, threads: int = 1) -> None:
        self.threads, self.seconds, self._made = threads, 0.0, 0
        self._folder = tempfile.TemporaryDirectory(prefix="twin-")
        command = [python, str(Path(__file__).with_name("engine.py"))]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise ConfigError("--python", python, f"cannot be started ({error})", hint="--python PATH") from error
        try:
            self.about = self._answer(python)
        except ConfigError:
            self.close()
            raise

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and remove its files."""
        self._process.terminate()
        with suppress(BrokenPipeError), self._process:  # closes its pipes and waits
            pass
        self._folder.cleanup()

    def _answer(self, python: str = "") -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(
                "--python", python or None, "its llama.cpp ended; its message is above",
                hint="--python PATH of an environment with llama-cpp-python (pip install 'kvbench[engines]')",
            )  # fmt: skip
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, file: Path, form: str, ids: Sequence[int], first: int) -> None:
        """Request the logits of a window from position `first` on, with keys and values in a format."""
        assert self._process.stdin is not None
        self._made += 1
        out = f"{self._folder.name}/{self._made}.npy"
        wanted = {"file": str(file), "type": form, "ids": list(ids), "first": first, "out": out}
        self._process.stdin.write(json.dumps({**wanted, "threads": self.threads}) + "\n")
        self._process.stdin.flush()

    def predictions(self) -> Predictions:
        """Return the answer to the oldest request that has none yet."""
        import numpy

        answer = self._answer()
        self.seconds += answer["seconds"]
        logits = torch.from_numpy(numpy.load(answer["out"]))
        Path(answer["out"]).unlink()
        return Predictions(logits)


class Predictions:
    """Predictions at several positions, in fp64: logits ``[positions, V]``, and what a divergence needs of them."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits.double()
        self.total = self.logits.logsumexp(-1)
        self.shares = (self.logits - self.total[:, None]).exp_()

    def divergence(self, other: Predictions) -> float:
        """Return the mean over positions of KL(self || other), in nats."""
        gap = torch.linalg.vecdot(self.shares, self.logits - other.logits)
        return float((gap - (self.total - other.total)).mean())


@dataclass
class Own:
    """kvbench's side: the model in float32, whose windows run in one pass that reads what is stored."""

    model: Any

    @torch.inference_mode()
    def predictions(self, ids: Sequence[int], first: int, form: str | None, part: str = "exact") -> Predictions:
        """Return the predictions from position `first` on; `form` None: keys and values in fp16."""
        if form is None:
            cache = load_method("fp16").new_cache(self.model)
            cache.progress.storage = torch.float16
        else:
            options = {"format": ON_CPU.get(form, form), "prefill": "quantized", **PARTS[part]}
            cache = load_method("engine", **options).new_cache(self.model)
        tokens = torch.tensor([list(ids)])
        out = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=len(ids) - first)
        return Predictions(out.logits[0])


def against_kvbench(
    twin: Twin, own: Own, file: Path, ids: Sequence[int], first: int, parts: Iterable[str]
) -> dict[str, Any]:
    """Return the divergences of a window on float32 weights, by format: of llama.cpp, of kvbench, between both."""
    for form in ("f16", *FORMATS):
        twin.ask(file, form, ids, first)
    mine, theirs = own.predictions(ids, first, None), twin.predictions()
    row: dict[str, Any] = {"f16": theirs.divergence(mine), "formats": {}}
    for form in FORMATS:
        packed = twin.predictions()
        line = row["formats"][form] = {"llamacpp": theirs.divergence(packed)}
        for part in parts:
            ours = own.predictions(ids, first, form, part)
            line |= {part: mine.divergence(ours), f"between_{part}": packed.divergence(ours)}
    return row


def against_itself(twin: Twin, file: Path, other: Path, ids: Sequence[int], first: int) -> dict[str, Any]:
    """Return the divergences of llama.cpp on one file of weights from itself on another, by format.

    ``own`` and ``other`` are those of each file from its own fp16 cache, ``between`` is from the one to the other.
    """
    for form in ("f16", *FORMATS):
        for weights in (file, other):
            twin.ask(weights, form, ids, first)
    base = twin.predictions(), twin.predictions()
    row: dict[str, Any] = {"f16": base[0].divergence(base[1]), "formats": {}}
    for form in FORMATS:
        packed = twin.predictions(), twin.predictions()
        own, rival = (x.divergence(y) for x, y in zip(base, packed, strict=True))
        row["formats"][form] = {"own": own, "other": rival, "between": packed[0].divergence(packed[1])}
    return row
