"""Files of calibrations: safetensors with provenance, and a sample of weights by which the model is recognised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.util import atomic
from kvbench.util.attachment import placement
from kvbench.util.progress import say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "method.calibration"
#: default output folder of ``python -m kvbench.calibrate``
FOLDER = Path("results/calibration")
#: what follows a command in a hint if it is not known whether the model's weights are random
RANDOM = " (with --random if its weights are random)"
#: largest relative difference of weights that a dtype explains (bfloat16: 2**-9); other models differ by about 1.4
SAME = 0.01


@dataclass
class Stored:
    """The calibration of a method for one model, as its file holds it; each method's kind of file is a subclass.

    Args:
        info: how the calibration was made, all as strings: ``format``, ``model``, ``layers``, ``kv_heads``,
            ``head_dim``, ``text_sha256``, ``tokens``, versions of packages, and others.
        tensors: the results, and ``probe.*``, a sample of the model's weights.
        path: the file; None if it has not been written yet.
    """

    info: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    path: Path | None = None

    #: name and version of the format, which the metadata must contain
    FORMAT: ClassVar[str]
    #: what to type to make such a file, after ``python -m kvbench.calibrate``
    ARGUMENTS: ClassVar[str] = ""

    @classmethod
    def command(cls, model: str) -> str:
        """Return the command line that would create a file of this kind, for a hint in an error message.

        Args:
            model: name of the model; ending in ``-random`` (:attr:`ModelConfig.calibrated_as`) for random weights.
        """
        name, random = model.removesuffix("-random"), " --random" if model.endswith("-random") else ""
        return f"python -m kvbench.calibrate{cls.ARGUMENTS} --model {name}{random} --text FILE"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the model's cache: the numbers of layers, of KV heads, and of channels per head."""
        return int(self.info["layers"]), int(self.info["kv_heads"]), int(self.info["head_dim"])

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of each tensor that a complete file must contain, given its metadata."""
        raise NotImplementedError

    def defect(self, name: str, tensor: Tensor) -> str | None:
        """Return what is wrong with a tensor that is finite and has its shape, as a verb phrase; None if nothing is."""
        return None

    def check_info(self) -> None:
        """Raise KeyError or ValueError if the metadata is incomplete."""
        self.info["model"]

    def check_model(self, model: PreTrainedModel) -> None:
        """Check that the file was made with this model, by its shape and a sample of its weights.

        Raises:
            ConfigError: the file was made with another model.
        """
        from kvbench.models.layers import attending
        from kvbench.models.projections import head_dim, kv_heads

        shape = (len(attending(model.config)), kv_heads(model), head_dim(model))
        problem = f"was made with another model, {self.info['model']}"
        if shape != self.shape:
            sizes = "{} layers of {} KV heads with {} channels"
            raise ConfigError(
                KEY,
                str(self.path),
                f"{problem}, which has {sizes.format(*self.shape)}; this one has {sizes.format(*shape)}",
                hint=self.command("MODEL") + RANDOM,
            )
        if not self.matches(probe(model)):
            raise ConfigError(
                KEY,
                str(self.path),
                f"{problem}, which has the same shape but different weights",
                hint=self.command("MODEL") + RANDOM,
            )

    def matches(self, numbers: Mapping[str, Tensor]) -> bool:
        """Return True unless a sample of weights (:func:`probe`) shows that the file was made with another model.

        Small differences, as between dtypes, are allowed. Samples that cannot be compared count as equal.
        """
        for name in ("probe.keys", "probe.embedding"):
            recorded, actual = self.tensors.get(name), numbers.get(name)
            if recorded is not None and actual is not None:
                same = recorded.shape == actual.shape
                return same and bool((recorded - actual).norm() <= SAME * recorded.norm())
        return True


S = TypeVar("S", bound=Stored)


def probe(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a small sample of a model's weights, by which a calibration file recognises the model it was made with.

    Returns:
        fp32 tensors: ``probe.embedding``, and ``probe.keys`` from the key projections unless their weights are
        quantized.
    """
    from kvbench.models.projections import attentions, key_source

    where = placement(model)
    team = where.team
    if where.probe is not None:
        return where.probe
    numbers = {"probe.embedding": _sample(model.get_input_embeddings().weight, 256)}
    weights = []
    for attention in attentions(model):
        weights.append(
            getattr(getattr(attention, "k_proj", None) or key_source(model, attention).module, "weight", None)
        )
    if all(isinstance(weight, Tensor) and weight.is_floating_point() for weight in weights):
        present = [weight for weight in weights if weight is not None]
        whole = present if team is None else (team.gather(weight.detach(), 0) for weight in present)
        numbers["probe.keys"] = torch.cat([_sample(weight, 16) for weight in whole])
    if team is not None:  # cached: computing it makes every rank send all its key projections
        where.probe = numbers
    return numbers


def _sample(weight: Tensor, count: int) -> Tensor:
    flat = weight.detach().reshape(-1)
    index = torch.linspace(0, len(flat) - 1, count, dtype=torch.float64).long()
    return flat[index.to(flat.device)].float().cpu()


def save(calibration: Stored, path: Path) -> None:
    """Write a calibration file; an interruption leaves no partial file.

    Raises:
        ConfigError: the file cannot be written.
    """
    tensors = {name: tensor.contiguous() for name, tensor in calibration.tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # not save_file, which writes files that only their owner can read
        atomic.replace_file(path, serialize(tensors, dict(calibration.info)))
    except (OSError, SafetensorError) as error:
        raise ConfigError("--out", str(path), f"cannot be written ({error})") from error


def load_stored(path: Path, kind: type[S]) -> S:
    """Return the checked contents of a file of a `kind`; an unchanged file is read only once per process.

    Raises:
        ConfigError: the file is missing, damaged, or of another format.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(
            KEY,
            str(path),
            "does not exist",
            hint=f"create one with python -m kvbench.calibrate{kind.ARGUMENTS} (see its --help)",
        ) from error
    return _load_changed(path, kind, stat.st_mtime_ns, stat.st_size)  # type: ignore[arg-type]


@lru_cache(maxsize=32)
def _load_changed(path: Path, kind: type[S], changed: int, size: int) -> S:
    again = kind.command("MODEL")
    try:
        with safe_open(path, framework="pt") as file:
            info = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(KEY, str(path), f"is not a safetensors file, or is damaged ({error})", hint=again) from error
    if info.get("format") != kind.FORMAT:
        raise ConfigError(
            KEY,
            str(path),
            f"is not a calibration file (format {info.get('format')!r}, expected {kind.FORMAT!r})",
            hint=f"create one with python -m kvbench.calibrate{kind.ARGUMENTS} (see its --help)",
        )
    again = kind.command(info.get("model", "MODEL"))
    calibration = kind(info, tensors, path)
    try:
        expected = list(calibration.expected())
        calibration.check_info()
    except (KeyError, ValueError) as error:
        raise ConfigError(KEY, str(path), f"is damaged: its metadata is incomplete ({error!r})", hint=again) from error
    for name, shape in expected:
        tensor = tensors.get(name)
        if tensor is None:
            raise ConfigError(KEY, str(path), f"is damaged: {name} is missing", hint=again)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise ConfigError(
                KEY, str(path), f"is damaged: {name} is not a finite tensor of shape {list(shape)}", hint=again
            )
        if defect := calibration.defect(name, tensor):
            raise ConfigError(KEY, str(path), f"is damaged: {name} {defect}", hint=again)
    return calibration


def calibrations_of_kind(folders: Iterable[Path], kind: type[S]) -> Iterator[S]:
    """Yield the calibrations of a `kind` found in some folders, those of a folder in the order of their file names.

    Folders need not exist. Files of other formats are skipped, damaged files with a warning.
    """
    for folder in folders:
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    if (file.metadata() or {}).get("format") != kind.FORMAT:
                        continue
                calibration = load_stored(path, kind)
            except (SafetensorError, OSError) as error:
                _passed_over(f"{path} is not a safetensors file, or is damaged ({error})")
                continue
            except ConfigError as error:
                _passed_over(f"{path} {error.problem}")
                continue
            yield calibration


def unfit(files: Sequence[Stored]) -> str:
    """Return the end of an error message: the calibration files found, none of which belongs to the model.

    At most three are named; the text is empty if there are none.
    """
    names = [f"{file.path} ({file.info['model']})" for file in files]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"; the files found are for other models or other weights: {', '.join(names[:3])}{more}" if names else ""


@lru_cache(maxsize=256)
def _passed_over(what: str) -> None:
    """Warn that a file is ignored; only once per process, because every batch's cache may search the folder."""
    say(f"warning: {what}; the file is ignored")


def versions() -> dict[str, Any]:
    """Return the installed versions of kvbench, torch and transformers, which a calibration file records."""
    import transformers

    from kvbench.util.version import __version__

    return {"kvbench": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
