"""Cocktail, Table V: what its two modules do for score, memory and time."""

from experiments.cocktail.common import LLAMA, MODELS, POINTS_CAPTION, QMSUM, TIMED, point_column
from experiments.item import MINI, Claim, Grid, Group, Row

_KEY = {"dataset": "qmsum"}
_MEMORY = point_column("GPU memory", "peak", 2**-30, "GiB", published=_KEY, value="gpu_memory_gb")
_TPOT = point_column("TPOT", "tpot_s", 1e6, "µs", digits=0, published=_KEY, value="tpot_us")


def _variant(name: str, options: str) -> Row:
    return Row(
        name=name,
        setting=f"cocktail{options}",
        small=f"cocktail:encoder=bm25{options}",
        timed=f"{TIMED}{options}",
        published={"variant": name},
    )


ITEM = Grid(
    id="cocktail/table5",
    number="Table V",
    title="The two modules",
    models=(*LLAMA, *(model for model in MODELS if model not in LLAMA)),
    rows=(
        Row(name="Baseline", setting="fp16", published={"variant": "Baseline"}),
        _variant("w/o Module I", ":search=none"),
        _variant("w/o Module II", ":reorder=false"),
        _variant("Cocktail", ""),
    ),
    columns=(QMSUM, _MEMORY, _TPOT),
    groups=(Group(name="Score", published={"dataset": "qmsum"}),),
    mini=MINI,
    base="Baseline",
    published="cocktail_table5",
    claims=(
        Claim(text="without module I the score drops", first="Cocktail", second="w/o Module I", column="Score"),
        Claim(
            text="without module II the score stays (within a point)",
            first="w/o Module II",
            second="Cocktail",
            column="Score",
            low=-1.0,
            high=1.0,
        ),
        Claim(
            text="without module II memory grows",
            first="w/o Module II",
            second="Cocktail",
            column="GPU memory",
            relative=True,
        ),
        Claim(
            text="without module II TPOT grows", first="w/o Module II", second="Cocktail", column="TPOT", relative=True
        ),
        Claim(
            text="memory is below FP16's",
            first="Cocktail",
            second="Baseline",
            column="GPU memory",
            low=-100.0,
            high=0.0,
            relative=True,
        ),
        Claim(
            text="TPOT is below FP16's",
            first="Cocktail",
            second="Baseline",
            column="TPOT",
            low=-100.0,
            high=0.0,
            relative=True,
        ),
    ),
    caption=f"""The paper: Llama2-7B, QMSum, one L40S; it calls QMSum's ROUGE "F1 score", and says neither the batch nor
    what memory it counted; the other models are ours alone. Without module I, as many chunks of each width are drawn at
    random. Without module II, chunks stay where they stand: each run of chunks of one width is stored and billed by
    itself, with the rest of its last tile of 128 tokens, and no fused kernel reads it, so that its steps are eager (16
    of them, which leaves its cache up to 0.05 GiB smaller). Here: one sequence, and the larger of the peaks while
    reading the prompt and while decoding, in GiB (the paper prints GB). The file of the points without module I was
    lost; as printed (results/h200/papers/README.md) they are those of Cocktail. {POINTS_CAPTION}""",
)
