"""The cache formats that ``fit`` compares: the bytes of each by its method's formula, and the flags of engines.

Flags are those of vLLM's ``vllm/config/cache.py`` (main, after 0.33), of SGLang's page "Quantized KV Cache" and of
llama.cpp's ``common/arg.cpp`` (as in llama-cpp-python 0.3.36).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kvbench.config.setting import parse_setting
from kvbench.methods.base import Method
from kvbench.profiling.roofline import Gpu

ENGINES = ("vllm", "sglang", "llama.cpp")


@dataclass(frozen=True)
class CacheFormat:
    """A format of a cache.

    Args:
        name: its name in tables and for ``--formats``.
        setting: method, quantizer and options whose formula has its bytes.
        line: its line among the measured KL divergences; None if it has none.
        flags: by engine, what chooses it; an engine that lacks it is not there.
        timed: False if no fused kernel of kvbench reads it, so that nothing like it was timed.
    """

    name: str
    setting: str
    line: str | None
    flags: Mapping[str, str]
    timed: bool = True

    @property
    def exact(self) -> bool:
        """True for the format that quantizes nothing."""
        return self.setting == "fp16"

    @cached_property
    def method(self) -> Method:
        """The method whose formula has the format's bytes."""
        return parse_setting(self.setting).load()


def _vllm(name: str, line: str | None, sglang: str = "", setting: str = "", timed: bool = True) -> CacheFormat:
    flags = {"vllm": f"--kv-cache-dtype {name}"} | ({"sglang": sglang} if sglang else {})
    return CacheFormat(name, setting or f"engine:format={name}", line, flags, timed)


def _turbo(name: str, line: str) -> CacheFormat:
    return _vllm(f"turboquant_{name}", line, setting=f"turboquant:format={name}")


def _llama(name: str, timed: bool = True) -> CacheFormat:
    # quantized values need flash attention
    flags = {"llama.cpp": f"-fa on -ctk {name} -ctv {name}"}
    return CacheFormat(name, f"engine:format={name}", f"{name}, rotated | open", flags, timed)


@dataclass(frozen=True)
class Needs:
    """The compute capabilities on which an engine serves a format, from `least` to below `below`, and why."""

    least: float
    why: str
    below: float = math.inf


_FP8 = Needs(8.9, "vLLM's Triton kernels cast to fp8 in hardware, from compute capability 8.9")
_NVFP4 = Needs(10, "vLLM has kernels for it on compute capability 10 (B200) alone", 11)
#: limits by engine and format; other formats are served on any CUDA card that the engine supports. fp8: issue 26431 of
#: vllm-project/vllm ("type fp8e4nv not supported" on a 3090) and pull request 45829, open in June 2026. nvfp4: issues
#: 47790 (v0.29.0 refuses compute capability 12) and 47684. SGLang: pull request 21601 of sgl-project/sglang, open
NEEDS: Mapping[tuple[str, str], Needs] = {
    ("vllm", "fp8"): _FP8,
    ("vllm", "fp8_per_token_head"): _FP8,
    ("vllm", "nvfp4"): _NVFP4,
    ("vllm", "nvfp4_4over6"): _NVFP4,
    ("sglang", "fp4_mx_block16"): Needs(10, "SGLang has kernels for it on compute capability 10 (B200) alone", 11),
}


def refusal(engine: str, form: CacheFormat, gpu: Gpu) -> str | None:
    """Return why an engine that has a format does not serve it on a card; None if it does, or if nothing is known."""
    if engine == "llama.cpp" or gpu.capability is None:
        return None
    if not gpu.capability:
        return None if gpu.name == "cpu" and form.exact else "its kernels need CUDA"
    needs = NEEDS.get((engine, form.name))
    return None if needs is None or needs.least <= gpu.capability < needs.below else needs.why


#: SGLang's int8 is asymmetric where vLLM's is symmetric; both take four bytes beside the codes
_SGLANG_INT8 = "--int8-kv-cache --attention-backend triton --page-size 1"
#: formats by name, with the most bits first
FORMATS: Mapping[str, CacheFormat] = {
    form.name: form
    for form in (
        CacheFormat(
            "fp16",
            "fp16",
            "fp16 | own",
            {"vllm": "--kv-cache-dtype auto", "sglang": "--kv-cache-dtype auto", "llama.cpp": "-ctk f16 -ctv f16"},
        ),
        _vllm("int8_per_token_head", "int8 per token | open", _SGLANG_INT8),
        _llama("q8_0"),
        _vllm("fp8", "fp8 | open", "--kv-cache-dtype fp8_e4m3"),
        _vllm("fp8_per_token_head", "fp8 per token | open"),
        _turbo("k8v4", "TurboQuant k8v4 | own"),
        _llama("q5_1", timed=False),
        _llama("q5_0", timed=False),
        _llama("q4_1", timed=False),
        CacheFormat("kivi int4", "kivi:int4", "kivi int4 G32 | own", {}),
        _llama("q4_0"),
        _llama("iq4_nl", timed=False),
        _vllm("int4_per_token_head", "vLLM int4 per token | open"),
        _vllm("nvfp4", "nvfp4 | open"),
        _vllm("nvfp4_4over6", "nvfp4 4over6 | open"),
        CacheFormat(
            "fp4_mx_block16",
            "engine:format=fp4_mx_block16",
            "fp4_mx_block16 | open",
            {"sglang": "--kv-cache-dtype fp4_e2m1"},
            timed=False,
        ),
        _turbo("4bit_nc", "TurboQuant 4 bits | own"),
        _turbo("k3v4_nc", "TurboQuant k3v4 | own"),
        CacheFormat("kvarn k4v2", "kvarn", "KVarN k4v2 | own", {}),
        _turbo("3bit_nc", "TurboQuant 3 bits | own"),
        CacheFormat("kivi int2", "kivi:int2", "kivi int2 G32 | own", {}),
    )
}
#: formats of latent attention: SGLang and vLLM store it in 16 bits or as fp8
LATENT = ("fp16", "fp8")


@dataclass(frozen=True)
class Serving:
    """The values that the commands of all engines share.

    Args:
        context: tokens per sequence.
        batch: sequences at a time.
        utilization: share of the memory that vLLM may use.
        static: share of the memory that weights and cache take, which SGLang asks for.
        gpus: GPUs that share each layer.
    """

    model: str
    context: int
    batch: int
    utilization: float
    static: float
    gpus: int = 1


def command_of(engine: str, form: CacheFormat, at: Serving, runtime_fp8: bool = False) -> str | None:
    """Return the command that serves a model with a format; None if the engine lacks it.

    `runtime_fp8`: the engine rounds 16-bit weights to fp8 when it loads them.
    """
    if engine not in form.flags:
        return None
    model, gguf = shlex.quote(at.model), at.model.lower().endswith(".gguf")
    if engine == "llama.cpp":  # its -c is the room of all slots together
        file = model if gguf else "MODEL.gguf"
        return f"llama-server -m {file} -ngl 99 -np {at.batch} -c {at.context * at.batch} {form.flags[engine]}"
    rounded = " --quantization fp8" if runtime_fp8 else ""
    if engine == "vllm":
        spread = f" --tensor-parallel-size {at.gpus}" if at.gpus > 1 else ""
        share = f"--gpu-memory-utilization {at.utilization:g}"
        size = f"--max-model-len {at.context} --max-num-seqs {at.batch}"
        return f"vllm serve {model} {size} {share}{spread}{rounded} {form.flags[engine]}"
    spread = f" --tp {at.gpus}" if at.gpus > 1 else ""
    size = f"--context-length {at.context} --max-running-requests {at.batch}"
    share = f"--mem-fraction-static {at.static:.2f}"
    return f"python -m sglang.launch_server --model-path {model} {size} {share}{spread}{rounded} {form.flags[engine]}"
