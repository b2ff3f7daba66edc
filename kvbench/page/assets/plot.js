/* Axes, scales and marks that all plots share. */

const MARKS = 7;
const LINE = 24;

/* A method's colour and mark; the pair differs for 50 methods, so that no one depends on colours alone. Only fp16 has
   the first colour. */
function styleOf(method) {
  const place = Math.max(0, report.methods.indexOf(method));
  if (!place) return { colour: "var(--c0)", mark: 0 };
  const round = Math.floor((place - 1) / MARKS);
  return { colour: `var(--c${1 + ((place - 1) % MARKS)})`, mark: (place + round) % MARKS };
}

/* A mark of radius r around x, y. */
function mark(kind, x, y, r, attributes) {
  const points = (list) => shape("polygon", { ...attributes, points: list.map(([a, b]) => `${(x + a * r).toFixed(1)},${(y + b * r).toFixed(1)}`).join(" ") });
  if (kind === 0) return shape("circle", { ...attributes, cx: x.toFixed(1), cy: y.toFixed(1), r });
  return points([
    null,
    [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]],
    [[0, -1.15], [1.05, 0.8], [-1.05, 0.8]],
    [[0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]],
    [[0, 1.15], [1.05, -0.8], [-1.05, -0.8]],
    [[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]],
    [[0, -1.3], [0.35, -0.4], [1.25, -0.4], [0.5, 0.2], [0.8, 1.1], [0, 0.55], [-0.8, 1.1], [-0.5, 0.2], [-1.25, -0.4], [-0.35, -0.4]],
  ][kind]);
}

/* A scale from values to pixels; logarithmic where the values span more than a factor of 6. */
function scaleOf(values, from, to, { log = false, zero = false } = {}) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  const useLog = log && low > 0 && high / low > 6;
  if (useLog) [low, high] = [low / 1.15, high * 1.15];
  else {
    if (zero) low = Math.min(0, low);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    [low, high] = [zero && low === 0 ? 0 : low - room, high + room];
  }
  const place = useLog ? Math.log : (value) => value;
  const [a, b] = [place(low), place(high)];
  const scale = (value) => from + ((place(value) - a) / (b - a)) * (to - from);
  scale.low = low;
  scale.ticks = useLog ? logTicks(low, high) : ticks(low, high, Math.max(3, Math.abs(to - from) / 80));
  return scale;
}

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const list = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) list.push(Number(at.toPrecision(12)));
  return list;
}

function logTicks(low, high) {
  const list = [];
  const steps = high / low > 200 ? [1] : high / low > 12 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 6, 8];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const step of steps) if (step * 10 ** power >= low && step * 10 ** power <= high) list.push(step * 10 ** power);
  }
  return list;
}

/* Ticks of an axis of bytes at round numbers of the unit that suits them. */
function byteScale(values, from, to, options) {
  let unit = 1;
  while (Math.max(...values) / unit >= 1000) unit *= 1024;
  const scale = scaleOf(values.map((value) => value / unit), from, to, options);
  const outer = (value) => scale(value / unit);
  outer.ticks = scale.ticks.map((tick) => tick * unit);
  outer.text = (value) => `${digits(value / unit)} ${BYTES[Math.round(Math.log(unit) / Math.log(1024))]}`;  // one unit for all
  return outer;
}

/* The frame of a plot: axes with ticks and titles. `box` has left, right, top and bottom in pixels. */
function axes(box, x, y, { xTitle, yTitle, xText, yText }) {
  const parts = [lowerTicks(box, x, xText)];
  for (const tick of y.ticks) {
    const at = y(tick);
    parts.push(shape("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }));
    parts.push(shape("text", { class: "tick", x: box.left - 6, y: at + 4, "text-anchor": "end" }, yText(tick)));
  }
  parts.push(shape("path", { class: "axis", d: `M${box.left},${box.top}V${box.bottom}H${box.right}` }));
  parts.push(shape("text", { class: "title", x: (box.left + box.right) / 2, y: box.bottom + 36, "text-anchor": "middle" }, xTitle));
  parts.push(shape("text", { class: "title", transform: `translate(14,${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, yTitle));
  return parts;
}

/* Grid lines and texts of the axis below, and of one above where the plot is long (`box.above`); texts that would
   overlap the one before are left out. */
function lowerTicks(box, x, text) {
  let free = -Infinity;
  return x.ticks.map((tick) => {
    const at = x(tick);
    const words = text(tick);
    const line = shape("line", { class: "grid", x1: at, x2: at, y1: box.top, y2: box.bottom });
    if (at - words.length * 3.4 < free) return line;
    free = at + words.length * 3.4 + 6;
    const label = (y) => shape("text", { class: "tick", x: Math.max(at, words.length * 3.4), y, "text-anchor": "middle" }, words);
    return [line, label(box.bottom + 16), box.above ? label(box.top - 6) : null];
  });
}

/* The names of the methods of some runs with their colours and marks. */
function legend(runs) {
  const names = report.methods.filter((name) => runs.some((run) => run.method === name));
  return el("ul", { class: "legend", "aria-label": "Methods" }, names.map((name) => {
    const style = styleOf(name);
    return el("li", {}, shape("svg", { width: 16, height: 16, "aria-hidden": "true" }, mark(style.mark, 8, 8, 5, { fill: style.colour })), name);
  }));
}

/* A figure with a heading, something drawn, and a note below it. */
function figure(title, drawing, note) {
  return el("figure", {}, el("figcaption", {}, title), drawing, note ? el("p", { class: "note" }, note) : null);
}

/* A drawing of the given size with a name for screen readers. */
function canvas(width, height, label, ...parts) {
  return shape("svg", { class: "plot", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label }, parts);
}

/* Width for a plot in the content, where `share` plots stand side by side on wide screens. */
function widthFor(share = 1) {
  const whole = byId("main").clientWidth - 32;
  return Math.max(300, share === 2 && whole >= 900 ? Math.floor((whole - 24) / 2) : Math.min(whole, 1080));
}

/* Where the names of lines stand: left of what is drawn, or above it where the page is narrow. */
function lineLayout(names, width) {
  const above = width < 520;
  const longest = Math.max(...names.map((name) => name.length));
  const left = above ? 10 : Math.min(Math.max(80, longest * 6.4 + 14), width * 0.42);
  const height = above ? 42 : LINE;
  return {
    left, height, above,
    offset: above ? 18 : 0,  // of what is drawn, below the top of the line
    label: (name, top) => (above ? fitted(name, 10, top + 13, width - 16, { "text-anchor": "start" }) : fitted(name, left - 8, top + 16, left - 14)),
  };
}

/* A name shortened to fit into a number of pixels, with the whole name as its title. */
function fitted(name, x, y, width, attributes = {}) {
  const most = Math.max(6, Math.floor(width / 6.4));
  const text = name.length > most ? `${name.slice(0, most - 1)}…` : name;
  return shape("text", { class: "label", x, y, "text-anchor": "end", ...attributes }, shape("title", {}, name), text);
}
