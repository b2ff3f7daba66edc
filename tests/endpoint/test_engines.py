"""Commands of engines, and the names of their cache formats."""

from __future__ import annotations

import shlex

import pytest

from kvbench.endpoint.engines import SERVED
from kvbench.errors import ConfigError

VALUES = {"model": "M", "port": 7, "name": "N", "slots": 4, "context": 512, "total": 2048, "bytes": 9000}
#: flags by engine and format that its documentation has
FLAGS = {
    ("llamacpp", "q8_0/q4_0"): "--cache-type-k q8_0 --cache-type-v q4_0 --flash-attn on --parallel 4 --ctx-size 2048",
    ("llamacpp", "fp16"): "llama-server --model M --alias N --host 127.0.0.1 --port 7 --cache-type-k f16",
    ("llamacpp_python", "iq4_nl"): "--type_k 20 --type_v 20 --flash_attn true --n_ctx 512",
    ("vllm", "fp8"): "vllm serve M --served-model-name N --host 127.0.0.1 --port 7 --kv-cache-dtype fp8",
    ("vllm", "fp16"): "--kv-cache-dtype auto --kv-cache-memory-bytes 9000 --max-model-len 512 --max-num-seqs 4",
    ("sglang", "fp4_mx_block16"): "--kv-cache-dtype fp4_e2m1 --context-length 512 --max-running-requests 4",
}
REUSE = {
    "llamacpp": ("--no-cache-prompt --cache-ram 0", "--cache-prompt"),
    "llamacpp_python": ("", "--cache true"),
    "vllm": ("--no-enable-prefix-caching", "--enable-prefix-caching"),
    "sglang": ("--disable-radix-cache", ""),
}


def command(engine: str, form: str, reuse: bool = False, binary: str | None = None, *args: str) -> str:
    keys, values = SERVED[engine].flags(form)
    return shlex.join(SERVED[engine].words(binary, args, reuse, keys=keys, values=values, **VALUES))


@pytest.mark.parametrize(("engine", "form"), FLAGS)
def test_flags_of_formats(engine: str, form: str) -> None:
    assert FLAGS[engine, form] in command(engine, form)


@pytest.mark.parametrize("engine", SERVED)
def test_prefix_reuse_is_two_settings_and_own_flags_come_last(engine: str) -> None:
    for reuse in (False, True):
        line = command(engine, "fp16", reuse, None, "--own", "x y")
        assert line.endswith(f"{REUSE[engine][reuse]} --own 'x y'".strip())
    assert command(engine, "fp16", False, "/opt/run it").startswith("/opt/run it ")


def test_formats_that_an_engine_lacks_are_refused_by_name() -> None:
    for engine, form, told in (
        ("vllm", "q8_0", "q8_0: is not a cache format of vllm"),
        ("llamacpp", "fp8", "fp8: is not a cache format of llamacpp"),
        ("llamacpp", "q8_0/nvfp4", "nvfp4: is not a cache format"),
        ("sglang", "fp8/fp4_mx_block16", "which sglang does not support"),
    ):
        with pytest.raises(ConfigError, match=told):
            SERVED[engine].flags(form)
