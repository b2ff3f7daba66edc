"""Cocktail, Table V: what its two modules do for score, memory and time."""

from experiments.cocktail.common import ALIKE, LESS, LLAMA, MODELS, POINTS_CAPTION, QMSUM, REAL, TIMED, point_column
from experiments.item import MINI, Claim, Grid, Group, Row

_KEY = {"dataset": "qmsum"}
_MEMORY = point_column("GPU memory", "peak", 2**-30, "GiB", published=_KEY, value="gpu_memory_gb")
_TPOT = point_column("TPOT", "tpot_s", 1e6, "µs", digits=0, published=_KEY, value="tpot_us")


def _variant(name: str, options: str) -> Row:
    return Row(
        name,
        f"cocktail{options}",
        small=f"cocktail:encoder=bm25{options}",
        real=f"{REAL}{options}",
        timed=f"{TIMED}{options}",
        published={"variant": name},
    )


ITEM = Grid(
    id="cocktail/table5",
    number="Table V",
    title="The two modules",
    models=(*LLAMA, *(model for model in MODELS if model not in LLAMA)),
    rows=(
        Row("Baseline", "fp16", published={"variant": "Baseline"}),
        _variant("w/o Module I", ":search=none"),
        _variant("w/o Module II", ":reorder=false"),
        _variant("Cocktail", ""),
    ),
    columns=(QMSUM, _MEMORY, _TPOT),
    groups=(Group("Score", published={"dataset": "qmsum"}),),
    mini=MINI,
    base="Baseline",
    published="cocktail_table5",
    claims=(
        Claim("without module I the score drops", "Cocktail", "w/o Module I", "Score"),
        Claim("without module II the score stays (within a point)", "w/o Module II", "Cocktail", "Score", **ALIKE),
        Claim("without module II memory grows", "w/o Module II", "Cocktail", "GPU memory", relative=True),
        Claim("without module II TPOT grows", "w/o Module II", "Cocktail", "TPOT", relative=True),
        Claim("memory is below FP16's", "Cocktail", "Baseline", "GPU memory", **LESS),
        Claim("TPOT is below FP16's", "Cocktail", "Baseline", "TPOT", **LESS),
    ),
    caption="""The paper: Llama2-7B, QMSum, one L40S; it calls QMSum's ROUGE "F1 score", and says neither the batch
    nor what memory it counted; the other models are ours alone. Without module I, as many chunks of each width are
    drawn at random. Without module II, chunks stay where they stand: each run of chunks of one width is stored and
    billed by itself, with the rest of its last tile of 128 tokens, and one kernel visits run after run.""",
    points_caption=f"""Here: one sequence, and the larger of the peaks while reading the prompt and while decoding, in
    GiB (the paper prints GB). The file of the points without module I was lost; as printed
    (results/h200/papers/README.md) they are those of Cocktail. {POINTS_CAPTION}""",
)
