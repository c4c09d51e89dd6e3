// Puts the page together: the runs, the panels in the order in which a person reads them, and what happens when something changes.
"use strict";

const seenPanels = new IntersectionObserver(entries => entries.forEach(entry => {
  const one = panels.find(each => each.section === entry.target);
  one.visible = entry.isIntersecting;
  one.refresh();
}), { rootMargin: "300px" });

function redrawAll() {  // colours are of the theme, heat maps of the width
  theme.clear();
  for (const one of timelines) one.coloured = null;
  repaint();
  invalidate();
}

function tellApart() {  // runs of one name by their directories
  const names = page.runs.map(run => run.name);
  for (const run of page.runs) if (names.filter(name => name === run.name).length > 1) run.name = run.run_id;
}

const followShown = () => [page.focus, ...page.shown().filter(run => run.state === "running")].slice(0, 4).forEach(page.follow);  // a browser holds six connections to one host

// Runs that began since, and states that changed.
async function moreRuns() {
  for (const found of await answer("/api/runs")) {
    const here = page.runs.find(run => run.run === found.run);
    if (here) Object.assign(here, found); else { page.runs.push(found); page.forget(page.runs[0], "compare"); }
  }
  tellApart();
  followShown();
  drawHeader();
}

(async () => {
  for (const one of panels) {
    byId("panels").append(one.section);
    byId("contents").append(element("a", { href: "#" + one.id }, one.title));
    seenPanels.observe(one.section);
  }
  try {
    page.runs = await answer("/api/runs");
    tellApart();
  } catch (error) {
    byId("state").textContent = error.message;
    return;
  }
  page.focus = page.runs.find(run => run.state === "running") ?? page.runs.at(-1);
  if (!REPORT) page.runs.slice(0, -RUN_COLOURS.length).forEach(run => page.hidden.add(run.run));  // a box in the head shows an older one
  drawHeader();
  if (!page.runs.length) return;
  invalidate();
  page.data(page.focus, "timeline").catch(() => null);  // its panel says what is wrong
  followShown();
  if (!REPORT) setInterval(() => moreRuns().catch(() => null), 10000);  // that a server is gone is told by its events
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  let wide = innerWidth, timer = null;
  addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; clearTimeout(timer); timer = setTimeout(() => invalidate("lengths"), 200); } });
  await drawUnseen();
})();
