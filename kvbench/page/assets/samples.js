/* The samples on which two runs differ, side by side. */

const MOST_WORDS = 400;
const PAGE = 20;

function samplesView(redraw) {
  if (!report.pairs.length) {
    return el("p", { class: "empty" }, "No pair of runs was named. Name two by their ids, or the beginnings of ids: python -m kvbench.report --html --pair A B");
  }
  const place = Math.min(choice.pair, report.pairs.length - 1);
  const pair = report.pairs[place];
  const names = pair.runs.map((id) => report.byId.get(id)?.name || id);
  const select = el("select", { change: (event) => { choice.pair = Number(event.target.value); redraw(); } },
    report.pairs.map((other, i) => el("option", { value: i }, other.runs.map((id) => report.byId.get(id)?.name || id).join("  |  "))));
  select.value = String(place);
  const table = smallTable("Differences by task", ["task", "A", "B", "B − A", "n"],
    pair.tasks.map(([key, a, b, diff, error, n]) => [key, fixed(a), fixed(b), `${signed(diff)} ${plusMinus(error)}`, plain(n)]));
  const list = el("ol", { class: "samples" });
  const state = { text: "", kind: "all", shown: PAGE };
  const count = el("p", { class: "count", role: "status" });
  const more = el("button", { type: "button", click: () => { state.shown += PAGE; draw(); } }, "Show more");
  const draw = () => {
    const words = state.text.toLowerCase();
    const chosen = pair.samples.filter(([id, a, b, left, right]) =>
      (!words || `${id}\n${left}\n${right}`.toLowerCase().includes(words))
      && (state.kind === "all" || (state.kind === "A" ? (a ?? 0) > (b ?? 0) : state.kind === "B" ? (b ?? 0) > (a ?? 0) : a === b)));
    list.replaceChildren(...chosen.slice(0, state.shown).map((sample) => sampleItem(sample)));
    more.hidden = chosen.length <= state.shown;
    const rest = pair.left_out ? ` ${pair.left_out} further samples are not in this page.` : "";
    count.textContent = `${chosen.length} samples with different answers or scores; ${pair.equal} are equal.${rest}`;
  };
  const search = el("input", { type: "search", placeholder: "text of a sample", "aria-label": "Filter samples", input: (event) => { state.text = event.target.value; state.shown = PAGE; draw(); } });
  const kinds = el("select", { "aria-label": "Which samples", change: (event) => { state.kind = event.target.value; state.shown = PAGE; draw(); } },
    [["all", "all that differ"], ["A", "A scores higher"], ["B", "B scores higher"], ["same", "same score"]].map(([key, text]) => el("option", { value: key }, text)));
  draw();
  return [
    el("div", { class: "tools" }, el("label", {}, "Pair", select), kinds, search),
    el("dl", { class: "sides" }, el("dt", {}, "A"), el("dd", {}, names[0]), el("dt", {}, "B"), el("dd", {}, names[1])),
    pair.notes.map((note) => el("p", { class: "note warn" }, note)), table, count, list, more,
  ];
}

function sampleItem([id, a, b, left, right]) {
  const [marksA, marksB] = difference(left, right);
  const side = (name, value, marks) => el("div", { class: "side" }, el("h4", {}, name, el("span", {}, value === null ? NONE : fixed(value))), el("p", { class: "answer", dir: "auto" }, marks));
  return el("li", {}, el("h3", {}, id), el("div", { class: "both" }, side("A", a, marksA), side("B", b, marksB)));
}

/* Both texts as nodes, in which the words that only one of them has are marked. */
function difference(left, right) {
  if (!left && !right) return [[emptyAnswer()], [emptyAnswer()]];
  const [a, b] = [left, right].map((text) => text.match(/\s+|[^\s]+/g) || []);
  if (a.length > MOST_WORDS || b.length > MOST_WORDS) return [[left || emptyAnswer()], [right || emptyAnswer()]];
  const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
  }
  const out = [[], []];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      out[0].push(a[i++]);
      out[1].push(b[j++]);
    } else if (j >= b.length || (i < a.length && common[i + 1][j] >= common[i][j + 1])) out[0].push(el("mark", {}, a[i++]));
    else out[1].push(el("mark", {}, b[j++]));
  }
  return out.map((nodes) => (nodes.length ? nodes : [emptyAnswer()]));
}

function emptyAnswer() {
  return el("em", {}, "(empty)");
}
