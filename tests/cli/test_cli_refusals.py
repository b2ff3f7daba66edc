"""Bad command lines: each is refused before torch is imported, with a message that names the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.refusing import LIGHT, Refusing, refusing

#: what is typed, and words of the answer: the key, what is allowed or what to type instead
REFUSED: list[tuple[list[str], list[str]]] = [
    # unknown choices and groups
    (["method=kiwi"], ["method=kiwi", "allowed: ", "'kivi'"]),
    (["quantizer=int7"], ["quantizer=int7", "int2", "int4", "did you mean"]),
    (["model=lama2-7b"], ["model=lama2-7b", "'llama2-7b'"]),
    (["dataset=minni"], ["dataset=minni", "'mini'"]),
    (["runtime=gpu"], ["runtime=gpu", "default"]),
    (["logger=wandbb"], ["logger=wandbb", "'wandb'"]),
    (["experiment=quickstart/kivi3"], ["quickstart/kivi4"]),
    (["modle=tiny"], ["modle=tiny", "'model'"]),
    (["metod.residual=64"], ["metod", "'method.residual'"]),
    (["dataset/mini=full"], ["dataset/mini", "dataset=mini"]),
    (["method="], ["method", "kivi"]),
    (["method=null"], ["method=null", "fp16, ", "kivi"]),
    (["logger=null"], ["logger=null", "none"]),
    (["method=[kivi]"], ["method", "fp16, ", "kivi"]),
    # unknown keys
    (["method=kivi", "method.residaul=64"], ["method.residaul=64", "'residual'"]),
    (["method=fp16", "method.residual=64"], ["method.residual=64", "which has the key 'residual'", "kivi"]),
    (["residual=64"], ["residual=64", "method.residual=64"]),
    (["max_new_tokens=8"], ["decoding.max_new_tokens=8"]),
    (["method=kivi", "+method.foo=1"], ["method.foo=1", "residual, sinks"]),
    (["method=kivi", "++method.foo=1"], ["method.foo=1", "residual, sinks"]),
    (["method=kivi", "+method.residual=64"], ["+method.residual=64", "remove the '+'"]),
    (["+method=kivi"], ["remove the '+'", "method=kivi"]),
    (["+seed=1"], ["seed=1", "runtime.seed=1"]),
    (["~method"], ["~method", "method=VALUE"]),
    (["~runtime.seed"], ["~runtime.seed", "runtime.seed=VALUE"]),
    (["method@foo=kivi"], ["method@foo=kivi", "method=kivi"]),
    (["decoding=greedy"], ["decoding=greedy", "decoding.KEY"]),
    (["decoding.temprature=1"], ["decoding.temprature", "'temperature'"]),
    (["runtime.batchsize=2"], ["runtime.batchsize", "'batch_size'"]),
    (["model.architecture.layers=3"], ["model.architecture", "null"]),
    (["runtime.seed.value=3"], ["runtime.seed is a single value and has no keys"]),
    # wrong types and values
    (["method=kivi", "method.residual=abc"], ["method.residual=abc", "a whole number"]),
    (["method=kivi", "method.residual=64.5"], ["method.residual=64.5", "a whole number"]),
    (["dataset.limit=2.5"], ["a whole number", "try dataset.limit=2 or dataset.limit=3"]),
    (["dataset.limit=0.5"], ["try dataset.limit=1\n"]),
    (["method=kivi", "method.residual=true"], ["method.residual=true", "a whole number"]),
    (["method=kivi", "method.residual=-32"], ["method.residual=-32", "at least 1"]),
    (["method=kivi", "method.residual=null"], ["method.residual=null", "a whole number"]),
    (["method=kivi", "method.sinks=-1"], ["method.sinks=-1", "at least 0"]),
    (["method=kivi", "method.key_axis=row"], ["method.key_axis=row", "channel, token"]),
    (["runtime.batch_size=0"], ["runtime.batch_size=0", "at least 1"]),
    (["runtime.batch_size=two"], ["runtime.batch_size=two", "a whole number"]),
    (["runtime.seed=-1"], ["runtime.seed=-1", "at least 0"]),
    (["runtime.device=gpu"], ["runtime.device=gpu", "cuda"]),
    (["runtime.prefill_chunk=0"], ["runtime.prefill_chunk=0", "at least 2"]),
    (["runtime.memory_limit_gb=0"], ["runtime.memory_limit_gb", "at least 0.01"]),
    (["runtime.retry=always"], ["runtime.retry=always", "oom"]),
    (["model.trust_remote_code=maybe"], ["model.trust_remote_code=maybe", "true or false"]),
    (["model.dtype=fp16"], ["model.dtype=fp16", "'float16'"]),
    (["model.weights=rnd"], ["model.weights=rnd", "pretrained, int4, int4_all, random"]),
    (["paths.results=x"], ["no such group as 'paths'", "--help"]),
    (["runtim.seed=1"], ["did you mean 'runtime.seed'"]),
    (["datset.limit=3"], ["did you mean 'dataset.limit'"]),
    (["methd=kivi"], ["did you mean 'method'"]),
    (["model.max_length=-1"], ["model.max_length=-1", "at least 16"]),
    (["model.prompt_limit=0"], ["model.prompt_limit=0", "at least 16"]),
    (["model.chat=alpaca"], ["model.chat=alpaca", "template"]),
    (["decoding.temperature=-1"], ["decoding.temperature=-1", "at least 0"]),
    (["decoding.max_new_tokens=0"], ["decoding.max_new_tokens=0", "at least 1"]),
    (["decoding.stop=END"], ["decoding.stop=END", "a list"]),
    (["decoding.stop=['']"], ["decoding.stop", "empty"]),
    (["dataset.limit=0"], ["dataset.limit=0", "at least 1"]),
    (["dataset=text", "--cfg", "job"], ["dataset.path", "dataset.path=FILE_OR_FOLDER"]),
    (["dataset=records", "dataset.path=/nope.jsonl"], ["dataset.path=/nope.jsonl", "does not exist"]),
    (["dataset=records"], ["dataset.path", "no file with records"]),
    (["dataset=perplexity/text"], ["dataset.path", "dataset.path=FILE_OR_FOLDER"]),
    (["logger=wandb", "logger.mode=sometimes"], ["logger.mode=sometimes", "offline"]),
    (["logger=wandb", "logger.project=''"], ["logger.project", "logger.project=kvbench"]),
    # wrong combinations
    (["method=fp16", "quantizer=int2"], ["quantizer=int2", "none"]),
    (
        ["method=cocktail", "quantizer=int3"],
        ["quantizer=none; the bits of method=cocktail are set by method.alpha, method.beta, method.split"],
    ),
    (["method=engine", "quantizer=int3"], ["are set by method.format"]),
    (["method=kivi", "quantizer=none"], ["quantizer=none", "int2"]),
    (["method=atom", "quantizer=int2"], ["quantizer=int2", "int4_token"]),
    (["method=kivi", "method.residual=33"], ["method.residual=33", "quantizer.key.group_size=32"]),
    (["method=kivi", "quantizer.key.bits=7"], ["quantizer.key.bits=7", "2, 3, 4, 5, 6, 8"]),
    (["method=kivi", "quantizer.value.group_size=48"], ["quantizer.value.group_size=48", "head_dim"]),
    (["method=kivi", "model=llama2-7b", "quantizer.value.group_size=96"], ["group_size=96", "head_dim 128"]),
    (["decoding.top_p=0.9"], ["decoding.top_p=0.9", "decoding.temperature=1.0"]),
    (["model.prompt_limit=100000"], ["model.prompt_limit=100000", "at most"]),
    (["decoding.max_new_tokens=100000"], ["decoding.max_new_tokens=100000", "at most"]),
    (["runtime.device=cpu", "runtime.device_map=auto"], ["runtime.device_map=auto", "runtime.device=auto"]),
    (["runtime.tensor_parallel=auto"], ["runtime.tensor_parallel=auto", "torchrun --nproc-per-node"]),
    (["model.path=/no/such/folder"], ["model.path=/no/such/folder", "config.json"]),
    (["model.path=null"], ["model.path=DIR", "model=tiny"]),
    ([f"runtime.results_dir={__file__}/runs"], ["runtime.results_dir", "is a file"]),
    # what cannot be read
    (["method=kivi", "method=atom"], ["given twice", "kivi and atom"]),
    (["method", "=", "kivi"], ["method", "needs a choice: GROUP=NAME"]),
    (["model.path=(a"], ["cannot be read", "quote"]),
    (["runtime.results_dir=${oc.env:KVBENCH_NOT_SET}"], ["runtime.results_dir", "KVBENCH_NOT_SET"]),
    (["method=kivi,atom"], ["method=kivi,atom", "--multirun"]),
    (["--multirun", "method=kivi,kiwi"], ["method=kiwi", "'kivi'"]),
    (
        ["-m", "method=fp16,kivi", "method.residual=64"],
        ["method.residual=64", "with method=fp16", "which has the key 'residual'"],
    ),
    (["--multirun", "method=kivi", "method.residual=64,96,100"], ["method.residual=100", "multiple"]),
    # flags
    (["--multirn", "method=kivi"], ["--multirn", "'--multirun'"]),
    (["--method", "kivi"], ["--method", "method=VALUE"]),
    (["--cfg"], ["--cfg", "needs a value"]),
    (["--config-dir", "/no/such/folder", "method=kivi"], ["--config-dir", "is not a folder"]),
    (["--config-name", "other"], ["--config-name", "--config-dir"]),
]


def test_there_are_forty() -> None:
    assert len(REFUSED) >= 40


@pytest.fixture(scope="module")
def answer() -> Iterator[Refusing]:
    with refusing() as process:
        yield process


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=[" ".join(line) for line, _ in REFUSED])
def test_is_refused_with_the_remedy(line: list[str], words: list[str], answer: Refusing, tmp_path: Path) -> None:
    said = answer(line, tmp_path)
    assert said.status == 2, said.err
    for word in words:
        assert word in said.err, f"{word!r} is missing in:\n{said.err}"
    assert said.err.startswith("error: ") and "Traceback" not in said.err
    assert not said.out and not said.started
    assert set(said.imported) <= LIGHT, "a refusal loads neither torch nor anything as large"
    assert said.compositions <= 4
    assert not list(tmp_path.iterdir()), "a refused command line leaves nothing behind"
