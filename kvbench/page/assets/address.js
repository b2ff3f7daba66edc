/* The reader's choices in the address behind #, such as #runs?filter.ratio=2..4&sort=-score: what differs from the
beginning. So an address can be kept or shared, and the browser's back button undoes a choice. Addresses come from
anywhere: values that this page does not know are left out. */

const TEXTS = ["text", "status", "group", "model", "job", "paper", "mine", "run"];
const ONE_OF = { metric: () => METRICS, point: () => POINT_METRICS, axis: () => AXES };
const COUNTS = ["budget", "fixed", "pair"];
/* What the address bar has: the address, the field that was typed into last, and whether the last step opened a run. */
const bar = { shown: "", typing: "", opened: false };

/* The address of the present choices, or of others. */
function addressOf(chosen = choice) {
  const parts = new URLSearchParams();
  for (const key of [...TEXTS, ...Object.keys(ONE_OF), ...COUNTS]) {
    if ((chosen[key] ?? "") !== (BEGINNING[key] ?? "")) parts.set(key, chosen[key]);
  }
  if (chosen.sort) parts.set("sort", `${chosen.sort.down ? "-" : ""}${chosen.sort.key}`);
  for (const [key, text] of Object.entries(chosen.filters)) if (text.trim()) parts.set(`filter.${key}`, text);
  for (const [key, shown] of chosen.columns) parts.append(shown ? "show" : "hide", key);
  const text = parts.toString();
  return `#${chosen.view}${text ? `?${text}` : ""}`;
}

/* Take the choices from the address; those that it does not have are as at the beginning. */
function takeAddress() {
  const [view, ...rest] = location.hash.slice(1).split("?");
  const given = new URLSearchParams(rest.join("?"));
  Object.assign(choice, BEGINNING, { filters: {}, columns: new Map(), sort: null });
  choice.view = views().some(([key]) => key === view) ? view : firstView();
  for (const key of TEXTS) if (given.get(key)) choice[key] = given.get(key);
  for (const [key, known] of Object.entries(ONE_OF)) if (Object.hasOwn(known(), given.get(key))) choice[key] = given.get(key);
  for (const key of COUNTS) if (/^\d{1,9}$/.test(given.get(key))) choice[key] = Number(given.get(key));
  const sort = given.get("sort");
  if (sort) choice.sort = { key: sort.replace(/^-/, ""), down: sort.startsWith("-") };
  choice.filters = Object.fromEntries([...given].filter(([key]) => key.startsWith("filter.")).map(([key, text]) => [key.slice(7), text]));
  for (const name of ["hide", "show"]) for (const key of given.getAll(name)) choice.columns.set(key, name === "show");
}

/* Put the choices into the address after anything that the reader did. Letters typed into one field are one step back. */
function remember(event) {
  const address = addressOf();
  const typing = event?.type === "input" ? event.target.dataset.filter || event.target.id : "";
  const same = Boolean(typing) && typing === bar.typing;
  if (event?.type === "input" || address !== bar.shown) bar.typing = typing;
  if (address === bar.shown) return;
  const put = putAddress(address, same ? "replaceState" : "pushState");
  bar.opened = put && Boolean(choice.run) && !same;
}

function putAddress(address, how) {
  bar.shown = address;
  try {
    history[how](null, "", address);
    return true;
  } catch {
    return false;  // a page inside another one may have no address of its own
  }
}

/* The details of a run were closed: one step back, where opening them was a step. */
function forgetRun() {
  choice.run = null;
  if (addressOf() === bar.shown) return;
  if (!bar.opened) return putAddress(addressOf(), "replaceState");
  bar.opened = false;
  bar.shown = addressOf();
  history.back();
}

/* Show what the address says, after the reader went back or changed it. */
function followAddress() {
  const view = () => addressOf({ ...choice, run: null });
  const before = view();
  takeAddress();
  Object.assign(bar, { shown: addressOf(), typing: "", opened: false });
  if (view() !== before) {  // not where only a run was opened or closed: the reader stays where they were
    drawTabs();
    draw();
  }
  drawRun();
}
