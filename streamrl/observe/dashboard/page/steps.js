// Panels over steps: waits, one step, engines, lengths, what races cut, staleness, memory, pushes, prompts.
"use strict";

let chosenStep = null;

panel("waits", "Why the run waits", "Seconds of each step by what the run as a whole waited for, and the share of slots that stood free (the bubble). Click a step to look at it.",
  { paths: ["waits"], without: "no step has ended, or metrics.jsonl is gone." }, (body, [run], [[waits]]) => {
    const names = Object.keys(waits.reasons).sort((a, b) => Object.keys(REASONS).indexOf(a) - Object.keys(REASONS).indexOf(b)), onpick = index => pickStep(waits.step[index]);
    body.className = "body pair";
    const seen = chart(body, "reasons", "Seconds of a step", "by reason", 220).stack(waits.step, names.map(name => ({ label: name, values: waits.reasons[name], colour: reasonColour(name) })), { unit: "s", onpick });
    chart(body, "bubble", "Bubble", "share of free slots: of the rollout alone, and of the whole step", 220).show(waits.step, [{ label: "rollout", values: waits.bubble_rollout, colour: reasonColour("tail") },
      { label: "step", values: waits.bubble_step, colour: reasonColour("sampling") }], { unit: "share", least: 0, most: 1, onpick });
    return seen;
  });

panel("step", "One step", "What took the time of one step, against the median step, and who finished last. It begins with the slowest step.", { paths: ["waits", "timeline", "words"], without: "no step has ended, or trace.jsonl is gone." },
  (body, [run], [[waits, columns, words]]) => {
    const { steps } = columns.head, typical = median(steps.map(step => step.step_s));
    if (!steps.length) return false;
    const step = steps.find(one => one.step === chosenStep) ?? steps.reduce((most, one) => one.step_s > most.step_s ? one : most), place = steps.indexOf(step);
    const go = by => () => pickStep(steps[Math.max(0, Math.min(steps.length - 1, place + by))].step), { reasons, most, rows, begin } = causeOf(columns, waits, step);
    body.replaceChildren(element("div", { class: "controls" }, element("button", { onclick: go(-1), disabled: place === 0 }, "◂ step before"), element("b", {}, `step ${step.step}`), element("button", { onclick: go(1), disabled: place === steps.length - 1 }, "step after ▸"),
      element("span", {}, `${seconds(step.step_s)}, ${number(step.step_s / typical)} times the median step (${seconds(typical)}). `, most && most.more > 0.02 * typical ? element("span", {}, "Most of the difference: ", element("b", {}, `${most.name} ${seconds(most.more)} more`),
        ` (${REASONS[most.name]?.[1] ?? ""}). To change it: ${REASONS[most.name]?.[2] ?? ""}.`) : "No reason stands out.")),
      table([{ head: "waited for", of: one => one.name, text: name => element("span", {}, swatch(reasonColour(name)), name) }, { head: "seconds", of: one => one.took, text: seconds }, { head: "more than the median step", of: one => one.more, text: value => Math.abs(value) < 0.005 ? "–" : (value > 0 ? "+" : "") + seconds(value) },
        { head: "which is", of: one => REASONS[one.name]?.[1] }], reasons, { sort: 1 }),
      table([{ head: "finished last", of: i => columns.reward_end[i] - begin, text: seconds, help: "after the step began, with its reward" }, { head: "sampled after", of: i => columns.rollout_end[i] - begin, text: seconds }, { head: "in reward", of: i => rewardTime(columns, i), text: seconds }, { head: "tokens", of: i => columns.tokens[i] }, { head: "a token", of: i => pace(columns, i), text: seconds },
        { head: "engine", of: i => columns.engineOf(i) }, { head: "outcome", of: i => columns.head.outcomes[columns.outcome[i]] }, { head: "prompt", of: i => promptName(columns, columns.prompt[i], words), class: "brief" }], rows, { sort: 0, most: 8, onrow: i => openSamples({ prompt: promptId(columns, columns.prompt[i]), step: "" }) }));
  });

const promptId = (columns, place) => columns.head.prompts[place] ?? "#" + place;
const promptName = (columns, place, words) => [promptId(columns, place), words[promptId(columns, place)]].filter(Boolean).join(" · ");
// Values of a gauge, each `every` of them as their mean: one of so many would show a rhythm of its own.
const meansOf = (values, every) => Array.from({ length: Math.ceil(values.length / every) }, (unused, place) => { const part = values.slice(place * every, (place + 1) * every).filter(known); return part.length ? sum(part) / part.length : null; });
const said = (figure, help) => { figure.help.textContent = help; return figure; };
const pace = (columns, i) => columns.tokens[i] > 0 ? (columns.sampling(i) - (columns.paused[i] || 0)) / columns.tokens[i] : null;

panel("engines", "Engines", "What each engine did and at what pace: an engine whose seconds a token are well above the others' is slow. Below, requests and KV cache of all engines over time.", { paths: ["timeline"], without: "no trajectory has ended, or trace.jsonl is gone." },
  (body, [run], [[columns]]) => {
    const { engines: load } = columns.head, rows = enginesOf(columns);
    if (!rows.length) return false;
    body.list ??= body.appendChild(element("div"));
    body.list.replaceChildren(table([{ head: "engine", of: row => row.engine || "unknown" }, { head: "trajectories", of: row => row.count, text: number }, { head: "tokens", of: row => row.tokens, text: number }, { head: "time a token, median", of: row => row.pace, text: seconds },
      { head: "against the median engine", of: row => row.slower, text: value => element("span", { class: value > 1.15 ? "bad" : "" }, value.toFixed(2) + (value > 1.15 ? " slow" : "")) }, { head: "queued, median", of: row => row.wait, text: seconds },
      { head: "slots taken", of: row => row.lanes ? row.busy / row.lanes / columns.end : null, text: percent, help: "sampling time of its trajectories over time of its slots" }], rows, { sort: 0, down: false }));
    body.pair ??= body.appendChild(element("div", { class: "pair" }));
    const every = Math.ceil(load.time_s.length / 700), means = values => every === 1 ? values : values && meansOf(values, every), time = load.time_s.filter((value, index) => index % every === 0);
    const over = every > 1 ? `, means of ${seconds((load.time_s.at(-1) - load.time_s[0]) / time.length)}` : "";
    said(chart(body.pair, "requests", "Requests"), "running and waiting" + over).show(time, [{ label: "running", gauge: true, values: means(load.running), colour: reasonColour("sampling") }, { label: "waiting", gauge: true, values: means(load.waiting), colour: reasonColour("reward") }], { xUnit: "s", least: 0 });
    said(chart(body.pair, "kv", "KV cache"), "share that is in use" + over).show(time, [{ label: "in use", gauge: true, values: means(load.kv_usage), colour: reasonColour("push") }], { xUnit: "s", unit: "share", least: 0 });
  });

panel("lengths", "Lengths", "Histogram of completion lengths over steps, dark is many: of all that were sampled, and of those that were trained. Where the two differ, races, cuts or filters choose by length.",
  { paths: ["lengths", "metrics"], without: "no completion was trained yet." }, (body, [run], [[lengths, metrics]]) => {
    if (!lengths.step.length) return false;
    body.className = "body pair";
    body.replaceChildren();
    body.charts = null;
    for (const name of ["sampled", "trained"]) heatMap(body, `${name[0].toUpperCase()}${name.slice(1)}, tokens`, lengths.step, lengths.edges, lengths[name], index => pickStep(lengths.step[index]));
    const of = name => metrics.values[name];
    chart(body, "means", "Mean length", "trained against sampled").show(metrics.step, [{ label: "sampled", values: of("length/sampled_mean"), colour: RUN_COLOURS[1] }, { label: "trained", values: of("completion/length_mean"), colour: RUN_COLOURS[0], dash: metrics.step.length < 200 ? [6, 4] : undefined }]);
    chart(body, "cut", "Truncated", "share of trained completions cut by max_tokens").show(metrics.step, [{ label: "truncated", values: of("completion/truncated_ratio"), colour: RUN_COLOURS[4] }], { unit: "share", least: 0 });
  });

panel("races", "What was not trained", "Trajectories by what became of them, and what the ones that were cut or lost a race had in common; when their prompt was launched again.", { paths: ["timeline"], without: "no trajectory has ended, or trace.jsonl is gone." },
  (body, [run], [[columns]]) => {
    const { steps, outcomes } = columns.head, counts = outcomes.map(() => new Float64Array(steps.length)), totals = outcomesOf(columns).map(one => ({ ...one, back: [] })), gone = new Map();
    if (!columns.count || !steps.length) return false;
    const trained = new Set();
    for (let i = 0; i < columns.count; i++) if (outcomes[columns.outcome[i]] === "trained") trained.add(columns.group[i]);
    for (let i = 0; i < columns.count; i++) {
      const one = totals[columns.outcome[i]], before = gone.get(columns.prompt[i]);
      if (before && columns.launched[i] > before.time && columns.group[i] !== before.group) { before.one.back.push(columns.launched[i] - before.time); gone.delete(columns.prompt[i]); }
      counts[columns.outcome[i]][columns.stepAt(columns.ended[i])]++;
      if ((one.name === "lost_race" || one.name === "cut") && !trained.has(columns.group[i])) gone.set(columns.prompt[i], { time: columns.ended[i], group: columns.group[i], one });
    }
    body.className = "body pair";
    const lost = chart(body, "outcomes", "Not trained", "trajectories a step, by reason", 200);
    lost.none.textContent = "Every one that ended was trained.";
    lost.stack(steps.map(step => step.step), outcomes.map((name, place) => ({ label: name, values: [...counts[place]], colour: outcomeColour(name) })).filter(one => one.label !== "trained"),
      { onpick: index => pickStep(steps[index].step) });
    body.list ??= body.appendChild(element("div", { class: "wide" }));
    const tokens = sum(totals.map(one => one.tokens));
    body.list.replaceChildren(table([{ head: "outcome", of: one => one.name, text: name => element("span", { title: OUTCOMES[name]?.[1] }, swatch(outcomeColour(name)), name) }, { head: "trajectories", of: one => one.count, text: number }, { head: "share", of: one => one.count / columns.count, text: percent },
      { head: "share of tokens", of: one => one.tokens / tokens, text: percent }, { head: "mean tokens", of: one => one.tokens / one.count, text: number }, { head: "mean reward", of: one => one.rewarded ? one.reward / one.rewarded : null, text: number },
      { head: "whole groups: sampled again after", of: one => median(one.back), text: (value, one) => known(value) ? `${seconds(value)} (${number(one.back.length)} times)` : "–", help: "of groups without a trained sibling: median time from their loss until their prompt was launched again" }], totals.filter(one => one.count), { sort: 1 }));
  });

panel("weights", "Staleness and pushes", "How many versions old trained samples were, and what a new version of the weights cost: bytes, seconds, elements that changed.", { paths: ["metrics"], without: "no step has ended, or metrics.jsonl is gone." }, (body, [run], [[metrics]]) => {
  body.className = "body pair";
  const line = (name, label, colour) => ({ label, values: metrics.values[name], colour: RUN_COLOURS[colour] }), steps = metrics.step, onpick = index => pickStep(steps[index]);
  return [chart(body, "stale", "Staleness", "versions").show(steps, [line("async/staleness_mean", "mean", 0), line("async/staleness_p95", "p95", 1), line("async/staleness_oldest_max", "oldest token", 4)], { least: 0, onpick }),
    chart(body, "bytes", "Bytes a push", "encoded, over ranks").show(steps, [line("weights/payload_bytes", "bytes", 3)], { unit: "bytes", least: 0, onpick }),
    chart(body, "push", "Time of a push", "announcement to last commit; engines paused").show(steps, [line("time/weight_sync_s", "push", 3), line("time/engine_paused_s", "paused", 4), line("time/publish_s", "encode", 5)], { unit: "s", least: 0, onpick }),
    chart(body, "changed", "Elements that changed", "share").show(steps, [line("weights/changed_ratio", "changed", 2)], { unit: "share", least: 0, onpick })].some(shown => shown);
});

panel("prompts", "Prompts", "Each prompt with its rewards over the run. Those at the top were tried most and never had a reward above their lowest: too hard, or a broken reward. Click one for its samples.", { paths: ["timeline", "words"], without: "no trajectory has ended, or trace.jsonl is gone." },
  (body, [run], [[columns, words]]) => {
    const { rows, low, high, never, always } = promptsOf(columns);
    if (!rows.length) return false;
    const spread = high > low ? [element("b", {}, `${number(never.length)} of ${number(rows.length)} prompts were never solved`), ` (no reward above ${number(low)}), ${number(always.length)} always (each reward is ${number(high)}): both teach nothing.`] :
      [element("b", {}, `Every reward is ${number(low)}`), `: nothing tells which of the ${number(rows.length)} prompts were solved, and nothing is learnt. streamrl reward test calls the reward alone.`];
    body.replaceChildren(element("p", {}, spread),
      table([{ head: "prompt", of: row => promptName(columns, row.key, words), class: "brief" }, { head: "sampled", of: row => row.sampled, help: "trajectories, those without a reward too" }, { head: "tries", of: row => row.tries, help: "trajectories with a reward" }, { head: "mean reward", of: row => row.total / row.tries, text: number }, { head: "best", of: row => row.best, text: number },
        { head: "mean tokens", of: row => row.tokens / row.tries, text: number }, { head: "never solved", of: row => row.best <= low && high > low ? row.tries : 0, text: value => value ? `${value} tries` : "" }],
      rows, { sort: 6, most: 12, onrow: row => openSamples({ prompt: promptId(columns, row.key), step: "" }) }));
  });
