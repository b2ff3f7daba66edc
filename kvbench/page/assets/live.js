/* New data from the server while runs go on (python -m kvbench.report --serve). */

const EVERY_MS = 2000;
const live = { mark: "", failed: 0 };

function follow() {
  if (document.body.dataset.live !== "true") return;
  setTimeout(poll, EVERY_MS);
}

async function poll() {
  try {
    const answer = await fetch(`data.json?mark=${encodeURIComponent(live.mark)}`, { cache: "no-store" });
    if (answer.status === 200) {
      refresh(await answer.json());
      live.mark = answer.headers.get("X-Mark") || "";  // data that cannot be shown are asked for again, and said again
    }
    if (live.failed) about();
    live.failed = 0;
  } catch (error) {
    live.failed += 1;
    const gone = error instanceof TypeError;  // what fetch throws without an answer
    about(gone ? `no answer from the server${live.failed > 5 ? "; it has ended" : ""}` : error.message);
  }
  setTimeout(poll, live.failed > 5 ? 5 * EVERY_MS : EVERY_MS);
}

/* Show new data; what the reader has chosen stays. */
function refresh(data) {
  const known = new Set(report.settings.map((column) => column.key));
  const before = report.runs.length;
  take(data);
  about();
  if (!before && data.runs.length) {
    draw();
    return;
  }
  const { id, dataset } = document.activeElement || {};
  if (choice.view === "runs" && data.settings.some((column) => !known.has(column.key))) draw();
  else shownView.update?.(false);
  if (id) byId(id)?.focus();
  else if (dataset?.id) document.querySelector(`#main [data-id="${CSS.escape(dataset.id)}"]`)?.focus({ preventScroll: true });
}
