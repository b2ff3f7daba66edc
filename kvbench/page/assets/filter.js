/* Filters: a text over everything, and one expression per column. */

const EXAMPLES = { bytes: "<2MiB or 1MiB..3MiB", time: "<30ms or 10ms..30ms", plain: ">=0.8 or 2..4" };
const COMPARISONS = {
  "<": (value, limit) => value < limit, "<=": (value, limit) => value <= limit, ">": (value, limit) => value > limit,
  ">=": (value, limit) => value >= limit, "=": near, "!": (value, limit) => !near(value, limit), "!=": (value, limit) => !near(value, limit),
};

function near(value, limit) {
  return Math.abs(value - limit) <= 1e-9 + 0.005 * Math.abs(limit);
}

/* What a column's filter asks for: null if it is empty, { test }, or { problem } where it says nothing that could be.
For numbers <, <=, >, >=, =, != and a..b, with units; for texts a part, !not, =whole. */
function expression(text, column) {
  const typed = text.trim();
  if (!typed) return null;
  return column.kind === "number" ? numberExpression(typed, column) : textExpression(typed, column);
}

function numberExpression(typed, { title, unit }) {
  if (typed === NONE) return { test: (value) => value === undefined || value === null };
  const wrong = (why) => ({ problem: `${title}: the filter ${typed} is not applied: ${why}. Type for example ${EXAMPLES[unit]}.` });
  const range = /^(.+?)\.\.(.+)$/.exec(typed);
  const [, sign, rest] = /^(<=|>=|!=|<|>|=|!)?(.*)$/s.exec(typed);
  const parts = range ? range.slice(1) : [rest];
  const numbers = parts.map((part) => measure(part, unit));
  const bad = numbers.findIndex((number) => Number.isNaN(number));
  if (bad >= 0 && !parts[bad].trim()) return wrong("it has no number");
  if (bad >= 0) return wrong(`${parts[bad].trim()} is not a number${/^\s*[-+−.]?\d/.test(parts[bad]) ? " with a unit of this column" : ""}`);
  const [low, high] = numbers;
  if (range && low > high) return wrong("its first number is the larger one");
  const compare = COMPARISONS[sign || "="];
  return { test: (value) => typeof value === "number" && (range ? value >= low && value <= high : compare(value, low)) };
}

function textExpression(typed, { title }) {
  const [, sign, rest] = /^(!|=)?(.*)$/s.exec(typed.toLowerCase());
  const part = rest.trim();
  if (!part) return { problem: `${title}: the filter ${typed} is not applied: it has no text. Type for example kivi, !kivi or =kivi int4.` };
  if (sign === "!") return { test: (value) => !textOf(value).includes(part) };
  return { test: sign ? (value) => textOf(value) === part : (value) => textOf(value).includes(part) };
}

function textOf(value) {
  return value === undefined || value === null ? NONE : String(value).toLowerCase();
}

/* What is wrong with the filters, which are then not applied: messages by the key of the column. */
function filterProblems(columns) {
  const known = new Map(columns.map((column) => [column.key, column]));
  const said = Object.entries(choice.filters).map(([key, text]) => [key, known.has(key) ? expression(text, known.get(key))?.problem
    : text.trim() && `${key}: the filter ${text} is not applied: the table has no such column.`]);
  return new Map(said.filter(([, problem]) => problem));
}

/* The order of the runs: the reader's, or else the best first. */
function orderOf(columns) {
  if (choice.sort) return choice.sort;
  const best = columns.find((column) => QUALITIES.includes(column.key) && !column.off);
  return { key: best?.key || "name", down: best?.key === "score" };
}

/* The runs that pass the reader's choices, in the reader's order. */
function chosenRuns(columns) {
  const words = choice.text.toLowerCase().split(/\s+/).filter(Boolean);
  const tests = columns
    .map((column) => [column, expression(choice.filters[column.key] || "", column)?.test])
    .filter(([, test]) => test);
  const runs = report.runs.filter((run) =>
    (!choice.status || run.status === choice.status) && words.every((word) => run.search.includes(word))
    && tests.every(([column, test]) => test(column.value(run))));
  const order = orderOf(columns);
  const column = columns.find((c) => c.key === order.key);
  return column ? sorted(runs, column, order.down) : runs;
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
