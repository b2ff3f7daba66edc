"""The numbers of warps, rings and CTAs among which the CUDA decode kernel chooses, the fastest on an H200 first."""

from __future__ import annotations


def options(columns: int, wide: bool, fine: bool, dense: bool, small: bool = False) -> list[dict[str, int]]:
    """Return the configurations to choose from for columns of query rows, the fastest on an H200 first.

    Up to 8 columns, each warp has tiles of its own, or two warps share the tokens of a tile, which takes half the
    shared memory. More are served by warps with two blocks of 8 columns each, or by such pairs of warps with two or
    three.

    Args:
        columns: number of columns that the query rows of a KV head take, usually one each.
        wide: True for heads of more than 128 channels, which leave a warp registers for one block of rows only.
        fine: True if a group has fewer than 32 tokens, so that two warps cannot share the tokens of a tile.
        dense: True if codes of 3 bits, of levels, or e2m1 codes with a column for each group are read, which is bound
            by unpacking them.
        small: True if 4-bit codes of levels or other e2m1 codes are read, which is bound by unpacking them and by their
            factors: with up to 4 columns, 16 warps of 128 registers are faster than 8 of twice as many.

    Returns:
        Values for ``team``, ``shares``, ``blocks``, ``teams``, ``stages`` and ``resident`` of a :class:`Build`.
    """
    blocks = -(-columns // 8)
    # team, shares, blocks, teams, resident
    if blocks == 1:
        choices = [(1, 1, 1, 4, 2), (1, 1, 1, 8, 1), (2, 2, 1, 4, 1), (2, 2, 1, 3, 1), (2, 2, 1, 2, 1)]
        choices = [(2, 2, 1, 8, 1)] * (small and columns <= 4) + choices[dense:]
        choices = [choice for choice in choices if choice[1] == 1 or not fine]
        choices += [(1, 1, 1, teams, 1) for teams in (4, 2, 1)]
    elif wide or fine:
        choices = [(min(blocks, 3), 1, 1, teams, 1) for teams in (4, 2, 1)]
    else:
        # 2 or 3 blocks a warp: as few CTAs as possible, then as few empty rows
        warp_blocks = min((3, 2), key=lambda n: (-(-blocks // n), -blocks % n))
        choices = [(1, 1, 2, 8, 1)] if warp_blocks == 2 else []
        choices += [(2, 2, warp_blocks, teams, 1) for teams in (4, 3, 2, 1)]
    names = ("team", "shares", "blocks", "teams", "resident")
    return [{**dict(zip(names, choice, strict=True)), "stages": 2} for choice in choices]
