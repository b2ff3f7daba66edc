/* The report's data and what the reader has chosen.

A run has, where they are known: id, name, label, model, data, status, older, fp16, done, asked, code, command, error,
device, path; settings and env (values by key); score [mean, its reach, samples, difference from fp16, its reach, the ends
of the mean's interval]; ppl [perplexity, its reach, difference]; kl [mean KL divergence from fp16, its 99.9 %, share of
equal first choices, median KL divergence, ends of the mean's interval, ends of the share's]; flips [answers wrong where
fp16's are right, the opposite, answers, ends of the share's interval]; left [answers equal to fp16's to their end, answers,
median index of the first other token];
tasks [[key (in the data: its number), score, error, n, difference,
its error, perplexity, its error, mean KL, its 99.9 %], ...]; kv and reserved (bytes); bill [codes,
scales, window, index]; ratio; peak [prefill, decode]; ttft, tpot, p99 (seconds); rate (tokens per second); ttfts and
tpots [five percentiles, count]; points [[prompt, batch, status, TTFT, TPOT, p10, p90, rate, KV bytes, peak], ...]. */

const report = { runs: [], settings: [], env: [], groups: {}, papers: [], pairs: [], board: [], rows: [], recipes: [], fits: [], sweep: null, skipped: [], methods: [], taskKeys: [], byId: new Map() };

/* What the address holds: null and "" leave the choice to the page. */
const BEGINNING = {
  text: "", status: "", group: null, model: null, budget: null, metric: "tpots", point: "tpot", axis: "prompt", fixed: null,
  pair: 0, job: "", paper: "", mine: "", run: null,
};
const choice = { ...BEGINNING, view: null, filters: {}, columns: new Map(), sort: null, jobs: 200, opened: null };

const VERSION = 4;

/* Take the data of the page, or new data from the server. */
function take(data) {
  if (data.version !== VERSION) throw new Error(`the data have version ${data.version}, this page reads ${VERSION}`);
  Object.assign(report, data);
  report.byId = new Map(data.runs.map((run) => [run.id, run]));
  data.runs.forEach((run, i) => {
    run.group = run.id.split("-")[0];
    run.method = run.label.split(" ")[0];
    run.tasks?.forEach((task) => { task[0] = data.tasks[task[0]]; });
    const among = (columns) => Object.fromEntries(columns.filter(({ of }) => of[i] >= 0).map(({ key, values, of }) => [key, values[of[i]]]));
    run.settings = among(data.settings);
    run.env = among(data.env);
    run.search = [run.name, run.model, run.data, run.status, run.older, run.id, run.device, run.error,
      ...Object.entries(run.settings).map(([key, value]) => `${key}=${value}`)].filter(Boolean).join("\n").toLowerCase();
  });
  const count = new Map();
  for (const run of data.runs) count.set(run.method, (count.get(run.method) || 0) + 1);
  const rest = [...count.keys()].filter((name) => name !== "fp16").sort();
  report.methods = count.has("fp16") ? ["fp16", ...rest] : ["", ...rest];
  report.taskKeys = data.tasks;
}

const score = (run) => run.score?.[0];
const perplexity = (run) => run.ppl?.[0];
const divergence = (run) => run.kl?.[0];
const sameTop = (run) => run.kl?.[2];
const flipped = (run) => run.flips && (run.flips[0] + run.flips[1]) / run.flips[2];
const done = (run) => run.status === "ok" || run.status === "older";

/* Groups of comparable runs among `runs`, largest first: the first half of their ids is equal. */
function groupsOf(runs) {
  const sizes = new Map();
  for (const run of runs) sizes.set(run.group, (sizes.get(run.group) || 0) + 1);
  return [...sizes.entries()].sort((a, b) => b[1] - a[1])
    .map(([group, size]) => ({ group, size, title: report.groups[group] || group }));
}

/* Words for the reader about the status of a run. */
function statusText(run) {
  const count = run.asked === undefined ? `${run.done || 0} samples` : `${run.done || 0} of ${run.asked}`;
  if (run.status === "unfinished" || run.status === "interrupted") return `${run.status}, ${count}`;
  return run.status;
}
