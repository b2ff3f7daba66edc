/* Everything about one run, in a dialog. */

function showDetails(run) {
  openDialog(run.name,
    facts([
      ["run", run.id], ["model", run.model], ["data", run.data], ["status", statusText(run)], ["older code", run.older],
      ["error", run.error], ["samples", run.problem], ["device", run.device], ["attention", run.path],
      ["score", run.score && `${fixed(score(run))} ${plusMinus(run.score[1])} over ${run.score[2]} samples`],
      ["difference from fp16", run.score?.[3] === undefined ? null : `${signed(run.score[3])} ${plusMinus(run.score[4])}`],
      ["perplexity", run.ppl && `${fixed(run.ppl[0], 4)} ${plusMinus(run.ppl[1], 4)}`],
      ["fidelity to fp16", run.kl && `KL ${small(run.kl[0])}, 99.9 % ${small(run.kl[1])}, same top ${percent(run.kl[2])}`],
      ["KV bytes", run.kv === undefined ? null : `${bytes(run.kv)} used, ${bytes(run.reserved)} reserved; fp16 needs ${times(run.ratio)}`],
      ["peak memory", run.peak && `${bytes(run.peak[0])} in prefill, ${bytes(run.peak[1])} in decode`],
      ["TTFT", run.ttft === undefined ? null : seconds(run.ttft)],
      ["TPOT", run.tpot === undefined ? null : `${seconds(run.tpot)} (p99 ${seconds(run.p99)})`],
    ]),
    el("h3", {}, "Command"),
    el("div", { class: "row" }, el("pre", { class: "command", tabindex: 0 }, run.command || "unknown"),
      el("button", { type: "button", click: () => copy(run.command) }, "Copy")),
    taskTable(run), pointTable(run), settingList(run));
}

function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "facts" }, known.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/* A small table with headings and rows of texts; the first column names the rows. */
function smallTable(label, headings, rows) {
  const line = (cells) => el("tr", {}, cells.map((cell, i) => (i ? el("td", { class: "number" }, cell) : el("th", { scope: "row" }, cell))));
  return el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": label },
    el("table", { class: "small" }, el("caption", {}, label),
      el("thead", {}, el("tr", {}, headings.map((text, i) => el("th", { scope: "col", class: i ? "number" : "text" }, text)))),
      el("tbody", {}, rows.map(line))));
}

function taskFigure(task) {
  if (task[8] !== undefined) return `KL ${small(task[8])}, 99.9 % ${small(task[9])}`;
  return task[6] === undefined ? `${fixed(task[1])} ${plusMinus(task[2])}` : `ppl ${fixed(task[6])} ${plusMinus(task[7])}`;
}

function taskTable(run) {
  if (!run.tasks) return null;
  const rows = run.tasks.map((task) => [
    task[0],
    taskFigure(task),
    task[4] === undefined || task[4] === null ? NONE : `${signed(task[4])} ${plusMinus(task[5])}`, plain(task[3]),
  ]);
  if (run.more_tasks) rows.push([`${run.more_tasks} further tasks: python -m kvbench.report --show ${run.id}`, "", "", ""]);
  return smallTable("Scores by task", ["task", "score", "Δ fp16", "n"], rows);
}

function pointTable(run) {
  if (!run.points) return null;
  const rows = run.points.map((p) => [`${p[0]} tokens`, plain(p[1]), p[2], seconds(p[3]), seconds(p[4]), plain(p[7]), bytes(p[8]), bytes(p[9])]);
  return smallTable("Time and memory", ["prompt", "batch", "status", "TTFT", "TPOT", "tokens/s", "KV bytes", "decode peak"], rows);
}

function settingList(run) {
  const entries = Object.entries(run.settings);
  if (!entries.length) return null;
  return [el("h3", {}, "Settings that vary between runs"), facts(entries.map(([key, value]) => [key, value === null ? "null" : String(value)]))];
}
