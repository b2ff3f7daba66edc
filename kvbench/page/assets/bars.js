/* Horizontal bars, one per run: the bill by part, and the distributions of times. */

const MOST_BARS = 80;
const PARTS = [
  ["codes", "packed codes"], ["scales", "scales and zeros"], ["window", "tokens in full precision"], ["index", "indices"],
  ["state", "states of layers without attention"],
];

function moreNote(runs) {
  return runs.length > MOST_BARS ? ` The first ${MOST_BARS} of ${runs.length} runs; filter the runs to see others.` : "";
}

/* The frame of a plot of bars: the names, the axis below, and what `bar` draws per run. */
function barPlot(all, scaleFor, text, title, label, bar) {
  const runs = all.slice(0, MOST_BARS);
  const width = widthFor();
  const layout = lineLayout(runs.map((run) => run.name), width);
  const above = runs.length > 16;
  const top = above ? 24 : 8;
  const bottom = top + 4 + runs.length * layout.height;
  const box = { left: layout.left, right: width - 16, top, bottom, above };
  const x = scaleFor(box);
  const parts = [lowerTicks(box, x, x.text || text)];
  parts.push(shape("text", { class: "title", x: (box.left + box.right) / 2, y: box.bottom + 38, "text-anchor": "middle" }, title));
  const groups = runs.map((run, i) => {
    const y = box.top + i * layout.height;
    const drawn = bar(run, y + 4 + layout.offset, x, LINE - 8);
    const zone = shape("rect", { class: "zone", x: 0, y, width: box.right, height: layout.height });
    return shape("g", {}, nameable(zone, run, drawn.lines), layout.label(run.name, y), drawn.parts);
  });
  roving(groups.map((group) => group.firstChild));
  return canvas(width, bottom + 48, `${label}: ${runs.length} runs. Arrow keys go from run to run.`, parts, groups);
}

function billView(all) {
  const runs = all.filter((run) => run.bill && run.kv > 0).sort((a, b) => b.kv - a.kv);
  if (!runs.length) return figure("KV bytes by part", el("p", { class: "empty" }, "No run here has a bill."));
  const most = runs.slice(0, MOST_BARS).map((run) => run.kv);
  const drawing = barPlot(runs, (box) => byteScale(most, box.left, box.right, { zero: true }), bytes, "bytes of one sequence's keys and values", "KV bytes by part", (run, top, x, height) => {
    let before = 0;
    const parts = run.bill.map((size, i) => {
      const rect = shape("rect", { class: `part p${i}`, x: x(before), y: top, width: Math.max(0, x(before + size) - x(before)), height });
      before += size;
      return rect;
    });
    const lines = [run.name, `${bytes(run.kv)}, fp16 needs ${times(run.ratio)}`, ...PARTS.map(([, name], i) => (run.bill[i] ? `${name}: ${bytes(run.bill[i])}` : null))];
    return { parts, lines };
  });
  const keys = el("ul", { class: "legend", "aria-label": "Parts" }, PARTS.map(([, name], i) =>
    el("li", {}, shape("svg", { width: 16, height: 16, "aria-hidden": "true" }, shape("rect", { class: `part p${i}`, x: 1, y: 2, width: 14, height: 12 })), name)));
  return [keys, figure("KV bytes by part", drawing, `Largest first.${moreNote(runs)}`)];
}

const METRICS = { tpots: ["time per output token", "TPOT"], ttfts: ["time to the first token", "TTFT"] };

function timesView(all, redraw) {
  const key = choice.metric;
  const runs = all.filter((run) => run[key]?.[5]).sort((a, b) => a[key][2] - b[key][2]);
  const [title, name] = METRICS[key];
  const switches = switchOf("Time", Object.entries(METRICS).map(([other, [, text]]) => [other, text]), key, (other) => { choice.metric = other; redraw(); });
  if (!runs.length) return [switches, figure(title, el("p", { class: "empty" }, `No run here has samples with a ${name}.`))];
  const shown = runs.slice(0, MOST_BARS);
  const reach = shown.flatMap((run) => [run[key][0], run[key][4]]);
  const drawing = barPlot(runs, (box) => scaleOf(reach, box.left + 4, box.right, { log: true }), seconds, title, `Distributions of ${name}`, (run, top, x, height) => {
    const [p5, p25, p50, p75, p95, count] = run[key];
    const style = styleOf(run.method);
    const middle = top + height / 2;
    const parts = [
      shape("line", { class: "whisker", x1: x(p5), x2: x(p95), y1: middle, y2: middle, stroke: style.colour }),
      shape("rect", { class: "box", x: x(p25), y: top + 1, width: Math.max(1, x(p75) - x(p25)), height: height - 2, fill: style.colour }),
      shape("line", { class: "median", x1: x(p50), x2: x(p50), y1: top - 1, y2: top + height + 1 }),
    ];
    const lines = [run.name, `median ${seconds(p50)}`, `middle half ${seconds(p25)} to ${seconds(p75)}`, `5 % to 95 %: ${seconds(p5)} to ${seconds(p95)}`, `${count} values on ${run.device || "an unknown device"}`];
    return { parts, lines };
  });
  const devices = new Set(runs.map((run) => run.device)).size;
  const note = `Line: 5 % to 95 %; box: the middle half; stroke: median. Shortest median first.${devices > 1 ? " Times of different devices cannot be compared." : ""}${moreNote(runs)}`;
  return [switches, legend(shown), figure(`${name}: ${title}`, drawing, note)];
}
