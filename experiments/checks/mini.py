"""Figures of results/mini, in its own page, in README.md, docs/methods.md and docs/faq.md."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks.rules import MIB, Block, Rule, Text, spread
from experiments.stored import ROOT, Row, grid, load_result_json, one

PAGE, FAQ, METHODS = "results/mini/README.md", "docs/faq.md", "docs/methods.md"
SCORES, PAIRS = "results/mini/scores.json", "results/mini/pairs.json"
ALL, SEARCH, CHUNKS = "results/mini/all/scores.json", "results/mini/search/pairs.json", "results/mini/chunks.md"
#: columns of docs/methods.md's table, and the settings in the file
COLUMNS = {
    "kivi 4": "kivi 4",
    "logquant 4": "logquant 4",
    "kivi 2": "kivi 2",
    "logquant 2": "logquant 2",
    "kivi 2, G 64": "kivi 2, G 64",
    "cocktail": "cocktail",
    "kivi 2, keys per token": "kivi 2, key per token",
    "hf_quantized 2 (hqq)": "hf_quantized 2 (hqq)",
    "snapkv": "snapkv, bytes of kivi 2",
    "newest 864 tokens": "kivi evict, bytes of kivi 2",
}


def setting(name: str, file: str = SCORES) -> Row:
    """Return a setting's figures over the tasks that all settings of its grid have finished."""
    return one(load_result_json(file), name=name)


def to_fp16(name: str, file: str = SCORES) -> str:
    """Return a setting's difference to fp16 in points."""
    return spread(setting(name, file)["mean"]["vs_fp16"])


def mib(name: str) -> float:
    """Return a setting's KV bytes in MiB."""
    return float(setting(name)["kv_bytes"]["used"] / MIB)


def compared_pair(first: str, second: str) -> Row:
    """Return a comparison of two settings over the samples that both have done."""
    return one(load_result_json(PAIRS), first=first, second=second)


def versus(first: str, second: str, by: str = "mean") -> str:
    """Return `first` less `second` in points."""
    return spread(compared_pair(first, second)[by])


def pair_with_count(first: str, second: str) -> str:
    """Return the same with the number of samples that both have done."""
    return f"{versus(first, second)} (n = {compared_pair(first, second)['mean']['n']})"


def both(first: str, *seconds: str) -> str:
    """Return two differences with their numbers of samples."""
    counts = ", ".join(str(compared_pair(first, second)["mean"]["n"]) for second in seconds)
    return f"{'; '.join(versus(first, second) for second in seconds)} (n = {counts})"


def sizes(first: str, second: str) -> list[float]:
    """Return the KV bytes of both settings over the samples of the pair, in MiB."""
    return [compared_pair(first, second)["kv_bytes"][side] / MIB for side in ("first", "second")]


def signed(text: str, digits: int = 1) -> str:
    """Return a figure with a spread as a table writes it: a sign, and one digit behind the point."""
    value, error = map(float, text.split(" ± "))
    return f"{value:+.{digits}f} ± {error:.{digits}f}".replace("-", "−")


def mini_rules() -> Iterator[Rule]:
    """Yield the rules."""
    yield from _claims()
    yield from _sentences()
    yield Block(METHODS, _methods(), SCORES, "mini")
    yield Block(PAGE, _chunks(), CHUNKS, "chunks")
    yield Block(PAGE, _search(), SEARCH, "search")


def _claims() -> list[Text]:
    """Return the lines of the table of the papers' claims, whose words are written by hand."""
    kivi, logquant, cocktail, atom = "kivi 2", "logquant 2", "cocktail", "atom 2"
    even, outliers, partial = (logquant, "kivi 2, G 64"), ("kvquant 2, 1% outliers", kivi), "partial_logquant 2"
    per_token, random = "cocktail 15/35/50, per token", "the same, random chunks"
    hqq, quanto, keys = "hf_quantized 2 (hqq)", "hf_quantized 2 (quanto)", "logquant 2, key per token"
    stream, streamed = "hf streaming 2 (hqq)", "hf streaming 2 (quanto)"
    chunks, mean = (cocktail, "cocktail, random chunks"), compared_pair(*even)["mean"]
    (mine, its), (own, larger), (small, large) = sizes(*even), sizes(logquant, kivi), sizes(*outliers)
    (of_mine, of_kivi), (held, atoms) = sizes(cocktail, kivi), sizes(cocktail, atom)
    (mixed, fours), fewer, over_atom = sizes(per_token, "kivi 4"), 100 * (1 - small / large), 100 * (held / atoms - 1)
    evicting = ("kivi evict", "streamingllm", "snapkv", "h2o")
    evicted = [compared_pair(kivi, f"{name}, bytes of kivi 2")["mean"] for name in evicting]
    gained, error = [100 * cell["diff"] for cell in evicted], 100 * max(cell["stderr"] for cell in evicted)
    alone, nibbles = ", ".join(map(to_fp16, ("kivi 4", "logquant 4", "atom 4"))), to_fp16("quantspec (both nibbles)")
    kvquant4 = "kvquant 4, 1% outliers"
    n, of_all = (f"(n = {row['mean']['n']})" for row in (setting("kivi 4"), setting(kvquant4, ALL)))
    pairs = (
        f"beat keys per token (2 bits, same bytes) | {pair_with_count(kivi, 'kivi 2, key per token')} |",
        f"(2 bits; {mine} MiB against KIVI's {its} with groups of 64) | {pair_with_count(*even)}; by",
        f"; by task {versus(*even, by='by_task')} | not shown: {mean['diff'] / mean['stderr']} ",
        f"of 32 ({larger} MiB, {100 * (larger / own - 1)} % more) | {pair_with_count(logquant, kivi)} |",
        f"QuantizedCache (hqq; quanto) | {versus(logquant, hqq)}; {pair_with_count(logquant, quanto)} |",
        f"released code has them | {both(keys, hqq, quanto)} | holds",
        f"the newest, keys per token) | {both(keys, stream, streamed)} |",
        f"PartialLogQuant loses little (LogQuant less Partial) | {pair_with_count(logquant, partial)} |",
        f"beats evicting (same bytes) | {pair_with_count(logquant, 'logquant evict, bytes of logquant 2')} |",
        f"SnapKV, H2O at KIVI's bytes | {', '.join(map(str, gained))} (± {error}) |",
        f"(Cocktail {of_mine} MiB, KIVI {of_kivi}) | {pair_with_count(cocktail, kivi)} |",
        f"at 2 bits ({atoms} MiB) | {pair_with_count(cocktail, atom)} | holds, at {over_atom} % more",
        f"keys per token, {mixed} MiB, KIVI {fours}) | {pair_with_count(per_token, 'kivi 4')} |",
        f"random chunks | {pair_with_count(*chunks)}; 15/35/50: {pair_with_count(per_token, random)} |",
        f"({small} MiB against {large}) | {pair_with_count(*outliers)} | as good, with {fewer} % fewer",
    )
    three_and_all = f"two nibbles) | {alone} {n}; {to_fp16(kvquant4, ALL)} {of_all}; {nibbles} {n} |"
    return [Text(PAGE, f"{SCORES}, {ALL}", three_and_all), *(Text(PAGE, PAIRS, sentence) for sentence in pairs)]


def _sentences() -> list[Text]:
    """Return all others."""
    cells, n = len(load_result_json(SCORES)), load_result_json(SCORES)[0]["mean"]["n"]
    assert len(load_result_json(SCORES)[0]["tasks"]) == 3, "results/mini/README.md says: the three tasks"
    assert max(len(entry["tasks"]) for entry in load_result_json(PAIRS)) == 6, (
        "results/mini/README.md says: up to six tasks"
    )
    stock, wide, snapkv = "hf_quantized 2 (hqq)", "kivi 2, G 64", "snapkv, bytes of kivi 2"
    kivi, error = to_fp16("kivi 2"), 100 * setting("kivi 2")["mean"]["vs_fp16"]["stderr"]
    return [
        Text("README.md", SCORES, f"{n} samples, {cells} settings ([results/mini]"),
        Text(METHODS, SCORES, f"three retrieval tasks at 4,096 tokens, {setting('fp16')['mean']['n']} samples"),
        Text(PAGE, SCORES, f"{cells} settings over the three tasks that all of them finished, n = {n / 3} a task"),
        Text(PAGE, SCORES, f"a task ({n} paired samples)"),
        Text(PAGE, PAIRS, f"(up to six tasks, {max(entry['mean']['n'] for entry in load_result_json(PAIRS))} samples)"),
        Text(PAGE, ALL, f"two tasks, n = {load_result_json(ALL)[0]['mean']['n']}."),
        Text(PAGE, SEARCH, f"random chunks of the same bytes, n = {load_result_json(SEARCH)[0]['mean']['n']}."),
        Text(
            PAGE, SEARCH, f"drawn at random; {load_result_json(SEARCH)[0]['kv_bytes']['first'] / MIB} MiB on both sides"
        ),
        Text(FAQ, SCORES, f"that costs {to_fp16(stock)} points (`method=hf_quantized`, with hqq), where"),
        Text(FAQ, SCORES, f"where KIVI at the same 2 bits costs {kivi}"),
        Text(FAQ, SCORES, f"instead of 32 cost KIVI {to_fp16(wide)} instead of {kivi} points"),
        Text(FAQ, SCORES, f"three retrieval tasks with {setting('kivi 2')['mean']['n']} samples in all"),
        Text(FAQ, SCORES, f"has a standard error of {error} points"),
        Text(FAQ, SCORES, f"of four bits no difference can be seen there ({to_fp16('kivi 4')})"),
        Text(FAQ, SCORES, f"KIVI takes {mib('kivi 2')} MiB on our tasks with groups of 32, and {mib(wide)} MiB with"),
        Text(FAQ, SCORES, f"exact window count too; fp16 takes {mib('fp16')} MiB"),
        Text(FAQ, SCORES, f"as KIVI ({mib(snapkv)} MiB) loses {to_fp16(snapkv)} points"),
    ]


def _methods() -> str:
    """Return docs/methods.md's table of whole methods."""
    body = [
        ["Δ", *(signed(to_fp16(name)) for name in COLUMNS.values())],
        [f"KV bytes, MiB (fp16 {mib('fp16'):.2f})", *(f"{mib(name):.2f}" for name in COLUMNS.values())],
    ]
    return grid(f"| | {' | '.join(COLUMNS)} |", body)


def _chunks() -> str:
    """Return the table of chunk search, a part of what ``python -m experiments.mini.chunks`` writes."""
    lines = (ROOT / CHUNKS).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    figures = {
        (row[0], row[1]): [f"{float(cell.split()[0]):.3f}".removeprefix("0") for cell in row[2:5]] for row in cells[1:]
    }
    body = []
    for task in dict.fromkeys(task for task, _ in figures):
        label = "multi_value (its three places)" if task == "multi_value" else task
        body.append([label, *figures[task, "whole words"], *figures[task, "tokens, decoded"]])
    head = "| task | key | all parts of the key | answer | decoded tokens: key | all parts | answer |"
    return grid(head, body, "-")


def _search() -> str:
    """Return the table of Cocktail's search against random chunks."""
    entry, body = load_result_json(SEARCH)[0], []
    for name, cell in (*reversed(entry["tasks"].items()), ("both", entry["mean"])):
        digits = 1 if name == "both" else 0
        shares = [f"{100 * cell[key]:.{digits}f}" for key in ("first", "second")]
        body.append([name.split("@")[0], *shares, signed(spread(cell)), str(cell["n"])])
    return grid("| task | search | random | Δ | n |", body, "-")
