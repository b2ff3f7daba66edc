"""Rotation of heads: keys, queries and values in another basis, in which a cache stores them. Knows only torch.

Attention scores do not change if the keys and the queries of a head are multiplied by the same orthogonal matrix, nor
does the output if the values are multiplied by one and the output by its inverse. In another basis, large channels are
spread over all channels, so that quantization loses less (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456).
"""

from kvbench.rotation.basis import Transform as Transform
from kvbench.rotation.named import transform as transform
