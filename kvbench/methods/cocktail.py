"""Cocktail: chunks of the context in INT2, INT4 or FP16 by their similarity to the question.

Source: Tao et al., "Cocktail: Chunk-Adaptive Mixed-Precision Quantization for Long-Context LLM Inference" (DATE 2025):
sec. III-B, eq. 1-3 (module I, chunk-level quantization search) and sec. III-C, Algorithm 1, eq. 4-5 (module II,
chunk-level computation). The paper leaves axes and groups open: keys are grouped per channel here, values per token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvbench.errors import CacheError, CombinationError, ConfigError
from kvbench.methods import cocktail_plan as in_place
from kvbench.methods.base import Method, Reach, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.cocktail_plan import ChunkPlan, Plans, aligned
from kvbench.methods.leaving import CHUNK, whole_groups
from kvbench.quantizers.spec import FormatSpec, fitting
from kvbench.util.lazy import lazy
from kvbench.util.requirements import Package
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvbench.cache import KVCache, Prompts
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.quantizers.affine import AffineQuantizer
else:
    torch = lazy("torch")


#: default number of channels in a value group
VALUE_GROUP = 64


@dataclass(kw_only=True)
class Cocktail(Method):
    """Cocktail: chunks of the context are stored in INT2, INT4 or FP16, depending on their similarity to the question.

    Everything else stays in full precision: the last tokens of the context, if they do not fill a chunk; the text
    around the context; the question; and all generated tokens. Keys are stored after RoPE.

    On a layer with a sliding window, bit widths are chosen for the same chunks as on other layers. A packed chunk is
    dropped once the window hides all of its tokens. Tokens in full precision are dropped once they are hidden, 32 at a
    time.

    Args:
        alpha: the threshold for INT2 lies this fraction of the way from the lowest to the highest score (eq. 2). Chunks
            with scores below it get INT2. With 0.6, for scores from 0 to 1, these are the chunks below 0.6.
        beta: the threshold for FP16 lies this fraction of the way from the highest to the lowest score (eq. 3). Chunks
            with scores above it stay in FP16; those between the thresholds get INT4. ``alpha + beta`` must be below 1.
        chunk_size: tokens per chunk.
        encoder: text encoder that scores the similarity: ``contriever``, ``bm25``, ``llm_embedder``, ``minilm``,
            ``openai``, or a sentence-transformers model.
        whole_words: True: where a chunk boundary splits a word, the encoder reads the complete word in both chunks; the
            tokens that the chunks contain stay the same. False: the encoder reads exactly the chunk's tokens. None:
            True for ``bm25``, which compares words, and False for all other encoders.
        search: ``similarity``: widths depend on the similarity to the question. ``none``: the same widths are assigned
            to the chunks in random order (Table V, without module I).
        reorder: True: chunks of one width are stored together (module II). False: chunks are stored and read in the
            order of the text (Table V, without module II; :mod:`kvbench.methods.cocktail_plan`).
        split: shares of FP16, INT4 and INT2 chunks, for comparisons at equal bytes. The chunks with the highest scores
            then get FP16, the next ones INT4 and the others INT2; `alpha` and `beta` are not used. None: `alpha` and
            `beta` decide.
        key_axis: elements of a group of keys. ``channel``: consecutive tokens of one channel; ``token``: consecutive
            channels of one token (ablation).
        group_size: tokens per key group, a divisor of `chunk_size`; None: the smaller of 32 and `chunk_size`.
        value_group_size: channels per value group. None: the smaller of 64 and the head dimension, or, if 64 does not
            divide the head dimension, the largest power of two that divides it (16 for 80 channels).
        seed: seed of the random order of ``search=none``; ``runtime.seed`` does not change it.
    """

    alpha: float = bounded(0.6, minimum=0.0, maximum=1.0)
    beta: float = bounded(0.1, minimum=0.0, maximum=1.0)
    chunk_size: int = bounded(32, minimum=1)
    encoder: str = "contriever"
    whole_words: bool | None = None
    search: Literal["similarity", "none"] = "similarity"
    reorder: bool = True
    split: tuple[float, ...] | None = None
    key_axis: Literal["channel", "token"] = "channel"
    group_size: int | None = None
    value_group_size: int | None = bounded(None, minimum=1)
    seed: int = 0

    needs_prompts: ClassVar[bool] = True
    widths: ClassVar[tuple[str, ...]] = ("alpha", "beta", "split")

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if a hyper-parameter is invalid, or a combination, such as ``alpha + beta >= 1``."""
        super().check(head_dim, max_length)
        if self.alpha + self.beta >= 1.0:
            raise CombinationError(
                "method.alpha",
                self.alpha,
                f"is too large for method.beta={self.beta}: alpha + beta must be below 1, so that T_low "
                "< T_high (eq. 2, 3)",
                hint=f"set method.alpha below {1 - self.beta:g}, or reduce method.beta",
            )
        if self.key_axis == "channel" and (self.key_group < 1 or self.chunk_size % self.key_group):
            divisors = [g for g in (4, 8, 16, 24, 32, 64, 128) if self.chunk_size % g == 0]
            raise ConfigError(
                "method.group_size",
                self.key_group,
                f"must divide method.chunk_size={self.chunk_size}",
                allowed=divisors,
            )
        if self.split is not None and (len(self.split) != 3 or min(self.split) < 0 or sum(self.split) <= 0):
            raise ConfigError(
                "method.split",
                list(self.split),
                "must be three shares, for FP16, INT4 and INT2",
                allowed="a list such as [15,35,50]",
            )
        if head_dim and head_dim % self.value_group(head_dim):
            groups = [g for g in (8, 16, 32, 64, 128) if head_dim % g == 0] or [head_dim]
            raise ConfigError(
                "method.value_group_size",
                self.value_group(head_dim),
                f"does not divide the model's head_dim {head_dim}",
                allowed=[*groups, "null"],
                hint=f"method.value_group_size={groups[-1]}",
            )
        from kvbench.retrieval.encoders import check_name

        check_name(self.encoder)

    def packages(self) -> tuple[Package, ...]:
        """Return the optional packages that the encoder needs."""
        from kvbench.retrieval.encoders import packages

        return packages(self.encoder)

    def reach(self) -> Reach:
        """Return the length of the longest context that stays in full precision: one token less than a chunk."""
        return Reach("method.chunk_size", self.chunk_size, self.chunk_size - 1, of_prompt=True)

    def identity(self) -> dict[str, Any]:
        """Return the extra entries that are hashed into a run's id.

        ``encoder`` is hashed instead of the encoder's name: the version of kvbench's BM25, a hash of the files in a
        model folder, or the model and URL of an OpenAI endpoint other than the default. It is absent for other
        encoders, whose name is hashed. ``reorder`` is present only with ``reorder=False``.
        """
        return self._encoder_identity() | ({} if self.reorder else {"reorder": "false: runs in place"})

    def _encoder_identity(self) -> dict[str, Any]:
        from kvbench.retrieval.encoders import BM25, NAMED, OPENAI_MODEL, OPENAI_URL, openai_endpoint
        from kvbench.util.fingerprint import SUFFIXES, fingerprint

        if self.encoder == "bm25":  # other words change the search
            return {"encoder": f"bm25 {BM25.version}"}
        if self.encoder == "openai" and openai_endpoint() != (OPENAI_MODEL, OPENAI_URL):
            return {"encoder": "openai {} {}".format(*openai_endpoint())}
        folder = None if self.encoder in NAMED else fingerprint(Path(self.encoder), suffixes=SUFFIXES, deep=True)
        return {"encoder": f"folder {folder}"} if folder else {}

    def ready(self) -> None:
        """Raise ModelError if the encoder cannot be used, because its weights, API key or package are missing."""
        from kvbench.retrieval.encoders import encoder

        encoder(self.encoder).ready()

    def value_group(self, channels: int) -> int:
        """Return the number of channels per value group for a head with `channels` channels."""
        if self.value_group_size is not None:
            return self.value_group_size
        return channels if channels <= VALUE_GROUP else fitting(VALUE_GROUP, channels) or VALUE_GROUP

    def fitted(self, head_dim: int) -> dict[str, int]:
        """Return ``{"method.value_group_size": SIZE}`` if the default, 64, does not divide `head_dim`; else empty."""
        group = self.value_group(head_dim)
        plain = self.value_group_size is not None or group == min(VALUE_GROUP, head_dim)
        return {} if plain else {"method.value_group_size": group}

    @property
    def key_group(self) -> int:
        """Number of tokens per key group."""
        return self.group_size if self.group_size is not None else min(32, self.chunk_size)

    def new_cache(
        self, model: PreTrainedModel, prompts: Prompts | None = None, max_length: int | None = None
    ) -> KVCache:
        """Choose the bit width of each chunk by its similarity to the question, and return an empty cache.

        ``cache.search_s`` is then the time of this choice in seconds, without loading the encoder. If embeddings were
        read from disk, the time that it took this machine to compute them is added. If that time is not known,
        ``cache.search_s`` is None.

        Raises:
            CacheError: `prompts` is None, or lacks the token ids or the function that decodes them.
        """
        if prompts is None or prompts.input_ids is None or prompts.decode is None:
            raise CacheError(
                "cocktail compares the context with the question before the prefill, so it needs the prompts: "
                "new_cache(model, Prompts.from_batch(input_ids, attention_mask, context_spans=..., queries=..., "
                "decode=tokenizer.decode))"
            )
        from kvbench.retrieval.encoders import encoder

        cache = super().new_cache(model, prompts, max_length)
        text_encoder = encoder(self.encoder)
        # before the search: seconds that stored embeddings saved so far, and stored ones whose seconds are not known
        unspent, uncharged = text_encoder.unspent_s, text_encoder.uncharged
        started = time.perf_counter()
        plans = [self.plan(prompts, row, len(cache.kv_layers) - 1) for row in range(len(prompts.starts))]
        elapsed = time.perf_counter() - started + text_encoder.unspent_s - unspent
        cache.search_s = max(elapsed, 0.0) if text_encoder.uncharged == uncharged else None
        cache.progress.method_state = Plans(plans)
        seconds_per_prompt = None if cache.search_s is None else cache.search_s / len(plans)
        cache.notes = [self.note(plan, seconds_per_prompt) for plan in plans]
        return cache

    def plan(self, prompts: Prompts, row: int, last_layer: int | None = None) -> ChunkPlan:
        """Divide the context of one prompt into chunks, and choose the bit width of each.

        For `last_layer` see :class:`ChunkPlan`.
        """
        from kvbench.retrieval.chunks import by_rank, by_threshold, cut_chunks, shuffled
        from kvbench.retrieval.encoders import encoder

        ids = prompts.row_ids(row)
        context = prompts.context_spans[row] if prompts.context_spans else None
        query = prompts.queries[row] if prompts.queries else ""
        assert prompts.decode is not None
        otherwise = prompts.query_sources[row] if prompts.query_sources else None
        text_encoder = encoder(self.encoder)
        words = text_encoder.whole_words if self.whole_words is None else self.whole_words
        chunks = cut_chunks(ids, prompts.decode, self.chunk_size, context, query, otherwise, words)
        scores = text_encoder.scores(chunks.query, chunks.texts) if chunks.texts else []
        widths = by_rank(scores, self.split) if self.split else by_threshold(scores, self.alpha, self.beta)
        if self.search == "none":
            widths = shuffled(widths, f"{self.seed}/{chunks.query}/{len(ids)}")
        return ChunkPlan(chunks, widths, last_layer)

    def note(self, plan: ChunkPlan, seconds: float | None) -> dict[str, Any]:
        """Return what a sample's result records about the choice of widths; `seconds` is its time, None if unknown."""
        widths = plan.widths
        return {
            "chunks": {"int2": widths.count(2), "int4": widths.count(4), "fp16": widths.count(16)},
            "t_low": widths.t_low,
            "t_high": widths.t_high,
            "encoder": self.encoder,
            "query_source": plan.chunks.query_source,
            "search_s": None if seconds is None else round(seconds, 6),
        }

    def make_quantizer(self, side: Side, bits: int, channels: int) -> AffineQuantizer:
        """Return the quantizer for chunks of 2 or 4 bits: keys grouped as `key_axis` says, values along channels."""
        from kvbench.quantizers.affine import AffineQuantizer

        if side == "key" and self.key_axis == "channel":
            return AffineQuantizer(bits, self.key_group, "channel")
        return AffineQuantizer(bits, self.value_group(channels), "token")

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return empty segments for INT2 chunks, for INT4 chunks, and for all other tokens (Algorithm 1).

        With ``reorder=False`` there is instead one segment for each run of consecutive chunks of one width. In both
        cases the last segment takes the generated tokens.
        """
        channels = layer.key_dim if side == "key" else layer.value_dim
        if not self.reorder:
            runs = in_place.runs(layer, self.plans(layer))
            room = max(of_row[-1].stop - of_row[-1].first for of_row in runs)
            return [
                *(
                    self.full(layer, side, count)
                    if bits == 16
                    else self.packed(layer, side, self.make_quantizer(side, bits, channels), count, whole_tiles=True)
                    for bits, count in aligned(runs)[0]
                ),
                self.full(layer, side, capacity=min(room + layer.coming(), layer.expected_length())),
            ]
        counts = [
            plan.order(layer.real_tokens(row), whole_groups(layer.hidden(row), CHUNK))
            for row, plan in enumerate(self.plans(layer))
        ]
        longest = [max(len(order[i]) for order in counts) for i in range(3)]
        return [
            self.packed(layer, side, self.make_quantizer(side, 2, channels), capacity=longest[0]),
            self.packed(layer, side, self.make_quantizer(side, 4, channels), capacity=longest[1]),
            self.full(layer, side, capacity=min(longest[2] + layer.coming(), layer.expected_length())),
        ]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store the prompt of each row, every chunk in its width; with `reorder`, chunks of one width are together."""
        if not self.reorder:
            return in_place.place_chunks(layer, rows, keys, values, self.plans(layer))
        first = rows.indices(layer.batch)[0]
        for row in range(*rows.indices(layer.batch)):
            plan = self.plans(layer)[row]
            hidden = whole_groups(layer.hidden(row), CHUNK)
            parts = plan.indices(keys.shape[2], keys.device, hidden)  # one for each segment: INT2, INT4, FP16
            one = slice(row, row + 1)
            for store, x in zip(layer.stores(), (keys, values), strict=True):
                mine = x[row - first : row - first + 1]
                for segment, tokens in zip(store.segments, parts, strict=True):
                    segment.append_chosen(one, mine, tokens)
            order = torch.cat(plan.indices(keys.shape[2], torch.device("cpu"), hidden))
            layer.order[row] = order.long() + layer.start(row)
            plan.placed(layer.index)

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop packed chunks whose tokens are all hidden by the sliding window, and hidden tokens in full precision."""
        if not self.reorder:
            return in_place.forget_chunks(layer, rows, hidden, self.plans(layer))
        first_seen = whole_groups(hidden, CHUNK)
        for row in range(*rows.indices(layer.batch)):
            order, one, remaining, begin = layer.positions(row), slice(row, row + 1), [], 0
            for number, segment in enumerate(layer.stores()[0].segments):
                positions = order[begin : begin + segment.length(one)]
                # a segment is in the order of the text, so its hidden tokens are its first ones
                count = int((positions < layer.start(row) + first_seen).sum())
                count = count // self.chunk_size * self.chunk_size if segment.packed else count
                begin += len(positions)
                remaining.append(positions[count:])
                for store in layer.stores() if count else ():
                    store.segments[number].drop_front(one, count)
            if sum(map(len, remaining)) < len(order):
                layer.order[row] = torch.cat(remaining)

    def reading_order(self, layer: KVLayer, rows: slice) -> list[tuple[int, int]] | None:
        """Return the slot ranges of the runs in the order of the text; None (slot order) if chunks are reordered."""
        return None if self.reorder else in_place.reading_order(layer, rows)

    @staticmethod
    def plans(layer: KVLayer) -> Sequence[ChunkPlan]:
        """Return the plan of each row, with its chunks and their widths, as :meth:`new_cache` made it."""
        state = layer.progress.method_state
        assert isinstance(state, Plans)
        return state.rows

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of the packed chunks and of all tokens in full precision.

        On a layer with a sliding window, the widths of the visible chunks are assumed to have the same shares as in the
        whole prompt. With ``reorder=False`` the bytes depend on the order of the chunks; unless ``at.widths`` gives
        this order, a random one is assumed.

        Raises:
            ConfigError: neither ``at.widths``, ``at.chunks`` nor `split` gives the widths, or the chunks have more
                tokens than the sequence.
        """
        total, gone = KVBytes(), whole_groups(at.hidden, CHUNK)
        share = max(at.prompt - gone, 0) / at.prompt  # of the prompt that is still seen
        rest = at.tokens - gone
        widths = self.chunk_widths(at)
        seen = widths[len(widths) - round(len(widths) * share) :] if gone else widths  # the last chunks
        for bits in (2, 4):
            chunks = widths.count(bits)
            count = (round(chunks * share) if gone and self.reorder else seen.count(bits)) * self.chunk_size
            value = FormatSpec(bits=bits, group_size=self.value_group(at.channels), axis="token")
            key = FormatSpec(bits=bits, group_size=self.key_group, axis="channel")
            key = key if self.key_axis == "channel" else value  # per token, keys are packed as values are
            for form in (key, value):
                group = self.key_group if form.axis == "channel" else 1
                parts = [count] if self.reorder else in_place.billed(seen, bits, self.chunk_size, group)
                total += at.packed(sum(parts), form)
            rest -= count
        if rest < 0:
            raise ConfigError("chunks", at.chunks, f"contain more tokens than the sequence, which has {at.tokens}")
        return total + at.both(rest)

    def chunk_widths(self, at: Setting) -> tuple[int, ...]:
        """Return the bits of each chunk of a prompt (2, 4 or 16), in the order of the text.

        These are ``at.widths`` if given. Otherwise the numbers of INT2 and INT4 chunks are those of ``at.chunks``, or
        else follow from the shares `split`. Their order then matters only with ``reorder=False``, and is random.

        Raises:
            ConfigError: none of the three is given.
        """
        if at.widths is not None:
            return at.widths
        if at.chunks is None and self.split is None:
            raise ConfigError(
                "method.split",
                None,
                "must be set to predict bytes, because without it the bit widths depend on the text",
                hint="set the shares of FP16, INT4 and INT2: split=[10,30,60]",
            )
        from kvbench.retrieval.chunks import Widths, by_rank, shuffled

        total = at.prompt // self.chunk_size
        if at.chunks is None:
            assert self.split is not None
            shares = by_rank([0.0] * total, self.split)
            two, four = shares.count(2), shares.count(4)
        else:
            two, four = at.chunks
        widths = Widths((2,) * two + (4,) * four + (16,) * (total - two - four), None, None)
        return (widths if self.reorder else shuffled(widths, str(self.seed))).bits
