/* Recipes of kvbench.tune: the format of keys and of values by layer, as a map and as a table. */

const SIDES = ["keys", "values"];
const MAP = { left: 58, top: 22, height: 30, widest: 34, least: 15 };

/* The class of a colour for a number of bits: darker for more. */
function bitsClass(bits) {
  const steps = [2, 3, 4, 5, 6, 8, 16];
  const at = steps.findIndex((step) => (bits ?? 16) <= step);
  return `b${steps[at < 0 ? steps.length - 1 : at]}`;
}

function recipesView() {
  return report.recipes.map((recipe) => {
    const [mean, se, p99] = recipe.kl;
    const loss = known(mean) ? `KL divergence ${plain(mean)}${known(se) ? ` ± ${plain(se)}` : ""} nats${known(p99) ? `, 99 % ${plain(p99)}` : ""}` : null;
    const about = [known(recipe.bits) && `${plain(recipe.bits)} bits an element`, known(recipe.budget_bits) && `budget ${plain(recipe.budget_bits)}`, loss,
      known(recipe.evaluations) && `${recipe.evaluations} settings tried`, `search ${recipe.search}`].filter(Boolean).join(" · ");
    return el("section", { class: "recipe" }, el("h2", {}, recipe.model), el("p", { class: "note" }, about),
      figure("Formats by layer", el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": `Layer map of ${recipe.model}, scrollable` }, layerMap(recipe))), mapLegend(recipe), layerTable(recipe));
  });
}

/* A cell per layer and side: its colour and its number say the bits, its title the format. */
function layerMap(recipe) {
  const count = recipe.layers.length;
  const step = Math.max(MAP.least, Math.min(MAP.widest, (widthFor() - MAP.left - 10) / count));
  const every = Math.ceil(26 / step);
  const rows = SIDES.map((side, row) => {
    const y = MAP.top + row * MAP.height;
    return [shape("text", { class: "tick", x: MAP.left - 8, y: y + 19, "text-anchor": "end" }, side),
      recipe.layers.map((layer, i) => [
        shape("rect", { class: `cell ${bitsClass(layer[2 + row])}`, x: MAP.left + i * step, y, width: step - 1, height: MAP.height - 2 },
          shape("title", {}, `layer ${i}, ${side}: ${layer[row]}`)),
        shape("text", { class: `bits ${bitsClass(layer[2 + row])}`, x: MAP.left + (i + 0.5) * step - 0.5, y: y + 18, "text-anchor": "middle", "aria-hidden": "true" }, layer[2 + row] ?? "?"),
      ])];
  });
  const ticks = recipe.layers.map((_, i) => i % every ? null : shape("text", { class: "tick", x: MAP.left + (i + 0.5) * step, y: MAP.top - 7, "text-anchor": "middle" }, String(i)));
  return canvas(MAP.left + count * step + 4, MAP.top + 2 * MAP.height + 4, `Formats of keys and values in ${count} layers; the table below has the same.`, ticks.filter(Boolean), rows);
}

function mapLegend(recipe) {
  const seen = new Map(recipe.layers.flatMap((layer) => [[layer[0], layer[2]], [layer[1], layer[3]]]));
  const entries = [...seen].sort((a, b) => (b[1] ?? 99) - (a[1] ?? 99));
  return el("ul", { class: "legend" }, entries.map(([name, bits]) => el("li", {},
    shape("svg", { width: 16, height: 16, "aria-hidden": "true", class: "plot" }, shape("rect", { class: `cell ${bitsClass(bits)}`, width: 15, height: 15 })), name)));
}

function layerTable(recipe) {
  const rows = recipe.layers.map(([keys, values], i) => el("tr", {}, el("th", { scope: "row", class: "number" }, String(i)), el("td", {}, keys), el("td", {}, values)));
  return el("details", {}, el("summary", {}, "As a table"), el("table", { class: "small" },
    el("thead", {}, el("tr", {}, ["layer", ...SIDES].map((text, i) => el("th", { scope: "col", class: i ? "text" : "number" }, text)))), el("tbody", {}, rows)));
}

/* Answers of kvbench.fit: the sentence, the formats that fit a card, and the commands of the one to use. */
function fitView() {
  return report.fits.map((fit) => {
    const heads = ["format", "fits", "longest context", "largest batch", "cache", "TPOT", "interval", "KL, nats", "flips", "engines"];
    const rows = fit.rows.map(([name, fits, context, batch, cache, tpot, low, high, kl, flips, engines]) => el("tr", { class: name === fit.best ? "best" : null },
      el("th", { scope: "row" }, name === fit.best ? `${name} (recommended)` : name), el("td", {}, fits ? "yes" : "no"),
      [String(context), String(batch), bytes(cache), seconds(tpot), known(high) ? `${seconds(low)} to ${seconds(high)}` : `from ${seconds(low)}`,
        known(kl) ? plain(kl) : NONE, known(flips) ? percent(flips, 1) : NONE].map((text) => el("td", { class: "number" }, text)),
      el("td", {}, (engines || []).join(", ") || NONE)));
    return el("section", {}, el("h2", {}, fit.title), el("p", {}, el("strong", {}, fit.sentence)),
      el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": `Formats for ${fit.title}, scrollable` }, el("table", { class: "small" },
        el("thead", {}, el("tr", {}, heads.map((text, i) => el("th", { scope: "col", class: i > 1 && i < 9 ? "number" : "text" }, text)))), el("tbody", {}, rows))),
      fit.commands.map(([engine, command]) => el("div", { class: "row" }, el("code", { class: "command", title: command }, `${engine}: ${command}`),
        el("button", { type: "button", "aria-label": `Copy the command of ${engine}`, click: () => copy(command) }, "Copy"))),
      el("ul", { class: "note" }, fit.notes.map((note) => el("li", {}, note))));
  });
}
