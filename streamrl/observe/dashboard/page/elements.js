// Elements made of text, numbers with units, tables, and the panels of the page. Every text of a run goes through textContent.
"use strict";

const byId = id => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value == null) continue;
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child != null) node.append(child);  // a string becomes a text node
  return node;
}

const theme = new Map();  // colours of style.css, which are slow to ask for
const css = name => {
  if (!theme.has(name)) theme.set(name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim());
  return theme.get(name);
};
const known = value => value != null && Number.isFinite(value);
const last = values => { for (let i = (values || []).length - 1; i >= 0; i--) if (known(values[i])) return values[i]; return null; };
const sum = values => values.reduce((total, value) => total + (value || 0), 0);

function median(values) {
  const sorted = Float64Array.from(values.filter(known)).sort();
  return sorted.length ? (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2 : null;
}

function number(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e12 || (size > 0 && size < 1e-3)) return value.toExponential(1);
  for (const [power, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= power) return (value / (letter === "k" ? 1e3 : power)).toPrecision(3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "") + " " + letter;
  return Number.isInteger(value) ? String(value) : size < 1 ? String(+value.toPrecision(3)) : value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

function seconds(value) {
  if (!known(value)) return "–";
  if (value < 0) return "−" + seconds(-value);
  if (value === 0) return "0 s";
  if (value < 0.1) return number(value * 1e3) + " ms";
  if (value < 100) return (value < 10 ? value.toFixed(2) : value.toFixed(1)) + " s";
  if (value < 5400) return Math.floor(Math.round(value) / 60) + " min " + String(Math.round(value) % 60).padStart(2, "0") + " s";
  if (value < 172800) return Math.floor(value / 3600) + " h " + String(Math.floor(value / 60) % 60).padStart(2, "0") + " min";
  return (value / 86400).toFixed(1) + " days";
}

const count = (size, what) => `${size} ${what}${size === 1 ? "" : "s"}`;
const percent = value => known(value) ? (value * 100).toFixed(value && Math.abs(value) < 0.1 ? 1 : 0) + " %" : "–";
const bytes = value => !known(value) ? "–" : value < 1e3 ? value + " B" : value < 1e6 ? (value / 1e3).toFixed(1) + " kB" :
  value < 1e9 ? (value / 1e6).toFixed(1) + " MB" : (value / 1e9).toFixed(2) + " GB";

function inUnit(value, unit) {
  return unit === "s" ? seconds(value) : unit === "share" ? percent(value) : unit === "bytes" ? bytes(value) : number(value);
}

// A table whose head sorts it. columns: [{head, of: row => value, text: value => string, help}]; at most `most` rows.
const orders = new Map();  // as a person sorted the table with these heads, which is made again when data comes
function table(columns, rows, { sort = null, down = true, most = 200, onrow = null, empty = "No data." } = {}) {
  const key = columns.map(column => column.head).join();
  [sort, down] = orders.get(key) ?? [sort, down];
  const body = element("tbody"), note = element("p", { class: "dim" });
  const heads = columns.map((column, index) => element("th", { title: column.help, scope: "col", tabIndex: 0, onclick: () => order(index),
    onkeydown: event => { if (event.key === "Enter") order(index); } }, column.head));
  const order = index => { orders.set(key, [sort, down] = [index, index === sort ? !down : true]); fill(); };
  function fill() {
    const sign = down ? -1 : 1, of = sort == null ? null : columns[sort].of;
    const list = of == null ? rows : [...rows].sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      return x == null ? 1 : y == null ? -1 : sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
    });
    heads.forEach((head, index) => head.setAttribute("aria-sort", index !== sort ? "none" : down ? "descending" : "ascending"));
    body.replaceChildren(...list.slice(0, most).map(row => element("tr", onrow ? { class: "link", tabIndex: 0, onclick: () => onrow(row),
      onkeydown: event => { if (event.key === "Enter") onrow(row); } } : {},
    columns.map(column => {
      const value = column.of(row), text = column.text ? column.text(value, row) : value;
      return element("td", { class: typeof value === "number" ? "number" : column.class }, text == null ? "–" : text instanceof Node ? text : String(text));
    }))));
    note.textContent = list.length > most ? `${most} of ${number(list.length)} rows; sort by another column to see others.` : "";
  }
  fill();
  if (!rows.length) return element("p", { class: "none" }, empty);
  return element("div", { class: "table" }, element("table", {}, element("thead", {}, element("tr", {}, heads)), body), note);
}

const AWAITED = { running: "The run goes on: this is drawn as soon as there is something.", failed: "The run failed: Processes has the ends of its logs, streamrl show RUN the cause." };

// ---- panels: each draws itself when it is in sight and something that it shows has changed
const panels = [];

function panel(id, title, explanation, needs, draw) {
  const body = element("div", { class: "body" }), failure = element("p", { class: "none", hidden: true });
  const section = element("section", { id, "aria-label": title }, element("h2", {}, title), element("p", { class: "explanation" }, explanation), failure, body);
  const made = { id, title, needs, section, body, dirty: true, visible: false, busy: false };
  made.refresh = async (unseen = false) => {
    if (!made.dirty || !(made.visible || unseen) || made.busy || !page.runs.length) return;
    [made.dirty, made.busy] = [false, true];
    try {
      const shown = made.needs.of === "all" ? page.shown() : [page.focus];
      const data = await Promise.all(shown.map(run => Promise.all(needs.paths.map(path => page.data(run, path)))));
      failure.hidden = await draw(body, shown, data) !== false;
      failure.textContent = ["No data:", needs.without, shown.length === 1 ? AWAITED[shown[0].state] : null].filter(Boolean).join(" ");
    } catch (error) {
      failure.hidden = false;
      failure.textContent = `Not shown: ${error.message}`;
      if (!error.expected) console.error(error);
    }
    body.hidden = !failure.hidden;
    made.busy = false;
    if (made.dirty) setTimeout(() => made.refresh(), 500);
  };
  panels.push(made);
  return made;
}

// A text that a person opens, and that stays open while it is brought up to date.
function fold(body, name, text, open = false) {
  const folds = body.folds ??= new Map();
  if (!folds.has(name)) folds.set(name, element("details", { open }, element("summary", {}, name), element("pre", { class: "text" })));
  const node = folds.get(name);
  if (node.lastChild.textContent !== text) node.lastChild.textContent = text;
  return node;
}

// Those out of sight too, in turns: text of another run must not be found, printed or copied there.
async function drawUnseen() {
  for (const one of panels) {
    await one.refresh(true);
    await new Promise(done => setTimeout(done));  // what was drawn is shown before the next one
  }
}

const invalidate = (...paths) => panels.forEach(one => {
  const listed = paths.includes(one.id) && !one.section.matches(":hover, :has(:focus-visible)");  // rows do not move under a pointer
  if (!paths.length || listed || one.needs.paths.some(path => paths.includes(path))) { one.dirty = true; one.refresh(); }
});

// ---- the one tip of the page
function showTip(event, text) {
  const tip = byId("tip");
  tip.textContent = text;
  tip.hidden = !text;
  if (!text) return;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
  tip.style.top = (event.clientY + 18 + height > innerHeight ? Math.max(4, event.clientY - height - 12) : event.clientY + 18) + "px";
}
