"""Launch parameters of the Triton kernel by format, chosen by measurement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvbench.attention.phases import Format


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of the Triton decode kernel; a *program* is Triton's thread block.

    Args:
        warps: number of warps of a program with up to 8 query rows and heads of more than 64 channels. With fewer
            channels, such a program has one warp.
        wide_warps: number of warps of a program with more than 8 query rows.
        stages: pipeline stages of the loop over whole tiles.
        part_stages: pipeline stages of the loop over parts of tiles.
        full_step: number of tokens per iteration if keys and values are in full precision.
        max_rows: largest number of query rows of a program. More rows are spread over several programs, which then read
            the same tiles, all but the first from the L2 cache.
        fused: largest number of partial results of a head that the last program to finish merges. If there are more, a
            second kernel merges them.
        resident: number of programs that a multiprocessor runs at once; 0 to compute it from the kernel's registers and
            shared memory.
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
        """Return how many warps a program should have.

        With too few warps, registers spill. With too many, several warps unpack the same codes.
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
    """Look up the launch parameters of the Triton kernel for the formats of a layer.

    They do not depend on the number of tokens, so a growing cache needs no recompilation.
    """
    forms = [form for pair in signature for form in pair]
    bits = min((form.bits for form in forms), default=16)
    return (WINDOWS if any(form.window for form in forms) else TABLE)[bits]


def costs(key: Format, value: Format, part: int) -> tuple[int, int]:
    """Estimate the cost of one iteration of the kernel's loops, so that work can be divided equally between programs.

    Args:
        part: number of tokens in a part of a tile.

    Returns:
        The cost of an iteration over a whole tile, and that of an iteration over a part of a tile, in the same
        arbitrary unit.
    """
    token = sum(COST[form.bits] * (WINDOWED if form.window else PARAMETERS[form.group]) for form in (key, value))
    # parts cost more per token: words are read again for each part, and parameters are loaded one iteration at a time
    return max(round(token * 128 / 16), 1), max(
        round(token * part / 16 * (1.5 if key.bits + value.bits < 32 else 1)), 1
    )


def changed(**choices: int) -> dict[int, Tuning]:
    """Return a copy of :data:`TABLE` with some launch parameters set to the same value for all code widths.

    To try a variant: ``TABLE.update(changed(warps=1))``.
    """
    return {bits: replace(line, **choices) for bits, line in TABLE.items()}
