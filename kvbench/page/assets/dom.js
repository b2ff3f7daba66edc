/* Elements, messages, tooltips and copying. Texts of runs are only ever set as text, never as HTML. */

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(key, value);
    else if (key === "css") Object.entries(value).forEach(([name, v]) => node.style.setProperty(name, v));
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/* An HTML element: attributes whose value is a function are listeners, `css` sets properties of the style. */
function el(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/* The same for an element of a drawing. */
function shape(name, attributes, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function byId(id) {
  return document.getElementById(id);
}

/* A picture of two sheets, for buttons that copy. */
function copyIcon() {
  return shape("svg", { width: 15, height: 15, viewBox: "0 0 16 16", "aria-hidden": "true", class: "icon" },
    shape("rect", { x: 5.5, y: 5.5, width: 8, height: 9, rx: 1.5 }), shape("path", { d: "M10.5,3.2V3a1.5,1.5 0 0 0 -1.5,-1.5H4A1.5,1.5 0 0 0 2.5,3v7A1.5,1.5 0 0 0 4,11.5" }));
}

let toastTimer = 0;

/* Show a message for a moment; screen readers read it out. */
function toast(text) {
  const box = byId("toast");
  box.textContent = text;
  box.classList.add("shown");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => box.classList.remove("shown"), 2600);
}

/* Copy a text, and say so; where the browser refuses, show the text so that it can be copied by hand. */
async function copy(text, what = "Command") {
  if (!text) return toast("There is no command here: it is too long for the page, or its configuration cannot be read");
  try {
    await navigator.clipboard.writeText(text);
    toast(`${what} copied`);
  } catch {
    const area = el("textarea", { class: "offscreen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (copied) toast(`${what} copied`);
    else showText(`${what} (select and copy)`, text);
  }
}

/* Show a text in a dialog. */
function showText(title, text) {
  openDialog(title, el("pre", { class: "command", tabindex: 0 }, text));
}

/* Open a dialog that Escape, its button or a click beside it closes; `closed` is then called. */
function openDialog(title, content, { kind = "text", id = null, closed = () => {} } = {}) {
  const heading = el("h2", { id: "dialog-title" }, title);
  const close = el("button", { type: "button", class: "close", "aria-label": "Close", click: () => box.close() }, "×");
  const box = el("dialog", { class: kind, "data-id": id, "aria-labelledby": "dialog-title" }, el("div", { class: "head" }, heading, close), content);
  box.addEventListener("click", (event) => event.target === box && box.close());
  box.addEventListener("close", () => { box.remove(); closed(); });
  document.body.append(box);
  box.showModal();
  return box;
}

/* Show lines of text next to an element. */
function tipAt(node, lines) {
  const tip = byId("tip");
  tip.replaceChildren(...lines.filter(Boolean).map((line, i) => el(i ? "div" : "strong", {}, line)));
  tip.hidden = false;
  const at = node.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left + at.width / 2 - size.width / 2), innerWidth - size.width - 8);
  const above = at.top - size.height - 10;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above > 8 ? above : Math.min(at.bottom + 10, innerHeight - size.height - 8)}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

/* Let an element of a drawing name a run on hover and on focus, and show its details on a click, Enter or Space. */
function nameable(node, run, lines) {
  fill(node, {
    role: "button",
    tabindex: -1,
    "data-id": run.id,
    "aria-label": `${lines.filter(Boolean).join(". ")}. Press Enter for the details.`,
    mouseenter: () => tipAt(node, [...lines, "Click: the run's details"]),
    mouseleave: hideTip,
    focus: () => tipAt(node, [...lines, "Enter: the run's details"]),
    blur: hideTip,
    click: () => showDetails(run),
    keydown: (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      showDetails(run);
    },
  }, []);
  node.classList.add("nameable");
  return node;
}

/* One stop for the Tab key in a group of elements: arrow keys, Home and End move within it. */
function roving(nodes) {
  if (!nodes.length) return;
  const go = (place) => {
    nodes.forEach((node) => node.setAttribute("tabindex", -1));
    nodes[place].setAttribute("tabindex", 0);
    nodes[place].focus();
  };
  nodes[0].setAttribute("tabindex", 0);
  nodes.forEach((node, i) => node.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) go((i + step + nodes.length) % nodes.length);
    else if (event.key === "Home") go(0);
    else if (event.key === "End") go(nodes.length - 1);
    else return;
    event.preventDefault();
  }));
}
