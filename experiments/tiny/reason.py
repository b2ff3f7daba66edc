"""Training rows of tiny-reason: programs with their traces. They are generated, so there is no corpus."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from experiments.tiny.config import ReasonConfig
from experiments.tiny.mix import ANSWER, FIRST, NONE
from kvbench.tasks.mini.rng import Rng
from kvbench.tasks.programs import BOS, EOS, LINE, NUMBERS, PAD, UNKNOWN, WORDS, WRAPPER, Streams, draw_programs


class TraceRows:
    """Maker of batches of programs; batch `i` of a seed is the same in every process.

    A row is one program and as much of its trace as fits. Programs of a batch have several sizes, each in four rows at
    least, as drawing rows together is faster.
    """

    #: most sizes of programs in a batch
    sizes = 12

    def __init__(self, config: ReasonConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    def batch(self, index: int, length: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return batch number `index`: ids and codes as :meth:`experiments.tiny.mix.Mix.batch` has them."""
        rng = Rng("reason training", self.seed, index)
        rows = tokens // length
        edges = np.linspace(0, rows, max(1, min(self.sizes, rows // 4)) + 1).astype(int)
        parts = []
        for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            streams = Streams([("reason training", self.seed, index, row) for row in range(first, end)])
            parts.append(_traces(streams, self.lines(rng, length), length))
        ids, codes = zip(*parts, strict=True)
        return np.concatenate(ids), np.concatenate(codes)

    def lines(self, rng: Rng, length: int) -> int:
        """Draw the number of lines of a program in a row of `length` tokens."""
        config = self.config
        most = max(2, min(config.lines, (int(config.filled * length) - WRAPPER) // LINE))
        fewest = min(most, max(2, int(config.least * most), length // (2 * NUMBERS)))
        return fewest + rng.below(most - fewest + 1)


def _traces(streams: Streams, lines: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows [B, length] of programs with their traces, and the code of each token [B, length]."""
    programs = draw_programs(streams, lines)
    prompts = programs.prompts()
    rows, first = prompts.shape
    steps = (length - first + 1) // 2
    ids = np.concatenate([prompts, programs.traces(steps)], 1)[:, :length].astype(np.uint16)
    codes = np.full((rows, length), ANSWER, np.uint8)
    codes[:, :first] = NONE
    codes[:, first::2][programs.first_visits(steps)] = FIRST
    return ids, codes


def write_tokenizer(folder: Path, context: int) -> Path:
    """Write the tokenizer, whose tokens are whole words, for `transformers.AutoTokenizer`; return its main file."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: place for place, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    tokenizer.add_special_tokens([PAD, BOS, EOS, UNKNOWN])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, words[BOS])]
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return folder / "tokenizer.json"
