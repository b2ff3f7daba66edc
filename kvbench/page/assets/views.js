/* The views behind the tabs, and the choice of runs above them. */

const VIEWS = [
  ["sweep", "Sweep"], ["runs", "Runs"], ["quality", "Quality"], ["fidelity", "Fidelity"], ["differences", "Differences"], ["memory", "Memory"],
  ["times", "Times"], ["points", "Points"], ["papers", "Papers"], ["samples", "Samples"], ["leaderboard", "Leaderboard"],
  ["recipes", "Recipes"], ["fit", "Fit"],
];
/* Views of one group of comparable runs; `true` where all runs together make sense too. */
const COMPARED = { quality: false, fidelity: false, differences: false, memory: true, times: true, points: true };
const ALL = "all";
/* Views that choose their runs themselves. */
const OWN = new Set(["sweep", "samples", "leaderboard", "recipes", "fit"]);
/* Views that have something to show without a run. */
const WITHOUT_RUNS = new Set(["sweep", "papers", "leaderboard", "recipes", "fit"]);

/* The views of the present data: those of a sweep, of recipes and of answers only where there are some. */
function views() {
  const some = { sweep: report.sweep, recipes: report.recipes.length, fit: report.fits.length };
  return VIEWS.filter(([key]) => !(key in some) || some[key]);
}

/* The view to begin with: the first that has something to show. */
function firstView() {
  if (report.sweep) return "sweep";
  return !report.runs.length && report.papers.length ? "papers" : "runs";
}

const shownView = { update: null };

function drawTabs() {
  byId("tabs").replaceChildren(...views().map(([key, title]) => el("button", {
    type: "button", role: "tab", id: `tab-${key}`, "aria-controls": "main", "aria-selected": String(choice.view === key),
    tabindex: choice.view === key ? 0 : -1, click: () => show(key),
    keydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const all = views();
      const place = all.findIndex(([other]) => other === choice.view);
      show(all[(place + step + all.length) % all.length][0]);
      byId(`tab-${choice.view}`).focus();
    },
  }, title)));
  byId(`tab-${choice.view}`).scrollIntoView({ block: "nearest", inline: "nearest" });
}

function show(view) {
  choice.view = view;
  drawTabs();
  draw();
}

/* Draw the present view from the beginning. */
function draw() {
  hideTip();
  drawFilters();
  showProblems([]);
  const main = byId("main");
  main.setAttribute("role", "tabpanel");
  main.setAttribute("aria-labelledby", `tab-${choice.view}`);
  main.className = `view-${choice.view}`;
  if (!report.runs.length && !WITHOUT_RUNS.has(choice.view)) {
    shownView.update = draw;
    main.replaceChildren(el("p", { class: "empty" }, `There are no runs in ${report.folder} yet.`));
    return;
  }
  if (choice.view === "runs") return drawTable(main);
  const redraw = () => {
    hideTip();
    main.replaceChildren(...[viewOf(choice.view, redraw)].flat(Infinity).filter(Boolean));
  };
  shownView.update = redraw;
  redraw();
}

function drawTable(main) {
  const all = tableColumns();
  const redraw = (heads = true, top = true) => {
    fillTable(chosenRuns(all), top);  // first, as it asks for the layout, which a new head would make anew
    if (heads) drawHead(all, redraw);
    showProblems(all);
  };
  main.replaceChildren(...tableView(all, redraw), ...skippedRuns());
  shownView.update = (top = true) => redraw(false, top);
  redraw(false);
}

/* Say what is wrong with the filters of the columns, and mark their fields. */
function showProblems(columns) {
  const problems = filterProblems(columns);
  byId("problems").replaceChildren(...(columns.length ? [...problems.values()] : []).map((text) => el("p", { class: "note warn" }, text)));
  for (const field of document.querySelectorAll("[data-filter]")) field.setAttribute("aria-invalid", String(problems.has(field.dataset.filter)));
}

/* The damaged runs, which are not in the table. */
function skippedRuns() {
  if (!report.skipped.length) return [];
  return [el("details", { class: "warn" }, el("summary", {}, `${report.skipped.length} damaged run${report.skipped.length > 1 ? "s" : ""} left out`),
    el("ul", {}, report.skipped.map((problem) => el("li", {}, problem))))];
}

/* The content of a view over the runs that pass the filters. */
function viewOf(view, redraw) {
  if (view === "sweep") return sweepView(redraw);
  if (view === "samples") return samplesView(redraw);
  if (view === "leaderboard") return leaderboardView(report.runs, redraw);
  if (view === "recipes") return recipesView();
  if (view === "fit") return fitView();
  const columns = tableColumns();
  const passing = chosenRuns(columns);
  showProblems(columns);
  if (view === "papers") return papersView(passing, redraw);
  const group = groupIn(passing, COMPARED[view], view);
  const runs = group === ALL ? passing : passing.filter((run) => run.group === group);
  if (!runs.length) return el("p", { class: "empty" }, "No run passes the filters.");
  if (view === "quality") return qualityView(runs);
  if (view === "fidelity") return fidelityView(runs);
  if (view === "differences") return heatView(runs);
  if (view === "points") return pointsView(runs, redraw);
  return view === "memory" ? billView(runs) : timesView(runs, redraw);
}

/* The group of comparable runs to show: the reader's, or else the largest with a quality. */
function groupIn(runs, allowAll, view) {
  if (choice.group === ALL && allowAll) return ALL;
  const has = { points: (run) => run.points, fidelity: (run) => run.kl && !run.fp16 }[view] || ((run) => run.score || run.ppl);
  const judged = runs.filter(has);
  const chosen = runs.some((run) => run.group === choice.group);  // the reader's choice, even where it has nothing to show
  return chosen ? choice.group : groupsOf(judged.length ? judged : runs)[0]?.group;
}

/* The text filter, the status and, where runs must be comparable, their group. */
function drawFilters() {
  const box = byId("filters");
  box.hidden = OWN.has(choice.view) || !report.runs.length;
  if (box.hidden) return;
  const text = el("input", { type: "search", id: "search", placeholder: "Filter runs: method, model, setting …", "aria-label": "Filter runs", input: (event) => { choice.text = event.target.value; shownView.update?.(); } });
  text.value = choice.text;
  const statuses = [...new Set([...report.runs.map((run) => run.status), choice.status].filter(Boolean))].sort();
  const status = el("select", { "aria-label": "Status", change: (event) => { choice.status = event.target.value; shownView.update?.(); } },
    [["", "any status"], ...statuses.map((s) => [s, s])].map(([key, name]) => el("option", { value: key }, name)));
  status.value = choice.status;
  const clear = el("button", { type: "button", click: () => { Object.assign(choice, { text: "", status: "", filters: {} }); draw(); } }, "Clear");
  const parts = [text, status, clear];
  if (choice.view in COMPARED) {
    const groups = groupsOf(report.runs);
    const allowAll = COMPARED[choice.view];
    const group = el("select", { "aria-label": "Model and data", change: (event) => { choice.group = event.target.value; shownView.update?.(); } },
      groups.map((g) => el("option", { value: g.group }, `${g.title}, ${g.size} runs`)),
      allowAll ? el("option", { value: ALL }, "all runs, comparable or not") : null);
    group.value = groupIn(chosenRuns(tableColumns()), allowAll, choice.view) || groups[0]?.group || "";
    parts.push(group);
  }
  const active = Object.values(choice.filters).filter(Boolean).length;
  if (active && choice.view !== "runs") parts.push(el("span", { class: "note" }, `and ${active} column filter${active > 1 ? "s" : ""}`));
  box.replaceChildren(...parts);
}
