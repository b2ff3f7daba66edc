"""A GGUF file with float32 weights, dequantized from another one by the package ``gguf``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.util import atomic

#: fields that describe the file itself, which the writer sets
OWN = ("general.architecture", "general.file_type", "general.quantization_version")


def write_float32(source: Path, target: Path, noise: bool = False) -> Path:
    """Write all tensors of a GGUF file in float32, with the same metadata; return the new file.

    Args:
        noise: True to move every number to one of its two neighbours in float32, chosen by a fixed seed.
    """
    import numpy
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

    if target.exists():
        return target
    reader: Any = GGUFReader(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(target) as partial:
        architecture = reader.fields["general.architecture"].contents()
        writer: Any = GGUFWriter(partial, architecture)
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in OWN:
                continue
            if field.types[0] == GGUFValueType.ARRAY:
                writer.add_array(name, field.contents())
            else:
                writer.add_key_value(name, field.contents(), field.types[0])
        writer.add_file_type(0)  # all of F32
        random = numpy.random.default_rng(0)
        for tensor in reader.tensors:
            numbers = dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
            if noise:
                side = numpy.where(random.random(numbers.shape, dtype=numpy.float32) < 0.5, -numpy.inf, numpy.inf)
                numbers = numpy.nextafter(numbers, side.astype(numpy.float32))
            writer.add_tensor(tensor.name, numbers)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return target
