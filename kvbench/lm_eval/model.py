"""The model ``kvbench`` of lm-eval: its Hugging Face model, which generates and scores through a kvbench cache.

Bytes, times and exactness of each request are recorded under the text of its prompt.

Tokens, chat templates, truncation, batches and stop strings are those of lm-eval's model ``hf``, from which this class
inherits, so that a difference in a score comes from the cache.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from kvbench.cache import Prompts
from kvbench.cache.cache import KVCache
from kvbench.config.run_config import RunConfig, RuntimeConfig
from kvbench.decoding.autoregressive import generate
from kvbench.decoding.questions import continuation_likelihoods
from kvbench.decoding.sampling import Sampling
from kvbench.errors import ConfigError, DataError
from kvbench.lm_eval.chosen import choose
from kvbench.models.load import load_model
from kvbench.profiling.device import device_name
from kvbench.profiling.memory import PhasePeaks
from kvbench.results.environment import cpu_name
from kvbench.runner.answers import generation_figures
from kvbench.runner.rows import Machine, row_bill
from kvbench.util.progress import Progress


@dataclass
class Figures:
    """Measurements of the requests.

    Args:
        by_prompt: the figures of the last request of each prompt, by the prompt's text. Likelihoods of several
            continuations of one context share an entry.
        requests: number of requests.
        exact: number of requests in which the cache still held every token exactly at the end; such a request gives the
            same answer with every setting, so it tests nothing.
    """

    by_prompt: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: int = 0
    exact: int = 0

    @property
    def empty(self) -> bool:
        """True before the first request, whose times include warm-up."""
        return not self.requests

    def add(self, prompt: str | None, *, exact: bool, **figures: Any) -> None:
        """Record the figures of a request; `exact` if the cache held every token exactly at the end.

        The prompt is None for a piece of a longer text, which has no entry of its own.
        """
        self.requests += 1
        self.exact += exact
        if prompt is not None:
            self.by_prompt[prompt] = {"exact": exact, **figures}

    def summary(self, setting: str) -> str:
        """Return a line for the user: the share of requests that tested the setting."""
        if not self.requests:
            return f"{setting}: no request reached the model (all answers came from lm-eval's request cache)"
        share = 100 * self.exact / self.requests
        line = (
            f"{setting}: {self.requests} requests; in {self.exact} ({share:.0f} %) the cache held every token exactly"
        )
        return line + (", so they test nothing but fp16" if self.exact else "")


Request = tuple[tuple[str, str], list[int], list[int]]

#: generation arguments of transformers that have no counterpart here, and the value that leaves an answer as it is
NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "length_penalty": 1,
    "early_stopping": False,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1,
    "min_p": 0,
    "use_cache": True,
}


@register_model("kvbench")
class CachedLM(HFLM):  # type: ignore[misc]
    """A model of lm-eval whose answers are read from a kvbench cache.

    Args:
        batch_size: prompts in one batch of generation; likelihoods take one context at a time.
        max_batch_size: not used; lm-eval passes it.
        device: torch's name of the device. lm-eval passes ``cuda:0`` also where there is no GPU; the CPU is used then.
        add_bos_token, prefix_token_id, chat_template_args, enable_thinking, think_end_token: as for lm-eval's ``hf``.
        results_dir: folder of the runs, in which :mod:`kvbench.lm_eval.rows` stores the evaluation; lm-eval's model
            does not use it.
        arguments: model, setting and their options (:func:`kvbench.lm_eval.chosen.choose`).

    Raises:
        KvbenchError: an argument is invalid, or the model cannot be loaded.
    """

    #: the model of this process that was built last; the command line reads its figures when lm-eval has ended
    last: CachedLM | None = None

    def __init__(
        self,
        *,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        results_dir: str | None = None,
        **arguments: Any,
    ) -> None:
        if not str(batch_size).isdecimal() or int(str(batch_size)) < 1:
            raise ConfigError("batch_size", batch_size, "must be a number of prompts", hint="--batch_size 8")
        if device is not None and (torch.cuda.is_available() or not device.startswith("cuda")):
            arguments["device"] = device
        self.chosen: RunConfig = choose(arguments)
        config = self.chosen
        loaded = load_model(config.model, config.runtime)
        super().__init__(
            pretrained=loaded.model,
            tokenizer=loaded.tokenizer,
            backend="causal",
            batch_size=int(str(batch_size)),
            max_length=loaded.max_length,
            add_bos_token=add_bos_token,
            prefix_token_id=prefix_token_id,
            chat_template_args=chat_template_args,
            enable_thinking=enable_thinking,
            think_end_token=think_end_token,
        )
        self.loaded = loaded
        self.machine = Machine(device_name(loaded.device) or cpu_name(), **loaded.dtypes.names())
        self.figures = Figures()
        self.results_dir = results_dir
        #: arguments of lm-eval's own that change what the model reads or how its answers are cut
        self.host = {
            name: value
            for name, value in {
                "add_bos_token": add_bos_token,
                "prefix_token_id": prefix_token_id,
                "chat_template_args": chat_template_args,
                "enable_thinking": enable_thinking,
                "think_end_token": think_end_token,
            }.items()
            if value is not None
        }
        self._texts: Sequence[str] = ()
        self._removed: Sequence[int] = ()
        self._asked: Counter[str] = Counter()
        CachedLM.last = self

    def tok_batch_encode(self, strings: list[str], *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Encode a batch of prompts as ``hf`` does, and remember their texts and how many tokens were cut."""
        ids, mask = super().tok_batch_encode(strings, *args, **options)
        room = options.get("left_truncate_len") or self.max_length
        cut = ids.shape[1] >= room
        self._texts = list(strings)
        self._removed = [max(0, len(self.tok_encode(text)) - room) if cut else 0 for text in strings]
        return ids, mask

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Return the prompts with their answers, ``[B, T + N]``, padded on the right with the end-of-sequence token."""
        mask = generation_kwargs.pop("attention_mask", None)
        chosen = sampling(generation_kwargs, self._seeds())
        cache = self._cache(context, mask, max_length)
        peaks = PhasePeaks(self.loaded.device, census=False)
        with peaks.run():
            generation = generate(
                self.model,
                cache,
                context,
                mask,
                max_new_tokens=max_length - context.shape[1],
                sampling=chosen,
                eos_token_ids=self.loaded.eos_token_ids,
                stop=stop,
                tokenizer=self.tokenizer,
                prefill_chunk=self._runtime.prefill_chunk,
                pad_token_id=self.tokenizer.pad_token_id or 0,
                observer=peaks,
                graphs=self._runtime.graphs,
                compile=self._runtime.compile,
                prefill_rows=self._runtime.prefill_rows,
            )
        measured = generation_figures(self.machine, cache, peaks, self.figures.empty, len(context), generation)
        for row, text in enumerate(self._texts):
            tokens = len(generation.tokens[row])
            decoded = min(len(generation.step_s), tokens - (generation.finish[row] != "eos"))
            bill = row_bill(cache, row, len(context))
            self.figures.add(
                text,
                exact=_exact(cache, row),
                prompt_tokens=generation.prompt_tokens[row],
                truncated=self._removed[row],
                tokens=tokens,
                finish=generation.finish[row],
                kv_bytes=bill,
                measured={**measured, "decoded": decoded},
            )
        longest = max(map(len, generation.tokens))
        rows = [tokens + [self.eot_token_id] * (longest - len(tokens)) for tokens in generation.tokens]
        return torch.cat([context, torch.tensor(rows, device=context.device, dtype=context.dtype)], 1)

    def _seeds(self) -> list[int]:
        """Return a seed for each prompt of the batch; a prompt that lm-eval repeats gets another one each time."""
        seeds = []
        for text in self._texts:
            seeds.append(zlib.crc32(f"{self._runtime.seed}/{self._asked[text]}/{text}".encode("utf-8", "replace")))
            self._asked[text] += 1
        return seeds

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return log-likelihood and greedy match of each continuation, read through the cache one token at a time."""
        results: dict[int, tuple[float, bool]] = {}
        with Progress("likelihoods through the cache", len(requests)) as bar:
            for numbers in _by_context(requests, self.max_length):
                for number, result in zip(numbers, self._continued([requests[n] for n in numbers]), strict=True):
                    results[number] = result
                    if requests[number][0]:  # else a piece of a longer text
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], result)
                    bar.advance(1)
        return [results[number] for number in range(len(requests))]

    def _continued(self, requests: Sequence[Request]) -> Iterator[tuple[float, bool]]:
        """Yield log-likelihood and greedy match of each request; all have the same context."""
        context = _context_end(requests[0], self.max_length)
        continuations = [continuation for _, _, continuation in requests]
        ids = torch.tensor([context], device=self.loaded.device)
        cache = self._cache(ids, None, len(context) + max(map(len, continuations)))
        answers = continuation_likelihoods(self.model, cache, context, continuations, self._runtime.prefill_chunk)
        for (pair, whole, _), (total, greedy, used) in zip(requests, answers, strict=True):
            path = {"reads_packed": bool(used.reads_packed), "path": str(used.path)}
            self.figures.add(
                pair[0] if pair else None,
                exact=_exact(used, 0),
                prompt_tokens=len(context),
                truncated=len(whole) - len(context),
                tokens=0,
                finish="window",
                kv_bytes=row_bill(used, 0, 1),
                measured=self.machine.measured(1, None, path),
            )
            yield total, greedy

    @property
    def _runtime(self) -> RuntimeConfig:
        return self.chosen.runtime

    def _cache(self, ids: Tensor, mask: Tensor | None, max_length: int) -> KVCache:
        prompts = Prompts.from_batch(ids, mask, decode=self.tokenizer.decode)
        return self.chosen.method.new_cache(self.model, prompts, max_length=max_length)


def _by_context(requests: Sequence[Request], max_length: int) -> Iterable[list[int]]:
    """Return for each context the indices of the requests that have it, the longest contexts first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        groups.setdefault(tuple(_context_end(request, max_length)), []).append(number)
    return [groups[context] for context in sorted(groups, key=len, reverse=True)]


def _context_end(request: Request, max_length: int) -> list[int]:
    """Return the last tokens of the context, as many as fit before the continuation; ``hf`` cuts at the same place.

    Raises:
        ConfigError: the continuation alone does not fit.
        DataError: the continuation has no tokens.
    """
    pair, context, continuation = request
    if not continuation:
        raise DataError(
            f"the answer {pair[1] if pair else ''!r} has no tokens of its own after its prompt, so it has no "
            "likelihood.\n  hint: check doc_to_choice or doc_to_target of the task"
        )
    room = max_length + 1 - len(continuation)
    if room < 1:
        raise ConfigError(
            "max_length",
            max_length,
            f"is too short for a continuation of {len(continuation)} tokens",
            hint="choose a model with a longer context",
        )
    return context[-room:]


def _exact(cache: KVCache, row: int) -> bool:
    """Return True if every token that a row has seen is still held exactly, so that the row tests no method."""
    bill = cache.bill(row)
    return not bill.used.codes and (bill.used.window + bill.used.state) * 2 >= bill.fp16_equivalent * bill.width


def sampling(options: Mapping[str, Any], seeds: Sequence[int]) -> Sampling:
    """Convert lm-eval's generation arguments, without stop strings and lengths, to sampling settings.

    `seeds` has a seed for each prompt.

    Raises:
        ConfigError: an argument has no counterpart here, or asks for draws without a temperature.
    """
    known = {"temperature", "do_sample", "top_p", "top_k"}
    refused = sorted(
        key for key, value in options.items() if key not in known and value is not None and value != NEUTRAL.get(key)
    )
    if refused:
        raise ConfigError(
            "gen_kwargs",
            f"{refused[0]}={options[refused[0]]}",
            "is not supported through the cache",
            allowed=sorted(known | {"until", "max_gen_toks"}),
        )
    temperature = float(options.get("temperature") or 0.0)
    if options.get("do_sample") and not temperature:
        raise ConfigError(
            "gen_kwargs",
            "do_sample=True",
            "needs a temperature above 0",
            hint="--gen_kwargs do_sample=True temperature=0.7",
        )
    if not options.get("do_sample", temperature > 0):
        temperature = 0.0
    return Sampling(temperature, float(options.get("top_p") or 1.0), seeds, options.get("top_k"))
