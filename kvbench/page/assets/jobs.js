/* The jobs of a sweep, whether or not they have a run yet (--sweep ID). */

const STATES = { done: "done", running: "running", failed: "failed", missing: "not started" };
const MOST_JOBS = 200;

/* The jobs as objects. */
function jobsOf(sweep) {
  return sweep.jobs.map(([number, label, state, id, status, command, message]) => ({ number, label, state, id, status, command, message, run: report.byId.get(id) }));
}

function sweepView(redraw) {
  const { sweep } = report;
  const jobs = jobsOf(sweep);
  const counts = Object.fromEntries(Object.keys(STATES).map((state) => [state, jobs.filter((job) => job.state === state).length]));
  const words = Object.entries(STATES).filter(([state]) => counts[state]).map(([state, text]) => `${counts[state]} ${text}`).join(", ");
  const known = choice.job in counts && counts[choice.job] ? choice.job : "";
  const shown = jobs.filter((job) => !known || job.state === known);
  const select = el("select", { "aria-label": "State of the jobs", change: (event) => { choice.job = event.target.value; choice.jobs = MOST_JOBS; redraw(); } },
    [["", `all ${jobs.length} jobs`], ...Object.entries(STATES).filter(([state]) => counts[state]).map(([state, text]) => [state, `${counts[state]} ${text}`])]
      .map(([key, text]) => el("option", { value: key }, text)));
  select.value = known;
  const more = shown.length > choice.jobs
    ? el("button", { type: "button", click: () => { choice.jobs += MOST_JOBS; redraw(); } }, `Show more (${shown.length - choice.jobs} left)`) : null;
  return [
    el("h2", {}, `Sweep ${sweep.id}`),
    el("p", { class: "count", role: "status" }, `${jobs.length} jobs: ${words || "none"}${sweep.driven || !(counts.missing || counts.running) ? "" : ". No process works on it: the same command continues it."}`),
    progressBar(counts, jobs.length, words),
    el("p", { class: "note" }, [moment(sweep.created) && `started ${moment(sweep.created)}`, sweep.launcher && `launcher ${sweep.launcher}`].filter(Boolean).join(", ")),
    sweep.command ? el("div", { class: "row" }, el("pre", { class: "command long", tabindex: 0 }, sweep.command), el("button", { type: "button", click: () => copy(sweep.command) }, "Copy")) : null,
    el("div", { class: "tools jobs" }, el("label", {}, "Jobs", select)), jobTable(shown.slice(0, choice.jobs)), more,
  ];
}

/* A time as the reader writes it; an unknown one is left out. */
function moment(text) {
  const date = new Date(text);
  return Number.isNaN(date.getTime()) ? "" : date.toLocaleString();
}

function progressBar(counts, total, words) {
  return el("div", { class: "progress", role: "img", "aria-label": `Jobs: ${words}` }, Object.keys(STATES).map((state) =>
    (counts[state] ? el("span", { class: state, title: `${counts[state]} ${STATES[state]}`, css: { "flex-grow": counts[state] / total } }) : null)));
}

function jobTable(jobs) {
  const heads = [["job", "number"], ["settings", "text"], ["state", "text"], ["score", "number"], ["KV bytes", "number"], ["TPOT", "number"], ["", "text"], ["message", "text"]];
  const line = (job) => {
    const { run } = job;
    const name = run ? el("button", { type: "button", class: "name", "data-id": run.id, title: run.name, click: () => showDetails(run) }, job.label) : el("span", {}, job.label);
    const doing = run && job.state === "running" ? statusText(run).replace("unfinished, ", "running, ") : STATES[job.state];
    const state = job.status && !["ok", "older"].includes(job.status) ? job.status : doing;
    const value = run && (score(run) === undefined ? (run.ppl ? `ppl ${fixed(run.ppl[0])}` : NONE) : `${fixed(score(run))} ${plusMinus(run.score[1])}`);
    return el("tr", {},
      el("td", { class: "number" }, String(job.number)), el("th", { scope: "row" }, name),
      el("td", {}, el("span", { class: `status ${job.state}` }, state)),
      el("td", { class: "number" }, value || NONE), el("td", { class: "number" }, bytes(run?.kv)), el("td", { class: "number" }, seconds(run?.tpot)),
      el("td", {}, el("button", { type: "button", class: "copy", "aria-label": `Copy the command of job ${job.number}`, title: job.command, click: () => copy(job.command) }, copyIcon())),
      el("td", { class: "note" }, job.message || ""));
  };
  return el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Jobs, scrollable" },
    el("table", { class: "small jobs" }, el("thead", {}, el("tr", {}, heads.map(([text, kind]) => el("th", { scope: "col", class: kind }, text || el("span", { class: "offscreen" }, "command"))))), el("tbody", {}, jobs.map(line))));
}
