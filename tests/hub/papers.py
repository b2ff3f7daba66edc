"""The papers' repositories as the stand-in serves them: tiny's first layers under their ids, and made-up records.

The layers are cut into heads as wide as those of the papers' models, so that every group size fits. Layouts are those
of the hub: an archive, parquet shards, gzipped and plain JSON lines. All texts are generated here.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import yaml
from pyarrow import parquet

from kvbench.models.spec import local_folder
from kvbench.tasks.longbench import EXTENDED, longbench_templates
from kvbench.util.confdir import group_options
from tests.hub.standin import Hub

#: layers of the models that are served, of tiny's eight: no test looks at answers
LAYERS = 2
#: input channels that share a scale in checkpoints in 4 bits
GROUP = 64
_WORDS = "the old river house stood near a quiet road where people walked home late with their bread".split()

Records = Sequence[Mapping[str, Any]]


def text(seed: object, words: int) -> str:
    """Return `words` words, the same ones for the same seed."""
    draw = random.Random(str(seed))
    return " ".join(draw.choice(_WORDS) for _ in range(words))


def lines(records: Records) -> bytes:
    """Return records as JSON lines."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def table(records: Records) -> bytes:
    """Return records as a parquet file of small row groups."""
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(records)), buffer, row_group_size=2)
    return buffer.getvalue()


def longbench() -> dict[str, bytes]:
    """Return the official archive with two records of every task."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        for task in (*longbench_templates(), *EXTENDED):
            base = task.removesuffix("_e")
            classes = ["place", "person"] if base in ("trec", "lsht") else None
            answer = classes[0] if classes else "Paragraph 1" if base == "passage_retrieval_en" else "1"
            answer = "段落1" if base == "passage_retrieval_zh" else answer
            fields = {"answers": [answer], "all_classes": classes, "length": 60, "dataset": base, "language": "en"}
            records = [
                {"input": text((task, n), 6), "context": text((n, task), 60), **fields, "_id": f"{n:032x}"}
                for n in range(2)
            ]
            members.writestr(f"data/{task}.jsonl", lines(records))
    return {"README.md": b"# LongBench", "data.zip": archive.getvalue()}


def gsm8k() -> dict[str, bytes]:
    """Return both splits; LogQuant's script shows training records up to number 94, and its paper wants 600 tokens."""
    files = {"README.md": b"# GSM8K"}
    for split, count in (("train", 96), ("test", 3)):
        records = [
            {
                "question": f"{text(n, 90)} What is {n} plus 1?",
                "answer": f"It is {n}+1=<<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}",
            }
            for n in range(count)
        ]
        files[f"main/{split}-00000-of-00001.parquet"] = table(records)
    return files


def openbookqa() -> dict[str, bytes]:
    """Return both splits with the nested choices of the hub's copy."""
    choices = {"text": ["sun", "moon", "rain", "snow"], "label": ["A", "B", "C", "D"]}
    records = [
        {"id": str(n), "question_stem": text(n, 5), "choices": choices, "answerKey": "ABCD"[n % 4]} for n in range(6)
    ]
    return {f"main/{split}-00000-of-00001.parquet": table(records) for split in ("train", "test")}


def texts(count: int, words: int) -> list[dict[str, str]]:
    """Return records with a text and nothing else that is read."""
    return [{"text": text(n, words), "url": f"http://example.org/{n}"} for n in range(count)]


def squad() -> dict[str, bytes]:
    """Return four articles of four paragraphs with a question each, in the layout of the hub's copy."""
    records = [
        {
            "id": f"{n}",
            "title": f"Article {n // 4}",
            "context": f"{text(n, 70)}.",
            "question": f"What is {n}?",
            "answers": {"text": [f"it is {n}"] * 2, "answer_start": [0, 0]},
        }
        for n in range(16)
    ]
    return {"squad_v2/validation-00000-of-00001.parquet": table(records), "README.md": _configured("squad_v2")}


def hotpotqa() -> dict[str, bytes]:
    """Return four questions with ten documents each, in the layout of the hub's copy."""
    records = [
        {
            "id": f"{n}",
            "question": f"Is it {n}?",
            "answer": "yes",
            "context": {"title": [f"T{n}{i}" for i in range(10)], "sentences": [[text((n, i), 9)] for i in range(10)]},
        }
        for n in range(4)
    ]
    return {"distractor/validation-00000-of-00001.parquet": table(records), "README.md": _configured("distractor")}


def _configured(name: str) -> bytes:
    """Return a README that defines one configuration with one split, in a folder of its name."""
    files = [{"split": "validation", "path": f"{name}/validation-*"}]
    return f"---\n{yaml.safe_dump({'configs': [{'config_name': name, 'data_files': files}]})}---\n".encode()


#: modules of the data sets whose files are not here
LONG = ("kvbench.tasks.long_answers.", "kvbench.tasks.mrcr.")


def files_of(hub_id: str) -> dict[str, bytes]:
    """Return the files of a repository of a data set."""
    if hub_id == "emozilla/pg19-test":  # two shards, with the digest that early uploads have in their names; the first
        # 8,000 tokens of a book are left out
        shards = {f"data/test-0000{n}-of-00002-29a571947c0b5ccc.parquet": table(texts(3, 9000)) for n in range(2)}
        return {"README.md": b"# PG-19", **shards}
    if hub_id == "allenai/multi_lexsum":
        cases = [{"id": str(n), "case_documents": ["a", "b"], "summary/short": text(n, 9)} for n in range(5)]
        documents = {name: {"doc_text": text(name, 2000)} for name in ("a", "b")}
        folder = "releases/v20220616"
        return {f"{folder}/test.json": lines(cases), f"{folder}/sources.json": json.dumps(documents).encode()}
    if hub_id == "xinrongzhang2022/InfiniteBench":
        books = [{"id": n, "context": text(n, 3000), "answer": [text(n, 9)], "options": []} for n in range(5)]
        return {"longbook_sum_eng.jsonl": lines(books)}
    return {
        "zai-org/LongBench": longbench,
        "openai/gsm8k": gsm8k,
        "baber/paul_graham_essays": lambda: {
            "essays.jsonl": lines([{"text": ". ".join(text((n, m), 9) for m in range(50)) + "."} for n in range(3)])
        },
        "rajpurkar/squad_v2": squad,
        "hotpotqa/hotpot_qa": hotpotqa,
        "allenai/openbookqa": openbookqa,
        "Salesforce/wikitext": lambda: {
            "wikitext-2-raw-v1/test-00000-of-00001.parquet": table([{"text": text(n, 40) + "\n"} for n in range(60)])
        },
        "allenai/c4": lambda: {"en/c4-validation.00000-of-00008.json.gz": gzip.compress(lines(texts(4, 900)))},
    }[hub_id]()


def datasets() -> dict[str, dict[str, Any]]:
    """Return the sources on the hub of the choices of ``conf/dataset``, by the choice's name (RULER's: with a key).

    Left out are sets of long answers, which are not the papers'; tests/tasks/test_long_answers.py has them.
    """
    groups = {name: yaml.safe_load(path.read_text(encoding="utf-8")) for name, path in group_options("dataset").items()}
    sources = {name: group["source"] for name, group in groups.items() if (group.get("source") or {}).get("hub_id")}
    sources = {name: one for name, one in sources.items() if not groups[name]["_target_"].startswith(LONG)}
    keys = ("essays", "squad_source", "hotpotqa_source")
    return {**sources, **{f"ruler {key}": groups["ruler"][key] for key in keys}}


def add_datasets(hub: Hub) -> None:
    """Add every data set of ``conf/dataset``, at the commit that its configuration names."""
    for source in datasets().values():
        name = f"datasets/{source['hub_id']}"
        if name not in hub.repositories:
            hub.add(name, files_of(source["hub_id"]))
            if source["revision"]:
                hub.pin(name, source["revision"])


def add_model(hub: Hub, preset: str, *, refuses: int | None = None) -> str:
    """Add tiny's first layers as two shards with a chat template, under a preset's id and commit; return the id.

    The weights of a preset whose name ends in ``-awq`` are in the format AWQ.
    """
    group = yaml.safe_load(group_options("model")[preset].read_text(encoding="utf-8"))
    shape = group["architecture"]
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    hub.add(group["hub_id"], _tiny(head_dim, preset.endswith("-awq")), refuses=refuses)
    if group["revision"]:
        hub.pin(group["hub_id"], group["revision"])
    return str(group["hub_id"])


@cache
def _tiny(head_dim: int, packed: bool = False) -> dict[str, bytes]:
    """Return the files of a checkpoint with tiny's first layers, and one KV head of the first `head_dim` channels.

    Args:
        head_dim: number of channels per head.
        packed: True for weights in 4 bits, in the format AWQ.
    """
    from safetensors.torch import load_file, save

    folder = local_folder("kvbench:tiny")
    assert folder is not None
    files = {name: (folder / name).read_bytes() for name in ("generation_config.json", "tokenizer.json")}
    config = json.loads((folder / "config.json").read_text())
    heads = {"num_attention_heads": config["hidden_size"] // head_dim, "num_key_value_heads": 1, "head_dim": head_dim}
    form = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    config |= {**heads, "num_hidden_layers": LAYERS, **({"quantization_config": form} if packed else {})}
    files["config.json"] = json.dumps(config).encode()
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    files["tokenizer_config.json"] = json.dumps({**tokenizer, "chat_template": template}).encode()
    tensors, index = load_file(folder / "model.safetensors"), {}
    for name in tensors:
        if "k_proj" in name or "v_proj" in name:
            tensors[name] = tensors[name][:head_dim].contiguous()
    for name in [name for name in tensors if packed and name.endswith("_proj.weight")]:
        tensors |= _awq(name.removesuffix(".weight"), tensors.pop(name))
    names = sorted(name for name in tensors if ".layers." not in name or int(name.split(".layers.")[1][0]) < LAYERS)
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        files[shard] = save({name: tensors[name] for name in part}, metadata={"format": "pt"})
        index |= dict.fromkeys(part, shard)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": index}).encode()
    return {**files, "README.md": b"# a model", "consolidated.safetensors": b"another copy of the weights"}


def _awq(layer: str, weight: Any) -> dict[str, Any]:
    """Return the tensors of a layer whose weights ``[out, in]`` are rounded to 4 bits, in the format AWQ."""
    import torch

    def words(codes: Any) -> Any:
        shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28])  # nibbles of eight consecutive output channels
        packed = (codes.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
        return torch.where(packed >= 2**31, packed - 2**32, packed).int()

    grouped = weight.float().T.unflatten(0, (-1, GROUP))  # groups, channels of a group, output channels
    low, high = grouped.amin(1).clamp(max=0), grouped.amax(1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (grouped / scales[:, None] + zeros[:, None]).round().clamp(0, 15).flatten(0, 1)
    return {f"{layer}.qweight": words(codes), f"{layer}.qzeros": words(zeros), f"{layer}.scales": scales}


def add_encoders(hub: Hub, folder: Path) -> None:
    """Add a BERT of a few hundred parameters as Contriever and as LLM-Embedder, plain checkpoints without pooling."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(_WORDS))]
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    folder.joinpath("vocab.txt").write_text("\n".join(words))
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    for name in ("facebook/contriever", "BAAI/llm-embedder"):
        hub.add(name, files)
