// The timeline: every trajectory as a bar. Bars are pixels of one image; far out, one coarse picture of the whole run is drawn instead.
"use strict";

const BINS = 16384, FAR_BINS = 4096, COARSE_ROWS = 512, MANY = 30000;
const TOP = 62, BOTTOM = 74;

// What all timelines of the page show, in seconds since each run's start.
const view = { start: 0, stop: 1, follow: true, sort: "slot", by: "outcome", only: null, every: false };
const timelines = new Set();
const longest = () => Math.max(0.001, ...[...timelines].map(one => one.columns?.end ?? 0));
const repaint = () => timelines.forEach(timeline => { timeline.dirty = true; timeline.ask(); });

class Timeline {
  constructor(host, run) {
    this.run = run;
    this.canvas = element("canvas", { tabIndex: 0, role: "img", "aria-label": `timeline of ${run.name}: arrows move, plus and minus zoom, 0 shows all` });
    this.over = element("canvas", { class: "over" });
    this.box = element("div", { class: "timeline" }, this.canvas, this.over);
    host.append(this.box);
    this.low = this.high = null;  // rows in view; null: all
    this.frames = [];
    resized.set(this.box, () => { this.dirty = true; this.ask(); });
    sizes.observe(this.box);
    this.listen();
    timelines.add(this);
  }

  remove() { timelines.delete(this); sizes.unobserve(this.box); this.box.remove(); }

  set(columns, metrics) {
    if (this.columns !== columns) this.arranged = null;
    this.columns = columns;
    const budgets = new Map(metrics.step.map((step, place) => [step, metrics.values["sizing/budget"]?.[place]]));
    for (const step of columns.head.steps) step.budget = budgets.get(step.step);
    if (view.follow) [view.start, view.stop] = [0, longest()];
    this.dirty = true;
    this.ask();
  }

  ask() { this.asked ??= requestAnimationFrame(() => { this.asked = null; if (this.dirty) { this.dirty = false; this.paint(); } }); }

  layOut() {
    const { columns } = this, key = [view.sort, view.sort === "slot" ? "" : columns.count].join();
    if (this.arranged !== key) {
      Object.assign(this, arrange(columns, view.sort), { arranged: key, coarse: {} });
      if (this.high > this.lanes) this.low = this.high = null;
    } else if (view.sort === "slot") [this.lane, this.lanes] = [columns.slot, columns.lanes];
    const colours = [view.by, view.only, css("bg"), columns.count < 1000 ? columns.count : 0].join();
    if (this.coloured !== colours) Object.assign(this, { coloured: colours, colour: colouring(columns, view.by, view.only), coarse: {} });
    this.phases = Object.fromEntries(Object.entries(PHASES).map(([name, colour]) => [name, pixel(channels(css(colour) || colour))]));
  }

  // The whole run as one picture of `bins` columns, brought up to date with bars that came.
  picture(bins) {
    const { columns, lane } = this, rows = Math.min(this.lanes, COARSE_ROWS);
    let coarse = this.coarse[bins];
    if (!coarse || columns.end > coarse.span || coarse.lanes !== this.lanes) {
      const canvas = new OffscreenCanvas(bins, rows), pen = canvas.getContext("2d"), image = pen.createImageData(bins, rows);
      coarse = this.coarse[bins] = { canvas, pen, image, pixels: new Uint32Array(image.data.buffer), span: columns.end * (this.run.state === "running" ? 1.3 : 1.0001), done: 0, lanes: this.lanes };
      coarse.pixels.fill(pixel(channels(css("panel"))));
    }
    if (coarse.done === columns.count) return coarse;
    const scale = bins / coarse.span, row = rows / this.lanes, { launched, begun: queued, rollout_end: sampled, reward_end: rewarded, ended } = columns;
    const { pixels } = coarse, { colour } = this, { waiting, reward, environment, queued: held } = this.phases;
    let [left, right] = [bins, 0];
    for (let i = coarse.done; i < columns.count; i++) {
      const at = (lane[i] * row | 0) * bins, a = launched[i] * scale | 0, b = Math.max(a, queued[i] * scale | 0), c = Math.max(b, sampled[i] * scale | 0);
      const d = Math.max(c, rewarded[i] * scale | 0), e = Math.min(bins, Math.max(a + 1, ended[i] * scale | 0));
      for (let x = d; x < e; x++) pixels[at + x] = waiting;
      for (let x = c; x < d; x++) pixels[at + x] = reward;
      for (let x = a; x < b; x++) pixels[at + x] = held;
      for (let x = b, color = colour(i); x < c || x === b; x++) pixels[at + x] = color;
      columns.outside(i, (from, to) => { for (let x = from * scale | 0, until = to * scale | 0; x < until; x++) pixels[at + x] = environment; });
      if (a < left) left = a;
      if (e > right) right = e;
    }
    coarse.done = columns.count;
    coarse.pen.putImageData(coarse.image, 0, 0, left, 0, right - left, rows);
    return coarse;
  }

  paint() {
    const { columns } = this, began = performance.now();
    if (!columns || !this.box.clientWidth) return;
    this.layOut();
    const width = this.box.clientWidth, height = Math.max(360, Math.min(620, innerHeight * 0.62)), ratio = devicePixelRatio || 1;
    [this.left, this.width, this.height] = [width < 600 ? 34 : 72, width, height];
    const pen = sheet(this.canvas, width, height);
    if (this.hovered) { sheet(this.over, width, height); this.hovered = false; }
    const area = { x: Math.round(this.left * ratio), y: Math.round(TOP * ratio), w: Math.round((width - this.left) * ratio), h: Math.round((height - TOP - BOTTOM) * ratio) };
    const [low, high] = [this.low ?? 0, this.high ?? this.lanes], span = view.stop - view.start;
    const inView = (columns.lower(view.stop) - columns.lower(view.start - columns.longest)) * (high - low) / this.lanes;
    if (inView > MANY) {
      const far = span * FAR_BINS > columns.end * area.w, coarse = this.picture(far ? FAR_BINS : BINS), scale = coarse.canvas.width / coarse.span, row = coarse.canvas.height / this.lanes;
      pen.imageSmoothingEnabled = false;
      pen.drawImage(coarse.canvas, view.start * scale, low * row, span * scale, (high - low) * row, this.left, TOP, width - this.left, height - TOP - BOTTOM);
      if (far) this.near ??= setTimeout(() => this.picture(BINS), 1000);  // before a person zooms in
    } else this.bars(pen, area, low, high, area.w / span);
    this.bands(pen, width, height, low, high);
    this.frames.push(performance.now() - began);
    if (this.frames.length > 500) this.frames.shift();
  }

  bars(pen, { x: x0, y: y0, w, h }, low, high, scale) {
    if (this.image?.width !== w || this.image?.height !== h) { this.image = pen.createImageData(w, h); this.pixels = new Uint32Array(this.image.data.buffer); }
    const { columns, lane, pixels, colour, phases } = this, { launched, begun: queued, rollout_end: sampled, reward_end: rewarded, ended } = columns;
    pixels.fill(pixel(channels(css("panel"))));
    const rise = h / (high - low), gap = rise > 3 * (devicePixelRatio || 1) ? 1 : 0;
    const fill = (from, to, top, bottom, value) => {
      from = Math.max(0, from); to = Math.min(w, to);
      if (to > from) for (let y = top; y < bottom; y++) pixels.fill(value, y * w + from, y * w + to);
    };
    columns.between(view.start, view.stop, i => {
      if (lane[i] < low - 1 || lane[i] >= high) return;
      const top = Math.max(0, (lane[i] - low) * rise | 0), bottom = Math.min(h, Math.max(top + 1, ((lane[i] + 1 - low) * rise | 0) - gap)), inset = (bottom - top) >> 2;
      const at = time => Math.floor((time - view.start) * scale), a = at(launched[i]), e = at(ended[i]);
      if (e - a < 2) return fill(a, a + 1, top, bottom, colour(i));
      const b = Math.max(a, at(queued[i])), c = Math.max(b, at(sampled[i])), d = Math.max(c, at(rewarded[i]));
      fill(a, b, top + inset, bottom - inset, phases.queued);
      fill(b, Math.max(c, b + 1), top, bottom, colour(i));
      columns.outside(i, (from, to) => fill(at(from), at(to), top, bottom, phases.environment));
      fill(c, d, top + inset, bottom - inset, phases.reward);
      fill(d, e, top + inset, bottom - inset, phases.waiting);
    });
    for (const event of columns.head.events) {  // what was sampled while engines were paused
      if (event.kind !== "pause" || !known(event.end_s) || event.end_s < view.start || event.time_s > view.stop) continue;
      const [from, to, ground] = [Math.max(0, Math.floor((event.time_s - view.start) * scale)), Math.min(w, Math.floor((event.end_s - view.start) * scale)), pixel(channels(css("panel")))];
      for (let y = 0; y < h && to > from; y++) for (let x = y * w + from; x < y * w + to; x++) if (pixels[x] !== ground && pixels[x] !== phases.environment) pixels[x] = phases.paused;
    }
    pen.putImageData(this.image, x0, y0);
  }

  x(time) { return this.left + (time - view.start) / (view.stop - view.start) * (this.width - this.left); }

  // Everything around the bars: axis, steps, pushes, pauses, evaluations above; running requests, group size and budget below.
  bands(pen, width, height, low, high) {
    const { head } = this.columns, { left } = this, inner = width - left, floor = height - BOTTOM, seen = (from, to) => to >= view.start && from <= view.stop;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const say = (text, x, y, colour = css("dim"), align = "left") => { pen.fillStyle = colour; pen.textAlign = align; pen.fillText(text, x, y); };
    const box = (from, to, y, tall, colour, text) => {
      const x = Math.max(left, this.x(from)), wide = Math.max(1, Math.min(width, this.x(to)) - x);
      pen.fillStyle = colour;
      pen.fillRect(x, y, wide, tall);
      if (text && wide > 20 && pen.measureText(text).width < wide - 6) say(text, x + 4, y + tall / 2 + 0.5, css("fg"));
    };
    const names = width < 600 ? ["", "", ""] : ["steps", "trainer", "events"];
    names.forEach((name, place) => say(name, left - 6, 22 + place * 15, css("dim"), "right"));
    const kinds = [...new Set(head.steps.map(step => step.round_kind))];
    const inSight = head.steps.slice(lowerBound(head.steps.length, at => head.steps[at].time_s < view.start), lowerBound(head.steps.length, at => head.steps[at].time_s - head.steps[at].step_s <= view.stop));
    let drawn = -1;
    for (const step of inSight) {
      const start = step.time_s - step.step_s, full = start + (step.rollout_s ?? 0), trained = full + (step.training_s ?? 0), x = this.x(step.time_s);
      if (x < drawn + 0.7) continue;  // thousands of steps: one a pixel
      drawn = x;
      box(start, step.time_s, 16, 12, faint(RUN_COLOURS[kinds.indexOf(step.round_kind) % 8], step.step % 2 ? "33" : "66"), `${step.step} ${step.round_kind ?? ""}${known(step.group_size) ? " ×" + number(step.group_size) : ""}`);
      if (this.x(trained) - this.x(full) > 0.5) box(full, trained, 31, 12, REASONS.training[0] + "aa", "train");
      if (x - this.x(step.time_s - (step.push_s ?? 0)) > 0.5) box(step.time_s - step.push_s, step.time_s, 31, 12, REASONS.push[0] + "aa", "push");
      if (inner / (view.stop - view.start) * step.step_s > 8) { pen.fillStyle = css("mark"); pen.fillRect(x, TOP, 1, floor - TOP); }
    }
    let marked = -9;
    for (const event of head.events) {
      if (!seen(event.time_s, event.end_s ?? event.time_s)) continue;
      const colour = eventColour(event.kind), x = this.x(event.time_s);
      if (known(event.end_s) && this.x(event.end_s) - x > 2) box(event.time_s, event.end_s, 46, 12, faint(colour, "99"), event.kind);
      else if (x - marked > 5) { pen.fillStyle = colour; pen.fillRect(x - 1.5, 46, 3, 12); marked = x; }
    }
    const range = view.stop - view.start, wish = range / Math.max(2, inner / 110), power = 10 ** Math.floor(Math.log10(wish));
    const tick = range > 100 ? TICKS.find(one => one >= wish) ?? wish : [1, 2, 5, 10].map(one => one * power).find(one => one >= wish);
    for (let time = Math.ceil(view.start / tick) * tick; time < view.stop; time += tick) {
      pen.fillStyle = css("line");
      pen.fillRect(this.x(time), 0, 1, 14);
      say(tick < 60 ? Number(time.toPrecision(8)) + " s" : clock(time), this.x(time) + 4, 7);
    }
    const rise = (floor - TOP) / (high - low);
    for (const name of this.names) {
      const y = TOP + (name.from - low) * rise, bottom = TOP + (name.to - low) * rise;
      if (bottom < TOP || y > floor) continue;
      pen.fillStyle = css("mark");
      if (y > TOP) pen.fillRect(left, y, inner, 1);
      if (bottom - y > 9) say(width < 600 ? name.text.replace("engine-", "e") : name.text, left - 6, (Math.max(TOP, y) + Math.min(floor, bottom)) / 2, css("dim"), "right");
    }
    if (!this.names.length && width >= 600) say(view.sort === "prompt" ? "prompts" : `${number(high - low)} rows`, left - 6, (TOP + floor) / 2, css("dim"), "right");
    this.load(pen, inSight, floor + 8, height - 4, width);
  }

  load(pen, inSight, top, bottom, width) {
    const { head, lanes } = this.columns, { engines } = head, { left } = this, tall = bottom - top, says = [];
    pen.save();
    pen.beginPath();
    pen.rect(left, top - 2, width - left, tall + 4);
    pen.clip();
    if (engines?.time_s?.length) {
      const peak = new Float32Array(Math.ceil(width) + 1), per = new Float32Array(peak.length), first = lowerBound(engines.time_s.length, at => engines.time_s[at] < view.start);
      for (let index = first; index < engines.time_s.length && engines.time_s[index] <= view.stop; index++) {
        const x = Math.round(this.x(engines.time_s[index]));
        if (x >= left && x <= width) { peak[x] += engines.running[index]; per[x]++; }
      }
      pen.fillStyle = css("load");
      pen.beginPath();
      pen.moveTo(left, bottom);
      const before = engines.running[first - 1];  // a gauge holds its value until the next one
      let y = known(before) ? bottom - Math.min(1, before / lanes) * tall : bottom;
      for (let x = Math.floor(left); x < peak.length; x++) { if (per[x]) y = bottom - Math.min(1, peak[x] / per[x] / lanes) * tall; pen.lineTo(x, y); }
      pen.lineTo(width, bottom);
      pen.fill();
      says.push([css("dim"), `running (to ${number(lanes)})`]);
    }
    const line = (name, colour, label) => {
      const most = head.steps.reduce((found, step) => Math.max(found, step[name] || 0), 0);
      if (!most) return;
      let drawn = -1;
      pen.fillStyle = colour;
      for (const step of inSight) {
        const [from, to] = [Math.max(left, this.x(step.time_s - step.step_s)), this.x(step.time_s)];
        if (known(step[name]) && to > drawn + 0.7) pen.fillRect(from, bottom - step[name] / (most * 1.15) * tall, Math.max(1, to - from), 2);
        if (to > drawn + 0.7) drawn = to;
      }
      says.push([colour, `${label} (to ${number(most)})`]);
    };
    line("group_size", RUN_COLOURS[1], "group size");
    line("budget", RUN_COLOURS[3], "straggler budget");
    pen.restore();
    if (width >= 600) says.forEach(([colour, text], index) => { pen.textAlign = "left"; pen.fillStyle = colour; pen.fillText(text, left + 6 + index * 150, top + 4); });
  }

  zoom(factor, at = 0.5) {
    const time = view.start + (view.stop - view.start) * at;
    this.look(time - (time - view.start) * factor, time + (view.stop - time) * factor);
  }

  look(start, stop) {
    const end = longest(), span = Math.min(Math.max(1e-3, stop - start), end * 1.1), from = Math.max(-span / 2, Math.min(end - span / 2, start));
    [view.start, view.stop, view.follow] = [from, from + span, false];
    repaint();
  }

  rows(low, high) {
    const span = Math.min(this.lanes, Math.max(4, high - low)), from = Math.max(0, Math.min(this.lanes - span, low));
    [this.low, this.high] = span >= this.lanes ? [null, null] : [from, from + span];
    repaint();
  }

  all() { [this.low, this.high, view.follow, view.start, view.stop] = [null, null, true, 0, longest()]; repaint(); }

  key(event) {
    const span = view.stop - view.start, [low, high] = [this.low ?? 0, this.high ?? this.lanes], tall = high - low;
    const step = offset => { const { steps } = this.columns.head, now = this.columns.stepAt((view.start + view.stop) / 2) + offset; if (steps[now]) this.look(steps[now].time_s - steps[now].step_s, steps[now].time_s); };
    const act = { ArrowLeft: () => this.look(view.start - span / 8, view.stop - span / 8), ArrowRight: () => this.look(view.start + span / 8, view.stop + span / 8),
      ArrowUp: () => this.rows(low - tall / 8, high - tall / 8), ArrowDown: () => this.rows(low + tall / 8, high + tall / 8), "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7),
      "*": () => this.rows(low + tall * 0.15, high - tall * 0.15), "/": () => this.rows(low - tall * 0.2, high + tall * 0.2), 0: () => this.all(), Home: () => this.all(), n: () => step(1), p: () => step(-1) }[event.key];
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act();
  }

  listen() {
    const { canvas } = this, touches = new Map();
    let moved = 0;
    canvas.addEventListener("keydown", event => this.key(event));
    canvas.addEventListener("wheel", event => {
      if (document.activeElement !== canvas && !event.ctrlKey) return;  // the page scrolls until the timeline was clicked
      event.preventDefault();
      const at = (event.offsetX - this.left) / (this.width - this.left), [low, high] = [this.low ?? 0, this.high ?? this.lanes];
      if (event.shiftKey) {
        const factor = Math.exp((event.deltaY || event.deltaX) * 0.002), row = low + (high - low) * Math.max(0, (event.offsetY - TOP) / (this.height - TOP - BOTTOM));
        this.rows(row - (row - low) * factor, row + (high - row) * factor);
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const by = event.deltaX / this.width * (view.stop - view.start);
        this.look(view.start + by, view.stop + by);
      } else this.zoom(Math.exp(event.deltaY * 0.002), Math.max(0, at));
    }, { passive: false });
    canvas.addEventListener("pointerdown", event => { touches.set(event.pointerId, event); moved = 0; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", event => {
      const before = touches.get(event.pointerId), inner = this.width - this.left;
      if (!before) return this.hover(event);
      const by = (event.clientX - before.clientX) / inner * (view.stop - view.start), rise = ((this.high ?? this.lanes) - (this.low ?? 0)) / (this.height - TOP - BOTTOM);
      moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
      if (touches.size === 2) {
        const other = [...touches.values()].find(one => one.pointerId !== event.pointerId), wide = point => Math.max(10, Math.abs(point.clientX - other.clientX));
        this.zoom(wide(before) / wide(event), ((event.clientX + other.clientX) / 2 - canvas.getBoundingClientRect().left - this.left) / inner);
      } else if (moved > 4) {
        this.look(view.start - by, view.stop - by);
        if (this.low != null && event.pointerType === "mouse") this.rows(this.low - (event.clientY - before.clientY) * rise, this.high - (event.clientY - before.clientY) * rise);
      }
      touches.set(event.pointerId, event);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, event => {
      if (name === "pointerup" && moved <= 4 && touches.size === 1) this.pick(event);
      touches.delete(event.pointerId);
    });
    canvas.addEventListener("pointerleave", event => { showTip(event, ""); if (this.width) sheet(this.over, this.width, this.height); });
    canvas.addEventListener("dblclick", () => this.all());
  }

  // The trajectory, step or event under the pointer.
  find(event) {
    const { columns, lane } = this, time = view.start + (event.offsetX - this.left) / (this.width - this.left) * (view.stop - view.start), near = (view.stop - view.start) / this.width * 3;
    if (!columns || event.offsetX < this.left) return {};
    if (event.offsetY < TOP && event.offsetY > 44) return { event: columns.head.events.find(one => time >= one.time_s - near && time <= (one.end_s ?? one.time_s) + near), time };
    if (event.offsetY < TOP || event.offsetY > this.height - BOTTOM) return { step: columns.head.steps[columns.stepAt(time)], time };
    const [low, high] = [this.low ?? 0, this.high ?? this.lanes], rise = (high - low) / (this.height - TOP - BOTTOM), row = low + (event.offsetY - TOP) * rise;
    let found = null;
    columns.between(time - near / 3, time + near / 3, i => { if (lane[i] >= Math.floor(row) && lane[i] < row + Math.max(rise, 1e-6)) found = i; });
    return { row: found, time };
  }

  hover(event) {
    const found = this.find(event), pen = sheet(this.over, this.width, this.height), { columns, lane } = this;
    this.hovered = true;
    pen.fillStyle = css("fg");
    pen.fillRect(Math.max(this.left, event.offsetX), 0, 0.5, this.height);
    showTip(event, found.row != null ? describe(columns, found.row) : found.event ? `${found.event.kind} at ${seconds(found.event.time_s)}\n${found.event.text ?? ""}` : found.step ? describeStep(found.step) : "");
    if (found.row == null) return;
    const [low, high] = [this.low ?? 0, this.high ?? this.lanes], rise = (this.height - TOP - BOTTOM) / (high - low), group = columns.group[found.row];
    pen.beginPath();
    pen.rect(this.left, TOP, this.width, this.height - TOP - BOTTOM);
    pen.clip();
    pen.strokeStyle = css("fg");
    columns.between(view.start, view.stop, i => {  // its siblings
      if (columns.group[i] !== group) return;
      pen.lineWidth = i === found.row ? 2 : 1;
      pen.strokeRect(this.x(columns.launched[i]), TOP + (lane[i] - low) * rise, Math.max(2, this.x(columns.ended[i]) - this.x(columns.launched[i])), Math.max(2, rise));
    });
  }

  pick(event) {
    const found = this.find(event);
    if (found.step) return pickStep(found.step.step);
    if (found.row == null) return;
    if (event.pointerType === "touch") showTip(event, describe(this.columns, found.row));
    const { head, prompt, tokens, reward } = this.columns, row = found.row;
    openSamples({ prompt: head.prompts[prompt[row]] ?? "", step: "", like: { tokens: tokens[row], reward: reward[row] } });
  }
}

const EVENT_COLOURS = { evaluation: "#2a9aa5", pause: "#b48ee0", push: "#9162c7", checkpoint: "#9a7350", alarm: "#d23b3b", setting: "#e07b39" };
const eventColour = kind => EVENT_COLOURS[Object.keys(EVENT_COLOURS).find(name => String(kind).startsWith(name))] ?? "#6b7680";

function describe(columns, i) {
  const { head } = columns, outcome = head.outcomes[columns.outcome[i]], sampled = columns.sampling(i), { turns, before, after } = columns.outside(i);
  const place = head.steps[columns.stepAt(columns.ended[i])];
  return [`prompt ${head.prompts[columns.prompt[i]] ?? "#" + columns.prompt[i]}, group ${columns.group[i]}, sample ${columns.sample[i]}`,
    `${columns.engineOf(i) || "engine unknown"}, slot ${columns.slot[i]}, launched at ${seconds(columns.launched[i])}`,
    `queued ${seconds(columns.queued(i))}, sampled ${seconds(sampled)}, paused ${seconds(columns.paused[i])}` + (turns ? `, in its environment ${seconds(before + after)}` : ""),
    `${columns.tokens[i]} tokens` + (turns ? ` in ${turns} turns` : "") + `, ${seconds(sampled / Math.max(1, columns.tokens[i]))} a token`,
    `reward ${number(columns.reward[i])} after ${seconds(columns.reward_end[i] - columns.rollout_end[i])}, then waited ${seconds(columns.ended[i] - columns.reward_end[i])}`,
    `sampled by versions ${columns.oldest[i]} to ${columns.newest[i]}${place ? ", ended in step " + place.step : ""}`,
    `${outcome}: ${OUTCOMES[outcome]?.[1] ?? ""}`].join("\n");
}

const describeStep = step => [`step ${step.step}: ${step.round_kind ?? ""}, group size ${number(step.group_size)}, ${step.samples} samples`, `took ${seconds(step.step_s)}`,
  `rollout ${seconds(step.rollout_s)}, training ${seconds(step.training_s)}, push ${seconds(step.push_s)}, engines paused ${seconds(step.paused_s)}`, "click: look at this step"].join("\n");

panel("timeline", "Timeline", "Every trajectory as a bar, from its launch until it was trained or dropped. Click it, then the wheel zooms (shift: rows). Keys: arrows, + and −, * and / for rows, n and p for steps, 0 for all. Click a bar for its sample.",
  { paths: ["timeline", "metrics"], without: "no trajectory has ended, or trace.jsonl is gone." }, async (body, runs, data) => {
    if (view.every) data = await Promise.all((runs = page.shown()).map(run => Promise.all([page.data(run, "timeline"), page.data(run, "metrics")])));
    if (!body.controls) {
      body.append(body.controls = element("div", { class: "controls" }, choice("rows by", Object.keys(SORTS), view.sort, value => { view.sort = value; timelines.forEach(one => { one.low = one.high = null; }); repaint(); legend(); }),
        choice("colour by", Object.keys(COLOURS), view.by, value => { view.by = value; repaint(); legend(); }),
        element("span", { class: "choices" }, ...[["−", "zoom out", one => one.zoom(1 / 0.6)], ["+", "zoom in", one => one.zoom(0.6)], ["all", "the whole run", one => one.all()]].map(([text, title, act]) =>
          element("button", { title, onclick: () => act([...timelines][0]) }, text))),
        element("label", {}, element("input", { type: "checkbox", onchange: event => { view.every = event.target.checked; invalidate("timeline"); } }), " every shown run")),
      body.legend = element("div", { class: "legend" }), body.hosts = element("div"));
      body.made = new Map();
    }
    const redraw = () => {
      for (const [run, one] of body.made) if (!runs.includes(run)) { one.remove(); one.title.remove(); body.made.delete(run); }
      runs.forEach((run, place) => {
        const [columns, metrics] = data[place];
        if (!body.made.has(run)) {
          const title = element("p", { class: "name" });
          body.hosts.append(title);
          body.made.set(run, Object.assign(new Timeline(body.hosts, run), { title }));
        }
        const one = body.made.get(run);
        one.title.textContent = runs.length > 1 ? run.name || run.run_id : "";
        one.set(columns, metrics);
      });
      legend();
    };
    const legend = () => {
      const [columns] = data[runs.indexOf(page.focus)], counts = new Uint32Array(256);
      for (let i = 0; i < columns.count; i++) counts[columns.outcome[i]]++;
      const outcomes = [...counts.entries()].filter(([, count]) => count).sort((a, b) => b[1] - a[1]).map(([place, count]) => {
        const name = columns.head.outcomes[place];
        return element("button", { title: `${OUTCOMES[name]?.[1] ?? name}; click: show these alone`, "aria-pressed": String(view.only === place),
          onclick: () => { view.only = view.only === place ? null : place; repaint(); legend(); } }, swatch(outcomeColour(name)), `${name} ${number(count)}`);
      });
      body.legend.replaceChildren(...outcomes, ...Object.entries(PHASES).map(([name, colour]) => element("span", {}, swatch(css(colour) || colour), { reward: "in the reward", waiting: "waiting for the batch", environment: "in the environment" }[name] ?? name)),
        element("span", { class: "dim" }, `${number(columns.count)} bars; rows: ${SORTS[view.sort]}; colour: ${COLOURS[view.by]}`));
    };
    if (!data.some(([columns]) => columns.count)) return false;
    redraw();
  });

// Shows one step: in the timeline and in the panel of steps.
function pickStep(step) {
  const one = [...timelines][0], found = one?.columns?.head.steps.find(each => each.step === step);
  if (found) { one.low = one.high = null; one.look(found.time_s - found.step_s * 1.02, found.time_s + found.step_s * 0.02); }
  chosenStep = step;
  invalidate("waits");
}
