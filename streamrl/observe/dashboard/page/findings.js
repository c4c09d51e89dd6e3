// What stands out in the runs that are shown, in sentences that lead to their panels.
"use strict";

const MOST_RUNS = 4;  // timelines are large

// A row an engine: {engine, count, tokens, busy, pace, wait, lanes, slower: against the median engine}.
function enginesOf(columns) {
  const found = new Map();
  for (let i = 0; i < columns.count; i++) {
    const engine = columns.engineOf(i);
    if (!found.has(engine)) found.set(engine, { engine, count: 0, tokens: 0, busy: 0, queued: [], paces: [] });
    const one = found.get(engine), thin = columns.count > 50000 && i % 16;
    one.count++;
    one.tokens += columns.tokens[i];
    one.busy += columns.sampling(i);
    if (!thin) { one.paces.push(pace(columns, i)); one.queued.push(columns.queued(i)); }
  }
  const rows = [...found.values()].map(one => ({ ...one, pace: median(one.paces), wait: median(one.queued), lanes: columns.head.slots.find(slot => slot.engine === one.engine)?.lanes }));
  const typical = rows.map(row => row.pace).filter(known).sort((a, b) => a - b)[(rows.length - 1) >> 1];  // of two: the faster
  return rows.map(row => ({ ...row, slower: row.pace / typical }));
}

// A row a prompt: {key, tries, total, best, latest, tokens}; `never` of them solved, `always` all.
function promptsOf(columns) {
  const found = new Map();
  let [low, high] = [Infinity, -Infinity];
  for (let i = 0; i < columns.count; i++) {
    const key = columns.prompt[i], reward = columns.reward[i];
    let one = found.get(key);
    if (!one) found.set(key, one = { key, sampled: 0, tries: 0, total: 0, best: -Infinity, latest: 0, tokens: 0 });
    one.sampled++;
    if (!known(reward)) continue;
    one.tries++; one.total += reward; one.tokens += columns.tokens[i]; one.latest = reward;
    if (reward > one.best) one.best = reward;
    if (reward < low) low = reward;
    if (reward > high) high = reward;
  }
  const rows = [...found.values()].filter(row => row.tries);
  return { rows, low, high, never: rows.filter(row => row.best <= low && high > low), always: rows.filter(row => row.total / row.tries >= high && high > low) };
}

// What took the time of a step: seconds by reason against the median step, and the trajectories that ended in it.
function causeOf(columns, waits, step) {
  const at = waits.step.indexOf(step.step), begin = step.time_s - step.step_s, rows = [];
  const reasons = Object.entries(waits.reasons).map(([name, values]) => ({ name, took: values[at], more: (values[at] ?? 0) - (median(values) ?? 0) })).filter(one => one.took > 0);
  columns.between(begin, step.time_s, i => { if (columns.ended[i] > begin && columns.rollout_end[i] <= step.time_s) rows.push(i); });
  return { reasons, rows, begin, most: reasons.reduce((found, one) => one.more > (found?.more ?? 0) ? one : found, null) };
}

// A row an outcome: {name, count, tokens, reward, rewarded}, in the order of the head's outcomes.
function outcomesOf(columns) {
  const rows = columns.head.outcomes.map(name => ({ name, count: 0, tokens: 0, reward: 0, rewarded: 0 }));
  for (let i = 0; i < columns.count; i++) {
    const one = rows[columns.outcome[i]], reward = columns.reward[i];
    one.count++;
    one.tokens += columns.tokens[i];
    if (known(reward)) { one.reward += reward; one.rewarded++; }
  }
  return rows;
}

// What changes an outcome that is frequent.
const REMEDIES = {
  lost_race: "To lose fewer: a tail_batching.prompt_oversampling and response_oversampling nearer to 1.",
  cut: "To cut none: rollout.rounds = \"synchronous\".",
  stale: "To lose fewer: a larger rollout.max_staleness.",
  zero_variance: "rollout.dynamic_sampling = false trains them; other prompts in prompts.train teach more.",
  reward_failed: "Events and processes say why; rewards.timeout_s is the limit of a call.",
};
const rewardTime = (columns, i) => columns.reward_end[i] - columns.rollout_end[i];
const greatest = (rows, of) => rows.reduce((best, i) => best == null || of(i) > of(best) ? i : best, null);

function culprit(columns, words, { most, rows, begin }) {
  if (!most || !rows.length) return "";
  if (most.name === "reward") {
    const i = greatest(rows, row => rewardTime(columns, row));
    return `; one reward took ${seconds(rewardTime(columns, i))} (prompt ${promptName(columns, columns.prompt[i], words)})`;
  }
  if (!["tail", "sampling"].includes(most.name)) return "";
  const i = greatest(rows, row => columns.rollout_end[row]);
  return `; the last completion, of ${number(columns.tokens[i])} tokens on ${columns.engineOf(i) ?? "an engine"}, ended after ${seconds(columns.rollout_end[i] - begin)}`;
}

function findingsOf(run, metrics, waits, words, columns) {
  const found = [], add = (id, text, act) => found.push({ run, id, text, act }), recent = name => median((metrics.values[name] ?? []).slice(-10));
  const advice = name => REASONS[name] ? ` To change it: ${REASONS[name][2]}.` : "";
  if (columns?.count) {
    const engines = enginesOf(columns), { rows, never } = promptsOf(columns), { steps } = columns.head, typical = median(steps.map(step => step.step_s));
    for (const one of engines) if (one.slower > 1.15 && engines.length > 1) add("engines", `${one.engine} takes ${seconds(one.pace)} a token, ${number(one.slower)} times the time of the typical engine.`);
    for (const step of steps.filter(one => steps.length > 4 && one.step_s > 2 * typical).sort((a, b) => b.step_s - a.step_s).slice(0, 3)) {
      const cause = causeOf(columns, waits, step), { most } = cause;
      add("step", `Step ${step.step} took ${seconds(step.step_s)}, ${number(step.step_s / typical)} times the median step${most ? `: ${most.name} ${seconds(most.more)} more` : ""}${culprit(columns, words, cause)}.${advice(most?.name)}`, () => pickStep(step.step));
    }
    const tried = never.filter(row => row.tries >= 8).sort((a, b) => b.tries - a.tries);
    if (tried.length) add("prompts", `${number(tried.length)} of ${number(rows.length)} prompts were never solved: ${tried.slice(0, 4).map(row => `${promptName(columns, row.key, words)} in ${row.tries} tries`).join(", ")}${tried.length > 4 ? ", ..." : ""}. rollout.dynamic_sampling = true leaves their groups out; a larger rollout.group_size tries them more often.`);
    const outcomes = outcomesOf(columns), lost = outcomes.filter(one => !["trained", "unfinished"].includes(one.name)).sort((a, b) => b.count - a.count);
    const sampled = sum(outcomes.map(one => one.tokens)), untrained = sum(lost.map(one => one.tokens)), [worst] = lost;
    if (untrained > 0.1 * sampled) add("races", `${percent(untrained / sampled)} of sampled tokens (${number(untrained)}) were not trained: ${worst.name} ${number(worst.count)} trajectories (${OUTCOMES[worst.name]?.[1] ?? ""}). ${REMEDIES[worst.name] ?? ""}`.trimEnd());
  }
  const free = median(waits.bubble_step.slice(-20)), shares = Object.entries(waits.reasons).map(([name, values]) => [name, sum(values.slice(-20))]).sort((a, b) => b[1] - a[1]);
  if (free > 0.5 && shares.length) add("waits", `${percent(free)} of the engines' slots stood free in the last steps; the run waited most for ${shares.slice(0, 3).map(([name, took]) => `${name} (${percent(took / sum(shares.map(one => one[1])))})`).join(", ")}.${advice(shares[0][0])}`);
  if (recent("reward/zero_std_ratio") > 0.4) add("prompts", `${percent(recent("reward/zero_std_ratio"))} of groups have equal rewards and teach nothing: rollout.dynamic_sampling = true leaves them out; or other prompts in prompts.train.`);
  if (recent("completion/truncated_ratio") > 0.2) add("lengths", `${percent(recent("completion/truncated_ratio"))} of trained completions were cut: sampling.max_tokens (and environment.max_tokens, with turns) twice as large, or a reward for length.`);
  const held = heldOut(metrics.evaluations), best = held ? Math.max(...held.values.filter(known)) : 0;
  if (held && last(held.values) < 0.9 * best) add("curves", `Held-out fell to ${number(last(held.values))} from ${number(best)} at step ${held.steps[held.values.indexOf(best)]}: a lower training.learning_rate; streamrl export RUN@best is that version, where checkpoint.keep_best = 1.`);
  return found;
}

panel("findings", "What stands out", "Of each run that is shown: what differs from the rest of it, or is far from what it could be. Click a line for its panel.", { of: "all", paths: ["metrics", "waits", "words"], without: "no step has ended." }, async (body, runs, data) => {
  const found = [];
  let empty = 0;
  for (const [place, run] of runs.slice(0, MOST_RUNS).entries()) {
    const columns = await page.data(run, "timeline").catch(() => null);  // its panel says what is wrong
    if (data[place][0].step.length || columns?.count) found.push(...findingsOf(run, ...data[place], columns)); else empty++;
  }
  if (empty === Math.min(runs.length, MOST_RUNS)) return false;
  const go = ({ run, id, act }) => () => { lookAt(run); act?.(); byId(id).scrollIntoView({ behavior: "smooth" }); };
  const more = runs.length > MOST_RUNS ? [element("p", { class: "dim" }, `Of the first ${MOST_RUNS} runs that are shown.`)] : [];
  body.replaceChildren(...(found.length ? [element("ul", { class: "findings" }, found.map(one => element("li", {}, element("button", { onclick: go(one) }, swatch(runColour(one.run)), runs.length > 1 ? element("b", {}, one.run.name + " ") : null, one.text))))] :
    [element("p", { class: "none" }, "Nothing: engines are equally fast, no step took twice the median, each prompt was solved, and nearly all that was sampled was trained.")]), ...more);
});
