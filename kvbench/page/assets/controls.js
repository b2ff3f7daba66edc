/* Controls that several views share. */

/* A labelled choice of one of `options`, pairs of value and text. */
function selectOf(label, options, value, set) {
  const select = el("select", { change: (event) => set(event.target.value) }, options.map(([key, text]) => el("option", { value: key }, text)));
  select.value = String(value ?? "");
  return el("label", {}, label, select);
}

/* A row of buttons of which one is pressed, for few `options`, pairs of key and text. */
function switchOf(label, options, value, set) {
  return el("div", { class: "switch", role: "group", "aria-label": label }, options.map(([key, text]) =>
    el("button", { type: "button", "data-key": key, "aria-pressed": String(key === value), click: () => {
      set(key);
      document.querySelector(`#main [aria-label="${CSS.escape(label)}"] [data-key="${CSS.escape(key)}"]`)?.focus();
    } }, text)));
}
