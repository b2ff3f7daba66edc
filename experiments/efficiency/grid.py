"""Arguments of ``python -m kvbench.bench`` for each figure, and the papers' claims about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

COCKTAIL = "cocktail:split=10/30/60,encoder=bm25"
LOGQUANT = "logquant:int2_g128:window=64,reserved=192"

_GRIDS = {
    # LogQuant, Fig. 7: 8B, prompts of 512 tokens, 2,000 new ones, 48 GB
    "logquant": "memory --model llama3.1-8b --contexts 512 --new-tokens 2000 --memory-limit-gb 48 --bisect 4"
    f" --settings fp16 {LOGQUANT} kivi:int2_g128",
    # Cocktail, Fig. 4-6: Llama2-7B, the batch growing until memory ends
    "batch": "memory --model llama2-7b --contexts 4k 8k --new-tokens 128 --bisect 2"
    f" --settings fp16 kivi:int4_g128 {LOGQUANT} {COCKTAIL}",
    # one sequence, the context growing
    "context": "tpot --model llama2-7b --contexts 4k 32k 64k 128k --fill random --baselines static-compiled"
    f" --settings fp16 kivi:int4_g128 kivi:int4 {LOGQUANT} {COCKTAIL}",
}
#: name -> what is typed after ``python -m kvbench.bench``
GRIDS = {name: tuple(text.split()) for name, text in _GRIDS.items()}


@dataclass(frozen=True)
class Claim:
    """A paper's claim about its method, compared with full precision.

    Args:
        where: paper and figure.
        method: settings that begin with this name are held against it.
        figure: ``throughput``, ``batch``, ``tpot`` or ``memory``.
        low, high: relative change to full precision, from the least to the most.
    """

    where: str
    method: str
    figure: Literal["throughput", "batch", "tpot", "memory"]
    low: float
    high: float


CLAIMS = (
    Claim("LogQuant, Fig. 7", "logquant", "throughput", 0.25, 0.25),
    Claim("LogQuant, Fig. 7", "logquant", "batch", 0.60, 0.60),
    Claim("Cocktail, Fig. 4", "cocktail", "memory", -0.42, -0.12),
    Claim("Cocktail, Fig. 5", "cocktail", "tpot", -0.52, -0.32),
)
