"""``python -m kvbench.bench predict``: roofline times and bytes by model, method, context, batch and GPU; needs no GPU.

Bytes are computed exactly (:mod:`kvbench.methods.bytes`). Times come from a roofline model
(:mod:`kvbench.profiling.roofline`), which leaves out launches, Cocktail's search and the dequantization in a kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvbench.bench import choices, predict_bytes
from kvbench.bench.choices import duration, method_of, number, numbers_of, positive, share, tokens
from kvbench.errors import ConfigError, KvbenchError
from kvbench.methods.base import Method
from kvbench.methods.byte_parts import KVBytes, View
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.load import load_method
from kvbench.profiling.gpus import GPUS, Gpu, gpu_named, own_gpu
from kvbench.profiling.intensity import accepted
from kvbench.profiling.roofline import KERNELS, Prediction, Shape, max_batch, predict
from kvbench.util import atomic
from kvbench.util.requirements import check_writable
from kvbench.util.table import table


@dataclass(frozen=True)
class Row:
    """A row of the table: the roofline's prediction for one model, method, batch size, prompt length and GPU.

    Args:
        model: name of the model.
        gpu: name of the GPU.
        method: setting of the method.
        batch: number of sequences.
        context: number of prompt tokens per sequence.
        new_tokens: number of tokens generated per sequence.
        ttft_s: lower bound on the seconds of the prefill of the whole batch.
        tpot_s: lower bound on the seconds of a decode step of the whole batch. With speculation, the seconds of a round
            divided by the mean number of tokens that it yields.
        expected_tpot_s: `tpot_s` plus the time that kernels take in addition to reading their bytes.
        over_fp16: speedup of decoding over fp16: the TPOT of fp16 divided by `tpot_s`.
        tokens_per_s: tokens per second of all sequences together, prefill included if `new_tokens` is more than 1.
        bound: ``memory`` or ``compute``, whichever limits the slower part of a decode step (linear layers, attention).
        prefill_bound: the same for the prefill.
        kv_share: fraction of a decode step's time that attention takes.
        weight_bytes: bytes of the weights, including the 4-bit copies for a draft.
        kv_bytes: bytes of keys and values of the whole batch at the end of the generation.
        kv_bytes_per_step: bytes of keys and values that the first decode step reads.
        kv_of_fp16: `kv_bytes` divided by the bytes that the keys and values would take in fp16.
        decode_peak_bytes: peak memory of decoding.
        prefill_peak_bytes: peak memory of the prefill.
        fits: True if the batch fits into the GPU's memory.
        max_batch: largest number of sequences that fits.
        draft_s: seconds of one drafted token; None without speculation.
        verify_s: seconds of the pass that verifies a round's drafts; None without speculation.
    """

    model: str
    gpu: str
    method: str
    batch: int
    context: int
    new_tokens: int
    ttft_s: float
    tpot_s: float
    expected_tpot_s: float
    over_fp16: float
    tokens_per_s: float
    bound: str
    prefill_bound: str
    kv_share: float
    weight_bytes: int
    kv_bytes: int
    kv_bytes_per_step: int
    kv_of_fp16: float
    decode_peak_bytes: int
    prefill_peak_bytes: int
    fits: bool
    max_batch: int
    draft_s: float | None = None
    verify_s: float | None = None


def add_parser(commands: Any) -> None:
    """Add the subcommand ``predict`` with its options to the bench's command line.

    Args:
        commands: object that argparse's ``add_subparsers`` returned, to which the subcommand is added.
    """
    add = commands.add_parser(
        "predict",
        help="predict TTFT, TPOT, memory and the largest batch with a roofline; does not need a GPU",
        description=__doc__,
    ).add_argument
    add(
        "--model",
        nargs="+",
        default=["llama2-7b"],
        help="models: presets, OWNER/NAME of the hub, folders with config.json, or YAML files of models",
    )
    add(
        "--methods",
        nargs="+",
        default=["fp16", "kivi:int4", "kivi:int2"],
        metavar="METHOD[:QUANTIZER][:KEY=VALUE]",
        help="settings, such as fp16 kivi:int4:residual=64 cocktail:split=10/30/60 quantspec:draft_weights=int4",
    )
    add(
        "--contexts",
        nargs="+",
        type=tokens,
        default=["4k", "32k", "128k"],
        metavar="N",
        help="prompt lengths in tokens",
    )
    add("--batches", nargs="+", type=number, default=[1], metavar="B")
    add("--gpu", nargs="+", default=["h200"], help=f"GPUs: {', '.join(GPUS)}")
    add(
        "--bandwidth-TBs",
        type=positive,
        help="describe another GPU: its achievable bandwidth in TB/s (requires --tflops and --memory-gb)",
    )
    add("--tflops", type=positive, help="describe another GPU: bf16 TFLOP/s that a large matmul achieves")
    add("--memory-gb", type=positive, help="memory in GiB of the described GPU, or of the GPUs of --gpu")
    add(
        "--new-tokens",
        type=number,
        default=1,
        help="tokens to generate; TPOT is that of the middle token, and tok/s includes the prefill",
    )
    add(
        "--weight-bits",
        type=int,
        choices=[4, 8, 16],
        default=16,
        help="bits of the weights of linear layers and lm_head",
    )
    add(
        "--weight-group",
        type=number,
        default=128,
        help="number of weights that share a scale and a zero point (below 16 bits)",
    )
    add(
        "--head-bits",
        type=int,
        choices=[16],
        help="16: lm_head has 16 bits, as with model.weights=int4 (default: --weight-bits, as with int4_all)",
    )
    add("--acceptance", type=share, default=0.9, help="probability that a drafted token is accepted (quantspec)")
    add(
        "--overhead-us",
        type=duration,
        default=0.0,
        help="microseconds per layer in addition to the time for its bytes and FLOPs (0: pure roofline)",
    )
    add("--prefill-chunk", type=tokens, metavar="N", help="prompt tokens per forward pass (default: all)")
    add(
        "--prefill-rows",
        type=choices.rows,
        default="auto",
        metavar="N",
        help="prompts per forward pass: auto (up to 16k tokens in total), all, or a number",
    )
    add(
        "--mlp-chunk",
        type=mlp_chunk,
        default="auto",
        metavar="N",
        help="tokens that feed-forward layers process at a time, like runtime.mlp_chunk: auto, none, or a number",
    )
    add("--out", type=Path, help="folder for a JSON file with all figures (default: none)")
    add("--name", help="name of the JSON file (default: predict)")


def mlp_chunk(text: str) -> int | Literal["auto"] | None:
    """Parse the number of tokens that feed-forward layers process at a time (an argparse ``type``).

    Returns:
        ``"auto"`` for ``auto``, None (all tokens) for ``none`` or ``null``, otherwise the number.
    """
    if text == "auto":
        return "auto"
    return None if text in ("none", "null") else tokens(text)


def gpus_of(args: argparse.Namespace) -> list[Gpu]:
    """Return the GPUs named by ``--gpu``, or the GPU described by ``--bandwidth-TBs``, ``--tflops``, ``--memory-gb``.

    Raises:
        ConfigError: a GPU is unknown, or one of the options that describe a GPU is missing.
    """
    own = args.bandwidth_TBs, args.tflops
    if all(own):
        if args.memory_gb is None:
            raise ConfigError(
                "--memory-gb", None, "is required with --bandwidth-TBs and --tflops", hint="--memory-gb 80"
            )
        return [own_gpu(args.bandwidth_TBs, args.tflops, args.memory_gb)]
    if any(own):
        missing = "--tflops" if args.bandwidth_TBs else "--bandwidth-TBs"
        raise ConfigError(
            missing,
            None,
            "is missing: the description of a GPU needs both --bandwidth-TBs and --tflops",
            hint=f"{missing} 2.0",
        )
    gpus = [gpu_named(name) for name in args.gpu]
    return [replace(gpu, memory_gib=args.memory_gb) for gpu in gpus] if args.memory_gb else gpus


@dataclass(frozen=True)
class Case:
    """One model, method, batch size, prompt length and GPU, whose times and memory are to be predicted.

    Args:
        shape: dimensions of the model.
        method: method that stores the keys and values.
        batch: number of sequences.
        context: number of prompt tokens per sequence.
        gpu: the GPU.
        args: the options of the command line.
    """

    shape: Shape
    method: Method
    batch: int
    context: int
    gpu: Gpu
    args: argparse.Namespace

    def kv(self, view: View, at: int) -> KVBytes:
        """Return the bytes of the keys and values of one sequence in all layers.

        Args:
            view: which bytes to count. ``all``: everything that the cache stores. ``target``: the same without a
                draft's own cache. ``draft``: what a drafted token reads.
            at: number of tokens of the sequence.
        """
        s = self.shape
        return kv_bytes(
            self.method,
            at,
            layers=s.layers,
            query_heads=s.query_heads,
            heads=s.heads,
            channels=s.channels,
            prompt=self.context,
            view=view,
            windows=s.windows,
        )

    @property
    def last(self) -> int:
        """Number of cached tokens per sequence at the end of the generation."""
        return self.context + self.args.new_tokens - 1

    def step(self, view: View, weights: int, q_len: int = 1) -> Prediction:
        """Predict the time and the memory of a decode step.

        The time is predicted for the length of the cache halfway through the generation, and the memory for its length
        at the end of the generation.

        Args:
            view: which part of the cache the step reads: ``all``, ``target`` or ``draft`` (:meth:`kv`).
            weights: bytes of the weights that the step uses.
            q_len: new tokens per sequence.
        """
        middle = self.context + (self.args.new_tokens - 1) // 2
        read = self.kv(view, middle)
        # a cache with nothing packed may have evicted tokens; any other holds all that a layer's window shows
        seen = (2 * self.shape.kv_bytes(middle, 1) if read.codes else read.window) / self.shape.kv_bytes(1)
        return predict(
            self.shape,
            self.batch * read.total,
            weights,
            self.batch,
            self.context,
            self.gpu,
            kv_stored_bytes=self.batch * self.kv("all", self.last).total,
            attended=seen,
            q_len=q_len,
            overhead_s_per_layer=self.args.overhead_us * 1e-6,
            **self.parts(),
        )

    def parts(self) -> dict[str, Any]:
        """Return the options that split the prefill, as keyword arguments of ``roofline.predict``."""
        return {key: getattr(self.args, key) for key in ("prefill_chunk", "prefill_rows", "mlp_chunk")}

    def row(self, model: str, label: str, fp16_s: float | None) -> Row:
        """Predict times and memory of this case, and return them as a row of the table.

        Args:
            model: name of the model in the table.
            label: name of the method in the table.
            fp16_s: TPOT of fp16 at the same point; None if this is the fp16 row.
        """
        args, shape = self.args, self.shape
        group = args.weight_group if args.weight_bits < 16 else None
        weights = shape.weight_bytes(args.weight_bits, group, args.head_bits)
        plan, extra, draft_s, verify_s = self.method.speculation, 0, None, None
        if plan is None:
            plain = self.step("all", weights)
            tpot, expected = plain.tpot_s, plain.expected_tpot_s
        else:
            light, extra = draft_weights(shape, weights, plan.weights)
            draft, rounds = self.step("draft", light), []
            for gamma in plan.choices:  # auto: the fastest of them
                checked, yields = self.step("target", weights, gamma + 1), accepted(args.acceptance, gamma)
                rounds.append(((gamma * draft.tpot_s + checked.tpot_s) / yields, gamma, checked, yields))
            tpot, gamma, plain, yields = min(rounds, key=lambda round_: round_[:2])
            verify_s, draft_s = plain.tpot_s, draft.tpot_s
            expected = (gamma * draft.expected_tpot_s + plain.expected_tpot_s) / yields
        stored = self.kv("all", self.last).total
        most = max_batch(shape, stored, weights + extra, self.context, self.gpu, **self.parts())
        whole = replace(plain, tpot_s=tpot)
        return Row(
            model=model,
            gpu=self.gpu.name,
            method=label,
            batch=self.batch,
            context=self.context,
            new_tokens=args.new_tokens,
            ttft_s=plain.ttft_s,
            tpot_s=tpot,
            expected_tpot_s=expected,
            over_fp16=1.0 if fp16_s is None else fp16_s / tpot,
            tokens_per_s=whole.throughput(self.batch, args.new_tokens) if args.new_tokens > 1 else self.batch / tpot,
            bound=plain.bound,
            prefill_bound=plain.prefill_bound,
            kv_share=plain.kv_share,
            weight_bytes=weights + extra,
            kv_bytes=self.batch * stored,
            kv_bytes_per_step=self.batch * self.kv("all" if plan is None else "target", self.context).total,
            kv_of_fp16=stored / shape.kv_bytes(self.last),
            decode_peak_bytes=plain.decode_peak_bytes + extra,
            prefill_peak_bytes=plain.prefill_peak_bytes + extra,
            fits=self.batch <= most,
            max_batch=most,
            draft_s=draft_s,
            verify_s=verify_s,
        )


def draft_weights(shape: Shape, weights: int, which: str) -> tuple[int, int]:
    """Return the size in bytes of the weights that drafting uses, and of those among them that are 4-bit copies.

    Drafting uses the target's own weights, except where 4-bit copies of them are made, which take additional memory.

    Args:
        shape: dimensions of the model.
        weights: bytes of the target's weights.
        which: weights with a 4-bit copy: none (``same``), those of the feed-forward layers (``int4``), or those of all
            linear layers and lm_head (``int4_all``; a lm_head that shares the weights of the embedding table too, and
            drafting then reads the copy instead of the table). Every group of 128 such weights takes another 4 bytes
            for its scale and zero point (:mod:`kvbench.linear.int4`).
    """
    if which == "same":
        return weights, 0
    exact = weights - 2 * (shape.other_elements + shape.head_elements)  # of all linear layers
    if which == "int4_all":
        light = _packed(shape.linear_elements + shape.head_elements)
        return weights - exact - (2 * shape.head_elements if shape.tied else 0) + light, light
    part = 3 * shape.hidden * shape.intermediate * shape.layers
    linear = shape.linear_elements + (0 if shape.tied else shape.head_elements)
    light = _packed(part)
    return weights - round(exact * part / linear) + light, light


def _packed(elements: int) -> int:
    """Return the bytes of weights in 4 bits in groups of 128."""
    return elements // 2 + 4 * elements // 128


def byte_rows(args: argparse.Namespace) -> list[predict_bytes.BytesRow]:
    """Predict the bytes of the caches of models that the roofline does not describe (:mod:`.predict_bytes`).

    Raises:
        ConfigError: a model or method is unknown, or a method cannot run with a model.
    """
    lines: list[predict_bytes.BytesRow] = []
    for name in args.model:
        numbers = numbers_of(name)
        if predict_bytes.outside_the_roofline(numbers):
            methods = {text: method_of(text) for text in args.methods}
            lines += predict_bytes.rows(name, numbers, methods, args.contexts, args.batches, args.new_tokens)
    return lines


def rows(args: argparse.Namespace) -> list[Row]:
    """Predict times and memory for each combination of model, GPU, context, batch and method, and return the rows.

    Models that the roofline does not describe are left out.

    Raises:
        ConfigError: a model, GPU or method is unknown, or a method cannot run with a model.
    """
    gpus, methods = gpus_of(args), {text: method_of(text) for text in args.methods}
    configs = {name: numbers_of(name) for name in args.model}
    shapes = {
        name: Shape.of(numbers) for name, numbers in configs.items() if not predict_bytes.outside_the_roofline(numbers)
    }
    for method in methods.values():
        for shape in shapes.values():
            method.check(shape.channels)
    rows, exact = [], load_method("fp16")
    for name, shape in shapes.items():
        for gpu in gpus:
            for context in args.contexts:
                for batch in args.batches:
                    base = Case(shape, exact, batch, context, gpu, args).row(name, "fp16", None)
                    for text, method in methods.items():
                        rows.append(Case(shape, method, batch, context, gpu, args).row(name, text, base.tpot_s))
    return rows


def run(args: argparse.Namespace) -> int:
    """Predict times and memory, print them as a table and, with ``--out``, also write them to a JSON file.

    Returns:
        The exit status: 0, or 2 if an error message was printed instead.
    """
    try:
        if args.out is not None:
            check_writable(str(args.out), "--out")
        lines, only_bytes = rows(args), byte_rows(args)
        print("\n\n".join([shown(lines, args)] * bool(lines) + [predict_bytes.shown(only_bytes)] * bool(only_bytes)))
        if args.out is not None:
            path = args.out / f"{args.name or 'predict'}.json"
            gpus = {gpu.name: {**asdict(gpu), "read": gpu.read, "matmul": gpu.matmul} for gpu in gpus_of(args)}
            content = {"argv": args.argv, "gpus": gpus, "rows": [asdict(row) for row in lines]}
            content |= {"bytes": [asdict(row) for row in only_bytes]} if only_bytes else {}
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(path, (json.dumps(content, indent=1) + "\n").encode())
            print(f"\n{path}")
    except (KvbenchError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def shown(rows: list[Row], args: argparse.Namespace) -> str:
    """Format predictions as a table, followed by notes on its columns.

    Args:
        rows: the predictions, one per line of the table.
        args: options of the command line, some of which the notes mention.
    """
    head = [
        "model",
        "gpu",
        "method",
        "B",
        "prompt",
        "TTFT s",
        "TPOT ms",
        "expected",
        "x fp16",
        "tok/s",
        "bound",
        "KV time %",
    ]
    head += ["KV GiB", "KV %", "prefill GiB", "decode GiB", "fits", "max B"]
    lines = []
    for row in rows:
        memory = (row.kv_bytes, row.prefill_peak_bytes, row.decode_peak_bytes)
        kv, prefill, decode = (size / 2**30 for size in memory)
        time = (row.ttft_s, 1e3 * row.tpot_s, 1e3 * row.expected_tpot_s, row.over_fp16, row.tokens_per_s)
        name = (row.model, row.gpu, row.method, row.batch, row.context)
        sizes = (kv, 100 * row.kv_of_fp16, prefill, decode, "yes" if row.fits else "no", row.max_batch)
        lines.append((*name, *time, row.bound, 100 * row.kv_share, *sizes))
    groups = ", all prompts read together" if args.prefill_rows is None else ", prompts read in groups"
    notes = [
        "The times are lower bounds from a roofline. expected: this bound plus the time that the kernels of a "
        "compiled step take in addition to"
        f" their bytes, {KERNELS} per layer."
    ]
    notes += [
        f"KV %: bytes of keys and values as a share of fp16's; max B: largest number of sequences that fit{groups}."
    ]
    if any(row.draft_s is not None for row in rows):
        notes.append(
            "Speculation: TPOT = (gamma * draft + verification) / E with an acceptance of "
            f"{args.acceptance:g} for each token; KV time % and bound refer to the verification."
        )
    return "\n".join([table(head, lines, head.index("TTFT s")), "", *notes])
