/* Time and memory at several prompt lengths and batch sizes (dataset=efficiency): a line per run. */

const MOST_LINES = 40;
/* A point is [prompt, batch, status, TTFT, TPOT, p10, p90, tokens per second, KV bytes, decode peak]. */
const POINT_METRICS = {
  tpot: { name: "TPOT", title: "time per output token", place: 4, low: 5, high: 6, text: seconds },
  ttft: { name: "TTFT", title: "time to the first token", place: 3, text: seconds },
  rate: { name: "tokens/s", title: "tokens per second, all sequences", place: 7, text: (value) => plain(value) },
  kv: { name: "KV bytes", title: "keys and values of one sequence", place: 8, text: bytes, sizes: true },
  peak: { name: "peak", title: "memory peak of decoding", place: 9, text: bytes, sizes: true },
};
const AXES = { prompt: { name: "prompt length", place: 0, other: "batch" }, batch: { name: "batch size", place: 1, other: "prompt" } };

/* Tokens as people name lengths: 4k for 4096. */
function tokens(value) {
  return value >= 1024 && value % 1024 === 0 ? `${value / 1024}k` : String(value);
}

function pointsView(all, redraw) {
  const having = all.filter((run) => run.points?.length);
  if (!having.length) return el("p", { class: "empty" }, "No run here measured time and memory by prompt length and batch. Run: python -m kvbench method=kivi dataset=efficiency");
  const runs = having.slice(0, MOST_LINES);
  const metric = POINT_METRICS[choice.point];
  const axis = AXES[choice.axis];
  const other = AXES[axis.other];
  const values = [...new Set(runs.flatMap((run) => run.points.map((point) => point[other.place])))].sort((a, b) => a - b);
  const width = (value) => new Set(runs.flatMap((run) => run.points.filter((point) => point[other.place] === value).map((point) => point[axis.place]))).size;
  const chosen = values.includes(choice.fixed) ? choice.fixed : values.reduce((best, value) => (width(value) > width(best) ? value : best), values[0]);
  const controls = el("div", { class: "tools" },
    switchOf("Figure", Object.entries(POINT_METRICS).map(([key, { name }]) => [key, name]), choice.point, (key) => { choice.point = key; redraw(); }),
    switchOf("Horizontal axis", Object.entries(AXES).map(([key, { name }]) => [key, name]), choice.axis, (key) => { choice.axis = key; choice.fixed = null; redraw(); }),
    selectOf(axis.other === "batch" ? "Batch" : "Prompt", values.map((value) => [value, axis.other === "batch" ? String(value) : `${tokens(value)} tokens`]), chosen, (value) => { choice.fixed = Number(value); redraw(); }));
  const more = having.length > MOST_LINES ? ` The first ${MOST_LINES} of ${having.length} runs; filter the runs to see others.` : "";
  const lines = runs.map((run) => ({ run, points: run.points.filter((point) => point[other.place] === chosen).sort((a, b) => a[axis.place] - b[axis.place]) }));
  return [controls, legend(runs), pointPlot(lines, metric, axis, more)];
}

function pointPlot(lines, metric, axis, more) {
  const caption = `${metric.name} by ${axis.name}`;
  const measured = (point) => point[2] === "ok" && point[metric.place] > 0;
  const good = lines.flatMap((line) => line.points.filter(measured));
  if (!good.length) return figure(caption, el("p", { class: "empty" }, `No point here has a ${metric.name}.`));
  const size = widthFor();
  const box = { left: 74, right: size - 18, top: 22, bottom: 400 };
  const lost = lines.flatMap((line) => line.points.filter((point) => point[2] === "oom").map((point) => [line.run, point]));
  const places = [...new Set([...good, ...lost.map(([, point]) => point)].map((point) => point[axis.place]))].sort((a, b) => a - b);
  const x = scaleOf(places, box.left + 0.05 * size, box.right - 0.05 * size, { log: true });
  if (places.length <= 14) x.ticks = places;
  const reach = good.flatMap((point) => [point[metric.place], point[metric.low] || point[metric.place], point[metric.high] || point[metric.place]]);
  const y = (metric.sizes ? byteScale : scaleOf)(reach, box.bottom - 8, box.top + 10, { log: true });
  const gaps = places.slice(1).map((place, i) => x(place) - x(places[i]));
  const shift = Math.min(6, (0.5 * Math.min(120, ...gaps)) / lines.length);  // runs stand next to each other
  const groups = lines.map(({ run, points }, i) => {
    const aside = (value) => x(value) + (i - (lines.length - 1) / 2) * shift;
    return pointLine(run, points.filter(measured), metric, axis, aside, y);
  });
  const crosses = lost.map(([run, point], i) => {
    const at = x(point[axis.place]) + ((i % 5) - 2) * 3;
    const cross = shape("path", { class: "lost", stroke: styleOf(run.method).colour, d: `M${at - 4},${box.top - 8}l8,8m0,-8l-8,8` });
    return nameable(cross, run, [run.name, `${tokens(point[0])} tokens, batch ${point[1]}: out of memory`]);
  });
  roving([...groups.flatMap((group) => [...group.querySelectorAll(".nameable")]), ...crosses]);
  const label = `${caption}: ${lines.length} runs, ${good.length} points. Arrow keys go from point to point.`;
  const drawing = canvas(size, box.bottom + 48, label, axes(box, x, y, {
    xTitle: axis.name, yTitle: metric.title, xText: (value) => (axis.place === 0 ? tokens(value) : plain(value)), yText: y.text || metric.text,
  }), groups, crosses);
  const oom = lost.length ? ` Crosses at the top: ${lost.length} point${lost.length > 1 ? "s" : ""} that ran out of memory.` : "";
  return figure(caption, drawing, `${metric.low ? "Bars: 10 % to 90 % of the steps. " : ""}Click on a point for its run.${oom}${more}`);
}

function pointLine(run, points, metric, axis, x, y) {
  const style = styleOf(run.method);
  const at = (point) => [x(point[axis.place]), y(point[metric.place])];
  const path = points.map((point, i) => `${i ? "L" : "M"}${at(point).map((v) => v.toFixed(1)).join(",")}`).join("");
  const marks = points.map((point) => {
    const [a, b] = at(point);
    const low = metric.low && point[metric.low];
    const high = metric.high && point[metric.high];
    const bar = low && high ? shape("path", { class: "error", stroke: style.colour, d: `M${a.toFixed(1)},${y(low).toFixed(1)}V${y(high).toFixed(1)}` }) : null;
    const lines = [run.name, `${tokens(point[0])} tokens, batch ${point[1]}`, `${metric.name} ${metric.text(point[metric.place])}`];
    return [bar, nameable(mark(style.mark, a, b, 5, { fill: style.colour, stroke: style.colour }), run, lines)];
  });
  return shape("g", {}, shape("path", { class: "line", stroke: style.colour, d: path || "M0,0" }), marks);
}
