/* Numbers as text, and texts as numbers. */

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];
const NONE = "–";
const MINUS = "−";
const DECIMAL = new Intl.NumberFormat("en-US", { maximumFractionDigits: 12, useGrouping: false });  // slow to make

const known = (value) => value !== null && value !== undefined;

/* Three significant digits without an exponent. */
function digits(value, count = 3) {
  return DECIMAL.format(Number(value.toPrecision(count)));
}

function small(value) {
  return value === undefined || value === null ? NONE : digits(value);
}

function percent(share, places = 2) {
  return share === undefined || share === null ? NONE : `${fixed(100 * share, places)} %`;
}

function bytes(value) {
  if (value === undefined || value === null) return NONE;
  let unit = 0;
  let left = value;
  for (; Math.abs(left) >= 1000 && unit < BYTES.length - 1; unit += 1) left /= 1024;
  return `${digits(left)} ${BYTES[unit]}`;
}

function seconds(value) {
  if (value === undefined || value === null) return NONE;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return value >= 1e-3 || value === 0 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
}

function fixed(value, places = 3) {
  if (value === undefined || value === null) return NONE;
  return value.toFixed(places).replace("-", MINUS);
}

function signed(value, places = 3) {
  if (value === undefined || value === null) return NONE;
  return `${value > 0 ? "+" : ""}${fixed(value, places)}`;
}

function plusMinus(value, places = 3) {
  return value === undefined || value === null ? "" : `±${fixed(value, places)}`;
}

function times(value) {
  return value === undefined || value === null ? NONE : `${value.toFixed(2)}×`;
}

function plain(value) {
  if (value === undefined || value === null) return NONE;
  return typeof value === "number" ? digits(value, 5) : String(value);
}

/* The units of each kind of column. */
const UNITS = {
  bytes: { "": 1, b: 1, kib: 1024, mib: 1024 ** 2, gib: 1024 ** 3, tib: 1024 ** 4, kb: 1e3, mb: 1e6, gb: 1e9 },
  time: { "": 1, s: 1, ms: 1e-3, "µs": 1e-6, us: 1e-6 },
  plain: { "": 1, "%": 1e-2, x: 1, "×": 1, k: 1e3, m: 1e6 },
};

/* A number with an optional unit of a kind, such as 2.5MiB, 30 ms or 0.8; NaN for anything else. */
function measure(text, kind) {
  const match = /^\s*([-+−]?\d*\.?\d+(?:e[-+]?\d+)?)\s*([a-zµ%×]*)\s*$/i.exec(text);
  if (!match) return NaN;
  const unit = UNITS[kind][match[2].toLowerCase()];
  return unit === undefined ? NaN : Number(match[1].replace(MINUS, "-")) * unit;
}
