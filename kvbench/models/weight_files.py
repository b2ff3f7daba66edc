"""Weight files of a checkpoint: their names, the headers of safetensors files, and the layers that they contain."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.models.json_files import DamagedFile, first_line, json_kind, read_object

#: bits per element of the types of safetensors; the sizes of other types are not checked
BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16},
    **{"I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8},
}
#: largest header in bytes that the safetensors library accepts
HEADER_LIMIT = 100_000_000
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def weight_files(folder: Path) -> Iterator[Path]:
    """Yield the weight files that transformers loads from a checkpoint's folder.

    These are a single file, or the shards that an index file lists. Safetensors files take precedence over pickled
    ones.

    Raises:
        DamagedFile: the index cannot be read, or lists files that are missing or in other folders.
    """
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / single).is_file():
            yield folder / single
            return
        if not (folder / index).is_file():
            continue
        table = read_object(folder / index).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
            raise DamagedFile(folder / index, "has no valid weight_map from tensors to files")
        named = sorted(set(table.values()))
        outside = [name for name in named if Path(name).name != name]
        if outside:
            raise DamagedFile(folder / index, f"refers to {outside[0]}, which is outside its own folder")
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
            raise DamagedFile(folder / index, f"refers to {len(named)} files, of which {missing[0]}{more} missing")
        yield from (folder / name for name in named)
        return


def tensor_names(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file, as :func:`tensor_types` does."""
    return list(tensor_types(file))


def tensor_types(file: Path) -> dict[str, tuple[str, int]]:
    """Return the type and the number of dimensions of each tensor in a safetensors file; only its header is read.

    Types have the names of the safetensors format, such as ``BF16``.

    Raises:
        DamagedFile: the header cannot be read, or contradicts the size of the file or the shape of a tensor.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            start = handle.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(size - 8, HEADER_LIMIT):
                raise DamagedFile(
                    file, f"is not a safetensors file (size: {size} bytes; size of its header: {length} bytes)"
                )
            header = json.loads(handle.read(length))
    except RecursionError:
        raise DamagedFile(file, "has a header that is nested too deeply to be read") from None
    except (OSError, ValueError) as error:
        raise DamagedFile(file, f"has a header that cannot be read ({first_line(error)})") from error
    if not isinstance(header, dict):
        raise DamagedFile(file, f"has a header that is {json_kind(header)}, not a JSON object")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 0
    for name, entry in tensors.items():
        place = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(place, list) and len(place) == 2 and all(isinstance(offset, int) for offset in place)):
            raise DamagedFile(file, f"has a header that does not give the position of the tensor {name}")
        end = max(end, place[1])
        bits, shape = BITS.get(str(entry.get("dtype"))), entry.get("shape")
        if bits and isinstance(shape, list) and all(isinstance(length, int) for length in shape):
            wanted = bits * math.prod(shape) // 8
            if wanted != place[1] - place[0]:
                given = place[1] - place[0]
                problem = (
                    f"has a header that gives {name} {given} bytes, but {entry['dtype']} of shape "
                    f"{shape} takes {wanted}"
                )
                raise DamagedFile(file, problem)
    if end != size - 8 - length:
        raise DamagedFile(
            file,
            f"has {size - 8 - length} bytes of tensors instead of the {end} that its header gives, so it is incomplete",
        )
    return {name: (str(entry.get("dtype")), len(entry.get("shape") or ())) for name, entry in tensors.items()}


def check_layers(numbers: Mapping[str, Any], names: list[str], folder: Path) -> None:
    """Raise DamagedFile if the weights have fewer layers than ``config.json`` states.

    transformers would fill the missing layers with random weights. `names` are those of all tensors of the weights.
    """
    count = numbers.get("num_hidden_layers")
    stored = {number for name in names if (number := layer_of(name)) is not None and "vision" not in name}
    if isinstance(count, int) and stored and max(stored) + 1 < count:
        raise DamagedFile(
            folder / "config.json",
            f"sets num_hidden_layers={count}, but the weights have only {max(stored) + 1} layers; "
            "the missing layers would be random",
            "add the missing weights, or use the config.json that belongs to these weights",
        )


def layer_of(name: str) -> int | None:
    """Return the index of the layer in a tensor's name; None if the tensor is not part of a layer."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])
