/* What runs are judged by against what they cost, with error bars and the Pareto front. */

/* A measure: the name of its axis, a run's value, the range of its error bar, both as text, and whether more is better. */
const SCORE = {
  name: "score", title: "score (mean over tasks)", value: score, range: (run) => ends(run.score, 5) || around(score(run), run.score[1]),
  shown: (run) => `${fixed(score(run))} ${plusMinus(run.score[1])}`, up: true,
};
const PERPLEXITY = {
  name: "perplexity", title: "perplexity (lower is better)", value: perplexity, range: (run) => around(perplexity(run), run.ppl[1]),
  shown: (run) => `${fixed(perplexity(run))} ${plusMinus(run.ppl[1])}`, up: false,
};
const DIVERGENCE = {
  name: "KL divergence", title: "KL divergence from fp16 (nats per token)", value: divergence, range: (run) => ends(run.kl, 4),
  shown: divergenceText, up: false, log: true,
};
const SAME_TOP = {
  name: "same top token", title: "tokens with fp16's first choice (%)", value: (run) => run.kl && 100 * sameTop(run),
  range: (run) => ends(run.kl, 6, 100), shown: (run) => percent(sameTop(run)), up: true,
};
const FLIPS = {
  name: "flips", title: "answers whose correctness flipped (%)", value: (run) => run.flips && 100 * flipped(run),
  range: (run) => ends(run.flips, 3, 100),
  shown: (run) => `${percent(flipped(run), 1)}: ${run.flips[0]} lost and ${run.flips[1]} won of ${run.flips[2]}`, up: false,
};
const BYTES_COST = { title: "KV bytes of a sequence", name: "bytes", value: (run) => run.kv, text: bytes, scale: byteScale };
const TPOT_COST = { title: "TPOT: median time per output token", name: "TPOT", value: (run) => run.tpot, text: seconds, scale: scaleOf };

/* The ends of an interval that stand at a place of an array. */
function ends(values, at, factor = 1) {
  return known(values[at]) ? [values[at] * factor, values[at + 1] * factor] : null;
}

function around(value, error) {
  return error ? [value - error, value + error] : null;
}

/* What the runs of a group are judged by: the first of scores, perplexities and divergences that one of them has. */
function qualityOf(runs) {
  return [SCORE, PERPLEXITY].find((measure) => runs.some((run) => known(measure.value(run)))) || DIVERGENCE;
}

/* The runs that no other run beats in both quality and cost, cheapest first. */
function paretoFront(runs, cost, quality) {
  const better = quality.up ? (a, b) => a > b : (a, b) => a < b;
  const ordered = [...runs].sort((a, b) => cost(a) - cost(b) || (quality.up ? -1 : 1) * (quality.value(a) - quality.value(b)));
  const front = [];
  for (const run of ordered) {
    if (!front.length || better(quality.value(run), quality.value(front.at(-1)))) front.push(run);
  }
  return front;
}

function qualityView(runs) {
  const shown = runs.filter(done);
  if (shown.some((run) => run.points || run.kl) && !shown.some((run) => run.score || run.ppl)) {
    const [view, what] = shown.some((run) => run.kl) ? ["fidelity", "how far predictions are from fp16's"] : ["points", "time and memory by prompt length and batch"];
    return el("p", { class: "empty" }, `These runs have no score; they measured ${what}. `, el("button", { type: "button", click: () => show(view) }, `Show ${view}`));
  }
  const quality = qualityOf(shown);
  return [legend(shown), el("div", { class: "pair" }, [BYTES_COST, TPOT_COST].map((cost) => scatter(shown, cost, quality)))];
}

/* How far predictions and answers are from fp16's. */
function fidelityView(all) {
  const runs = all.filter((run) => done(run) && !run.fp16);
  const measures = [DIVERGENCE, SAME_TOP, FLIPS].filter((measure) => runs.some((run) => known(measure.value(run))));
  if (!measures.length) {
    return el("p", { class: "empty" }, "No run here was compared with fp16. For KL divergence and top tokens run: python -m kvbench method=kivi dataset=fidelity. Flips need a run of method=fp16 on the same samples.");
  }
  return [legend(runs), el("div", { class: "pair" }, measures.map((measure) => scatter(runs, BYTES_COST, measure))),
    el("p", { class: "note" }, "fp16 itself is left out: its predictions are the ones compared with.")];
}

function scatter(all, cost, quality) {
  const width = widthFor(2);
  const having = all.filter((run) => known(quality.value(run)) && cost.value(run) > 0);
  const log = quality.log && having.some((run) => quality.value(run) > 0);
  const runs = log ? having.filter((run) => quality.value(run) > 0) : having;
  const caption = `${quality.name} against ${cost.name}`;
  if (!runs.length) return figure(caption, el("p", { class: "empty" }, `No finished run here has both a ${quality.name} and ${cost.name}.`));
  const height = Math.round(Math.min(440, Math.max(320, width * 0.72)));
  const box = { left: 62, right: width - 14, top: 12, bottom: height - 48 };
  const reach = runs.flatMap((run) => [quality.value(run), ...(quality.range(run) || []).filter((end) => !log || end > 0)]);
  const x = cost.scale(runs.map(cost.value), box.left + 8, box.right - 8, { log: true });
  const y = scaleOf(reach, box.bottom - 6, box.top + 6, { log });
  const front = paretoFront(runs, cost.value, quality);
  const steps = front.map((run, i) => (i ? `H${x(cost.value(run)).toFixed(1)}V${y(quality.value(run)).toFixed(1)}` : `M${x(cost.value(run)).toFixed(1)},${y(quality.value(run)).toFixed(1)}`));
  const ordered = [...runs].sort((a, b) => cost.value(a) - cost.value(b));
  const marks = ordered.map((run) => dot(run, x(cost.value(run)), y, quality, cost, front.includes(run)));
  roving(marks.map((group) => group.lastChild));
  const onTop = (group) => (front.includes(ordered[marks.indexOf(group)]) ? 1 : 0);
  const layers = [...marks].sort((a, b) => onTop(a) - onTop(b));  // the front lies above the others
  const label = `${caption}: ${runs.length} runs, ${front.length} on the Pareto front. Arrow keys go from run to run.`;
  const drawing = canvas(width, height, label,
    axes(box, x, y, { xTitle: cost.title, yTitle: quality.title, xText: x.text || cost.text, yText: (value) => digits(value).replace("-", MINUS) }),
    shape("path", { class: "front", d: `${steps.join("")}H${box.right}` }), layers);
  const zero = having.length - runs.length;
  return figure(caption, drawing, `Line: the Pareto front, ${front.length} of ${runs.length} runs. Bars: 95 % intervals.${zero ? ` ${zero} with a ${quality.name} of 0 not drawn.` : ""}`);
}

/* A run's mark with its error bar; runs of the front are filled. */
function dot(run, x, y, quality, cost, onFront) {
  const style = styleOf(run.method);
  const value = quality.value(run);
  const ends = quality.range(run)?.map((end) => y(Math.max(end, y.low)).toFixed(1));
  const bar = ends ? shape("path", { class: "error", stroke: style.colour, d: `M${x.toFixed(1)},${ends[0]}V${ends[1]}m-3,0h6M${(x - 3).toFixed(1)},${ends[0]}h6` }) : null;
  const point = mark(style.mark, x, y(value), 5.5, {
    fill: onFront ? style.colour : "var(--paper)", stroke: style.colour, "stroke-width": 1.8,
  });
  const lines = [run.name, `${quality.name} ${quality.shown(run)}`, `${cost.name} ${cost.text(cost.value(run))}`, onFront ? "on the Pareto front" : null];
  return shape("g", {}, bar, nameable(point, run, lines));
}
