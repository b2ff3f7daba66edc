/* The columns of the table of runs. */

/* Columns of what a run is judged by: the first of them with values decides the order of the table. */
const QUALITIES = ["score", "ppl", "kl"];
const NARROW = matchMedia("(max-width: 560px)");

/* Columns for the present data: fixed ones, one per setting that varies, and one per task. */
function tableColumns() {
  const text = (key, title, value, more = {}) => ({ key, title, kind: "text", value, show: (run) => plain(value(run)), ...more });
  const number = (key, title, value, show, more = {}) => ({ key, title, kind: "number", unit: show === bytes ? "bytes" : show === seconds ? "time" : "plain", value, show: (run) => show(value(run), run), ...more });
  const several = (read) => new Set(report.runs.map(read)).size > 1;
  const any = (read) => report.runs.some((run) => read(run) !== undefined);
  const columns = [
    text("name", "run", (run) => run.name, { fixed: true, width: 15 }),
    text("model", "model", (run) => run.model, { off: !several((run) => run.model), width: 8 }),
    text("data", "data", (run) => run.data, { off: !several((run) => run.data), width: 10 }),
    number("score", "score", score, (value, run) => (NARROW.matches ? `${fixed(value)} ${plusMinus(run.score?.[1])}` : fixed(value)), { hint: "mean over tasks", off: !any(score), width: NARROW.matches ? 7 : 5 }),
    number("stderr", "± error", (run) => run.score?.[1], (value) => plusMinus(value) || NONE, { hint: "distance to the farther end of the score's 95 % interval", off: !any(score) || NARROW.matches, width: 5 }),
    number("diff", "Δ fp16", (run) => run.score?.[3], (value, run) => `${signed(value)} ${plusMinus(run.score?.[4])}`, { hint: "paired difference from fp16 on the same samples", off: !any(score), width: 8 }),
    number("ppl", "perplexity", perplexity, (value) => fixed(value), { off: !any(perplexity), hint: "lower is better", width: 6 }),
    number("kl", "KL", divergence, small, { off: !any(divergence), hint: "mean KL divergence from fp16's predictions, in nats per token; lower is better", width: 6 }),
    number("kl50", "KL median", (run) => run.kl?.[3], small, { off: true, hint: "median of the KL divergence over tokens", width: 7 }),
    number("kl999", "KL 99.9 %", (run) => run.kl?.[1], small, { off: !any(divergence), hint: "99.9th percentile of the KL divergence over tokens", width: 7 }),
    number("same", "same top", sameTop, (value) => percent(value), { off: !any(divergence), hint: "share of tokens whose most probable next token is that of fp16", width: 6 }),
    number("flips", "flips", flipped, (value) => percent(value, 1), { off: !any(flipped), hint: "share of answers that are right with fp16 and wrong here, or the opposite", width: 5 }),
    number("n", "n", (run) => run.score?.[2] ?? run.done, plain, { hint: "samples in the score", width: 4 }),
    number("kv", "KV bytes", (run) => run.kv, bytes, { hint: "keys and values of one sequence at the end of its answer", width: 6 }),
    number("ratio", "ratio", (run) => run.ratio, times, { hint: "bytes of fp16 divided by those of this run", width: 5 }),
    number("peak", "peak", (run) => (run.peak ? Math.max(...run.peak.filter((v) => v !== null)) : undefined), bytes, { hint: "largest memory peak of prefill and decode", off: true, width: 6 }),
    number("tpot", "TPOT", (run) => run.tpot, seconds, { hint: "median time per output token", width: 6 }),
    number("ttft", "TTFT", (run) => run.ttft, seconds, { hint: "median time to the first token", width: 6 }),
    number("rate", "tokens/s", (run) => run.rate, plain, { off: true, width: 6 }),
    text("status", "status", (run) => run.status, { show: statusText, width: 6 }),
    text("older", "older code", (run) => run.older, { off: !any((run) => run.older), hint: "parts of the code that have changed since the samples were made", width: 9 }),
  ];
  for (const column of report.settings) {
    const numeric = column.values.every((value) => value === null || typeof value === "number");
    const read = (run) => run.settings[column.key];
    const title = column.key.replace(/^(method|runtime)\./, "");
    const more = { hint: column.key, off: report.settings.indexOf(column) >= 8, width: 7 };
    columns.push(numeric ? number(column.key, title, read, plain, more) : text(column.key, title, read, more));
  }
  columns.push(
    text("device", "device", (run) => run.device, { off: !several((run) => run.device), width: 8 }),
    text("path", "attention", (run) => run.path, { off: true, hint: "the path that read the cache", width: 8 }),
    text("code", "code", (run) => run.code, { off: true, hint: "digest of the code that made the samples", width: 7 }),
    text("id", "run id", (run) => run.id, { off: true, width: 12 }),
  );
  for (const key of report.taskKeys.slice(0, 60)) {
    const task = (run) => (run.tasks || []).find((entry) => entry[0] === key);
    const read = (run) => task(run)?.[6] ?? task(run)?.[1] ?? task(run)?.[8] ?? undefined;
    const show = (value, run) => task(run)?.[8] !== undefined ? `KL ${small(value)}` : `${fixed(value)} ${plusMinus(task(run)?.[6] === undefined ? task(run)?.[2] : task(run)?.[7])}`;
    columns.push(number(`task ${key}`, key, read, show, { off: true, hint: `score of ${key}`, width: 9 }));
  }
  return NARROW.matches ? columns.sort((a, b) => placeOf(a) - placeOf(b)) : columns;
}

/* Where the screen is narrow: quality, name, other figures, and then what the runs have in common. */
function placeOf({ key }) {
  if (QUALITIES.includes(key)) return 0;
  return { name: 1, model: 3, data: 3 }[key] || 2;
}

/* The columns that the reader sees; one with a filter is always seen. */
function visibleColumns(columns) {
  return columns.filter((column) => column.fixed || choice.filters[column.key] || (choice.columns.get(column.key) ?? !column.off));
}
