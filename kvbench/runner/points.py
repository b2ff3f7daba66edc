"""Points of time and memory into rows: ``dataset=efficiency`` through a session's model and method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.measure.meter import How, Meter
from kvbench.measure.point_figures import per_sequence
from kvbench.results.samples import MEASURED, Row
from kvbench.runner.scoring import scored
from kvbench.tasks.base import Sample

if TYPE_CHECKING:
    from kvbench.runner.session import Session


def point_rows(session: Session, sample: Sample) -> list[Row]:
    """The row of one point of :class:`kvbench.tasks.efficiency.Efficiency`; the session keeps its meter."""
    point = sample.meta["point"]
    if session.meter is None:
        decoding, runtime = session.config.decoding, session.config.runtime
        how = How(
            new_tokens=decoding.max_new_tokens or sample.max_new_tokens,
            **{key: point[key] for key in ("repeats", "warm_up", "seed")},
            # a capture is worth its time here however short the answer: it is in no figure but capture_s
            graphs="always" if runtime.graphs == "auto" else runtime.graphs,
            **{key: getattr(runtime, key) for key in ("compile", "prefill_chunk", "prefill_rows")},
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            options=session.options,
        )
        session.meter = Meter(session.loaded.model, session.loaded.tokenizer, session.config.method, how)
    figures = session.meter.point(point["prompt"], point["batch"])
    good = figures["status"] == "ok"
    if point["prompt"] + figures["new_tokens"] > session.loaded.max_length:
        figures["beyond"] = session.loaded.max_length  # with random weights alone (Efficiency.fits)
    note = figures.pop("note", None)
    row = {
        "id": sample.id,
        "task": sample.task,
        "length": sample.length,
        "prompt_tokens": point["prompt"],
        "truncated": 0,
        "prediction": "",
        "tokens": [],
        "finish": "length" if good else "oom",
        "status": figures["status"],
        **scored(session.task, sample, ""),
        "nll": None,
        "kv_bytes": per_sequence(figures) if good else None,
        MEASURED: {
            "device": session.device_name,
            "dtype": session.dtype,
            "warm_up": False,
            "batch_rows": point["batch"],
            "ttft_s": None,  # a mean over points would say nothing: each has its own figures
            "step_s": [],
            "decoded": 0,
            "peak_bytes": figures.get("peak"),
            "attention": {"reads_packed": figures["reads_packed"], "path": figures["path"]} if good else None,
            "point": figures,
        },
    }
    return [{**row, "method": note} if note else row]
