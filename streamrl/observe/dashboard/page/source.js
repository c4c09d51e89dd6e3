// Where the page has its data from: the server's JSON and columns, its events while a run goes on, or the report that it is in.
"use strict";

const REPORT = window.STREAMRL_REPORT;

async function answer(path, binary = false) {
  if (REPORT) {
    const held = REPORT[path] ?? REPORT[path.split("?")[0]];
    if (held == null) throw Object.assign(new Error(`this report does not hold ${path}.`), { expected: true });
    return binary ? Uint8Array.from(atob(held), letter => letter.charCodeAt(0)).buffer : held;
  }
  const response = await fetch(path);
  if (!response.ok) throw Object.assign(new Error(`${path} answered ${response.status} ${(await response.text()).slice(0, 300)}`), { expected: true });
  return binary ? response.arrayBuffer() : response.json();
}

const ARRAYS = { f4: Float32Array, u4: Uint32Array, u2: Uint16Array, u1: Uint8Array };

// The first of `count` places, in an ascending order, that is not `before`.
function lowerBound(count, before) {
  let [low, high] = [0, count];
  while (low < high) { const middle = (low + high) >> 1; if (before(middle)) low = middle + 1; else high = middle; }
  return low;
}

// Trajectories as typed arrays, one a column, views of the server's block until rows come in; `sorted` of them by `launched`.
class Columns {
  constructor(buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    let offset = 4 + length;
    this.names = head.columns.map(column => column.name);
    this.head = head;
    this.count = this.sorted = this.capacity = head.count;
    for (const { name, type } of head.columns) {
      offset = Math.ceil(offset / 8) * 8;
      this[name] = new ARRAYS[type](buffer, offset, head.count);
      offset += this[name].byteLength;
    }
    [this.moments, this.fresh] = [new Float32Array(buffer, Math.ceil(offset / 8) * 8, head.moments), []];
    [this.end, this.longest, this.lanes] = [0, 0, Math.max(1, sum(head.slots.map(slot => slot.lanes)))];
    this.measure(0);
    for (const step of head.steps) this.end = Math.max(this.end, step.time_s);
  }

  measure(from) {
    const { launched, ended, slot } = this;
    for (let i = from; i < this.count; i++) {
      if (ended[i] > this.end) this.end = ended[i];
      if (ended[i] - launched[i] > this.longest) this.longest = ended[i] - launched[i];
      if (slot[i] >= this.lanes) this.lanes = slot[i] + 1;
    }
  }

  // The turns of a trajectory, and its seconds in the environment before the first and after it; `visit(from, to)` for each time of them.
  outside(row, visit = () => {}) {
    const at = this.turns[row], start = this.launched[row];
    const turns = row < this.sorted ? this.moments.subarray(at + 1, at + 1 + this.moments[at]) : this.fresh[row - this.sorted], found = { turns: turns.length >> 1, before: 0, after: 0 };
    for (let k = 0, from = start; k < turns.length; from = start + turns[k + 1], k += 2) {
      visit(from, start + turns[k]);
      found[k ? "after" : "before"] += start + turns[k] - from;
    }
    return found;
  }
  queued(row) { return Math.max(0, Math.round((this.begun[row] - this.launched[row] - this.outside(row).before) * 1e4) / 1e4); }
  sampling(row) { return this.rollout_end[row] - this.begun[row] - this.outside(row).after; }

  append(rows) {
    this.fresh.push(...rows.map(row => row[this.names.indexOf("turns")]));
    const from = this.count, count = from + rows.length;
    if (count > this.capacity) {
      this.capacity = Math.max(count, this.capacity * 2, 4096);
      for (const name of this.names) {
        const grown = new this[name].constructor(this.capacity);
        grown.set(this[name].subarray(0, from));
        this[name] = grown;
      }
    }
    rows.forEach((row, place) => this.names.forEach((name, column) => { this[name][from + place] = row[column] ?? NaN; }));
    this.count = count;
    this.measure(from);
  }

  // The first of the sorted rows that was launched at `time` or later.
  lower(time) {
    return lowerBound(this.sorted, row => this.launched[row] < time);
  }

  // Calls `visit(row)` for each one that was under way between two moments.
  between(start, stop, visit) {
    const stopSorted = this.lower(stop), { launched, ended } = this;
    for (let i = this.lower(start - this.longest); i < stopSorted; i++) if (ended[i] >= start) visit(i);
    for (let i = this.sorted; i < this.count; i++) if (ended[i] >= start && launched[i] < stop) visit(i);
  }

  // The place in head.steps of the step that was under way at a moment (the last one, if it was later).
  stepAt(time) {
    const { steps } = this.head;
    return Math.min(lowerBound(steps.length, place => steps[place].time_s < time), steps.length - 1);
  }

  engineOf(row) {
    let slot = this.slot[row];
    for (const { engine, lanes } of this.head.slots) { if (slot < lanes) return engine; slot -= lanes; }
    return null;
  }
}

// ---- what is known of the runs, fetched once and brought up to date
const page = {
  runs: [], hidden: new Set(), focus: null, cache: new Map(),

  shown() { return page.runs.filter(run => run === page.focus || !page.hidden.has(run.run)); },

  data(run, path) {
    const key = run.run + path;
    if (!page.cache.has(key)) {
      const wanted = path === "compare" ? answer("/api/compare?runs=" + page.runs.map(one => one.run).join(",")) :
        answer(`/api/runs/${run.run}/${path}`, path === "timeline").then(given => path === "timeline" ? new Columns(given) : given);
      page.cache.set(key, wanted.catch(error => { page.cache.delete(key); throw error; }));
    }
    return page.cache.get(key);
  },

  forget(run, ...paths) { paths.forEach(path => page.cache.delete(run.run + path)); },

  // New steps of the metrics, appended to those that are here.
  async more(run) {
    if (!page.cache.has(run.run + "metrics")) return;
    const here = await page.data(run, "metrics");
    const more = await answer(`/api/runs/${run.run}/metrics?after=${here.step.at(-1) ?? -1}`);
    const joined = (into, from) => {
      const fresh = from.step.map((step, index) => index).filter(index => from.step[index] > (into.step.at(-1) ?? -1));
      for (const name of Object.keys(from.values)) into.values[name] ??= into.step.map(() => null);
      for (const [name, values] of Object.entries(into.values)) values.push(...fresh.map(index => from.values[name]?.[index] ?? null));
      for (const name of ["step", "time_s", "trained_tokens"]) if (from[name]) into[name].push(...fresh.map(index => from[name][index]));
    };
    joined(here, more);
    joined(here.evaluations, more.evaluations);
    here.help = { ...here.help, ...more.help };
  },

  follow(run) {
    if (REPORT || run.stream || run.state !== "running") return;
    const stream = run.stream = new EventSource(`/api/runs/${run.run}/live`);
    const due = new Set();
    let timer = null;
    const later = (...paths) => {  // a second of news is drawn at once
      paths.forEach(path => due.add(path));
      timer ??= setTimeout(async () => {
        timer = null;
        const now = [...due];
        due.clear();
        try {
          if (now.includes("metrics")) await page.more(run);
          page.forget(run, "words", ...now.filter(path => path !== "metrics" && path !== "timeline"));
          invalidate(...now);
          drawHeader();
        } catch (error) { if (!error.expected) console.error(error); }
      }, 1000);
    };
    const on = (name, act, ...changes) => stream.addEventListener(name, async event => {
      const news = JSON.parse(event.data), columns = page.cache.has(run.run + "timeline") ? await page.data(run, "timeline").catch(() => null) : null;
      if (columns && act(columns.head, news, columns) === "gap") page.forget(run, "timeline");  // fetched again, sorted
      later(...changes);
    });
    on("step", ({ steps }, news) => {
      const before = steps.at(-1)?.step ?? news.step - 1;
      if (news.step === before + 1 && known(news.time_s)) steps.push(news); else if (news.step > before) return "gap";
    }, "metrics", "waits", "lengths", "timeline", "samples");
    on("evaluation", () => null, "metrics");
    on("trajectories", (head, news, columns) => {
      if (news.first > columns.count) return "gap";
      if (news.prompts) head.prompts.splice(news.first_prompt, news.prompts.length, ...news.prompts);
      Object.assign(head, { outcomes: news.outcomes ?? head.outcomes, slots: news.slots ?? head.slots });
      columns.append(news.rows.slice(columns.count - news.first));
      if (columns.count - columns.sorted > 50000) return "gap";
    }, "timeline");
    on("event", ({ events }, news) => { if (!events.some(one => one.time_s === news.time_s && one.text === news.text)) events.push(news); }, "timeline", "details");
    on("engines", ({ engines }, news) => { for (const name of Object.keys(news)) engines[name]?.push(...news[name]); }, "timeline");
    stream.addEventListener("step", event => { run.step = JSON.parse(event.data).step; });
    stream.addEventListener("state", event => { Object.assign(run, JSON.parse(event.data), { name: run.name }); later("details", "metrics"); });
    stream.onerror = () => { run.silent = true; drawHeader(); };
    stream.onopen = () => { run.silent = false; drawHeader(); };
  },
};
