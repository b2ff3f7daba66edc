"""Train a bundled model; starting the same command again goes on from the last checkpoint.

    python -m experiments.tiny.train experiments/tiny/tiny.yaml corpus.path=FOLDER run.dir=FOLDER
    python -m experiments.tiny.train experiments/tiny/reason.yaml run.dir=FOLDER

``run.seconds`` sets how long it takes: rates and row lengths follow the clock. ``run.steps`` in its place makes the
rows a function of the seed alone. In ``run.dir`` lie log.jsonl, checkpoint.pt and, at the end, model/.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.tiny import corpus
from experiments.tiny.circuits import draw_circuits
from experiments.tiny.config import CorpusConfig, TrainConfig, length_at, rate_at, read_train_config
from experiments.tiny.export import export
from experiments.tiny.feed import Batch, Feed
from experiments.tiny.fillers import Library
from experiments.tiny.mix import ANSWER, FIRST, TEXT, WEIGHTS, Mix
from experiments.tiny.model import Network
from experiments.tiny.reason import TraceRows, write_tokenizer
from kvbench.util import atomic


def prepare_corpus(config: CorpusConfig, workers: int) -> Library:
    """Return the tokenized corpus, from its cache where there is one."""
    cache = Path(config.cache) if config.cache else None
    tokenizer = Path(config.tokenizer)
    if cache and cache.exists():
        tokens = corpus.Tokens.load(cache)
    else:
        tokens = corpus.tokenize(Path(config.path), config.code, tokenizer, 2, workers)
        if cache:
            cache.parent.mkdir(parents=True, exist_ok=True)
            tokens.save(cache)
    return Library(tokens, tokenizer)


def row_maker(config: TrainConfig) -> tuple[Mix | TraceRows, Path]:
    """Return the maker of rows, and the file of the tokenizer that their tokens are of."""
    run = config.run
    if config.reason is not None:
        return TraceRows(config.reason, run.seed), write_tokenizer(Path(run.dir) / "tokenizer", config.model.context)
    assert config.corpus is not None and config.mix is not None
    begin = time.perf_counter()
    library = prepare_corpus(config.corpus, run.workers)
    print(
        f"corpus: {len(library.tokens.prose) / 1e6:.1f}M prose and {len(library.tokens.code) / 1e6:.1f}M code tokens,"
        f" {time.perf_counter() - begin:.1f} s",
        flush=True,
    )
    return Mix(config.mix, library, run.seed), Path(config.corpus.tokenizer)


#: share of the training over which the noise of keys and values rises from 0
RISE = 0.1


class Trainer:
    """Network, optimiser and position of one run."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        on_gpu = device.type == "cuda"
        names = {"auto": torch.bfloat16 if on_gpu else torch.float32}
        compute = names.get(config.run.compute) or getattr(torch, config.run.compute)
        self.network = Network(config.model, compute, config.run.compile and on_gpu)
        generator = torch.Generator().manual_seed(config.run.seed)
        self.network.initialise(generator)
        if config.reason is not None and config.reason.circuits:
            draw_circuits(self.network, generator)  # raises ConfigError for shapes that lack room for it
        self.network.to(device)
        self.weights = torch.tensor(WEIGHTS, device=device)
        parameters = list(self.network.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.optimizer.decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        betas = (config.optimizer.beta1, config.optimizer.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=config.optimizer.rate, betas=betas, fused=on_gpu)
        self.step, self.seconds, self.tokens = 0, 0.0, 0

    @property
    def progress(self) -> float:
        """Finished share of the run, in [0, 1]."""
        run = self.config.run
        return min(1.0, self.step / run.steps if run.steps else self.seconds / (run.seconds or math.inf))

    def update(self, batch: Batch) -> torch.Tensor:
        """Take one step.

        Returns:
            [10] on the device: loss, its weight, answers' loss and count, text's loss and count, first visits' loss and
            count, and the number of answers' tokens and of first visits that have less than half of the probability
            (sums over tokens).
        """
        run = self.config.run
        self.network.noise = run.noise * min(1.0, max(0.0, self.progress - run.quiet) / RISE)
        if self.network.noise:
            torch.manual_seed((run.seed << 32) + self.step)  # the same noise in a run that is resumed
        ids = torch.from_numpy(batch[0].astype(np.int32)).to(self.device, non_blocking=True)
        codes = torch.from_numpy(batch[1]).to(self.device, non_blocking=True)
        # codes say what predicting a token is worth; the losses stand one place earlier
        codes = torch.cat([codes[:, 1:], torch.zeros_like(codes[:, :1])], 1)
        weights = self.weights[codes.long()]
        losses = self.network.losses(ids.long())
        total = weights.sum()
        loss = (losses * weights).sum() / total
        rate = rate_at(self.config.optimizer, self.step, self.progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optimizer.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += ids.numel()
        plain, answers, text, first = losses.detach(), codes >= ANSWER, codes == TEXT, codes == FIRST
        sums = [loss.detach() * total, total]
        for part in (answers, text, first):
            sums += [(plain * part).sum(), part.sum()]
        unsure = plain > math.log(2)
        return torch.stack([*sums, (answers & unsure).sum(), (first & unsure).sum()])

    def save(self, path: Path) -> None:
        """Write a checkpoint in one go, so that a kill leaves the old one or the new one."""
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "model": dataclasses.asdict(self.config.model),
        }
        with atomic.replacing(path) as partial:
            torch.save(state, partial)

    def load(self, path: Path) -> None:
        """Resume from a checkpoint of the same model."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["model"] != dataclasses.asdict(self.config.model):
            raise ValueError(f"{path} contains a model of another shape.\n  hint: set run.dir to another folder")
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]


def row_of_log(trainer: Trainer, sums: torch.Tensor, length: int, pace: float) -> dict[str, Any]:
    """Write one line of the log: means over the steps since the last."""
    loss, weight, answers, n_answers, text, n_text, first, n_first, unsure, first_unsure = sums.tolist()
    return {
        "step": trainer.step,
        "seconds": round(trainer.seconds, 2),
        "tokens": trainer.tokens,
        "length": length,
        "rate": round(trainer.optimizer.param_groups[0]["lr"], 7),
        "loss": round(loss / max(weight, 1e-9), 4),
        "answers": round(answers / max(n_answers, 1), 7),
        "unsure": round(unsure / max(n_answers, 1), 7),
        "first": round(first / max(n_first, 1), 7),
        "first_unsure": round(first_unsure / max(n_first, 1), 7),
        "text": round(text / max(n_text, 1), 4),
        "tokens_per_second": round(pace),
    }


def train_model(config: TrainConfig, stop_after: int | None = None) -> Trainer:
    """Train to the end of the run, or for `stop_after` steps more.

    Raises:
        FloatingPointError: the loss is no longer finite.
    """
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    atomic.tidy(folder)
    checkpoint = folder / "checkpoint.pt"
    run = config.run
    rows, tokenizer = row_maker(config)

    def make(index: int, progress: float) -> Batch:
        return rows.batch(index, length_at(config.phases, progress), run.batch_tokens)

    start = torch.load(checkpoint, map_location="cpu", weights_only=True)["step"] if checkpoint.exists() else 0
    with Feed(make, run.workers, start, run.steps) as feed, (folder / "log.jsonl").open("a") as log:
        device = torch.device(run.device if run.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        trainer = Trainer(config, device)
        if checkpoint.exists():
            trainer.load(checkpoint)
        feed.tell(trainer.progress)
        clock = time.perf_counter() - trainer.seconds
        saved, logged, sums = trainer.seconds, (trainer.seconds, trainer.tokens), torch.zeros(10, device=device)
        steps = 0
        while trainer.progress < 1.0 and (stop_after is None or steps < stop_after):
            batch = feed.next()
            sums += trainer.update(batch)
            steps += 1
            trainer.seconds = time.perf_counter() - clock
            feed.tell(trainer.progress)
            if trainer.step % run.log_every == 0 or trainer.progress >= 1.0:
                values = sums.clone()
                row = row_of_log(trainer, values, batch[0].shape[1], 0.0)
                trainer.seconds = time.perf_counter() - clock  # the log has waited for the device
                row["tokens_per_second"] = round((trainer.tokens - logged[1]) / max(1e-9, trainer.seconds - logged[0]))
                logged = (trainer.seconds, trainer.tokens)
                if not math.isfinite(row["loss"]):
                    raise FloatingPointError(f"the loss is {row['loss']} at step {trainer.step}")
                log.write(json.dumps(row) + "\n")
                log.flush()
                if trainer.step % (4 * run.log_every) == 0:
                    print(json.dumps(row), flush=True)
                sums.zero_()
            if trainer.seconds - saved > run.checkpoint_every:
                trainer.save(checkpoint)
                saved = trainer.seconds
        trainer.save(checkpoint)
    if trainer.progress >= 1.0:
        export(config.model, trainer.network.state_dict(), tokenizer, folder / "model")
        print(f"{trainer.step} steps, {trainer.tokens / 1e6:.0f}M tokens, {trainer.seconds:.0f} s: {folder / 'model'}")
    return trainer


def main() -> None:
    """Read the configuration and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    args = parser.parse_args()
    train_model(read_train_config(args.config, args.overrides))


if __name__ == "__main__":
    main()
