// Lines and stacked areas by uPlot, sparklines, and heat maps on a canvas.
"use strict";

const RUN_COLOURS = ["#3b7dd8", "#e07b39", "#3a9d5d", "#9162c7", "#cf4f5f", "#2a9aa5", "#9a7350", "#d068a5"];
const runColour = run => RUN_COLOURS[run.run % RUN_COLOURS.length];
const TICKS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800, 2592000];
const SHORT = Array.from({ length: 6 }, (unused, power) => [1, 2, 5].map(one => one * 10 ** (power - 7))).flat();  // below a tenth of a second
const WHOLE = Array.from({ length: 12 }, (unused, power) => [1, 2, 5].map(one => one * 10 ** power)).flat();
const clock = time => time < 5400 && time !== 3600 ? `${Math.round(time / 60)} min` : time % 3600 ? `${Math.floor(time / 3600)} h ${String(Math.floor(time / 60) % 60).padStart(2, "0")}` : time < 172800 || time % 86400 ? `${time / 3600} h` : `${time / 86400} days`;
const FONT = "11px system-ui, sans-serif", ruler = new OffscreenCanvas(1, 1).getContext("2d");
const widest = texts => { ruler.font = FONT; return Math.max(0, ...(texts ?? []).map(text => ruler.measureText(text).width)); };
const faint = (colour, alpha = "55") => colour + alpha;

// Sizes of hosts are told by one observer.
const resized = new WeakMap();
const sizes = new ResizeObserver(entries => entries.forEach(entry => resized.get(entry.target)?.()));

// One figure: a title, a help text, a plot, or "no data". `show` may be called as often as data comes.
class Chart {
  constructor(host, title, help = "", height = 170) {
    this.height = height;
    this.plot = element("div", { class: "plot" });
    this.plot.style.minHeight = height + "px";  // also before it is drawn, so that nothing below moves
    this.none = element("p", { class: "none", hidden: true }, "No data.");
    this.says = element("div", { class: "says" });
    this.figure = element("figure", {}, element("figcaption", {}, element("b", {}, title), " ", this.help = element("span", { class: "dim" }, help)), this.says, this.plot, this.none);
    host.append(this.figure);
    resized.set(this.plot, () => this.uplot && this.plot.clientWidth && this.uplot.setSize({ width: this.plot.clientWidth, height: this.height }));
    sizes.observe(this.plot);
  }

  // series: [{label, values, colour, width, dash, points, fill, gauge, raw}] over x; a `gauge` holds until its next value, and `raw` is what is said instead of `values`.
  show(x, series, { unit = "", xUnit = "step", least = null, most = null, onpick = null } = {}) {
    series = series.filter(one => one.values?.some(known));
    this.onpick = onpick;
    this.none.hidden = x.length > 0 && series.length > 0;
    this.plot.hidden = this.says.hidden = !this.none.hidden;
    if (this.plot.hidden) return false;
    const signature = JSON.stringify([series.map(one => [one.label, one.colour, one.width, one.dash]), unit, xUnit, least, most, css("line")]);
    const data = [x, ...series.map(one => one.values)];
    this.say = at => this.says.replaceChildren(element("span", {}, at == null && series.some(one => !known((one.raw || one.values).at(-1))) ? "newest" : onX(x[at ?? x.length - 1])), ...series.filter(one => one.label).map(one =>
      element("span", {}, swatch(one.colour), one.label, " ", element("b", {}, inUnit(at == null ? last(one.raw || one.values) : (one.raw || one.values)[at], one.unit ?? unit)))));
    const onX = value => xUnit === "s" ? seconds(value) : xUnit + " " + number(value);
    this.say(null);
    if (this.uplot && this.signature === signature) { this.uplot.setData(data); return true; }
    this.uplot?.destroy();
    this.signature = signature;
    const axis = { stroke: css("dim"), grid: { stroke: css("line"), width: 1 }, ticks: { show: false }, font: FONT };
    this.uplot = new uPlot({
      width: this.plot.clientWidth || 300, height: this.height, padding: [6, 14, 0, 0],
      cursor: { sync: { key: xUnit }, y: false, points: { size: 5 }, drag: { x: true, y: false, dist: 6 } },
      legend: { show: false }, hooks: { setCursor: [plot => this.say(plot.cursor.idx)] }, scales: { x: { time: false }, y: { range: (plot, low, high) => {
        if (!known(low) || (low === 0 && high === 0)) return [0, 1];
        const gap = high > low ? Math.max((high - low) * 0.08, Math.abs(high) * 0.01) : Math.abs(high) / 2;  // labels of 3 digits differ
        return [least ?? low - gap, most ?? high + gap];
      } } },
      axes: [{ ...axis, size: 22, incrs: xUnit === "s" ? TICKS : WHOLE, values: (plot, ticks, axis, space, step) => ticks.map(tick => xUnit !== "s" ? number(tick) : step < 60 ? number(tick) + " s" : clock(tick)) },
        { ...axis, size: (plot, texts) => Math.max(54, Math.ceil(widest(texts)) + 14), incrs: unit === "s" ? [...SHORT, ...TICKS] : undefined,
          values: (plot, ticks, axis, space, step) => ticks.map(tick => unit === "share" && step < 0.01 ? (100 * tick).toFixed(step < 0.001 ? 2 : 1) + " %" : inUnit(tick, unit)) }],
      series: [{}, ...series.map(one => ({
        label: one.label, stroke: one.colour, width: one.width ?? 1.5, dash: one.dash, fill: one.fill, spanGaps: true, paths: one.gauge ? uPlot.paths.stepped({ align: 1 }) : undefined,
        points: { show: one.points ?? x.length < 3, size: 6, fill: one.colour }, 
      }))],
    }, data, this.plot);
    this.uplot.over.addEventListener("click", () => { if (this.onpick && this.uplot.cursor.idx != null) this.onpick(this.uplot.cursor.idx); });
    return true;
  }

  // Areas on each other: [{label, values, colour}], the first at the bottom.
  stack(x, parts, options = {}) {
    const total = x.map(() => 0), series = [];
    for (const part of parts) {
      part.values.forEach((value, index) => { total[index] += value || 0; });
      series.unshift({ label: part.label, raw: part.values, values: [...total], colour: part.colour, fill: part.colour, width: 1 });
    }
    return this.show(x, series.filter(one => sum(one.raw) > 0), { least: 0, ...options });
  }
}

// Charts that a panel made, by name, so that new data goes into those that are there.
function chart(host, name, title, help, height) {
  host.charts ??= new Map();
  if (!host.charts.has(name)) host.charts.set(name, new Chart(host, title, help, height));
  return host.charts.get(name);
}

// A canvas of CSS pixels, cleared, with its context.
function sheet(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

function sparkline(values, colour, width = 120, height = 26) {
  const canvas = element("canvas", { class: "spark", "aria-hidden": "true" }), pen = sheet(canvas, width, height);
  const points = values.map((value, index) => [index, value]).filter(([, value]) => known(value));
  if (points.length < 2) return canvas;
  const low = Math.min(...points.map(point => point[1])), high = Math.max(...points.map(point => point[1]));
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (const [index, value] of points)
    pen.lineTo(2 + index / (values.length - 1) * (width - 4), height - 3 - (high > low ? (value - low) / (high - low) : 0.5) * (height - 6));
  pen.stroke();
  return canvas;
}

const channels = colour => { const value = parseInt(colour.slice(1), 16); return [value >> 16, value >> 8 & 255, value & 255]; };
const mix = (from, to, share) => from.map((value, index) => Math.round(value + (to[index] - value) * share));

// rows[step][bin] as shares of their step, a column a step; hover tells what lies there.
function heatMap(host, title, steps, edges, rows, onpick) {
  const figure = element("figure", {}, element("figcaption", {}, element("b", {}, title)));
  host.append(figure);
  if (!rows.some(row => row && sum(row) > 0)) return figure.append(element("p", { class: "none" }, "No data."));
  const canvas = element("canvas", { class: "heat", role: "img", "aria-label": title }), [left, bottom, height] = [54, 20, 190];
  figure.append(canvas);
  const width = figure.clientWidth - 16, bins = Math.max(...rows.map(row => row?.length ?? 0)), pen = sheet(canvas, width, height);
  const picture = new OffscreenCanvas(rows.length, bins), brush = picture.getContext("2d"), image = brush.createImageData(rows.length, bins);
  const [ground, ink] = [channels(css("panel")), channels(css("heat"))];
  const most = Math.max(...rows.map(row => Math.max(...row ?? [0]) / (sum(row ?? []) || 1)));
  rows.forEach((row, x) => {
    const total = sum(row ?? []) || 1;
    for (let bin = 0; bin < bins; bin++) {
      const share = (row?.[bin] ?? 0) / total, colour = mix(ground, ink, share > 0 ? 0.12 + 0.88 * Math.sqrt(share / most) : 0);
      image.data.set([...colour, 255], ((bins - 1 - bin) * rows.length + x) * 4);
    }
  });
  brush.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(picture, left, 2, width - left - 8, height - bottom - 2);
  pen.fillStyle = css("dim");
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "right";
  const rise = (height - bottom - 2) / bins;
  for (let bin = 0; bin <= bins; bin += Math.max(1, Math.ceil(16 / rise)))
    if (known(edges[bin])) pen.fillText(number(edges[bin]), left - 5, Math.max(10, height - bottom - bin * rise + 3));
  pen.textAlign = "center";
  for (let tick = 0; tick < 6 && tick < rows.length; tick++) {
    const place = Math.round(tick * (rows.length - 1) / Math.max(1, Math.min(5, rows.length - 1)));
    const text = number(steps[place]), half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(width - half - 1, left + (place + 0.5) * (width - left - 8) / rows.length), height - 6);
  }
  const at = event => {
    const x = Math.floor((event.offsetX - left) / (width - left - 8) * rows.length), bin = Math.floor((height - bottom - event.offsetY) / rise);
    return x >= 0 && x < rows.length && bin >= 0 && bin < bins ? [x, bin] : null;
  };
  canvas.addEventListener("pointermove", event => {
    const place = at(event), row = place && rows[place[0]];
    showTip(event, row ? `step ${steps[place[0]]}: ${row[place[1]] ?? 0} of ${sum(row)} completions have ${number(edges[place[1]])} to ${number(edges[place[1] + 1])} tokens` : "");
  });
  canvas.addEventListener("pointerleave", event => showTip(event, ""));
  if (onpick) canvas.addEventListener("click", event => { const place = at(event); if (place) onpick(place[0]); });
}
