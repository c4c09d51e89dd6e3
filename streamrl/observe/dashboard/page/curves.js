// Curves of every metric: a small chart each, of several runs over each other.
"use strict";

const KEY_METRICS = ["reward/mean", "completion/length_mean", "policy/entropy", "policy/kl_rollout", "optim/grad_norm", "optim/loss", "async/staleness_mean", "time/step_s",
  "util/trainer_idle_ratio", "util/free_slot_ratio", "perf/samples_s", "reward/zero_std_ratio"];
const curves = { search: "", prefix: "key", smooth: 0.6, x: "step" };

function smoothed(values, weight) {
  let [total, mass] = [0, 0];
  return values.map(value => {
    if (!known(value)) return null;
    [total, mass] = [total * weight + value * (1 - weight), mass * weight + 1 - weight];
    return total / mass;
  });
}

// The x values of a series of a run, by choice of the person.
function xOf(run, metrics, series) {
  if (curves.x === "step") return series.step;
  if (curves.x === "time") return series.time_s.map(time => sinceStart(run, time));
  if (series.trained_tokens) return series.trained_tokens;
  return series.step.map(step => { const place = metrics.step.findLastIndex(one => one <= step); return place < 0 ? 0 : metrics.trained_tokens[place]; });
}

// The number of prompts of each evaluation of a score: those of different numbers are not compared.
function setSizes({ step, values }, name) {
  const columns = ["size", "prompts"].map(size => values[name.replace(/[^/]*$/, size)] ?? []);
  return step.map((unused, at) => columns.map(column => column[at]).find(known) ?? null);
}

function drawCurve(one, runs, data) {
  const tables = [], series = [];
  runs.forEach((run, place) => {
    const [metrics] = data[place];
    const held = metrics.evaluations.values[one.name] ?? [], sizes = setSizes(metrics.evaluations, one.name), different = [...new Set(sizes.filter((size, at) => known(held[at])))];
    for (const [from, points, values, size] of [[metrics, false, metrics.values[one.name]], ...different.map(size => [metrics.evaluations, true, held.map((value, at) => sizes[at] === size ? value : null), size])]) {
      if (!values?.some(known)) continue;
      const name = runs.length > 1 ? run.name || run.run_id : one.name.split("/").at(-1), label = different.length > 1 ? `${name} of ${number(size)} prompts` : name, smooth = curves.smooth > 0 && !points && values.length > 4;
      const colour = points && size !== different[0] ? faint(runColour(run), "99") : runColour(run);
      const rows = xOf(run, metrics, from).map((x, index) => [x, values[index]]).filter(([x]) => known(x)).sort((a, b) => a[0] - b[0]);
      const unique = rows.filter(([x], index) => index + 1 === rows.length || x !== rows[index + 1][0]);
      const [xs, ys] = [unique.map(row => row[0]), unique.map(row => row[1])];
      tables.push(smooth ? [xs, ys, smoothed(ys, curves.smooth)] : [xs, ys]);
      series.push({ label: smooth ? "" : label, colour: smooth ? faint(colour) : colour, width: smooth ? 1 : 1.5, points: points ? true : undefined });
      if (smooth) series.push({ label, colour, width: 2, raw: true });
    }
  });
  const [x, ...columns] = tables.length === 1 ? tables[0] : tables.length ? uPlot.join(tables) : [[]];
  one.chart.show(x, series.map((each, index) => ({ ...each, values: columns[index], raw: each.raw && columns[index - 1] })), { unit: unitOf(one.help, one.name), xUnit: { step: "step", time: "s", tokens: "tokens" }[curves.x],
    onpick: index => curves.x === "step" && pickStep(x[index]) });
}

const unitOf = (help, name) => /\(([^(),]*)[^()]*\)\.?\s*$/.exec(help ?? "")?.[1] ?? (/_s$/.test(name) && !/samples_s|groups_s|tok_s/.test(name) ? "s" : /_ratio$/.test(name) ? "share" : /_bytes$/.test(name) ? "bytes" : "");

panel("curves", "Curves", "Every metric of the run and of its evaluations. A thin line is the value itself, a thick one its running mean. Drag in a chart to zoom, double click to see all, click to open the step.",
  { of: "all", paths: ["metrics"], without: "no step has ended, or metrics.jsonl is gone." }, (body, runs, data) => {
    const names = new Map();
    for (const [metrics] of data) for (const values of [metrics.values, metrics.evaluations.values]) for (const name of Object.keys(values)) names.set(name, metrics.help?.[name] ?? names.get(name) ?? "");
    if (!names.size) return false;
    const redraw = () => body.redraw(), prefixes = ["key", "all", ...new Set([...names.keys()].map(name => name.split("/")[0]))];
    if (!body.grid) {
      body.prefixes = element("span", { class: "choices" });
      body.append(element("div", { class: "controls" },
        element("input", { type: "search", placeholder: "search metrics", "aria-label": "search metrics", oninput: event => { curves.search = event.target.value.toLowerCase(); redraw(); } }), body.prefixes,
        choice("x", ["step", "time", "tokens"], curves.x, value => { curves.x = value; redraw(); }),
        element("label", {}, "smooth ", element("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: "0.6", oninput: event => { curves.smooth = +event.target.value; redraw(); } }))),
      body.grid = element("div", { class: "grid" }));
      body.made = new Map();
      body.seen = new IntersectionObserver(entries => entries.forEach(entry => {
        const one = body.made.get(entry.target.dataset.metric);
        one.visible = entry.isIntersecting;
        if (one.visible && one.stale) { one.stale = false; body.drawOne(one); }
      }), { rootMargin: "200px" });
    }
    body.prefixes.replaceChildren(...prefixes.map(prefix => element("button", { "aria-pressed": String(prefix === curves.prefix), onclick: () => { curves.prefix = prefix; redraw(); } }, prefix)));
    body.drawOne = one => drawCurve(one, runs, data);
    function draw() {
      for (const button of body.prefixes.children) button.setAttribute("aria-pressed", String(button.textContent === curves.prefix && !curves.search));
      const rank = name => /^eval\/.*avg@/.test(name) ? 0.5 : KEY_METRICS.indexOf(name);
      const wanted = [...names.keys()].filter(name => curves.search ? (name + " " + names.get(name)).toLowerCase().includes(curves.search) : curves.prefix === "all" ||
        (curves.prefix === "key" ? rank(name) >= 0 : name.startsWith(curves.prefix + "/")));
      wanted.sort((a, b) => curves.prefix === "key" && !curves.search ? rank(a) - rank(b) : a.localeCompare(b));
      for (const [name, one] of body.made) if (!wanted.includes(name)) { one.chart.figure.remove(); one.visible = false; }
      wanted.forEach((name, place) => {
        if (!body.made.has(name)) {
          const chart = new Chart(body.grid, name, "", 150);
          chart.figure.dataset.metric = name;
          body.made.set(name, { name, help: names.get(name), chart, visible: false });
          chart.figure.firstChild.title = names.get(name);
          chart.figure.firstChild.append(element("small", {}, names.get(name)));
          body.seen.observe(chart.figure);
        }
        const one = body.made.get(name);
        if (body.grid.children[place] !== one.chart.figure) body.grid.insertBefore(one.chart.figure, body.grid.children[place] ?? null);
        one.stale = !one.visible;
        if (one.visible) drawCurve(one, runs, data);
      });
      body.grid.dataset.empty = wanted.length ? "" : "No metric has this in its name.";
    }
    body.redraw = draw;
    draw();
  });

// Buttons of which one is chosen.
function choice(label, options, chosen, act) {
  const group = element("span", { class: "choices", role: "group", "aria-label": label }, label === "" ? null : label + " ");
  for (const option of options) group.append(element("button", { "aria-pressed": String(option === chosen), onclick: event => {
    for (const button of group.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button === event.currentTarget));
    act(option);
  } }, option));
  return group;
}
