// Systems side by side: their figures and the same seconds of each. Only a report of streamrl compare has it.
"use strict";

const LANE = 6, TALLEST = 170, ABOVE = 16, BELOW = 18;

// A bar to the mean and a dot for each run, from 0 to the most of all systems.
function strip(values, most) {
  const canvas = element("canvas", { class: "strip" }), pen = sheet(canvas, 110, 12), right = value => 104 * value / most;
  pen.fillStyle = css("line");
  pen.fillRect(3, 4, 104, 4);
  pen.fillStyle = RUN_COLOURS[0];
  pen.fillRect(3, 4, right(sum(values) / values.length), 4);
  pen.fillStyle = css("fg");
  for (const value of values) { pen.beginPath(); pen.arc(3 + right(value), 6, 2.5, 0, 7); pen.fill(); }
  return canvas;
}

// The `span` seconds from `start` on: a bar for each trajectory on its slot, those that worked longest at the top, and a band from each full batch until its version is live.
function stretch(columns, start, span, width) {
  const rows = [], worked = new Map(), { begun, rollout_end: sampled, reward_end: rewarded, slot, outcome } = columns;
  columns.between(start, start + span, i => {
    if (sampled[i] <= begun[i] || rewarded[i] <= start) return;
    rows.push(i);
    worked.set(slot[i], (worked.get(slot[i]) ?? 0) + Math.min(sampled[i], start + span) - Math.max(begun[i], start));
  });
  const lanes = new Map([...worked].sort((a, b) => b[1] - a[1]).map(([one], place) => [one, place])), rise = Math.min(LANE, TALLEST / Math.max(1, lanes.size));
  const canvas = element("canvas", { role: "img" }), floor = ABOVE + rise * lanes.size, pen = sheet(canvas, width, floor + BELOW);
  const x = time => Math.max(0, Math.min(1, (time - start) / span)) * width;
  const box = (from, to, y, tall, colour) => { pen.fillStyle = colour; pen.fillRect(x(from), y, x(to) - x(from), tall); };
  for (const step of columns.head.steps) {
    if (step.time_s <= start || step.time_s - step.step_s + step.rollout_s >= start + span) continue;
    box(step.time_s - step.step_s + step.rollout_s, step.time_s, ABOVE, floor - ABOVE, css("line"));
    pen.fillStyle = css("dim");
    pen.fillText(`step ${step.step}`, x(step.time_s) - 34, ABOVE - 5);
    pen.fillRect(x(step.time_s) - 1, 4, 2, floor - 4);
  }
  for (const i of rows) {
    const y = ABOVE + lanes.get(slot[i]) * rise, tall = Math.max(rise * 0.9, 0.8);
    box(begun[i], sampled[i], y, tall, outcomeColour(columns.head.outcomes[outcome[i]]));
    columns.outside(i, (from, to) => box(from, to, y, tall, PHASES.environment));
    box(sampled[i], rewarded[i], y, tall, PHASES.reward);
  }
  const tick = TICKS.find(one => span / one <= 10);
  pen.fillStyle = css("dim");
  for (let time = 0; time < span; time += tick) pen.fillText(seconds(time), x(start + time) + 2, floor + 13);
  return canvas;
}

if (REPORT?.["/api/comparison"]) panel("systems", "Systems side by side", "Figures are means over repeats, in brackets the least and the greatest; a dot is a run. Times as fast: the wall time a sample of the first system over that of this one, repeat by repeat, as a geometric mean. The other panels have the first run of each system.",
  { of: "all", paths: ["timeline"], without: "no run is finished." }, async body => {
    const found = await answer("/api/comparison"), most = found.heads.map((head, at) => Math.max(...found.rows.flatMap(row => row.values[at])));
    const figures = found.heads.map(({ name, meaning }, at) => ({ head: name, help: meaning, of: row => row.values[at].length ? sum(row.values[at]) / row.values[at].length : row.cells[at],
      text: (value, row) => element("span", {}, row.cells[at], row.values[at].length && most[at] > 0 ? strip(row.values[at], most[at]) : "") }));
    const columns = await Promise.all(page.runs.map(run => page.data(run, "timeline"))), line = text => element("li", {}, text);
    const outcomes = [...new Set(columns.flatMap(one => one.head.outcomes))].map(name => element("span", { title: OUTCOMES[name]?.[1] }, swatch(outcomeColour(name)), name));
    const pictures = found.stretches.map(({ title, place }, at) => {
      const step = columns[at].head.steps[place];
      return element("figure", {}, element("figcaption", {}, title), step ? stretch(columns[at], step.time_s - step.step_s, found.seconds, Math.max(300, body.clientWidth - 20)) : element("p", { class: "none" }, "its trace is gone"));
    });
    body.replaceChildren(element("p", {}, found.about), element("ul", { class: "bad" }, found.notes.map(line)), table(figures, found.rows),
      element("p", { class: "dim" }, "The same seconds of each: a row is a slot of the engines, empty places are the bubble; a band is the time from a full batch until its version is live. It begins with the step of its run whose time a sample is the median."),
      element("div", { class: "legend" }, outcomes, element("span", {}, swatch(PHASES.reward), "in the reward")),
      ...pictures, element("ul", { class: "dim" }, found.warnings.map(line)));
  });
