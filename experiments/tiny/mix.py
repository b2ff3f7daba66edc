"""The training mix: rows of tokens with a loss weight each."""

from __future__ import annotations

import numpy as np

from experiments.tiny.config import MixConfig
from experiments.tiny.fillers import CorpusCodeFiller, CorpusFiller, CorpusWriter, Library
from kvbench.tasks.mini.compose import VARIANTS, WRAPPERS, Setting, TooShort, Writer, compose, tails
from kvbench.tasks.mini.filler import CodeFiller, Filler, ProseFiller
from kvbench.tasks.mini.prose import Prose
from kvbench.tasks.mini.rng import Rng
from kvbench.tasks.mini.task import TASKS

BOS, EOS = 1, 2

#: loss weights by code: nothing, what cannot be known (random records, wording), text, answers, and of them those that
#: can be read in one place only
WEIGHTS = (0.0, 0.1, 1.0, 10.0, 20.0)
NONE, LOW, TEXT, ANSWER, FIRST = range(5)
_ROLES = {"fixed": LOW, "record": LOW, "filler": TEXT}


class Mix:
    """Maker of batches; batch `i` of a seed is the same in every process."""

    def __init__(self, config: MixConfig, texts: Library, seed: int) -> None:
        self.config, self.texts, self.seed = config, texts, seed
        self.newline = texts.encode(["\n"])[0]

    def batch(self, index: int, length: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return batch number `index`.

        Returns:
            ids [rows, length] uint16 and codes [rows, length] uint8: the weight of predicting each token, as an index
            into :data:`WEIGHTS`.
        """
        rng = Rng("tiny training", self.seed, index)
        rows = [self.row(rng, length) for _ in range(tokens // length)]
        return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])

    def row(self, rng: Rng, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return one row of exactly `length` tokens."""
        ids: list[int] = []
        codes: list[int] = []
        if not rng.chance(self.config.text):
            sizes = [length]
            if length >= 1024 and rng.chance(self.config.packs):
                sizes = []
                while length - sum(sizes) >= 256:
                    fitting = [s for s in (256, 512, 1024) if s <= min(length // 2, length - sum(sizes))]
                    sizes.append(rng.choice(fitting))
            for size in sizes:
                more = self.sample(rng, size, length)
                ids += more[0]
                codes += more[1]
        left = length - len(ids)
        if left > 1:
            ids += [BOS, *self.texts.row(rng, left - 1, rng.chance(self.config.code)).tolist()]
            codes += [NONE] + [TEXT] * (left - 1)
        elif left == 1:
            ids.append(EOS)
            codes.append(LOW)
        codes[0] = NONE
        return np.asarray(ids, np.uint16), np.asarray(codes, np.uint8)

    def sample(self, rng: Rng, length: int, row: int) -> tuple[list[int], list[int]]:
        """Return a sample of at most `length` tokens in a row of `row`; nothing after five draws that are too long."""
        for _ in range(5):
            try:
                return self._sample(rng, length, row)
            except TooShort:
                continue
        return [], []

    def _sample(self, rng: Rng, length: int, row: int) -> tuple[list[int], list[int]]:
        config, encode = self.config, self.texts.encode
        weights = config.early if config.early and row < 1024 else config.tasks
        entry = TASKS[rng.weighted(weights)]
        if length < entry.shortest:
            raise TooShort(f"{length} tokens")
        prose = Prose(rng)
        writer: Writer = prose if rng.chance(config.grammar) else CorpusWriter(self.texts, rng)
        vary = length < 1024 or rng.chance(config.vary)
        draft = entry.make(Setting(rng, writer, length, vary=vary, questions=rng.between(1, 6)))
        wrapper = WRAPPERS[draft.style]
        if not rng.chance(config.own_wording):
            wrapper = rng.choice(VARIANTS[draft.style])
        prompts = [tails(draft, wrapper)[0], *(question.prompt for question in draft.questions[1:])]
        asked = encode([t for p, q in zip(prompts, draft.questions, strict=True) for t in (p, q.continuation)])
        while len(asked) > 2 and sum(map(len, asked)) > length // 3:
            asked = asked[:-2]
        room = length - 2 - len(self.newline) - sum(map(len, asked))
        pieces = compose(draft, wrapper, self._filler(rng, draft.code, prose), encode, rng, room).pieces
        ids, codes = [BOS], [NONE]
        for piece in pieces:
            ids += piece.ids
            # the solved problems at a context's end are worth learning from
            role = "filler" if piece.text and piece.text == draft.closing else piece.role
            codes += [_ROLES[role]] * len(piece.ids)
        for prompt, answer in zip(asked[::2], asked[1::2], strict=True):
            # the line break that ends the answer before is part of that answer
            first = ANSWER if codes[-1] == ANSWER else LOW
            ids += prompt
            codes += [first] + [LOW] * (len(prompt) - 1)
            ids += answer
            codes += [ANSWER] * len(answer)
        ids += [*self.newline, EOS]
        codes += [ANSWER] * len(self.newline) + [TEXT]
        return ids, codes

    def _filler(self, rng: Rng, code: bool, prose: Prose) -> Filler:
        grammar = rng.chance(self.config.grammar)
        if code:
            return CodeFiller(rng, self.texts.encode) if grammar else CorpusCodeFiller(self.texts, rng)
        if grammar:
            return ProseFiller(prose, self.texts.encode)
        if rng.chance(0.12) and len(self.texts.lines) > 100:
            return CorpusCodeFiller(self.texts, rng)
        return CorpusFiller(self.texts, rng)
