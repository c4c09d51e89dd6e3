// Completions with their rewards, versions and logprobs; events, processes and recipes. All of their text is hostile: textContent alone.
"use strict";

const wanted = { step: "", least: "", most: "", prompt: "", offset: 0, like: null }, PAGE_OF_SAMPLES = 20;

function openSamples(filter) {
  Object.assign(wanted, { least: "", most: "", offset: 0, like: null }, filter);
  const one = panels.find(each => each.id === "samples");
  for (const field of one.section.querySelectorAll("input[name]")) field.value = wanted[field.name];
  one.section.scrollIntoView({ behavior: "smooth" });
  one.body.chosen = null;
  one.dirty = true;
  one.refresh();
}

async function samplesOf(run, filter) {
  const query = Object.entries(filter).filter(([, value]) => value !== "").map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  const given = await answer(`/api/runs/${run.run}/samples?${query}`);
  if (!REPORT) return given;
  const { step, least, most, prompt, offset, limit } = filter;  // a report holds them all
  const rows = given.rows.filter(row => (step === "" || row.step === +step) && (least === "" || row.reward >= +least) && (most === "" || row.reward <= +most) && (prompt === "" || row.prompt_id === prompt || row.prompt?.includes(prompt)));
  return { total: rows.length, rows: rows.slice(offset, offset + limit) };
}

// The completion, by token where the tokens are known: coloured by logprob (rare is red) or by the version that sampled it.
function completion(row, by, whole = row.text, from = 0, to = row.token_texts?.length) {
  const box = element("pre", { class: "text" }), texts = row.token_texts, versions = row.versions ?? [];
  if (!texts || by === "plain" || (by === "logprob" && !row.logprobs)) return box.textContent = whole ?? "", box;
  const first = Math.min(...versions);
  texts.slice(from, to).forEach((text, place) => {
    const index = from + place, part = element("span", { title: [known(row.logprobs?.[index]) ? `logprob ${row.logprobs[index].toFixed(3)}, p ${percent(Math.exp(row.logprobs[index]))}` : null, versions.length === texts.length ? `version ${versions[index]}` : null].filter(Boolean).join("\n") }, text);
    if (by === "logprob" && known(row.logprobs[index])) part.style.background = `rgba(220, 60, 50, ${(Math.min(1, -row.logprobs[index] / 5) * 0.75).toFixed(2)})`;
    if (by === "version" && versions.length === texts.length) part.style.background = faint(RUN_COLOURS[(versions[index] - first) % 8]);
    box.append(part);
  });
  return box;
}

// Each message under its role: turns of the model as completions, what an environment wrote as it stands.
function conversation(row, by, from = 0) {
  return row.turns.map(({ role, text, tokens, sampled, version, again }) => element("div", { class: sampled ? "turn sampled" : "turn" },
    element("div", { class: "facts" }, element("b", {}, role), element("span", {}, `${count(tokens, "token")}${sampled ? `, version ${version ?? 0}` : ""}${again ? ", behind an earlier turn" : ""}`)),
    sampled ? completion(row, by, text, from, from += tokens) : element("pre", { class: "text" }, text)));
}

function sample(row, by, title = "") {
  const parts = Object.entries(row.rewards ?? {}), versions = [...new Set(row.versions ?? [])];
  return element("article", {}, element("div", { class: "facts" }, title ? element("b", {}, title) : null, element("span", {}, "step ", element("b", {}, String(row.step ?? "–"))), element("span", {}, "reward ", element("b", {}, number(row.reward))),
    ...parts.map(([name, value]) => element("span", {}, `${name} ${number(value)}`)), element("span", {}, `${count(row.tokens ?? "–", "token")}${row.turns?.length ? ` in ${count(row.turns.filter(turn => turn.sampled).length, "turn")}` : ""}`), element("span", {}, row.finish_reason || "stopped"), versions.length ? element("span", {}, `version${versions.length > 1 ? "s" : ""} ${versions.join(", ")}`) : null),
  ...(row.turns?.length ? conversation(row, by) : [element("pre", { class: "text prompt" }, row.prompt ?? ""), completion(row, by)]));
}

panel("samples", "Samples", "Completions that the run kept, with their rewards. Click one to read it whole; with several runs shown, the same prompt of the others stands beside it.", { of: "all", paths: [], without: "" }, async (body, runs) => {
  if (!body.controls) {
    body.by = "logprob";
    const again = () => { const one = panels.find(each => each.id === "samples"); body.chosen = null; one.dirty = true; one.refresh(); };
    const field = (name, label, type, size) => element("label", {}, label + " ", element("input", { name, type, size: size ?? null, step: "any", value: String(wanted[name]), onchange: event => { wanted[name] = event.target.value.trim(); wanted.offset = 0; again(); } }));
    body.append(body.controls = element("div", { class: "controls" }, field("step", "step", "number"), field("least", "reward from", "number"), field("most", "to", "number"), field("prompt", "prompt", "search", 18),
      body.colours = choice("colour by", ["logprob", "version", "plain"], body.by, value => { body.by = value; body.open?.(); })), body.list = element("div"), body.one = element("div", { class: "compared" }));
    body.again = again;
  }
  const run = page.focus, { total, rows } = await samplesOf(run, { ...wanted, like: "", limit: PAGE_OF_SAMPLES }), { like } = wanted;
  const open = async row => {
    const others = await Promise.all(runs.filter(other => other !== run).map(async other => [other, (await samplesOf(other, { step: "", least: "", most: "", prompt: row.prompt_id || row.prompt, offset: 0, limit: 1 }).catch(() => ({ rows: [] }))).rows[0]]));
    body.open = () => body.one.replaceChildren(sample(row, body.by, others.length ? run.name : ""), ...others.map(([other, found]) => found ? sample(found, body.by, other.name) : element("p", { class: "none" }, `${other.name} kept no sample of this prompt.`)));
    body.open();
  };
  const turn = by => () => { wanted.offset = Math.max(0, wanted.offset + by * PAGE_OF_SAMPLES); body.again(); }, brief = text => (text ?? "").slice(0, 160).replace(/\s+/g, " ");
  body.list.replaceChildren(table([{ head: "step", of: row => row.step }, { head: "reward", of: row => row.reward, text: number }, { head: "tokens", of: row => row.tokens }, { head: "kept as", of: row => [row.source, row.chosen, row.set].filter(Boolean).join(" ") || null }, { head: "end", of: row => row.finish_reason },
    { head: "prompt", of: row => brief(row.question || row.prompt), class: "brief" }, { head: "completion", of: row => brief(row.text), class: "brief" }], rows, { onrow: row => { body.chosen = row; open(row); }, empty: `No sample ${["step", "least", "most", "prompt"].some(name => wanted[name] !== "") ? "that was kept fits" : "is kept yet"}. A run keeps the best, the worst and a random completion of each batch, and those of evaluations.` }),
  element("div", { class: "controls" }, element("button", { onclick: turn(-1), disabled: wanted.offset === 0 }, "◂"), `${total ? wanted.offset + 1 : 0} to ${Math.min(total, wanted.offset + rows.length)} of ${number(total)}`,
    element("button", { onclick: turn(1), disabled: wanted.offset + rows.length >= total }, "▸")));
  body.colours.hidden = !rows.some(row => row.token_texts);
  if (body.chosen) return;  // what a person reads stays while the list goes on
  body.one.replaceChildren();
  const clicked = like && rows.find(row => row.tokens === like.tokens && Math.abs((row.reward ?? 0) - (like.reward || 0)) < 1e-4);
  if (rows.length) await open(clicked ?? rows[0]);
  if (like && !clicked) body.one.prepend(element("p", { class: "none" }, "The run did not keep the completion that was clicked" + (rows.length ? "; this is another one of its prompt." : ".")));
});

panel("events", "Events", "Evaluations, checkpoints, pauses, restarts, alarms and changed settings, newest first. Click one to see it in the timeline.", { paths: ["timeline", "details"], without: "nothing was recorded." }, (body, [run], [[columns, details]]) => {
  const alarms = (details.alarms ?? []).map(alarm => ({ kind: "alarm", time_s: sinceStart(run, alarm.time_s), step: alarm.step, text: alarm.text }));
  const told = new Set(columns.head.events.map(event => event.text)), rows = [...columns.head.events, ...alarms.filter(alarm => !told.has(alarm.text))].reverse(), kinds = ["all but pushes", "all", ...new Set(rows.map(row => row.kind))];
  if (!rows.length) return false;
  const show = kind => table([{ head: "time", of: row => row.time_s, text: seconds }, { head: "step", of: row => row.step }, { head: "kind", of: row => row.kind, text: name => element("span", {}, swatch(eventColour(name)), name) }, { head: "took", of: row => known(row.end_s) ? row.end_s - row.time_s : null, text: seconds }, { head: "", of: row => row.text, class: "long" }],
    rows.filter(row => kind === "all" || row.kind === kind || (kind === kinds[0] && row.kind !== "push")), { most: 60, onrow: row => { const [one] = timelines; if (one && known(row.time_s)) { const wide = Math.max(5, (row.end_s ?? row.time_s) - row.time_s); one.look(row.time_s - wide, (row.end_s ?? row.time_s) + wide); one.box.scrollIntoView({ behavior: "smooth", block: "center" }); } } });
  body.kind ??= kinds[0];
  const list = element("div", {}, show(body.kind));
  body.replaceChildren(choice("", kinds, body.kind, kind => { body.kind = kind; list.replaceChildren(show(kind)); }), list);
});

panel("processes", "Processes", "What runs, how often it was restarted, and the end of its log.", { paths: ["details"], without: "the run says nothing of its processes." }, (body, [run], [[details]]) => {
  const rows = details.processes ?? [], logs = Object.entries(details.log_tail ?? {});
  if (!rows.length && !logs.length) return false;
  body.replaceChildren(table([{ head: "name", of: row => row.name }, { head: "restarts", of: row => row.restarts, text: value => element("span", { class: value > 0 ? "bad" : "" }, String(value ?? 0)) }, { head: "state", of: row => row.state }], rows),
  ...logs.map(([name, text]) => fold(body, name, text || "This log is empty.")));
});

panel("recipe", "Recipe", "The recipe of the run, and the keys in which the runs on this page differ.", { paths: ["details"], without: "the run has no recipe.toml." }, async (body, [run], [[details]]) => {
  const shown = page.shown(), several = shown.length > 1, { recipe_differences } = several ? await page.data(page.runs[0], "compare") : { recipe_differences: [] };
  const valueOf = one => row => { const value = row.values[page.runs.indexOf(one)]; return value == null ? null : typeof value === "string" ? value : JSON.stringify(value); };
  const rows = recipe_differences.filter(row => new Set(shown.map(one => valueOf(one)(row))).size > 1);
  if (!details.recipe && !rows.length) return false;
  body.replaceChildren(several ? table([{ head: "key", of: row => row.key }, ...shown.map(one => ({ head: one.name || one.run_id, of: valueOf(one) }))], rows, { empty: "The recipes are equal." }) : "",
    fold(body, "recipe.toml", details.recipe ?? "", page.runs.length === 1));
});
