"""Decode attention over keys and values in full precision that also returns the attention that each token receives.

    attend(query, work, scaling)   # Tensor [B, q, Hq, Dv]; work.received is filled
    refuses(query, work)           # the reason why it cannot serve the step, or None

It serves methods that observe the attention of every step (H2O). The kernels are in
:mod:`kvbench.attention.triton.observed_kernel`. Importing this module requires triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from kvbench.attention.phases import Work
from kvbench.attention.reads import OBSERVED, misfit
from kvbench.attention.triton.decode import HEAD_DIMS, INTERPRETED, LOG2E, no_device
from kvbench.attention.triton.observed_kernel import attend_and_score, attend_and_score_one, merge_and_weigh

#: largest number of query rows of a KV head (query heads per KV head x new tokens of the step)
ROWS = 32


@dataclass(frozen=True)
class Launch:
    """Launch parameters of the two kernels, chosen by measurement on an H200.

    Args:
        block: tokens per iteration of the first kernel.
        warps: number of warps of a program of the first kernel.
        stages: pipeline stages of the first kernel's loop.
        resident: number of programs of the first kernel that a multiprocessor should run at once.
        weigh_block: tokens of a program of the second kernel.
        weigh_warps: number of warps of a program of the second kernel.
    """

    block: int = 32
    warps: int = 2
    stages: int = 3
    resident: int = 4
    weigh_block: int = 512
    weigh_warps: int = 4


LAUNCH = Launch()


def refuses(query: Tensor, work: Work) -> str | None:
    """Return why these kernels cannot compute the attention of a decode step, or None if they can.

    Returns:
        A short phrase, which a run's results show as the reason for the reference path.
    """
    if reason := no_device(query):
        return reason
    if len(work.phases) != 1 or any(form.kind != "full" for form in work.signature()[0]):
        return "packed tokens whose attention is observed"
    if not work.logits.plain:
        return "observed attention with a softcap or sinks"
    rows = query.shape[1] // work.heads * query.shape[2]
    if rows > ROWS:
        return f"{query.shape[1] // work.heads} query heads a KV head x {query.shape[2]} tokens of observed attention"
    return misfit(query, work, HEAD_DIMS, OBSERVED, OBSERVED)


def attend(query: Tensor, work: Work, scaling: float, launch: Launch | None = None) -> Tensor:
    """Compute the attention of the newest tokens over all cached tokens, and write to ``work.received``.

    Args:
        query: copied if its channels are not contiguous. New token i sees all slots except the newest q - 1 - i.
        work: :func:`refuses` must have returned None for it. ``work.received`` gets the attention that every token
            receives from every new one; its contents behind the last token do not change.
    """
    assert work.received is not None
    received, launch = work.received.buffer, launch or LAUNCH
    batch, query_heads, count, channels = query.shape
    if query.stride(-1) != 1:
        query = query.contiguous()
    group, cells = query_heads // work.heads, batch * work.heads
    rows, width = group * count, received.shape[-1]
    keys, values = (part.buffer for part in work.phases[0])
    assert keys is not None and values is not None
    padded = max(triton.next_power_of_2(rows), 8)
    parts = 2 if INTERPRETED else observed_split(query.device, cells, width, launch)
    floats = partial(torch.empty, dtype=torch.float32, device=query.device)
    out = query.new_empty(batch, count, query_heads, work.value_dim)
    scores = floats(cells * rows * width)
    stats, sums = floats(cells * parts * 2 * padded), floats(cells * parts * padded * work.value_dim)
    tensors = (query, work.table, keys, values, scores, stats, sums)
    rooms = (keys.shape[2], values.shape[2], width, scaling * LOG2E)
    if rows == 1:
        attend_and_score_one[(parts, cells)](
            *tensors, *query.stride()[:2], work.heads, *rooms, channels, work.value_dim, padded, launch.block,
            launch.stages, num_warps=launch.warps,
        )  # fmt: skip
    else:
        attend_and_score[(parts, cells)](
            *tensors, *query.stride()[:3], work.heads, *rooms, channels, work.value_dim, group, count, padded,
            launch.block, launch.stages, not INTERPRETED, num_warps=launch.warps,
        )  # fmt: skip
    merge_and_weigh[(rows + -(-width // launch.weigh_block), cells)](
        work.table, scores, stats, sums, out, received, parts, work.heads, width, work.value_dim, group, count, padded,
        launch.weigh_block, received.shape[2] > 1, work.received.mean, torch.finfo(out.dtype).max,
        num_warps=launch.weigh_warps,
    )  # fmt: skip
    return out


def observed_split(device: torch.device, cells: int, width: int, launch: Launch) -> int:
    """Return among how many programs to split the tokens of a head, so that all programs just fill the GPU at once.

    The number depends on the room in the buffers and not on the tokens in use, so that a step that is replayed as a
    CUDA graph and one that is launched normally add up partial results in the same order.

    Args:
        cells: number of pairs of sequence and KV head.
        width: number of tokens for which there is room.
    """
    programs = torch.cuda.get_device_properties(device).multi_processor_count * launch.resident
    return max(1, min(programs // cells, -(-width // (2 * launch.block))))
