/* Everything about one run, in a panel at the side. */

function showDetails(run) {
  document.querySelector("dialog.run")?.remove();  // of the run that the address named before
  hideTip();
  choice.run = run.id;
  openDialog(run.name, [
    keyFigures(run),
    el("h3", {}, "Command"),
    el("div", { class: "row" }, el("pre", { class: "command", tabindex: 0 }, run.command || "unknown"),
      el("button", { type: "button", click: () => copy(run.command) }, "Copy")),
    facts([
      ["run", run.id], ["model", run.model], ["data", run.data], ["status", statusText(run)], ["older code", run.older],
      ["error", run.error], ["samples", run.problem], ["device", run.device], ["attention", run.path],
      ["KL divergence", run.kl && `${divergenceText(run)}; median ${small(run.kl[3])}, 99.9 % ${small(run.kl[1])} nats`],
      ["flips", run.flips && `${run.flips[0]} lost and ${run.flips[1]} won, of ${run.flips[2]} answers`],
      ["equal to fp16's", run.left && `${run.left[0]} of ${run.left[1]} answers to their end${known(run.left[2]) ? `; median first other token: ${run.left[2]}` : ""}`],
      ["KV bytes", run.kv === undefined ? null : `${bytes(run.kv)} used, ${bytes(run.reserved)} reserved; fp16: ${times(run.ratio)} as much`],
      ["peak memory", run.peak && `${bytes(run.peak[0])} in prefill, ${bytes(run.peak[1])} in decode`],
      ["TTFT", run.ttft === undefined ? null : seconds(run.ttft)],
      ["TPOT", run.tpot === undefined ? null : `${seconds(run.tpot)} (p99 ${seconds(run.p99)})`],
    ]),
    taskTable(run), pointTable(run), listOf("Settings that vary between runs", run.settings), listOf("Environment", run.env),
  ], { kind: "run", id: run.id, closed: forgetRun });
}

/* The run that an address names: one of the report, or of the leaderboard that is always there. */
function runOf(id) {
  return report.byId.get(id) || boardRuns().find((run) => run.id === id);
}

/* Open the details of the run that the address names, and close those of another. */
function drawRun() {
  const box = document.querySelector("dialog.run");
  if (box?.dataset.id === choice.run) return;
  box?.remove();
  const run = choice.run && runOf(choice.run);
  if (run) showDetails(run);
  else if (choice.run) toast(`There is no run ${choice.run} in this report`);
}

function divergenceText(run) {
  return `${small(run.kl[0])}${known(run.kl[4]) ? ` (${small(run.kl[4])} to ${small(run.kl[5])})` : ""}`;
}

/* The figures that most readers look for, with what stands beside them in small letters. */
function keyFigures(run) {
  const entries = [
    ["score", run.score && fixed(score(run)), run.score && `${plusMinus(run.score[1])}${known(run.score[2]) ? `, n = ${run.score[2]}` : ""}`],
    ["Δ fp16", known(run.score?.[3]) && signed(run.score[3]), plusMinus(run.score?.[4])],
    ["perplexity", run.ppl && fixed(perplexity(run)), run.ppl && plusMinus(run.ppl[1])],
    ["KL from fp16", run.kl && small(divergence(run)), "nats per token"],
    ["same top", run.kl && percent(sameTop(run)), "of the tokens"],
    ["flips", run.flips && percent(flipped(run), 1), run.flips && `of ${run.flips[2]} answers`],
    ["KV bytes", known(run.kv) && bytes(run.kv), known(run.ratio) && `fp16: ${times(run.ratio)} as much`],
    ["TPOT", known(run.tpot) && seconds(run.tpot), "median"],
  ];
  return el("dl", { class: "figures" }, entries.filter(([, value]) => value).map(([name, value, beside]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value, beside ? el("small", {}, beside) : null))));
}

function facts(pairs) {
  const shown = pairs.filter(([, value]) => known(value) && value !== "");
  return el("dl", { class: "facts" }, shown.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
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
    task[4] === undefined || task[4] === null ? NONE : `${signed(task[4])} ${plusMinus(task[5])}`, plain(task[3] || undefined),
  ]);
  if (run.more_tasks) rows.push([`${run.more_tasks} further tasks: python -m kvbench.report --show ${run.id}`, "", "", ""]);
  return smallTable("Scores by task", ["task", "score", "Δ fp16", "n"], rows);
}

function pointTable(run) {
  if (!run.points) return null;
  const rows = run.points.map((p) => [`${p[0]} tokens`, plain(p[1]), p[2], seconds(p[3]), seconds(p[4]), plain(p[7]), bytes(p[8]), bytes(p[9])]);
  return smallTable("Time and memory", ["prompt", "batch", "status", "TTFT", "TPOT", "tokens/s", "KV bytes", "decode peak"], rows);
}

/* Settings or facts of any name, under a heading. */
function listOf(title, values) {
  const entries = Object.entries(values || {});
  if (!entries.length) return null;
  return [el("h3", {}, title), facts(entries.map(([key, value]) => [key, value === null ? "null" : String(value)]))];
}
