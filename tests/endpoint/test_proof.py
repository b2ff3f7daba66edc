"""A server's word for its cache format, held against bytes."""

from __future__ import annotations

import pytest

from kvbench.endpoint import proof
from kvbench.endpoint.client import Place
from kvbench.endpoint.engines import LLAMACPP, LLAMACPP_PYTHON, SGLANG, VLLM, Engine
from kvbench.endpoint.life import EndpointError
from kvbench.endpoint.proof import Facts

#: lines of llama-server's log with SmolLM2-135M: 30 layers, 3 heads of 64 channels
LOG = {
    "f16": "1.588.464 I llama_kv_cache: size =  720.00 MiB (  8192 cells,  30 layers,  4/4 seqs), "
    "K (f16):  360.00 MiB, V (f16):  360.00 MiB",
    "q8_0/q4_0": "llama_kv_cache: size =  292.50 MiB (  8192 cells,  30 layers,  4/4 seqs), "
    "K (q8_0):  191.25 MiB, V (q4_0):  101.25 MiB",
}


def told(engine: Engine, monkeypatch: pytest.MonkeyPatch, answers: dict, log: str = "") -> Facts:
    monkeypatch.setattr(proof, "get", lambda url, path: answers.get(path))
    return proof.facts(Place("http://x", engine, "m"), log)


def test_llamacpp_says_it_in_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"/props": {"build_info": "b1"}, "/openapi.json": {"info": {"version": "0.3.36"}}}
    facts = told(LLAMACPP, monkeypatch, about, f"x\n{LOG['f16']}\ny")
    assert facts == Facts("b1", "f16", 30 * 2 * 3 * 64 * 2)
    facts = told(LLAMACPP_PYTHON, monkeypatch, about, LOG["q8_0/q4_0"])
    assert facts == Facts("0.3.36", "q8_0/q4_0", 30 * 3 * 64 * (34 + 18) / 32)
    assert proof.verdict(facts, LLAMACPP_PYTHON, "q8_0/q4_0", 9360.0).proof == "proven"
    assert told(LLAMACPP, monkeypatch, about) == Facts("b1")
    two = told(LLAMACPP, monkeypatch, about, LOG["f16"] + "\n" + LOG["f16"])
    assert two == Facts("b1", "f16"), "sliding windows have a cache of their own"


def test_vllm_says_it_in_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = (
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
        'vllm:cache_config_info{block_size="16",cache_dtype="auto",kv_cache_memory_bytes="1048576000",'
        'kv_cache_size_tokens="16000",num_gpu_blocks="1000"} 1.0\n'
    )
    facts = told(VLLM, monkeypatch, {"/version": {"version": "0.30"}, "/metrics": metrics})
    assert facts == Facts("0.30", "auto", 65536.0)
    unset = metrics.replace("1048576000", "None")
    assert told(VLLM, monkeypatch, {"/metrics": unset}) == Facts(None, "auto")


def test_sglang_says_it_of_itself_or_in_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {
        "version": "0.5",
        "kv_cache_dtype": "fp8_e4m3",
        "max_total_num_tokens": 100000,
        "internal_states": [{"memory_usage": {"kvcache": 6.1}}],
    }
    facts = told(SGLANG, monkeypatch, {"/server_info": about})
    assert (facts.version, facts.word) == ("0.5", "fp8_e4m3")
    assert facts.bytes_per_token == pytest.approx(6.1 * 2**30 / 1e5)
    log = "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 100000, K size: 3.05 GB, V size: 3.05 GB"
    assert told(SGLANG, monkeypatch, {"/get_server_info": about}, log).bytes_per_token == pytest.approx(65498, abs=1)


@pytest.mark.parametrize(
    ("engine", "form", "word", "held", "expected", "proven"),
    [
        (VLLM, "fp8", "fp8", 2048.0, 2048.0, "proven"),
        (VLLM, "fp8", "auto", 2050.0, 2048.0, "proven"),  # the checkpoint sets it, and the bytes tell
        (VLLM, "fp8", "fp8_e4m3", None, 2048.0, "claimed"),
        (VLLM, "fp16", "auto", None, 4096.0, "unknown"),
        (VLLM, "fp16", "bfloat16", 4096.0, None, "claimed"),
        (LLAMACPP, "q8_0_cpu", "q8_0", 9.0, 9.0, "proven"),
        (LLAMACPP, "q8_0", None, None, 9.0, "unknown"),
    ],
)
def test_verdicts(
    engine: Engine, form: str, word: str | None, held: float | None, expected: float | None, proven: str
) -> None:
    verdict = proof.verdict(Facts("1", word, held), engine, form, expected)
    assert (verdict.proof, verdict.word, verdict.expected) == (proven, word, expected)


@pytest.mark.parametrize(
    ("engine", "form", "word", "held", "expected"),
    [
        (VLLM, "fp8", "auto", 4096.0, 2048.0),
        (VLLM, "fp16", "auto", 2048.0, 4096.0),
        (VLLM, "fp16", "fp8", None, 4096.0),
        (VLLM, "fp8", "fp8_per_token_head", None, 2048.0),
        (LLAMACPP, "iq4_nl", "q4_0", 9.0, 9.0),
    ],
)
def test_another_format_is_refused(engine: Engine, form: str, word: str, held: float | None, expected: float) -> None:
    with pytest.raises(EndpointError, match=r"has another format|but this run is about"):
        proof.verdict(Facts("1", word, held), engine, form, expected)


def test_bytes_of_a_part_prove_nothing() -> None:
    verdict = proof.verdict(Facts("1", "fp8", 1024.0), VLLM, "fp8", 2048.0, ["--tensor-parallel-size=2"])
    assert verdict.proof == "claimed"
