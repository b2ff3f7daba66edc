/* The table of runs. Only the rows in sight are in the document, so that thousands of runs stay quick. */

const ROW = 34;
const SPARE = 6;

const table = { box: null, body: null, head: null, runs: [], columns: [], from: -1, to: -1 };

/* Build the table view of the columns `all`; `redraw` is called when filters or the order change. */
function tableView(all, redraw) {
  table.head = el("thead", {});
  table.body = el("tbody", {});
  table.grid = el("table", { class: "runs", "aria-label": "Runs" }, table.head, table.body);
  table.box = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of runs, scrollable" }, table.grid);
  let waiting = false;
  table.box.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      drawRows();
    });
  }, { passive: true });
  const count = el("p", { class: "count", role: "status", id: "count" });
  table.count = count;
  drawHead(all, redraw);
  return [el("div", { class: "tools" }, count, columnChooser(all, redraw), csvButton(all)), table.box];
}

function drawHead(all, redraw) {
  table.columns = visibleColumns(all);
  const order = orderOf(all);
  const heads = table.columns.map((column) => {
    const current = order.key === column.key;
    const arrow = current ? (order.down ? " ▼" : " ▲") : "";
    const sort = el("button", {
      type: "button", class: "sort", title: column.hint, "data-key": column.key,
      click: () => {
        choice.sort = { key: column.key, down: current ? !order.down : column.kind === "number" };
        redraw();
        table.head.querySelector(`[data-key="${CSS.escape(column.key)}"]`)?.focus();
      },
    }, column.title, el("span", { "aria-hidden": "true" }, arrow));
    const direction = current ? (order.down ? "descending" : "ascending") : "none";
    const width = NARROW.matches ? Math.min(column.width, 10) : column.width;
    return el("th", { scope: "col", "aria-sort": direction, class: cellClass(column), css: { "min-width": `${width}em` } }, sort);
  });
  const filters = table.columns.map((column) => {
    const input = el("input", {
      type: "search", "aria-label": `Filter ${column.title}`, placeholder: column.kind === "number" ? "> <" : "filter",
      "data-filter": column.key,
      input: (event) => {
        choice.filters[column.key] = event.target.value;
        redraw(false);
      },
    });
    input.value = choice.filters[column.key] || "";
    return el("td", { class: cellClass(column) }, input);
  });
  table.head.replaceChildren(el("tr", {}, heads), el("tr", { class: "filters" }, filters));
}

/* Show the chosen runs, from the first if `top`. */
function fillTable(runs, top) {
  table.runs = runs;
  table.from = -1;
  if (top && table.box.scrollTop) table.box.scrollTop = 0;
  table.grid.setAttribute("aria-rowcount", runs.length + 2);
  table.count.textContent = runs.length === report.runs.length
    ? `${runs.length} runs` : `${runs.length} of ${report.runs.length} runs`;
  drawRows();
}

function drawRows() {
  const height = table.box.clientHeight || 600;
  const first = Math.max(0, Math.floor(table.box.scrollTop / ROW) - SPARE);
  const last = Math.min(table.runs.length, first + Math.ceil(height / ROW) + 2 * SPARE);
  if (first === table.from && last === table.to) return;
  const focused = table.body.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  table.from = first;
  table.to = last;
  const spacer = (rows) => el("tr", { class: "spacer", "aria-hidden": "true", css: { height: `${rows * ROW}px` } }, el("td", { colspan: table.columns.length }));
  const rows = table.runs.slice(first, last).map((run, i) => row(run, first + i));
  if (!table.runs.length) rows.push(el("tr", {}, el("td", { colspan: table.columns.length, class: "empty" }, "No run passes the filters.")));
  table.body.replaceChildren(spacer(first), ...rows, spacer(table.runs.length - last));
  if (focused) table.body.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

function row(run, index) {
  const cells = table.columns.map((column) => {
    const shown = column.show(run);
    if (column.key === "name") return el("th", { scope: "row", class: cellClass(column) }, nameButton(run, index));
    const label = column.key === "status" ? el("span", { class: `status ${run.status}` }, shown) : shown;
    return el("td", { class: cellClass(column), title: column.kind === "text" ? shown : null }, label);
  });
  const open = (event) => event.target.closest("button") || String(getSelection()) || showDetails(run);
  return el("tr", { "aria-rowindex": index + 3, click: open }, cells);
}

function nameButton(run, index) {
  const button = el("button", {
    type: "button", class: "name", "data-id": run.id, title: run.name, click: () => showDetails(run),
    keydown: (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      focusRow(index + step);
    },
  }, run.name);
  const clip = el("button", { type: "button", class: "copy", "aria-label": `Copy the command of ${run.name}`, title: run.command, click: () => copy(run.command) }, copyIcon());
  return [button, clip];
}

function focusRow(index) {
  if (index < 0 || index >= table.runs.length) return;
  const head = table.head.offsetHeight;
  const top = index * ROW;
  if (top < table.box.scrollTop) table.box.scrollTop = top;
  else if (top + ROW > table.box.scrollTop + table.box.clientHeight - head) table.box.scrollTop = top + ROW + head - table.box.clientHeight;
  drawRows();
  table.body.querySelector(`[data-id="${CSS.escape(table.runs[index].id)}"]`)?.focus({ preventScroll: true });
}

function cellClass(column) {
  return `${column.kind}${column.fixed ? " fixed" : ""}`;
}

function columnChooser(all, redraw) {
  const seen = new Set(visibleColumns(all));
  const boxes = all.filter((column) => !column.fixed).map((column) => {
    const input = el("input", {
      type: "checkbox",
      change: (event) => {
        if (event.target.checked === !column.off) choice.columns.delete(column.key);
        else choice.columns.set(column.key, event.target.checked);
        delete choice.filters[column.key];
        drawHead(all, redraw);
        redraw(false);
      },
    });
    input.checked = seen.has(column);
    return el("label", {}, input, el("span", {}, column.title), column.hint && column.hint !== column.title ? el("small", {}, column.hint) : null);
  });
  return el("details", { class: "chooser" }, el("summary", {}, "Columns"), el("div", { class: "panel" }, boxes));
}

/* A button that copies the chosen runs as CSV, with the visible columns. */
function csvButton(all) {
  const quote = (value) => {
    const text = value === undefined || value === null ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return el("button", {
    type: "button",
    click: () => {
      const columns = visibleColumns(all);
      const lines = [[...columns.map((c) => c.title), "command"], ...table.runs.map((run) => [...columns.map((c) => c.value(run)), run.command])];
      copy(lines.map((line) => line.map(quote).join(",")).join("\n") + "\n", `${table.runs.length} runs as CSV`);
    },
  }, "Copy as CSV");
}
