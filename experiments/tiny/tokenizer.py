"""The tokenizer of tiny: byte-level BPE of 4096 entries, every digit by itself.

python -m experiments.tiny.tokenizer --corpus FOLDER --out kvbench/models/tiny
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from experiments.tiny import corpus
from kvbench.tasks.mini.code import function
from kvbench.tasks.mini.compose import VARIANTS, WRAPPERS, Setting
from kvbench.tasks.mini.prose import Prose
from kvbench.tasks.mini.rng import Rng
from kvbench.tasks.mini.task import HARD, TASKS

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
CONTEXT = 4096


def generated(samples: int, seed: int = 0) -> Iterator[str]:
    """Yield records, questions, filler and code as `mini` has them, without lengths (which need a tokenizer)."""
    for index in range(samples):
        for name, entry in TASKS.items():
            if name in HARD:  # they came after the tokenizer
                continue
            rng = Rng("tokenizer", seed, name, index)
            prose = Prose(rng)
            draft = entry.make(Setting(rng, prose, 1024, vary=True, questions=2))
            wrapper = rng.choice((WRAPPERS[draft.style], *VARIANTS[draft.style]))
            asked = [question.prompt + question.continuation for question in draft.questions]
            yield "\n".join([wrapper.head, *draft.records, prose.passage(250), draft.closing, wrapper.tail, *asked])
        yield function(Rng("tokenizer code", seed, index))


def sample(folder: Path, code: list[str], prose_characters: int, code_characters: int) -> Iterator[str]:
    """Yield the beginning of every document, in shares that add up to the characters wanted."""
    paths = corpus.text_files(folder)
    for wanted, kind in ((prose_characters, False), (code_characters, True)):
        texts = [
            text for path in paths if corpus.is_code(path, code) == kind for text in corpus.training_documents(path)
        ]
        share = wanted // max(1, len(texts))
        for text in texts:
            yield text[:share]


def train_tokenizer(folder: Path, code: list[str], size: int = 4096) -> Tokenizer:
    """Train the tokenizer on 18M characters of prose, 5M of code and 10M of `mini`'s own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def lines() -> Iterator[str]:
        yield from sample(folder, code, 18_000_000, 5_000_000)
        yield from generated(200)

    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines(), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for `transformers.AutoTokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with text files")
    parser.add_argument("--code", nargs="*", default=["python*"], help="names of the files that contain code")
    parser.add_argument("--out", type=Path, default=Path("kvbench/models/tiny"))
    parser.add_argument("--size", type=int, default=4096)
    args = parser.parse_args()
    save(train_tokenizer(args.corpus, args.code, args.size), args.out)


if __name__ == "__main__":
    main()
