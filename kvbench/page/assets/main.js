/* The beginning: theme, heading, the view that the address names. */

const THEMES = { auto: "Theme: automatic", light: "Theme: light", dark: "Theme: dark" };

function remembered(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;  // a page from a file may have no storage
  }
}

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme").textContent = THEMES[name];
  byId("theme").dataset.name = name;
  try {
    localStorage.setItem("kvbench-theme", name);
  } catch {
    // without storage the choice lasts as long as the page
  }
}

function about(problem) {
  const unfinished = report.runs.filter((run) => run.status === "unfinished").length;
  const parts = [report.sweep && `sweep ${report.sweep.id}`, `${report.runs.length} run${report.runs.length === 1 ? "" : "s"}`, unfinished ? `${unfinished} unfinished` : null, report.folder, new Date(report.made).toLocaleString(),
    document.body.dataset.live === "true" && !problem ? "live" : null, problem];
  byId("about").textContent = parts.filter(Boolean).join(" · ");
}

take(JSON.parse(byId("data").textContent));
byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(byId("theme").dataset.name) + 1) % names.length]);
});
setTheme(remembered("kvbench-theme") in THEMES ? remembered("kvbench-theme") : "auto");
about();
takeAddress();
bar.shown = addressOf();
drawTabs();
draw();
drawRun();
addEventListener("resize", () => {
  clearTimeout(live.resize);
  live.resize = setTimeout(() => choice.view === "runs" ? drawRows() : draw(), 150);
});
addEventListener("scroll", hideTip, { passive: true });
addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
  if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(document.activeElement?.tagName)) {
    event.preventDefault();
    byId("search")?.focus();
  }
});
// behind all other listeners, so that each choice is made by then
for (const kind of ["click", "change", "input", "keydown"]) addEventListener(kind, remember);
addEventListener("popstate", followAddress);
NARROW.addEventListener("change", draw);
follow();
