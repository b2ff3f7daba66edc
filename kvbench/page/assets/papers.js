/* The papers' tables and figures that results/ holds: the papers' numbers and claims next to ours, where ours exist. */

/* An item with its names in place of their indices, made once. */
function itemOf(item) {
  if (!item.lines) {
    const name = (i) => item.names[i] ?? "";
    item.lines = item.cells.map(([row, column, model, unit, theirs, ours, error, id]) => ({
      row: name(row), column: name(column), model: name(model), unit: name(unit), paper: theirs, ours, error, run: report.byId.get(id),
      name: [name(row), name(column), name(model)].filter(Boolean).join(", "),
    }));
    item.said = item.claims.map(([claim, model, unit, verdict, theirs, ours, error]) => ({
      name: `${name(claim)} (${name(model)})`, unit: name(unit), verdict: name(verdict), paper: theirs, ours, error,
    }));
  }
  return item;
}

function papersView(runs, redraw) {
  const ids = new Set(runs.map((run) => run.id));
  if (!report.papers.length) {
    return el("p", { class: "empty" }, "The folder of results has no table or figure of a paper. python -m experiments makes them.");
  }
  const papers = [...new Set(report.papers.map((item) => item.item.split("/")[0]))].sort();
  const mine = (item) => item.mine > 0 && itemOf(item).lines.some((line) => line.run && ids.has(line.run.id));
  const withRuns = report.papers.filter(mine);
  const items = report.papers.filter((item) => (!choice.paper || item.item.startsWith(`${choice.paper}/`)) && (!choice.mine || withRuns.includes(item)));
  const controls = el("div", { class: "tools" },
    selectOf("Paper", [["", "all"], ...papers.map((name) => [name, name])], choice.paper, (value) => { choice.paper = value; redraw(); }),
    selectOf("Show", [["", `all ${report.papers.length} tables and figures`], ["mine", `the ${withRuns.length} with a run of this report`]], choice.mine, (value) => { choice.mine = value; redraw(); }));
  const sign = (name, text) => el("li", {}, shape("svg", { width: 16, height: 16, class: "plot", "aria-hidden": "true" }, shape("circle", { class: name, cx: 8, cy: 8, r: 4.5 })), text);
  const marks = el("ul", { class: "legend", "aria-label": "Marks" }, sign("theirs", "the paper"), sign("ours", "ours"), sign("ours weak", "ours, where the claim is not shown to hold"));
  const comparable = (item) => itemOf(item).lines.some((line) => known(line.paper) && known(line.ours));
  const first = withRuns[0] || report.papers.find(comparable) || report.papers[0];
  if (!choice.opened) choice.opened = new Set([first.item + first.variant]);
  return [controls, marks, items.length ? items.map(paperItem) : el("p", { class: "empty" }, "No table or figure passes.")];
}

/* A table or figure, drawn when it is opened for the first time. */
function paperItem(item) {
  itemOf(item);
  const paper = item.item.split("/")[0];
  const key = item.item + item.variant;
  const holds = item.said.filter((claim) => claim.verdict === "holds").length;
  const judged = item.said.filter((claim) => known(claim.ours)).length;
  const ours = item.lines.filter((line) => known(line.ours)).length;
  const facts = [item.variant && `on ${item.variant}`, ours ? `${ours} numbers of ours` : "ours not measured",
    judged ? `${holds} of ${judged} claims hold` : null, item.mine ? `${item.mine} from runs here` : null];
  const body = el("div", {});
  const fillIn = () => { if (!body.childNodes.length) body.append(...[paperBody(item)].flat(Infinity).filter(Boolean)); };
  const box = el("details", { class: "paper", "data-item": key, toggle: () => {
    choice.opened[box.open ? "add" : "delete"](key);
    if (box.open) fillIn();
  } }, el("summary", {}, el("h2", {}, `${paper}, ${item.number}: ${item.title}`), el("span", { class: "note" }, facts.filter(Boolean).join(" · "))), body);
  box.open = choice.opened.has(key);
  if (box.open) fillIn();
  return box;
}

function paperBody(item) {
  const both = item.lines.filter((line) => known(line.paper) && known(line.ours));
  const claims = item.said.filter((claim) => known(claim.ours));
  const open = item.said.filter((claim) => !known(claim.ours));
  return [
    both.length ? figure("Numbers: the paper's and ours", beside(both), null) : null,
    claims.length ? figure("Claims: the paper's difference and ours", beside(claims), null) : null,
    open.length ? el("details", {}, el("summary", {}, `${open.length} claims without a number of ours`), el("ul", {}, open.map((claim) =>
      el("li", {}, `${claim.name}${known(claim.paper) ? `: paper ${number(claim.paper, claim.unit)}` : ""}`)))) : null,
    numberTables(item),
    item.notes.length ? el("details", {}, el("summary", {}, "How ours was made"), el("ul", {}, item.notes.map((note) => el("li", {}, note)))) : null,
  ];
}

function number(value, unit) {
  return known(value) ? `${digits(value, 4).replace("-", MINUS)}${unit ? ` ${unit}` : ""}` : NONE;
}

/* All numbers of an item, a table per model: ours, and the paper's in brackets. */
function numberTables(item) {
  const models = [...new Set(item.lines.map((line) => line.model))];
  const tables = models.map((model) => {
    const lines = item.lines.filter((line) => line.model === model);
    const columns = [...new Set(lines.map((line) => line.column))];
    const cells = new Map(lines.map((line) => [`${line.row}\n${line.column}`, line]));
    const text = (line) => (line ? `${number(line.ours)}${line.error ? ` ${plusMinus(line.error, 2)}` : ""}${known(line.paper) ? ` (${number(line.paper)})` : ""}` : NONE);
    const unit = (column) => lines.find((line) => line.column === column).unit;
    return smallTable(model || "Numbers", ["", ...columns.map((column) => (unit(column) ? `${column}, ${unit(column)}` : column))],
      [...new Set(lines.map((line) => line.row))].map((row) => [row, ...columns.map((column) => text(cells.get(`${row}\n${column}`)))]));
  });
  if (!tables.length) return null;
  const more = item.more ? el("p", { class: "note" }, `${item.more} further numbers are in results/${item.item}.`) : null;
  return el("details", { open: item.lines.length <= 60 }, el("summary", {}, "All numbers: ours (the paper's)"), tables, more);
}

/* One line per number: a ring for the paper's, a dot with its error bar for ours; one scale per unit. */
function beside(all) {
  const byUnit = new Map();
  for (const line of all) byUnit.set(line.unit, [...(byUnit.get(line.unit) || []), line]);
  return el("div", {}, [...byUnit.entries()].map(([unit, lines]) => besideUnit(unit, lines.slice(0, MOST_BARS), lines.length)));
}

function besideUnit(unit, lines, count) {
  const width = widthFor();
  const layout = lineLayout(lines.map((line) => line.name), width);
  const { left } = layout;
  const reach = lines.flatMap((line) => [line.paper, line.ours, line.ours - (line.error || 0), line.ours + (line.error || 0)]).filter(known);
  const bottom = lines.length * layout.height + 12;
  const x = scaleOf(reach, left + 8, width - 24, { log: true });
  const parts = lowerTicks({ top: 8, bottom }, x, (tick) => digits(tick).replace("-", MINUS));
  const rows = lines.map((line, i) => besideRow(line, 8 + i * layout.height, width, x, layout));
  roving(rows.map((row) => row.firstChild));
  const title = shape("text", { class: "title", x: (left + width) / 2, y: bottom + 36, "text-anchor": "middle" }, unit || "value");
  const more = count > lines.length ? el("p", { class: "note" }, `The first ${lines.length} of ${count} numbers.`) : null;
  return [canvas(width, bottom + 46, `${lines.length} numbers in ${unit || "no unit"}. Arrow keys go from line to line.`, parts, title, rows), more];
}

function besideRow(line, top, width, x, layout) {
  const y = top + layout.offset + LINE / 2;
  const text = (value) => (known(value) ? number(value, line.unit) : "unknown");
  const words = [line.run?.name || line.name, line.run ? line.name : null, `paper ${text(line.paper)}`, `ours ${text(line.ours)}${line.error ? ` ${plusMinus(line.error, 2)}` : ""}`, line.verdict ? `claim: ${line.verdict}` : null];
  const zone = shape("rect", { class: "zone", x: 0, y: top, width, height: layout.height });
  if (line.run) nameable(zone, line.run, words);
  else fill(zone, { tabindex: -1, role: "img", "aria-label": words.filter(Boolean).join(". "), mouseenter: () => tipAt(zone, words), mouseleave: hideTip, focus: () => tipAt(zone, words), blur: hideTip }, []);
  return shape("g", {}, zone, layout.label(line.name, top),
    known(line.paper) ? shape("line", { class: "between", x1: x(line.paper), x2: x(line.ours), y1: y, y2: y }) : null,
    line.error ? shape("line", { class: "error ours", x1: x(line.ours - line.error), x2: x(line.ours + line.error), y1: y, y2: y }) : null,
    known(line.paper) ? shape("circle", { class: "theirs", cx: x(line.paper), cy: y, r: 5 }) : null,
    shape("circle", { class: `ours${line.verdict && line.verdict !== "holds" ? " weak" : ""}`, cx: x(line.ours), cy: y, r: 4.5 }));
}
