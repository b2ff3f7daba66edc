/* The papers' tables and figures that runs of the report belong to: the paper's number next to ours. */

function papersView(runs) {
  const ids = new Set(runs.map((run) => run.id));
  const items = report.papers.filter((item) => item.claims.length || item.cells.some((cell) => ids.has(cell[7])));
  if (!items.length) {
    return el("p", { class: "empty" }, "No run here is a cell of a paper's table or figure with a number to set beside. python -m experiments makes such runs.");
  }
  const key = (name, text) => el("li", {}, shape("svg", { width: 16, height: 16, class: "plot", "aria-hidden": "true" }, shape("circle", { class: name, cx: 8, cy: 8, r: 4.5 })), text);
  return [el("ul", { class: "legend", "aria-label": "Marks" }, key("theirs", "the paper"), key("ours", "ours"), key("ours weak", "ours, where the claim does not hold or cannot be seen")), items.map(paperItem)];
}

function paperItem(item) {
  const paper = item.item.split("/")[0];
  const heading = el("h2", {}, `${paper}, ${item.number}: ${item.title}`);
  const parts = [heading];
  if (item.cells.length) {
    const lines = item.cells.map(([row, column, model, unit, theirs, ours, error, id]) => ({
      name: [row, column, model].filter(Boolean).join(", "), unit, paper: theirs, ours, error, run: report.byId.get(id),
    }));
    parts.push(figure("Numbers: the paper's and ours", beside(lines), null));
  }
  if (item.claims.length) {
    const lines = item.claims.map(([claim, model, theirs, ours, error, unit, verdict]) => ({
      name: `${claim} (${model})`, unit, paper: theirs, ours, error, verdict,
    }));
    parts.push(figure("Claims: the paper's difference and ours", beside(lines), null));
  }
  if (item.notes.length) parts.push(el("details", {}, el("summary", {}, "How ours was made"), el("ul", {}, item.notes.map((note) => el("li", {}, note)))));
  return el("section", { class: "paper" }, parts);
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
  const reach = lines.flatMap((line) => [line.paper, line.ours, line.ours - (line.error || 0), line.ours + (line.error || 0)]).filter((value) => value !== null && value !== undefined);
  const bottom = lines.length * layout.height + 12;
  const x = scaleOf(reach, left + 8, width - 24, { log: true });
  const parts = lowerTicks({ top: 8, bottom }, x, (tick) => digits(tick).replace("-", MINUS));
  const rows = lines.map((line, i) => {
    const top = 8 + i * layout.height;
    const y = top + layout.offset + LINE / 2;
    const text = (value) => (value === null || value === undefined ? "unknown" : `${digits(value, 4).replace("-", MINUS)} ${unit}`);
    const known = line.paper !== null && line.paper !== undefined;
    const words = [line.run?.name || line.name, line.run ? line.name : null, `paper ${text(line.paper)}`, `ours ${text(line.ours)}${line.error ? ` ${plusMinus(line.error, 2)}` : ""}`, line.verdict ? `the claim ${line.verdict}` : null];
    const zone = shape("rect", { class: "zone", x: 0, y: top, width, height: layout.height });
    if (line.run) nameable(zone, line.run, words);
    else fill(zone, { tabindex: -1, role: "img", "aria-label": words.filter(Boolean).join(". "), mouseenter: () => tipAt(zone, words), mouseleave: hideTip, focus: () => tipAt(zone, words), blur: hideTip }, []);
    return shape("g", {}, zone, layout.label(line.name, top),
      known ? shape("line", { class: "between", x1: x(line.paper), x2: x(line.ours), y1: y, y2: y }) : null,
      line.error ? shape("line", { class: "error ours", x1: x(line.ours - line.error), x2: x(line.ours + line.error), y1: y, y2: y }) : null,
      known ? shape("circle", { class: "theirs", cx: x(line.paper), cy: y, r: 5 }) : null,
      shape("circle", { class: `ours${line.verdict && line.verdict !== "holds" ? " weak" : ""}`, cx: x(line.ours), cy: y, r: 4.5 }));
  });
  roving(rows.map((row) => row.firstChild));
  const title = shape("text", { class: "title", x: (left + width) / 2, y: bottom + 36, "text-anchor": "middle" }, unit || "value");
  const more = count > lines.length ? el("p", { class: "note" }, `The first ${lines.length} of ${count} numbers.`) : null;
  return [canvas(width, bottom + 46, `${lines.length} numbers in ${unit || "no unit"}`, parts, title, rows), more];
}
