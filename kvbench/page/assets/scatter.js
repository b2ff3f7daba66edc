/* Score (or perplexity) against what a run costs, with error bars and the Pareto front. */

/* What the runs of a group are judged by: scores, or perplexities where there are no scores. */
function qualityOf(runs) {
  if (runs.some((run) => score(run) !== undefined)) {
    return { name: "score", title: "score (mean over tasks)", value: score, error: (run) => run.score?.[1], up: true };
  }
  return { name: "perplexity", title: "perplexity (lower is better)", value: perplexity, error: (run) => run.ppl?.[1], up: false };
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
  if (shown.some((run) => run.points) && !shown.some((run) => run.score || run.ppl)) {
    return el("p", { class: "empty" }, "These runs measured time and memory by prompt length and batch. ", el("button", { type: "button", click: () => show("points") }, "Show their points"));
  }
  const quality = qualityOf(shown);
  const share = 2;
  const costs = [
    { title: "KV bytes of a sequence", name: "bytes", value: (run) => run.kv, text: bytes, scale: byteScale },
    { title: "TPOT: median time per output token", name: "TPOT", value: (run) => run.tpot, text: seconds, scale: scaleOf },
  ];
  const plots = costs.map((cost) => scatter(shown, cost, quality, widthFor(share)));
  return [legend(shown), el("div", { class: "pair" }, plots)];
}

function scatter(all, cost, quality, width) {
  const runs = all.filter((run) => quality.value(run) !== undefined && quality.value(run) !== null && cost.value(run) > 0);
  const caption = `${quality.name} against ${cost.name}`;
  if (!runs.length) return figure(caption, el("p", { class: "empty" }, `No finished run here has both a ${quality.name} and ${cost.name}.`));
  const height = Math.round(Math.min(440, Math.max(320, width * 0.72)));
  const box = { left: 62, right: width - 14, top: 12, bottom: height - 48 };
  const reach = runs.flatMap((run) => {
    const error = quality.error(run) || 0;
    return [quality.value(run) - error, quality.value(run) + error];
  });
  const x = cost.scale(runs.map(cost.value), box.left + 8, box.right - 8, { log: true });
  const y = scaleOf(reach, box.bottom - 6, box.top + 6);
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
  return figure(caption, drawing, `Line: the Pareto front, ${front.length} of ${runs.length} runs. Bars: 95 % intervals, on both sides as long as on the longer.`);
}

/* A run's mark with its error bar; runs of the front are filled. */
function dot(run, x, y, quality, cost, onFront) {
  const style = styleOf(run.method);
  const value = quality.value(run);
  const error = quality.error(run);
  const bar = error ? shape("path", {
    class: "error", stroke: style.colour,
    d: `M${x.toFixed(1)},${y(value - error).toFixed(1)}V${y(value + error).toFixed(1)}m-3,0h6M${(x - 3).toFixed(1)},${y(value - error).toFixed(1)}h6`,
  }) : null;
  const point = mark(style.mark, x, y(value), 5.5, {
    fill: onFront ? style.colour : "var(--paper)", stroke: style.colour, "stroke-width": 1.8,
  });
  const lines = [run.name, `${quality.name} ${fixed(value)} ${plusMinus(error)}`, `${cost.name} ${cost.text(cost.value(run))}`, onFront ? "on the Pareto front" : null];
  return shape("g", {}, bar, nameable(point, run, lines));
}
