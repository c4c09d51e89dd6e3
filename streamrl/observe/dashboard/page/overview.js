// The head of the page and the figures that a person asks for first.
"use strict";

// Reasons of util/wait_reason: colour, meaning, and what changes it.
const REASONS = {
  sampling: ["#4c8bf5", "engines sample and most slots are taken", "engines.count, or a lower sampling.max_tokens"],
  tail: ["#e5604d", "few long completions still run while other slots are free", "rollout.system = \"fastest\", another rollout.rounds, or group_sizing.kind"],
  environment: ["#b4cc3a", "trajectories are in their environments, and engines idle", "environment.workers, a larger rollout.prompts_per_batch, or quicker tools"],
  reward: ["#f2b134", "completions wait for their reward", "reward_limits.workers, reward_limits.concurrency, or a shorter rewards.timeout_s"],
  training: ["#3a9d5d", "the trainer computes", "training.ranks, or a larger training.micro_batch_tokens"],
  push: ["#9162c7", "new weights go to the engines", "weights.transport, or a larger rollout.prompts_per_batch"],
  evaluation: ["#2a9aa5", "the held-out evaluation is in the way", "a larger evaluation.every, or a smaller evaluation.limit"],
  checkpoint: ["#9a7350", "a checkpoint is written", "a larger checkpoint.every"],
  prompts: ["#9aa7b4", "no prompt is launched", "a quicker source in prompts.train: rows in a file, or a quicker iterator"],
  engine_start: ["#d068a5", "engines start", "nothing: once a start"],
  recovery: ["#b0303f", "a process failed and is being replaced", "see events and processes"],
  paused: ["#b8a1d9", "launches were paused by hand", "streamrl continue RUN"],
  shutdown: ["#6b7680", "the run ends", "nothing"],
  control: ["#c3ccd6", "an event is on its way to control", "nothing: should be small"],
};
const reasonColour = name => REASONS[name]?.[0] ?? RUN_COLOURS[7];

const runStart = run => known(run.started) ? run.started : 0;
const sinceStart = (run, time) => !known(time) ? null : time > 1e8 ? time - runStart(run) : time;  // the files have both

function lookAt(run) {
  page.focus = run;
  page.follow(run);
  drawHeader();
  invalidate();
  drawUnseen();
}

function drawHeader() {
  const chosen = page.runs.map(run => [run.name, run === page.focus, page.hidden.has(run.run)]).join();
  if (chosen !== page.chosen) byId("runs").replaceChildren(...page.runs.map(run => {
    const others = page.runs.length > 1;
    return element("span", { class: "run" + (run === page.focus ? " focus" : "") },
      others ? element("input", { type: "checkbox", checked: run === page.focus || !page.hidden.has(run.run), title: "in charts of several runs", "aria-label": `show ${run.name} beside others`,
        onchange: event => { page.hidden[event.target.checked ? "delete" : "add"](run.run); invalidate(); } }) : null,
      element("button", { title: [run.directory, run.run_id, run.project, ...(run.tags ?? [])].filter(Boolean).join("\n"), "aria-pressed": String(run === page.focus),
        onclick: () => lookAt(run) }, swatch(runColour(run)), run.name || run.run_id));
  }));
  page.chosen = chosen;
  const run = page.focus, place = byId("state");
  if (!run) { place.textContent = "no run found"; return; }
  const name = REPORT ? "report" : run.silent ? "the server does not answer; trying again" : run.state;
  place.className = run.silent ? "bad" : run.state;
  place.textContent = `${name} · step ${number(run.step)}${run.steps ? " of " + number(run.steps) : ""}${run.left ? " · " + seconds(run.left) + " left" : ""}`;
  document.title = `${run.name || run.run_id} · streamrl`;
}

const swatch = colour => { const node = element("i", { class: "swatch" }); node.style.background = colour; return node; };

function tile(label, value, detail, extra = null) {
  return element("div", { class: "tile" }, element("div", { class: "label" }, label), element("div", { class: "value" }, value), element("div", { class: "dim" }, detail), extra);
}

function heldOut(evaluations) {
  const names = Object.keys(evaluations.values), name = names.find(one => /\/avg@/.test(one));
  if (!name) return null;
  const sizes = setSizes(evaluations, name), newest = sizes[evaluations.values[name].findLastIndex(known)];
  return { name, size: newest, steps: evaluations.step, values: evaluations.values[name].map((value, at) => sizes[at] === newest ? value : null) };
}

panel("overview", "Overview", "The newest figures of the run. A small line shows the last 200 steps.", { paths: ["metrics", "waits", "details"], without: "no step has ended, or metrics.jsonl is gone." },
  (body, [run], [[metrics, waits, details]]) => {
    const of = name => metrics.values[name] ?? [], recent = values => values.slice(-200), colour = runColour(run), held = heldOut(metrics.evaluations);
    if (!metrics.step.length && !held) return false;
    const tiles = [];
    const change = values => {
      const [now, before] = [median(values.slice(-10)), median(values.slice(-20, -10))];
      return known(now) && known(before) && before !== 0 ? `${now >= before ? "+" : "−"}${percent(Math.abs(now / before - 1))} over 10 steps` : "";
    };
    for (const [label, name, unit] of [["Reward", "reward/mean"], ["Length, tokens", "completion/length_mean"], ["Samples a second", "perf/samples_s"], ["Time of a step", "time/step_s", "s"]])
      tiles.push(tile(label, inUnit(last(of(name)), unit), change(of(name)), sparkline(recent(of(name)), colour)));
    if (held) {
      const best = Math.max(...held.values.filter(known));
      tiles.splice(1, 0, tile("Held-out", number(last(held.values)), `best ${number(best)} at step ${held.steps[held.values.indexOf(best)]}, ${held.name.split("/").at(-1)}`, sparkline(held.values, colour)));
    } else tiles.splice(1, 0, tile("Held-out", "–", "no evaluation yet"));
    const steps = recent(of("time/step_s")).slice(-20).filter(known), step = last(metrics.step) ?? 0;
    run.left = run.state === "running" && run.steps > step && steps.length ? (run.steps - step) * sum(steps) / steps.length : null;
    tiles.push(tile("Step", `${number(step)}${run.steps ? " / " + number(run.steps) : ""}`, run.left ? `about ${seconds(run.left)} left` : run.state === "stopped" ? `${details.drained ? "drained" : "killed"}; streamrl resume goes on` : run.state, element("progress", { max: run.steps || 1, value: step, "aria-label": "steps done" })));
    const shares = Object.entries(waits.reasons).map(([name, values]) => [name, last(values.slice(-1)) ?? 0]).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
    const whole = sum(shares.map(share => share[1])), bar = element("div", { class: "bar" });
    for (const [name, value] of shares) {
      const part = element("i", { title: `${name}: ${seconds(value)}` });
      part.style.background = reasonColour(name);
      part.style.flexGrow = value / whole * 100;  // a sum below 1 would leave a part of the bar empty
      bar.append(part);
    }
    const [first] = shares;
    tiles.push(tile("The last step waited for", first ? `${first[0]} ${percent(first[1] / whole)}` : "–", first ? `${REASONS[first[0]]?.[1] ?? ""}. To change it, where nothing else stands out: ${REASONS[first[0]]?.[2] ?? ""}.` : "no step yet", bar));
    tiles.at(-1).classList.add("wide");
    const alarms = details.alarms ?? [], alarm = alarms.at(-1);
    tiles.push(tile("Alarms", String(alarms.length), alarm ? `${known(alarm.step) ? "step " + alarm.step + ": " : ""}${alarm.text}` : "none"));
    tiles.at(-1).classList.toggle("bad", alarms.length > 0);
    body.className = "body tiles";
    body.replaceChildren(...tiles);
    drawHeader();
  });
