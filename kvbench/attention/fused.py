"""The choice of the kernel that serves a decode step: CUDA, Triton, the CPU kernel, or the reference path.

Kernels serve one case only: causal attention to all cached tokens, or to the newest ones of a sliding window. All other
steps (several new tokens with a sliding window that hides some, formats that no kernel reads, ...) go to
:mod:`kvbench.attention.reference`, and the layer records the reason in its ``paths``, which results show.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import ModuleType

import torch
from torch import Tensor

from kvbench.attention.logits import PLAIN, Logits
from kvbench.attention.phases import NotServed, Work, holder, out_of_order, receiving, work
from kvbench.cache.layer import KVLayer
from kvbench.cache.progress import Kernels
from kvbench.cache.segments.codebook import NuqSegment
from kvbench.cache.segments.packed import HostPacker


def attend_fused(
    layer: KVLayer, query: Tensor, mask: Tensor | None, scaling: float, logits: Logits = PLAIN
) -> Tensor | None:
    """Compute the attention of a decode step with a fused kernel, or return None if no kernel can or should.

    If kernels were considered, the name of the one that was used, or the reason why none could be, is added to
    ``layer.paths``.
    """
    wanted = layer.progress.options.kernels
    if wanted == "reference" or query.device.type not in ("cpu", "cuda"):
        return None
    packs = any(segment.packed for store in layer.stores() for segment in store.segments)  # also if empty so far
    observed = layer.method.observe_steps
    if wanted == "auto" and not packs and logits.plain and not observed:
        return None  # torch's own SDPA serves what is exact, as in stock transformers
    try:
        check_plain_causal(layer, mask, query.shape[2])
        described = work(layer, upper=layer.progress.upper)
        described.logits = logits
        if observed:
            described.received = receiving(layer, query.shape[2], fresh=any(holder(layer).pending))
        module, labels = picked(query, described, wanted)
    except NotServed as reason:
        layer.paths.add(f"reference ({reason})")
        return None
    layer.paths |= labels
    # kernels are launched on the current device: runtime.device=cuda:1
    with torch.cuda.device_of(query) if query.device.type == "cuda" else nullcontext():
        out: Tensor = module.attend(query, described, scaling)
    if described.received is not None:
        holder(layer).hold(described.received.buffer)
    return out


def picked(query: Tensor, described: Work, wanted: Kernels) -> tuple[ModuleType, set[str]]:
    """Return the kernel that :func:`pick` chooses, and its :func:`label`; on a CPU, equal steps share the result."""
    alike = (wanted, query.shape, query.dtype) if query.device.type == "cpu" else None
    known: tuple[ModuleType, set[str]] | None = described.prepared.get(alike)
    if known is None:
        name, module = pick(query, described, wanted)
        known = module, label(name, described)
        if alike is not None:
            described.prepared[alike] = known
    return known


def label(name: str, described: Work) -> set[str]:
    """Return the entries of ``layer.paths`` for a kernel's step: its name, and ``packed`` if any segment was packed."""
    return {name, "packed"} if any(f.kind != "full" for pair in described.signature() for f in pair) else {name}


def pick(query: Tensor, described: Work, wanted: Kernels) -> tuple[str, ModuleType]:
    """Return the first of the wanted kernels that supports a step's shapes and formats.

    Args:
        wanted: ``cuda``, ``triton`` or ``cpu`` for only this kernel. ``auto``: on a GPU the CUDA kernel, or Triton's if
            that refuses; on a CPU the CPU kernel. Of the GPU's kernels, only CUDA's reads codes of a codebook.

    Raises:
        NotServed: no kernel can serve the step; the message gives the reason of each.
    """
    reasons = []
    usual: tuple[str, ...] = ("cpu",) if query.device.type == "cpu" else ("cuda", "triton")
    names = usual if wanted == "auto" else (wanted,)
    if any(form.kind == "codebook" for pair in described.signature() for form in pair):
        if wanted == "triton":
            raise NotServed("triton: only the CUDA kernel reads codes of a codebook")
        names = ("codebook",) if "cuda" in names else names
    if described.in_place:
        if wanted not in ("auto", "triton"):
            raise NotServed(f"{wanted}: only Triton's kernel reads segments in the order of the text")
        names = ("in_place",)
    for name in names:
        module = load_kernel(name) if described.received is None else observing(name)
        reason = module if isinstance(module, str) else module.refuses(query, described)
        if reason is None:
            assert isinstance(module, ModuleType)
            named = getattr(module, "kernel_name", None)  # with the instruction set, on a CPU
            return (named() if named else name), module
        reasons.append(f"{name}: {reason}")
    raise NotServed("; ".join(reasons))


def load_kernel(name: str) -> ModuleType | str:
    """Import a kernel's module; if it cannot be imported, return the reason as a string.

    Args:
        name: ``cuda``, ``triton``, ``cpu``; ``codebook``: the CUDA kernel for codes of a codebook; or ``in_place``: the
            Triton kernel for segments in the order of the text.
    """
    try:
        if name == "cpu":
            from kvbench.attention.cpu import decode as cpu_decode

            return cpu_decode
        if name == "cuda":
            from kvbench.attention.cuda import decode as cuda_decode

            return cuda_decode
        if name == "codebook":
            from kvbench.attention.codebook import decode as codebook_decode

            return codebook_decode
        if name == "in_place":
            from kvbench.attention.triton import in_place

            return in_place
        from kvbench.attention.triton import decode as triton_decode

        return triton_decode
    except ModuleNotFoundError as error:
        return f"{error.name or error} is not installed"
    except ImportError as error:  # another version of a package
        return str(error)


def prepare() -> HostPacker | None:
    """Compile the CPU kernel, unless it has been compiled before, so that no step waits for it.

    Returns:
        The function that packs tokens on a CPU. None if the machine cannot compile it; a warning then says why, and
        what to do about it.
    """
    from kvbench.attention.cpu import build, pack

    if reason := build.missing():
        warnings.warn(f"packed caches are read in plain torch, which is slow: {reason} ({build.HINT})", stacklevel=3)
        return None
    return pack.pack_tokens


def observing(name: str) -> ModuleType | str:
    """Import the variant of a kernel that also returns the attention which tokens receive; without one, say why."""
    if name in ("cuda", "cpu"):
        return "it does not return attention weights"
    decode = load_kernel(name)
    if isinstance(decode, str):
        return decode
    from kvbench.attention.triton import observed

    return observed


def check_plain_causal(layer: KVLayer, mask: Tensor | None, count: int, length: int | None = None) -> None:
    """Raise NotServed unless kernels can compute a step: causal attention, possibly within a sliding window.

    Args:
        length: number of tokens, padding included, up to which later steps must be served too; None: only this step.

    Raises:
        NotServed: the method needs attention probabilities that no kernel returns; attention rounds as an engine's does
            (:func:`check_rounding`); the cache holds pre-RoPE keys that are not in KVQuant's format; there are several
            new tokens, and the method packs them before their attention is computed; on a CPU, the method must read the
            segments in the order of the text; a sliding window hides tokens that a kernel cannot leave out
            (:func:`check_window`); or the mask hides anything else than padding, later tokens, and tokens outside the
            sliding window.
    """
    method = layer.method
    if method.observe_steps and method.observe_group is None:
        raise NotServed(f"{type(method).__name__.lower()} needs attention weights, which kernels do not return")
    if layer.rope is not None and not any(isinstance(segment, NuqSegment) for segment in layer.segments()):
        raise NotServed("the cache holds pre-RoPE keys, which no kernel reads")
    check_rounding(layer, count)
    if method.eager and count > 1:
        raise NotServed("several new tokens are packed before they attend")
    if method.reading_order(layer, slice(0, 1)) is not None and layer.device.type == "cpu":
        raise NotServed("segments must be read in the order of the text, which a CPU's kernels do not support")
    if layer.window is not None and max(layer.seen, length or 0) > layer.window:
        check_window(layer, count)
    if not plain_mask(layer, mask, count, layer.window):
        raise NotServed("the mask hides more than padding and later tokens")


def check_rounding(layer: KVLayer, count: int) -> None:
    """Raise NotServed if an engine's attention rounds more than the queries, which only the reference path does."""
    if (rounding := layer.rounding(count)) is not None:
        raise NotServed(f"as in the engine, {rounding.rounds} are rounded, which kernels do not do")


def check_window(layer: KVLayer, count: int) -> None:
    """Raise NotServed unless kernels can leave out the tokens that a layer's sliding window hides.

    Kernels read all slots of a phase, so hidden tokens must be in the first slots, and the same ones for all queries:
    the phases then begin after them (:func:`kvbench.attention.phases.divide_into_phases`).
    """
    name = type(layer.method).__name__.lower()
    if count > 1:
        raise NotServed(f"a sliding window hides different tokens from each of the {count} new tokens")
    if layer.method.observe_steps or layer.rope is not None:
        raise NotServed(f"a sliding window hides tokens, and the kernels for {name} cannot leave them out")
    if layer.method.drops_tokens or out_of_order(layer):
        raise NotServed(f"a sliding window hides tokens, and {name} does not keep tokens in the order of the text")


def plain_mask(layer: KVLayer, mask: Tensor | None, count: int, window: int | None = None) -> bool:
    """Return True if `mask` is an ordinary causal mask: it hides nothing except padding and later tokens.

    The comparison waits for the GPU, so its result is cached for the other layers of the step.

    Args:
        count: number of new tokens.
        window: number of tokens that a query sees by the expected mask, its own included; None for all before it.
    """
    if mask is None:
        return True
    seen = (id(mask), layer.seen, count)
    known = layer.progress.plain_masks.get(window)
    if known is None or known[0] != seen:
        width = mask.shape[-1]
        columns = torch.arange(width, device=mask.device)
        starts = torch.tensor([layer.start(row) for row in range(layer.batch)], device=mask.device)
        newest = width - count + torch.arange(count, device=mask.device)
        expected = (columns >= starts[:, None, None, None]) & (columns <= newest[:, None])
        if window is not None:
            expected &= columns > newest[:, None] - window
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        # holds a reference to the mask, so that its id cannot be reused while the answer is remembered
        known = layer.progress.plain_masks[window] = (seen, bool((visible == expected).all()), mask)
    return bool(known[1])
