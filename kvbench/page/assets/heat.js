/* A heat map of the paired differences from fp16: a row per run, a column per task. */

const MOST_ROWS = 80;

function heatView(all) {
  const runs = all.filter((run) => (run.tasks || []).some((task) => task[4] !== undefined && task[4] !== null))
    .sort((a, b) => lossOf(a) - lossOf(b));
  const caption = "Paired differences from fp16, by task";
  if (!runs.length) return figure(caption, el("p", { class: "empty" }, "No run here has an fp16 run on the same samples. Run: python -m kvbench method=fp16, with the same model and data."));
  const shown = runs.slice(0, MOST_ROWS);
  const keys = report.taskKeys.filter((key) => shown.some((run) => run.tasks.some((task) => task[0] === key && task[4] !== undefined && task[4] !== null)));
  const sizes = shown.flatMap((run) => run.tasks.map((task) => Math.abs(task[4] ?? 0)));
  const most = Math.max(...sizes) || 1;
  const layout = lineLayout(shown.map((run) => run.name), widthFor());
  const { left } = layout;
  const mean = shown.some((run) => run.score);  // perplexities of several texts have none
  const columns = keys.length + (mean ? 1 : 0);
  const cell = Math.max(46, Math.min(84, (widthFor() - left) / columns));
  const top = 96;
  const width = left + cell * columns + 60;
  const height = top + shown.length * layout.height + 12;
  const heads = [...(mean ? ["mean"] : []), ...keys].map((key, i) => shape("text", {
    class: "tick", transform: `translate(${left + i * cell + cell / 2},${top - 8}) rotate(-32)`,
  }, shape("title", {}, key), key.length > 18 ? `${key.slice(0, 17)}…` : key));
  const rows = shown.map((run, i) => heatRow(run, keys, mean, layout, top + i * layout.height, cell, most));
  roving(rows.map((row) => row.firstChild));
  const scroller = el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Heat map, scrollable" },
    canvas(width, height, `${caption}: ${shown.length} runs and ${keys.length} tasks. Arrow keys go from run to run.`, heads, rows));
  const more = runs.length > MOST_ROWS ? ` The first ${MOST_ROWS} of ${runs.length} runs; filter the runs to see others.` : "";
  return [heatKey(most, signOf(shown[0])), figure(caption, scroller, `Numbers in italics: the 95 % interval contains zero, or may. Smallest loss first.${more}`)];
}

function heatRow(run, keys, mean, layout, top, cell, most) {
  const { left } = layout;
  const y = top + layout.offset;
  const sign = signOf(run);
  const entries = [...(mean ? [["mean", run.score?.[3], run.score?.[4]]] : []), ...keys.map((key) => {
    const task = run.tasks.find((entry) => entry[0] === key);
    return [key, task?.[4], task?.[5]];
  })];
  const lines = [run.name, ...entries.slice(0, 9).filter(([, diff]) => diff !== undefined && diff !== null).map(([key, diff, error]) => `${key}: ${signed(diff)} ${plusMinus(error)}`)];
  const zone = shape("rect", { class: "zone", x: 0, y: top, width: left + cell * entries.length, height: layout.height });
  const cells = entries.map(([, diff, error], i) => {
    const x = left + i * cell;
    if (diff === undefined || diff === null) return shape("text", { class: "tick", x: x + cell / 2, y: y + 16, "text-anchor": "middle" }, NONE);
    const strength = Math.min(1, Math.abs(diff) / most);
    const within = error !== undefined && error !== null && Math.abs(diff) <= error;
    return [
      shape("rect", { class: sign * diff < 0 ? "loss" : "gain", x: x + 1, y: y + 1, width: cell - 2, height: LINE - 2, css: { "fill-opacity": (0.85 * strength).toFixed(3) } }),
      shape("text", { class: `value${strength > 0.55 ? " strong" : ""}${within ? " within" : ""}`, x: x + cell / 2, y: y + 16, "text-anchor": "middle" }, signed(diff, 2)),
    ];
  });
  return shape("g", {}, nameable(zone, run, lines), layout.label(run.name, top), cells.flat());
}

/* 1 for scores, where less is a loss; -1 for perplexities, where more is. */
function signOf(run) {
  return run.score ? 1 : -1;
}

/* How much a run loses compared with fp16: the mean over tasks, or the perplexity. */
function lossOf(run) {
  return run.score ? -(run.score[3] ?? 0) : (run.ppl?.[2] ?? 0);
}

function heatKey(most, sign) {
  const steps = [-1, -0.5, 0, 0.5, 1].map((share) => el("li", {}, shape("svg", { width: 22, height: 16, "aria-hidden": "true" },
    shape("rect", { class: sign * share < 0 ? "loss" : "gain", x: 1, y: 1, width: 20, height: 14, css: { "fill-opacity": (0.85 * Math.abs(share)).toFixed(2) } })), signed(share * most, 2)));
  return el("ul", { class: "legend", "aria-label": "Colours of differences" }, steps);
}
