"""Launch parameters of the Triton kernel by format, chosen by measurement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvbench.attention.phases import Format


@dataclass(frozen=True)
class Tuning:
    """Launch parameters for the formats of a layer.

    Args:
        warps: warps of a program with up to 8 query rows and more than 64 channels; with fewer channels it has one.
        wide_warps: warps of a program with more than 8 query rows.
        stages: pipeline stages of the loop over whole tiles.
        part_stages: pipeline stages of the loop over parts of tiles.
        full_step: tokens per iteration where keys and values are exact.
        max_rows: largest number of query rows of a program; more are spread over several programs, which then read the
            same tiles, all but the first from L2.
        fused: largest number of partial results that the last program merges; more are merged by a second kernel.
        resident: programs that a multiprocessor runs at once; 0: computed from the kernel's registers and shared
            memory.
    """

    warps: int = 2
    wide_warps: int = 2
    stages: int = 3
    part_stages: int = 3
    full_step: int = 32
    max_rows: int = 16
    fused: int = 16
    resident: int = 0

    def warps_for(self, rows: int, channels: int) -> int:
        """Return the warps of a program with `rows` query rows of `channels` channels.

        With too few, registers spill; with too many, several warps unpack the same codes.
        """
        return self.wide_warps if rows > 8 else 1 if channels <= 64 else self.warps


#: launch parameters by the width of a layer's narrowest codes; 16: nothing is packed. A field of 2-bit codes has 16
#: tokens, which is one row of matrix instructions, so a second warp would unpack the same keys again. 8 bits are two
#: planes of 4.
TABLE: dict[int, Tuning] = {
    2: Tuning(warps=1, stages=4),
    4: Tuning(warps=2, stages=3),
    8: Tuning(warps=2, stages=3, part_stages=2),
    16: Tuning(warps=2, part_stages=4),
}
#: the same for keys whose groups may cross tile boundaries: twice as many scaled queries pass through shared memory
WINDOWS: dict[int, Tuning] = {bits: replace(TABLE[bits], stages=2, part_stages=2) for bits in (2, 4, 8)}

#: relative time of one token's key or value in a whole tile, by bits: proportional to the bytes, except that
#: unpacking is the bottleneck for 2 bits
COST = {2: 3, 4: 4, 8: 8, 16: 16}
#: factor on it by group size, as smaller groups have more parameters to read; and for groups that may cross tiles
PARAMETERS = {32: 1.25, 64: 1.1, 128: 1.0, 0: 1.0}
WINDOWED = 2.0


def tuning(signature: Iterable[tuple[Format, Format]]) -> Tuning:
    """Return the launch parameters for the formats of a layer.

    They do not depend on lengths, so that a growing cache needs no recompilation.
    """
    forms = [form for pair in signature for form in pair]
    bits = min((form.bits for form in forms), default=16)
    return (WINDOWS if any(form.window for form in forms) else TABLE)[bits]


def costs(key: Format, value: Format, part: int) -> tuple[int, int]:
    """Return the relative costs of a whole tile and of a part of a tile with `part` tokens, in the same unit."""
    token = sum(COST[form.bits] * (WINDOWED if form.window else PARAMETERS[form.group]) for form in (key, value))
    # parts cost more per token: words are read again for each part, and parameters are loaded one iteration at a time
    return max(round(token * 128 / 16), 1), max(
        round(token * part / 16 * (1.5 if key.bits + value.bits < 32 else 1)), 1
    )


def changed(**choices: int) -> dict[int, Tuning]:
    """Return :data:`TABLE` with `choices` set in every line, to try variants: ``TABLE.update(changed(warps=1))``."""
    return {bits: replace(line, **choices) for bits, line in TABLE.items()}
