"""Settings and prompts of the power table, a line each in kvbench's grammar."""

from __future__ import annotations

from experiments.measured import Setting

_SETTINGS = {
    "fp16": "fp16",
    "kivi 4": "kivi:int4",
    "kivi 3": "kivi:int3",
    "kivi 2": "kivi:int2",
    "atom 4": "atom:int4_token",
    "quantspec 8 (both nibbles)": "quantspec:gamma=0",
    "kvquant 4, 1% outliers": "kvquant",
    "kvquant 3, 1% outliers": "kvquant:bits=3",
    "logquant 4": "logquant:int4_g64",
    "logquant 2": "logquant",
    "partial_logquant 2": "partial_logquant",
    "hf_quantized 2 (hqq)": "hf_quantized:backend=hqq:axis_key=1:axis_value=1",
    "cocktail": "cocktail:encoder=bm25",
    "streamingllm, half": "streamingllm:budget=512",
    "snapkv, half": "snapkv:budget=512",
    "h2o, half": "h2o:budget=512",
}
#: all methods, and formats of 4 bits, which scores hardly separate
SETTINGS = tuple(Setting(name, "", setting) for name, setting in _SETTINGS.items())

#: tasks of mini with answers of 12 to 144 tokens, and the nominal length of their prompts
TASKS = ("key_value_hex", "multi_value", "copy_long", "repeat")
LENGTH = 1024
#: the two runs of a setting: fp16's own answers decoded through its cache, and answers of its own
FORCED, FREE = "fidelity", "mini"


def data(length: int, forced: int, free: int) -> dict[str, list[str]]:
    """Return the data of both runs, over the same prompts.

    Args:
        length: nominal tokens of a prompt.
        forced: samples per task of fp16's answers.
        free: samples per task of own answers.
    """
    options = f"{{tasks: [{', '.join(TASKS)}], lengths: [{length}], limit: {forced}}}"
    tasks = [f"dataset.tasks=[{','.join(TASKS)}]", f"dataset.lengths=[{length}]", f"dataset.limit={free}"]
    return {
        FORCED: ["dataset=fidelity/answers", "dataset.over=mini", f"dataset.options={options}"],
        FREE: ["dataset=mini", *tasks],
    }
