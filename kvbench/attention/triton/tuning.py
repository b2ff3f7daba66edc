"""Launch parameters of the Triton kernel by format, chosen by measurement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvbench.attention.phases import Format


@dataclass(frozen=True)
class Tuning:
    """Launch choices for one list of phases.

    Args:
        warps: of a program with up to 8 query rows of more than 64 channels; fewer channels take one, more rows
            `wide_warps`. stages: of the loop over whole tiles. part_stages: of the loop over parts of tiles.
        full_step: tokens of a step where keys and values are exact.
        max_rows: query rows of a program; more are spread over several programs, whose second reads come from L2.
        fused: partial results that the last program merges at most; more go to a second kernel.
        resident: programs that a multiprocessor holds; 0: from the registers and the shared memory of the kernel.
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
        """Warps of a program with `rows` query rows: too few spill, too many unpack the same codes twice."""
        return self.wide_warps if rows > 8 else 1 if channels <= 64 else self.warps


#: by the narrowest packed codes of a layer; 16: nothing is packed. Fields of 2 bits have 16 tokens, which is one row of
#: matrix instructions: a second warp would unpack the same keys again. 8 bits are two planes of 4.
TABLE: dict[int, Tuning] = {
    2: Tuning(warps=1, stages=4),
    4: Tuning(warps=2, stages=3),
    8: Tuning(warps=2, stages=3, part_stages=2),
    16: Tuning(warps=2, part_stages=4),
}
#: the same where keys have groups that may end anywhere: twice the scaled queries pass through shared memory
WINDOWS: dict[int, Tuning] = {bits: replace(TABLE[bits], stages=2, part_stages=2) for bits in (2, 4, 8)}

#: relative time of one token's key or value in a whole tile; an exact one has its bytes, 16. Two bits cost more than
#: their bytes: unpacking bounds them.
COST = {2: 3, 4: 4, 8: 8, 16: 16}
#: groups of 32 and 64 read more parameters; so do groups that may end anywhere
PARAMETERS = {32: 1.25, 64: 1.1, 128: 1.0, 0: 1.0}
WINDOWED = 2.0


def tuning(signature: Iterable[tuple[Format, Format]]) -> Tuning:
    """Return the choices for the formats of a layer; lengths do not count, or a growing cache would compile anew."""
    forms = [form for pair in signature for form in pair]
    bits = min((form.bits for form in forms), default=16)
    return (WINDOWS if any(form.window for form in forms) else TABLE)[bits]


def costs(key: Format, value: Format, part: int) -> tuple[int, int]:
    """Return the cost of a whole tile, and of `part` tokens of one, in a common unit."""
    token = sum(COST[form.bits] * (WINDOWED if form.window else PARAMETERS[form.group]) for form in (key, value))
    # words of a part of a tile are read again for each part, and its parameters one step at a time
    return max(round(token * 128 / 16), 1), max(
        round(token * part / 16 * (1.5 if key.bits + value.bits < 32 else 1)), 1
    )


def changed(**choices: int) -> dict[int, Tuning]:
    """Return the table with `choices` in every line (to try variants: ``TABLE.update(changed(warps=1))``)."""
    return {bits: replace(line, **choices) for bits, line in TABLE.items()}
