/* Filters: a text over everything, and one expression per column. */

/* A test for the expression of a column: for numbers <, <=, >, >=, =, a..b with units; for texts a part, !not, =whole. */
function expression(text, kind) {
  const trimmed = text.trim();
  if (!trimmed) return null;
  if (kind === "number") {
    const range = /^(.+)\.\.(.+)$/.exec(trimmed);
    if (range) {
      const [low, high] = [measure(range[1]), measure(range[2])];
      if (!Number.isNaN(low) && !Number.isNaN(high)) return (value) => typeof value === "number" && value >= low && value <= high;
    }
    const match = /^(<=|>=|<|>|=)?(.+)$/.exec(trimmed);
    const limit = measure(match[2]);
    if (!Number.isNaN(limit)) {
      const near = (value) => Math.abs(value - limit) <= 1e-9 + 0.005 * Math.abs(limit);
      const tests = {
        "<": (v) => v < limit, "<=": (v) => v <= limit, ">": (v) => v > limit, ">=": (v) => v >= limit, "=": near,
      };
      const test = tests[match[1] || "="];
      return (value) => typeof value === "number" && test(value);
    }
  }
  const lower = trimmed.toLowerCase();
  if (lower.startsWith("!")) return (value) => !textOf(value).includes(lower.slice(1).trim());
  if (lower.startsWith("=")) return (value) => textOf(value) === lower.slice(1).trim();
  return (value) => textOf(value).includes(lower);
}

function textOf(value) {
  return value === undefined || value === null ? NONE : String(value).toLowerCase();
}

/* The runs that pass the reader's choices, in the reader's order. */
function chosenRuns(columns) {
  const words = choice.text.toLowerCase().split(/\s+/).filter(Boolean);
  const tests = columns
    .map((column) => [column, expression(choice.filters[column.key] || "", column.kind)])
    .filter(([, test]) => test);
  const runs = report.runs.filter((run) =>
    (!choice.status || run.status === choice.status) && words.every((word) => run.search.includes(word))
    && tests.every(([column, test]) => test(column.value(run))));
  const column = columns.find((c) => c.key === choice.sort.key);
  return column ? sorted(runs, column, choice.sort.down) : runs;
}

/* Sorted runs; those without a value come last in both directions. */
function sorted(runs, column, down) {
  const known = [];
  const unknown = [];
  for (const run of runs) {
    const value = column.value(run);
    if (value === undefined || value === null) unknown.push(run);
    else known.push([value, run]);
  }
  const sign = down ? -1 : 1;
  const rank = ranks(known.map((pair) => pair[0]));
  known.sort((a, b) => sign * (rank(a[0]) - rank(b[0])));
  return [...known.map((pair) => pair[1]), ...unknown];
}

const collator = new Intl.Collator("en", { numeric: true });

/* A number per value, in the order of the values: texts are compared once per distinct value, which is the slow part. */
function ranks(values) {
  if (values.every((value) => typeof value === "number")) return (value) => value;
  const places = new Map([...new Set(values)].sort((a, b) => collator.compare(String(a), String(b))).map((value, i) => [value, i]));
  return (value) => places.get(value);
}
