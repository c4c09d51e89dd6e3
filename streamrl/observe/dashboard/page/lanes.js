// Rows of the timeline: which one a trajectory lies in, by slot, group, prompt or length; and its colour.
"use strict";

const OUTCOMES = {
  trained: ["#4c8bf5", "trained"],
  unfinished: ["#9cc0f5", "still under way, or the run ended"],
  lost_race: ["#e5604d", "enough siblings or prompts were faster"],
  cut: ["#c43d5e", "the batch was full without its group; sampled again"],
  stale: ["#a8762d", "older than max_staleness"],
  zero_variance: ["#7b9a3c", "all rewards of its group are equal"],
  reward_failed: ["#d03fb0", "its reward failed"],
  engine_failed: ["#7a1f5c", "its engine failed"],
  cancelled: ["#6b7680", "cancelled"],
  drained: ["#59636d", "left over when the run drained"],
};
const PHASES = { queued: "#8593a1", environment: "#b4cc3a", paused: "#b48ee0", reward: "#f2b134", waiting: "wait" };
const outcomeColour = name => OUTCOMES[name]?.[0] ?? RUN_COLOURS[7];
const SORTS = {
  slot: "a row is a slot of an engine", group: "siblings lie together, longest first", prompt: "a row is a prompt's sample, over the whole run", length: "those of a step lie together, longest first",
};
const COLOURS = { outcome: "what became of it", reward: "its reward, from red to green", tokens: "its length, dark is long", staleness: "versions between oldest and trained" };

// {lane: row of each trajectory, lanes: how many, names: [{from, to, text}]}
function arrange(columns, sort) {
  const { count, head } = columns;
  if (sort === "slot") {
    const names = [];
    let from = 0;
    for (const { engine, lanes } of head.slots) { names.push({ from, to: from + lanes, text: engine || "slots" }); from += lanes; }
    return { lane: columns.slot, lanes: columns.lanes, names };
  }
  const lane = new Uint32Array(count);
  if (sort === "prompt") {
    let [prompts, samples] = [0, 1];
    for (let i = 0; i < count; i++) { prompts = Math.max(prompts, columns.prompt[i] + 1); samples = Math.max(samples, Math.min(16, columns.sample[i] + 1)); }
    for (let i = 0; i < count; i++) lane[i] = columns.prompt[i] * samples + Math.min(columns.sample[i], samples - 1);
    return { lane, lanes: Math.max(1, prompts * samples), names: [] };
  }
  return { lane, lanes: blocks(columns, lane, sort), names: [] };
}

// Blocks of rows, one a group or step, each as high as it has members and where it first finds room. Gives the number of rows.
function blocks(columns, lane, sort) {
  const { launched, ended, rollout_end: sampled, count } = columns, places = new Map(), starts = [], ends = [], members = [];
  for (let i = 0; i < count; i++) {
    const key = sort === "group" ? columns.group[i] : columns.stepAt(launched[i]);
    let place = places.get(key);
    if (place === undefined) { places.set(key, place = starts.length); starts.push(Infinity); ends.push(0); members.push([]); }
    members[place].push(i);
    if (launched[i] < starts[place]) starts[place] = launched[i];
    if (ended[i] > ends[place]) ends[place] = ended[i];
  }
  const free = [];
  for (const place of Uint32Array.from(starts.keys()).sort((a, b) => starts[a] - starts[b])) {
    const wanted = members[place].sort((a, b) => (sampled[b] - launched[b]) - (sampled[a] - launched[a])), start = starts[place];
    let [from, room] = [0, 0];
    while (room < wanted.length) {
      if (from + room >= free.length) free.push(0);
      if (free[from + room] <= start) room++; else [from, room] = [from + room + 1, 0];
    }
    wanted.forEach((row, index) => { lane[row] = from + index; free[from + index] = ends[place]; });
  }
  return Math.max(1, free.length);
}

const pixel = ([red, green, blue]) => (0xff000000 | blue << 16 | green << 8 | red) >>> 0;
const RAMP_REWARD = [channels("#d2453c"), channels("#d9b13b"), channels("#2f9e55")];

// A function from a row to its pixel (ABGR) and a legend: [[colour, text, outcome place]].
function colouring(columns, by, only) {
  const { outcomes } = columns.head, hidden = pixel(channels(css("line"))), outcome = columns.outcome;
  if (by === "outcome") {
    const pixels = Uint32Array.from(outcomes, (name, place) => only == null || only === place ? pixel(channels(outcomeColour(name))) : hidden);
    return row => pixels[outcome[row]] ?? hidden;
  }
  const steps = 64, ramp = by === "reward" ? RAMP_REWARD : [channels("#9fd0f2"), channels("#3f78c4"), channels("#3a1d6e")];
  const table = Uint32Array.from({ length: steps }, (unused, place) => { const at = place / (steps - 1) * 2; return pixel(mix(ramp[Math.min(1, at | 0)], ramp[Math.min(1, at | 0) + 1], at - Math.min(1, at | 0))); });
  const value = by === "reward" ? i => columns.reward[i] : by === "tokens" ? i => Math.sqrt(columns.tokens[i]) : i => columns.newest[i] - columns.oldest[i];
  let [low, high] = [Infinity, -Infinity];
  for (let i = 0; i < columns.count; i++) { const one = value(i); if (one < low) low = one; if (one > high) high = one; }
  const scale = high > low ? (steps - 1) / (high - low) : 0;
  return row => (only == null || only === outcome[row]) && value(row) >= low ? table[(value(row) - low) * scale | 0] : hidden;
}
