"""The models, data and settings that LogQuant's items on attention share."""

from experiments.item import Claim, Column, Model

LLAMA31 = (Model("llama3.1-8b-instruct", "Llama3.1-8B"),)
LLAMA3 = (Model("llama3-8b-instruct", "Llama3-8B-Instruct"),)
#: the models of Figure 4
THREE = (
    *LLAMA3,
    Model("qwen2-7b-instruct", "Qwen2-7B-Instruct"),
    Model("phi3-mini-128k-instruct", "Phi-3-mini-128k-Instruct"),
)

GSM8K = Column("GSM8K", "gsm8k_logquant")
OPENBOOKQA = Column("OpenBookQA", "openbookqa")

#: row -> setting: the paper's groups of 64 and R = 128; an eviction twin drops what its method would quantize
KIVI = "kivi:int2:quantizer.key.group_size=64:quantizer.value.group_size=64"
FOUR = {
    "LogQuant (2-bit)": "logquant",
    "KiVi (2-bit)": KIVI,
    "LogQuant (Eviction)": "logquant:evict=true",
    "KiVi (Eviction)": f"{KIVI}:evict=true",
}
#: prompts and decode steps of an analysis without ``--limit``
PROMPTS, STEPS = 50, 8
#: options of the items that compare all four settings
FOUR_ON_GSM8K = {"data": (GSM8K,), "settings": FOUR, "prompts": PROMPTS, "steps": STEPS}

OPEN = """The paper does not say how many prompts and decode steps it measures: here at most 50 prompts, and up to
    8 tokens of each answer, which the model decodes greedily with exact attention. Methods see the same queries, keys
    and values in every layer, so their errors are their own and not those of earlier layers."""


def dropping_is_worse(text: str, column: str) -> list[Claim]:
    """Return a claim for each method: its eviction twin has the larger error in a column."""
    names = ("LogQuant", "KiVi")
    return [Claim(f"{text} ({name})", f"{name} (Eviction)", f"{name} (2-bit)", column) for name in names]
