"""Rounds of speculative decoding as replays of CUDA graphs, between which the device does not wait for the host.

A round is gamma replays of a pass over one token, whose output is the input of the next replay, and one replay of a
pass over gamma + 1 tokens, which also accepts drafts and prepares the next round
(:mod:`kvbench.decoding.round_passes`). The host waits once per round, for the tokens. It then queues the next round at
once and updates the lengths of the cache while the device works. Only if the method has to pack or drop tokens before
the next round does the host update the cache first (:mod:`kvbench.decoding.tables`). Draft and target may use the
caches of any methods.
Tokens are those of eager rounds (:class:`kvbench.decoding.speculative.Eager`), although gamma tokens are drafted even
if fewer can be accepted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.attention.phases import NotServed
from kvbench.cache import KVCache
from kvbench.decoding.drafting import Drafter
from kvbench.decoding.graphs import Captured, Tokens, reason
from kvbench.decoding.recordable import NotCaptured
from kvbench.decoding.recorded import settle
from kvbench.decoding.round_passes import Draft, Shared, Verification
from kvbench.decoding.round_times import Round
from kvbench.decoding.sampling import Sampling, Stopping
from kvbench.decoding.speculative import Engine, taken
from kvbench.decoding.tables import Ledger
from kvbench.errors import CacheError
from kvbench.methods.speculation import Speculation
from kvbench.util.failures import is_out_of_memory

#: points in a round: before the cache is updated, before the drafts, before the verification, and after it
FLUSH, DRAFT, VERIFY, END = range(4)


class Marks:
    """CUDA events between the parts of one round, to measure their times; on a CPU nothing is measured."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(END + 1)] if cuda else []

    def set(self, point: int) -> None:
        """Record the event of a point on the current stream; a second call for the same point replaces the first."""
        if self._events:
            self._events[point].record()

    def fill(self, done: Round, flushed: bool) -> None:
        """Fill in the times of the parts of a round, which the device has completed.

        `flushed` is True if the cache was updated before the round, so that :data:`FLUSH` was set.
        """
        if self._events:
            done.draft_seconds = self._between(DRAFT, VERIFY)
            done.verify_seconds = self._between(VERIFY, END)
            done.flush_seconds = self._between(FLUSH, DRAFT) if flushed else 0.0

    def _between(self, first: int, second: int) -> float:
        return self._events[first].elapsed_time(self._events[second]) / 1e3


class CapturedRounds(Engine):
    """Engine that replays CUDA graphs: one for a forward pass that drafts, and one per gamma for verification.

    Args:
        cache: the target's cache, which already contains the prompts.
        capture: True: capture CUDA graphs; False: run the code of the passes at each replay (for tests on a CPU).

    Attributes:
        draft: the pass that drafts one token.
        verifications: for each gamma that has been used, the pass that verifies that number of drafts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        speculation: Speculation,
        how: Sampling,
        batch: int,
        *,
        compile: bool = False,
        capture: bool = True,
    ) -> None:
        self.drafter = Drafter(model, cache, speculation)
        self.cache, self.most, self.batch, self.model = cache, speculation.most, batch, model
        device = model.get_input_embeddings().weight.device
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self.ledgers = [Ledger(cache, batch, device)]
        if self.drafter.own:
            self.ledgers.append(Ledger(self.drafter.cache, batch, device))
        self.shared = Shared(batch, self.most, how, speculation.forced, vocabulary, device)
        draft = Draft(model, self.ledgers[-1], self.shared, speculation.draft == "upper")
        self.draft = Captured(draft, compile=compile, capture=capture, drafting=True)
        self.verifications: dict[int, Captured] = {}
        # the gamma of the first round: with gamma=auto, that of kvbench.decoding.round_times.Gamma
        self._first = speculation.choices[0] if len(speculation.choices) == 1 else 4
        self._seconds, self._versions = 0.0, [0] * len(self.ledgers)
        # the last round, whose times are not filled in yet: with its marks, and whether the cache was updated before it
        self._untimed: tuple[Round, Marks, bool] | None = None
        self._stale = False  # the device's lengths are not those of the cache
        self._ahead = False  # the first draft of the next round is already queued
        self._outcome = Tokens(self.shared.outcome)
        self._marks = [Marks(device) for _ in range(3)]  # of this round, the last one and the next one
        self._last = 0.0  # when the tokens of the last round arrived

    @property
    def stepping(self) -> str:
        """See :attr:`Captured.stepping`."""
        return self.draft.stepping

    @property
    def seconds(self) -> float:
        """Seconds spent so far on warm-ups and on capturing passes."""
        return self._seconds + self.draft.seconds + sum(one.seconds for one in self.verifications.values())

    def prepare(self) -> None:
        """Capture the draft's pass and the verification of the first round; call this once, before the first round.

        The caches contain the same tokens afterwards.

        Raises:
            NotCaptured: one of the passes cannot be captured.
            torch.OutOfMemoryError: there is not enough memory for the capture.
        """
        started = time.perf_counter()
        try:
            for ledger in self.ledgers:
                ledger.cache.settle()
            verification = Verification(self.model, self.ledgers[0], self._drafts(), self._first)
            for step in (self._drafts(), verification):
                step.check()
                step.warm()
            self._stale = True  # nothing has been sent to the device yet
            self._refresh(self.ledgers)
            self._seconds += time.perf_counter() - started
            self._record()
            self._verification(self._first)
        except (NotServed, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise NotCaptured(reason(error)) from error

    def begin(self, token: Tensor) -> None:
        """See :meth:`Engine.begin`."""
        self.shared.pending.copy_(token)
        self._restart()
        self._last = time.perf_counter()

    def round(
        self,
        gamma: int,
        active: list[bool],
        limits: list[int],
        stopping: Stopping,
        generators: Sequence[torch.Generator],
    ) -> Round:
        """Run one round; see :meth:`Engine.round`. The times of its parts are filled in during the next round."""
        recorded, marks = self.seconds, self._marks[0]
        self._marks.append(self._marks.pop(0))  # from here on, the first are those of the next round
        self.shared.give(self.shared.draws(active, limits, generators))
        flushed = self._stale or not all(ledger.fits() for ledger in self.ledgers)
        if flushed:
            marks.set(FLUSH)
            self._flush()
        verification = self._verification(gamma)
        if not self._ahead:
            marks.set(DRAFT)
        self._draft(gamma - self._ahead)  # the first may have been drafted at the end of the last round
        marks.set(VERIFY)
        verification.replay()
        marks.set(END)
        self._outcome.fetch()
        # The first draft of the next round needs nothing from the host, unless it is drawn or the cache may change.
        self._ahead = (
            self.shared.chances is None
            and max(limits) == gamma
            and all(ledger.fits(gamma + 1) for ledger in self.ledgers)
        )
        if self._ahead:
            self._marks[0].set(DRAFT)
            self._draft(1)
        self._catch_up()  # while the device works

        settled = self._lengths()
        outcome = self._outcome.wait()
        arrived, width = time.perf_counter(), self.most + 2
        rows = [outcome[row * width : (row + 1) * width] for row in range(self.batch)]
        # Shared.outcome: the number of accepted drafts (-1 in a row that has ended), the token after them, the drafts
        accepted = [max(row[0], 0) for row in rows]
        emitted = taken(stopping, active, accepted, [row[2:] for row in rows], [row[1] for row in rows])
        # a row that ended among its drafts has fewer tokens than the device counted
        self._stale = any(on and n <= count for on, n, count in zip(active, emitted, accepted, strict=True))
        for ledger in self.ledgers:
            ledger.gained = [gained + count for gained, count in zip(ledger.gained, emitted, strict=True)]
            ledger.behind = gamma + 1, emitted
        seconds = arrived - self._last - (self.seconds - recorded)
        self._last = arrived
        done = Round(seconds, settled, list(limits), accepted, emitted)
        self._untimed = done, marks, flushed
        return done

    def end(self) -> None:
        """Complete the bookkeeping of the last round.

        Raises:
            NonFiniteError: the method packed NaN or Inf.
        """
        self._catch_up()
        for ledger in self.ledgers:
            ledger.cache.progress.watches.check()

    # -- bookkeeping on the host --------------------------------------------------------------------------------------

    def _drafts(self) -> Draft:
        step = self.draft.step
        assert isinstance(step, Draft)
        return step

    def _lengths(self) -> list[int]:
        """Return the number of cached tokens of each row, without padding; the cache must be up to date."""
        starts = self.cache.progress.padding.starts or [0] * self.batch
        return [self.cache.get_seq_length() - start for start in starts]

    def _draft(self, count: int) -> None:
        """Queue the next drafts of a round."""
        with self.drafter.drafting() if not self.draft.capture else nullcontext():
            for _ in range(count):
                self.draft.replay()

    def _catch_up(self) -> None:
        """Add the tokens of the last round to the caches on the host, and fill in the times of its parts.

        Raises:
            NonFiniteError: a method packed NaN or Inf in an earlier round.
        """
        for ledger in self.ledgers:
            ledger.catch_up()
        if self._untimed is not None:
            done, marks, flushed = self._untimed
            marks.fill(done, flushed)
            self._untimed = None

    def _flush(self) -> None:
        """Let the methods pack or drop tokens, and send the lengths of the caches to the device.

        Raises:
            CacheError: a pass can no longer be captured.
            NonFiniteError: the method packed NaN or Inf in an earlier round.
        """
        try:
            self._refresh([ledger for ledger in self.ledgers if self._stale or not ledger.fits()])
            if self._versions != [ledger.version for ledger in self.ledgers]:
                self._record()
            self._restart()
        except (NotServed, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise CacheError(
                f"decoding by CUDA graphs stopped, because a round cannot be captured again: {reason(error)}.\n"
                "  hint: set runtime.graphs=never"
            ) from error

    def _refresh(self, ledgers: Sequence[Ledger]) -> None:
        """Let the methods of some caches pack or drop tokens, and send the lengths of these caches to the device."""
        for ledger in ledgers:
            ledger.catch_up()
            settle(ledger.cache)
            ledger.refresh(self.most + 1)
        if self._stale:  # a row has ended, whose tokens the device has counted otherwise
            self.shared.lengths.copy_(torch.tensor(self._lengths()))
        self._stale = False

    def _restart(self) -> None:
        """Make the next replay of the draft's pass draft the first token of a round, if necessary for a second time."""
        self._drafts().restart()
        self._ahead = False

    def _record(self) -> None:
        """Capture the draft's pass for the present buffers of the caches; verifications follow when they are needed."""
        layout = self.ledgers[-1].layout
        assert layout is not None
        self._seconds += sum(one.seconds for one in self.verifications.values())  # kept in the total
        self.verifications.clear()
        step = self._drafts()
        step.build(layout)
        step.restart()
        with self.drafter.drafting():
            self.draft.record()
        self._versions = [ledger.version for ledger in self.ledgers]

    def _verification(self, gamma: int) -> Captured:
        """Return the pass that verifies `gamma` drafts, captured at the first call."""
        known = self.verifications.get(gamma)
        if known is None:
            step = Verification(self.model, self.ledgers[0], self._drafts(), gamma)
            layout = self.ledgers[0].layout
            assert layout is not None
            step.build(layout)
            known = Captured(step, compile=self.draft.compile, capture=self.draft.capture)
            known.record()
            self._restart()  # the capture has overwritten the place of a token that has been drafted ahead
            self.verifications[gamma] = known
        return known


def captured_rounds(
    model: PreTrainedModel, cache: KVCache, speculation: Speculation, how: Sampling, batch: int, compile: bool
) -> CapturedRounds:
    """Create a :class:`CapturedRounds` from the same arguments, capture its first passes, and return it.

    Raises:
        NotCaptured: the passes cannot be captured. The caches contain the same tokens as before.
    """
    engine = CapturedRounds(model, cache, speculation, how, batch, compile=compile)
    engine.prepare()
    return engine
