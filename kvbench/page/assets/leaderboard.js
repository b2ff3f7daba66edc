/* The leaderboard: methods of one model on the same data, by quality at equal bytes. */

const BUDGETS = [1, 2, 3, 4, 5, 6, 8];
const BUNDLED = "tiny";

/* The best run of each method that needs at most 1/budget of fp16's bytes, best first. */
function ranking(runs, budget) {
  const quality = qualityOf(runs);
  const better = (a, b) => (quality.up ? quality.value(b) - quality.value(a) : quality.value(a) - quality.value(b)) || (a.kv ?? Infinity) - (b.kv ?? Infinity);
  const best = new Map();
  for (const run of runs) {
    if (!known(quality.value(run)) || (budget > 1 && !(run.ratio >= budget * 0.995))) continue;
    const other = best.get(run.method);
    if (!other || better(run, other) < 0) best.set(run.method, run);
  }
  return { quality, runs: [...best.values()].sort(better) };
}

/* The measured leaderboard that is part of the repository (results/mini), as runs. */
const BOARD = "results/mini";

function boardRuns() {
  return report.board.map(([name, method, command, value, error, n, diff, diffError, kv, fp16, device]) => ({
    id: `${BOARD}/${name}`, name, label: method, method, model: BUNDLED, data: "mini", status: "ok", group: BOARD, command, device,
    score: [value, error, n, diff, diffError], kv, ratio: fp16 / kv, settings: {},
  }));
}

/* The rows that anybody can add (leaderboard/), as runs: groups are those of the rows. */
const SHARED = "leaderboard/";

function sharedRuns() {
  return report.rows.map(([name, model, data, group, measure, value, error, n, diff, diffError, kv, fp16, device, who, link, status, file]) => ({
    id: SHARED + file, name, label: name, method: file, model, data, status: "ok", group: SHARED + group, device, kv, ratio: fp16 / kv, settings: {}, done: n,
    title: `${SHARED}: ${data}`, who, link, word: status, fp16: name === "fp16",
    ...{ score: { score: [value, error, n, diff, diffError] }, perplexity: { ppl: [value, error, diff] }, kl: { kl: [value] } }[measure],
  }));
}

function leaderboardView(all, redraw) {
  const measured = [...boardRuns(), ...sharedRuns()];
  const judged = [...all, ...measured].filter((run) => done(run) && known(qualityOf([run]).value(run)));
  const models = [...new Set(judged.map((run) => run.model))];
  if (!models.length) return el("p", { class: "empty" }, "There is nothing to rank yet: no finished run has a score, a perplexity or a KL divergence. Run for example: python -m kvbench method=kivi");
  const most = groupsOf(all.filter((run) => judged.includes(run)))[0]?.group || BOARD;
  const model = models.includes(choice.model) ? choice.model : (judged.find((run) => run.group === most) || judged[0]).model;
  const ofModel = judged.filter((run) => run.model === model);
  const groups = groupsOf(ofModel.filter((run) => all.includes(run)));
  const size = report.board.length;
  if (model === BUNDLED && size) groups.push({ group: BOARD, size, title: `${BOARD}, as measured for this repository` });
  for (const group of groupsOf(ofModel.filter((run) => run.who))) groups.push({ ...group, title: ofModel.find((run) => run.group === group.group).title });
  const group = groups.find((g) => g.group === choice.group) || groups[0];
  const runs = ofModel.filter((run) => group && run.group === group.group);
  const rankings = new Map(BUDGETS.map((size) => [size, ranking(runs, size)]));
  const methods = new Set(runs.filter((run) => !run.fp16).map((run) => run.method)).size;
  const enough = (size) => rankings.get(size).runs.length >= Math.max(2, methods / 2);
  const shared = runs.some((run) => run.who);
  const budget = BUDGETS.includes(choice.budget) ? choice.budget : (!shared && [4, 3, 2].find(enough)) || 1;
  const board = rankings.get(budget);
  const pick = (label, options, value, set) => selectOf(label, options, value, (chosen) => { set(chosen); redraw(); });
  const controls = el("div", { class: "tools" },
    pick("Model", models.map((name) => [name, name]), model, (value) => { choice.model = value; }),
    group ? pick("Data", groups.map((g) => [g.group, `${g.title}, ${g.size} runs`]), group.group, (value) => { choice.group = value; }) : null,
    pick("KV bytes", BUDGETS.map((b) => [String(b), b === 1 ? "any" : `at most 1/${b} of fp16's`]), String(budget), (value) => { choice.budget = Number(value); }));
  const which = shared ? "Rows that anybody can add, within the bytes: self-reported until somebody else's run agrees." : "The best run of each method that stays within the bytes, over all its settings.";
  const about = el("p", { class: "note" }, `${which} Runs answer the same samples; a difference whose 95 % interval contains zero is not shown to be real.`);
  if (!board.runs.length) return [controls, about, el("p", { class: "empty" }, `No finished run of ${model} stays within these bytes; choose more of them.`)];
  const counts = new Set(board.runs.map((run) => run.score?.[2])).size > 1;
  return [controls, about, boardTable(board), counts ? el("p", { class: "note warn" }, "The runs have different numbers of samples: run those with fewer again with a larger dataset.limit.") : null];
}

/* What stands behind a run: the command that repeats it, or for a row that somebody added, whose it is. */
function behind(run) {
  if (run.who) return el("td", {}, run.link ? el("a", { href: run.link, rel: "nofollow noopener" }, run.who) : run.who, `, ${run.word}`);
  return el("td", {}, el("div", { class: "row" }, el("code", { class: "command", title: run.command }, run.command || "unknown"),
    el("button", { type: "button", "aria-label": `Copy the command of ${run.name}`, click: () => copy(run.command) }, "Copy")));
}

function boardTable({ quality, runs }) {
  const heads = ["", "method", quality.name, "Δ fp16", "n", "KV bytes", "ratio", "TPOT", runs.some((run) => run.who) ? "by" : "command"];
  const rows = runs.map((run, i) => el("tr", {},
    el("td", { class: "number" }, String(i + 1)),
    el("th", { scope: "row" }, run.who ? run.name : el("button", { type: "button", class: "name", click: () => showDetails(run) }, run.name)),
    el("td", { class: "number" }, quality.shown(run)),
    el("td", { class: "number" }, run.score?.[3] === undefined ? NONE : `${signed(run.score[3])} ${plusMinus(run.score[4])}`),
    el("td", { class: "number" }, plain(run.score?.[2] ?? run.done)),
    el("td", { class: "number" }, bytes(run.kv)), el("td", { class: "number" }, times(run.ratio)), el("td", { class: "number" }, seconds(run.tpot)),
    behind(run)));
  return el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Leaderboard, scrollable" },
    el("table", { class: "small board" }, el("thead", {}, el("tr", {}, heads.map((text, i) => el("th", { scope: "col", class: i === 1 || i === 8 ? "text" : "number" }, text)))), el("tbody", {}, rows)));
}
