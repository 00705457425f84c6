"use strict";
// Draws the diagrams into the figures that the page already holds. Names come from users: they are only ever
// set as text, never parsed as HTML.

const { report, axes, margin, dashes } = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set(); // numbers of the methods that are switched off, for all diagrams alike
const DODGE = 3; // pixels between methods measured at the same x, so that their bars stand side by side

// ---- Small things

function html(name, className = "", text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
}

function shape(parent, name, attributes = {}, text = "") {
  const element = document.createElementNS(parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return parent.appendChild(element);
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const least = (numbers) => numbers.reduce((a, b) => Math.min(a, b), Infinity); // as arguments they are too many
const ends = (numbers) => [least(numbers), -least(numbers.map((one) => -one))];
const sorted = (numbers) => [...new Set(numbers)].sort((a, b) => a - b);
const short = (value) =>
  (Math.abs(value) >= 10000 ? value.toLocaleString("en") : String(+value.toPrecision(6)));
// Ticks have little room: 10M for ten million, and no more digits of a third than needed.
const brief = (value) => (Math.abs(value) >= 1e6 ? value.toLocaleString("en", { notation: "compact" })
  : Math.abs(value) >= 10000 ? short(value) : String(+value.toPrecision(4)));
const exact = (value) => value.toFixed(4);
const told = (chart, value) => (value !== null ? exact(value) : chart.panel.markers ? "diverged" : "none");
const name = (series) => series.method + (series.weights === "live" ? " (live)" : "");

// ---- The charts, by place

const charts = [];
const places = [...document.querySelectorAll(".place")].map((element) => {
  const place = { element, charts: [] };
  const buttons = [...element.querySelectorAll(".choices button")];
  element.querySelectorAll(".panel").forEach((figure, index) => {
    const number = +figure.dataset.panel;
    const panel = report.panels[number];
    const series = panel.series.map((one) => ({ ...one, number: report.methods.indexOf(one.method) }));
    // Bold lines are drawn last, over the thin ones.
    series.sort((a, b) => (a.weights === "live" ? 0 : 1) - (b.weights === "live" ? 0 : 1));
    const find = (selector) => figure.querySelector(selector);
    const chart = {
      panel, series, axis: axes[number], place, figure, button: buttons[index], zoom: null, at: null,
      box: find(".chart"), svg: find("svg"), tip: find(".tip"), note: find(".note"), reset: find(".reset"),
    };
    charts[number] = chart;
    place.charts.push(chart);
  });
  return place;
});

const visible = (chart) => chart.series.filter((series) => !hidden.has(series.number));
const usable = (chart, x) => !chart.panel.x_log || x > 0;

/** The range of x that is in view. */
function xRange(chart) {
  if (chart.zoom) return chart.zoom;
  const xs = chart.series.flatMap((series) => series.x).filter((x) => usable(chart, x));
  return xs.length ? ends(xs) : [1, 2];
}

/** All values in view, each with its series: lines, and the ends of bands and bars. */
function valuesInView(chart) {
  const [left, right] = xRange(chart);
  return visible(chart).flatMap((series) =>
    [series.y, series.low ?? [], series.high ?? []].flatMap((numbers) =>
      numbers.flatMap((value, i) =>
        value !== null && left <= series.x[i] && series.x[i] <= right ? [{ value, series }] : [])));
}

/** The range of y for what is in view. Which values are too far off was decided for the whole panel. */
function freshRange(chart) {
  const values = valuesInView(chart).map((one) => one.value);
  const [floor, ceiling] = chart.axis.fence ?? [-Infinity, Infinity];
  const near = values.filter((value) => floor <= value && value <= ceiling);
  const used = 2 * near.length >= values.length ? near : values; // far off no longer, where most values are
  if (!used.length) return chart.axis.range;
  const [low, high] = ends(used);
  const room = margin * (high - low || Math.abs(high) || 1);
  return [low - room, high + room];
}

// ---- Axes

/** Round numbers between two ends, about `count` of them, and how many decimals they need. */
function roundTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * (rough / power < 1.5 ? 1 : rough / power < 3.5 ? 2 : rough / power < 7.5 ? 5 : 10);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return { ticks, decimals };
}

/** Where x has ticks: at the measured points if those are few, else at round numbers. */
function xTicks(chart, [left, right], room) {
  const measured = sorted(chart.series.flatMap((series) => series.x)).filter((x) => left <= x && x <= right);
  if (measured.length <= 10 && (chart.panel.markers || chart.panel.x_log)) return measured;
  if (chart.panel.x_log && right / left > 10) {
    const ticks = [];
    const factors = Math.log10(right / left) * 90 < room ? [1, 2, 5] : [1];
    for (let power = Math.floor(Math.log10(left)); power <= Math.log10(right); power++)
      for (const factor of factors) ticks.push(factor * 10 ** power);
    return ticks.filter((x) => left <= x && x <= right);
  }
  return right > left ? roundTicks(left, right, clamp(room / 110, 3, 8)).ticks : [left];
}

// ---- Drawing

function draw(chart) {
  const { panel, svg, place } = chart;
  const width = Math.max(place.width, 200), height = clamp(Math.round(width * 0.6), 260, 400);
  const [low, high] = chart.zoom || hidden.size ? freshRange(chart) : chart.axis.range;
  const [left, right] = xRange(chart);
  const y = roundTicks(low, high, height / 60);
  const yTexts = y.ticks.map((tick) => tick.toFixed(y.decimals));
  const gutter = 14 + 7 * Math.max(3, ...yTexts.map((text) => text.length)); // room for the texts of the ticks
  const area = { left: gutter, right: width - 14, width: width - 14 - gutter, top: 32, bottom: height - 46 };
  area.height = area.bottom - area.top;
  const inset = panel.markers ? 28 : 0; // dots and bars stay clear of the edges
  const flat = panel.x_log ? Math.log10 : Number, room = area.width - 2 * inset;
  const span = flat(right) - flat(left);
  const toX = (x) => area.left + inset + (span ? (flat(x) - flat(left)) / span : 0.5) * room;
  const fromX = (pixel) => {
    const value = flat(left) + ((pixel - area.left - inset) / room) * span;
    return clamp(panel.x_log ? 10 ** value : value, left, right);
  };
  const toY = (value) => area.bottom - ((value - low) / (high - low)) * area.height;
  Object.assign(chart, { area, toX, toY, fromX, width });

  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.aspectRatio = `${width} / ${height}`;
  const clip = shape(shape(svg, "defs"), "clipPath", { id: `clip-${report.panels.indexOf(panel)}` });
  shape(clip, "rect", { x: area.left, y: area.top, width: area.width, height: area.height });

  y.ticks.forEach((tick, i) => {
    shape(svg, "line", { class: "grid", x1: area.left, x2: area.right, y1: toY(tick), y2: toY(tick) });
    shape(svg, "text", { x: area.left - 8, y: toY(tick) + 4, "text-anchor": "end" }, yTexts[i]);
  });
  let free = -Infinity; // where the last label ends: one that would run into it is left out
  for (const tick of xTicks(chart, [left, right], room)) {
    const text = brief(tick), half = 3.5 * text.length, at = toX(tick);
    shape(svg, "line", { class: "axis", x1: at, x2: at, y1: area.bottom, y2: area.bottom + 4 });
    if (at - half < free + 6) continue;
    const x = clamp(at, half, width - half);
    shape(svg, "text", { x, y: area.bottom + 18, "text-anchor": "middle" }, text);
    free = at + half;
  }
  shape(svg, "line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom });
  shape(svg, "text", { x: 0, y: 14 }, panel.y_label);
  const xLabel = panel.x_label + (panel.x_log ? " (log scale)" : "");
  shape(svg, "text", { x: area.right, y: height - 6, "text-anchor": "end" }, xLabel);

  const inside = shape(svg, "g", { "clip-path": `url(#${clip.id})` });
  const edge = shape(svg, "g"); // signs at the edge of the plot, which no clip may cut
  visible(chart).forEach((series) => drawSeries(chart, series, inside, edge));
  chart.guide = shape(svg, "g", { class: "guide" });
  chart.reset.hidden = !chart.zoom;
  tellWhatIsCut(chart, low, high);
  point(chart, null);
}

function drawSeries(chart, series, inside, edge) {
  const { panel, area, toX, toY } = chart;
  const colour = `--c:var(--c${series.number})`;
  const look = { class: `series ${series.weights}`, "data-method": series.number, style: colour };
  const group = shape(inside, "g", look), signs = shape(edge, "g", look);
  const shift = panel.markers ? DODGE * (series.number - (report.methods.length - 1) / 2) : 0;
  const xs = series.x.map((x) => (usable(chart, x) ? toX(x) + shift : NaN));
  const along = (run, numbers) => run.map((i) => `${xs[i].toFixed(2)},${toY(numbers[i]).toFixed(2)}`);
  const known = (...lists) => xs.map((x, i) => !isNaN(x) && lists.every((list) => list[i] !== null));

  if (series.low && series.high) {
    const stretches = unbroken(known(series.low, series.high));
    if (panel.markers)
      stretches.flat().forEach((i) => shape(group, "line", {
        class: "bar", x1: xs[i], x2: xs[i], y1: toY(series.low[i]), y2: toY(series.high[i]) }));
    else
      stretches.forEach((run) => {
        const outline = [...along(run, series.high), ...along(run, series.low).reverse()];
        shape(group, "path", { class: "band", d: `M${outline.join("L")}Z` });
      });
  }
  const scale = series.weights === "live" ? 1.25 : 2.25; // dashes are given in line widths
  const runs = unbroken(known(series.y));
  shape(group, "path", {
    class: "line",
    // A point between two gaps has no line; a short stroke shows it all the same.
    d: runs.map((run) => `M${along(run, series.y).join("L")}${run.length > 1 ? "" : "h1.5"}`).join(""),
    "stroke-dasharray": dashes[series.number].map((length) => length * scale).join(" "),
  });
  if (!panel.markers) return;
  series.y.forEach((value, i) => {
    if (isNaN(xs[i]) || xs[i] < area.left || xs[i] > area.right) return;
    const top = area.top - 6;
    if (value === null)
      shape(signs, "path", { class: "lost", d: `M${xs[i] - 3.5},${top - 3.5}l7,7m0,-7l-7,7` });
    else if (toY(value) < area.top)
      shape(signs, "path", { class: "beyond", d: `M${xs[i]},${top - 4}l4.5,8h-9Z` });
    else if (toY(value) > area.bottom)
      shape(signs, "path", { class: "beyond", d: `M${xs[i]},${area.bottom - 1}l4.5,-8h-9Z` });
    else
      shape(group, "circle", { class: "dot", cx: xs[i], cy: toY(value), r: series.weights === "live" ? 2.5 : 3.6 });
  });
}

/** Runs of indices for which `present` holds. */
function unbroken(present) {
  const runs = [];
  present.forEach((yes, i) => {
    if (!yes) return;
    if (i && present[i - 1]) runs.at(-1).push(i);
    else runs.push([i]);
  });
  return runs;
}

/** Nothing leaves the plot silently. */
function tellWhatIsCut(chart, low, high) {
  const { panel } = chart;
  const texts = [];
  const cut = valuesInView(chart).filter(({ value }) => value < low || value > high);
  if (cut.length) {
    const values = cut.map((one) => one.value), who = [...new Set(cut.map((one) => one.series.method))];
    const whose = who.length > 3 ? `${who.length} methods` : who.join(", ");
    const reach = [...new Set(ends(values).map(exact))].join(" to ");
    texts.push(`The axis is cut so that the lines can be told apart. Values outside: ${reach} (${whose})` +
      (panel.markers ? ", marked ▲ at the edge." : "."));
  }
  const lost = panel.markers ? visible(chart).filter((series) => series.y.includes(null)) : [];
  if (lost.length) texts.push(`× at the top edge: diverged (${[...new Set(lost.map(name))].join(", ")}).`);
  chart.note.textContent = texts.join(" ");
  chart.note.hidden = !texts.length;
}

// ---- Reading values

/** The x values that can be read, from left to right. */
function stops(chart) {
  const [left, right] = xRange(chart);
  return sorted(visible(chart).flatMap((series) => series.x)).filter((x) => left <= x && x <= right);
}

function nearest(numbers, pixel, toX) {
  const off = (x) => Math.abs(toX(x) - pixel);
  return numbers.reduce((best, x) => (off(x) < off(best) ? x : best), numbers[0]);
}

/** Shows guide and values at x; null takes them away. */
function point(chart, x) {
  const { tip, guide, area, toX, panel, width } = chart;
  chart.at = x;
  guide.replaceChildren();
  tip.replaceChildren();
  tip.hidden = x === null;
  if (x === null) return;
  const pixel = toX(x);
  shape(guide, "line", { x1: pixel, x2: pixel, y1: area.top, y2: area.bottom });

  const rows = visible(chart).flatMap((series) => {
    // Methods may be measured at different x. The nearest one counts, unless it is far from the guide.
    const own = nearest(series.x.filter((x) => usable(chart, x)), pixel, toX);
    if (own === undefined || Math.abs(toX(own) - pixel) > 0.02 * area.width) return [];
    return [{ series, own, value: series.y[series.x.indexOf(own)] }];
  });
  rows.sort((a, b) => (a.value ?? Infinity) - (b.value ?? Infinity));
  tip.append(html("div", "x", `${panel.x_label} ${short(x)}`));
  for (const { series, own, value } of rows) {
    const row = html("div", `row ${series.weights}`);
    row.append(document.querySelector(`.legend [data-method="${series.number}"] svg`).cloneNode(true));
    row.append(html("span", "name", name(series) + (own === x ? "" : ` at ${short(own)}`)));
    row.append(html("span", "value", told(chart, value)));
    tip.append(row);
  }
  // Beside the guide, on the side with more room; below the plot where there is room on neither.
  const ratio = chart.box.clientWidth / width, rightHalf = pixel > width / 2;
  const narrow = width < 560;
  tip.style.top = `${(narrow ? area.bottom + 24 : area.top) * ratio}px`;
  tip.style.left = narrow ? "0" : rightHalf ? "auto" : `${(pixel + 14) * ratio}px`;
  tip.style.right = !narrow && rightHalf ? `${(width - pixel + 14) * ratio}px` : narrow ? "0" : "auto";
}

function listen(chart) {
  const { svg, box } = chart;
  let start = null, select = null; // where a drag began, and the shade over what it covers
  const pixelOf = (event) => (event.offsetX * chart.width) / svg.clientWidth;
  const read = (event) => {
    const readable = stops(chart);
    if (readable.length) point(chart, nearest(readable, pixelOf(event), chart.toX));
  };
  svg.addEventListener("pointerdown", (event) => {
    // A finger that moves reads values; only a mouse or a pen zooms.
    if (event.pointerType === "touch" || event.button) return read(event);
    start = clamp(pixelOf(event), chart.area.left, chart.area.right);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (start === null) return read(event);
    const now = clamp(pixelOf(event), chart.area.left, chart.area.right);
    point(chart, null);
    select ??= shape(svg, "rect", { class: "select", y: chart.area.top, height: chart.area.height });
    select.setAttribute("x", Math.min(start, now));
    select.setAttribute("width", Math.abs(now - start));
  });
  svg.addEventListener("pointerup", (event) => {
    if (start === null) return;
    const [left, right] = sorted([start, clamp(pixelOf(event), chart.area.left, chart.area.right)]);
    select?.remove();
    start = select = null;
    if (right - left < 8) return; // a click, or as good as one
    const range = [chart.fromX(left), chart.fromX(right)];
    if (stops(chart).filter((x) => range[0] <= x && x <= range[1]).length > 1) zoom(chart, range);
  });
  svg.addEventListener("pointercancel", () => { select?.remove(); start = select = null; });
  svg.addEventListener("pointerleave", (event) => {
    // A finger hides what it points at: its values stay until it points elsewhere.
    if (start === null && event.pointerType !== "touch") point(chart, null);
  });
  document.addEventListener("pointerdown", ({ target }) => { if (!box.contains(target)) point(chart, null); });
  svg.addEventListener("dblclick", () => zoom(chart, null));
  chart.reset.addEventListener("click", () => { zoom(chart, null); box.focus(); });
  box.addEventListener("keydown", (event) => {
    const readable = stops(chart), jumps = { Home: 0, End: readable.length - 1 };
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") return chart.zoom ? zoom(chart, null) : point(chart, null);
    if (!readable.length || (step === undefined && !(event.key in jumps))) return;
    event.preventDefault();
    const now = readable.indexOf(chart.at);
    const next = step === undefined ? jumps[event.key] : now < 0 ? (step > 0 ? 0 : jumps.End) : now + step;
    point(chart, readable[clamp(next, 0, jumps.End)]);
  });
  box.addEventListener("blur", () => point(chart, null));
  const details = chart.figure.querySelector("details");
  // Thousands of cells nobody asked for would slow the page down; they are made on demand.
  details.addEventListener("toggle", () => fillNumbers(chart, details.querySelector("div")));
}

function fillNumbers(chart, box) {
  if (box.firstChild) return;
  const table = html("table"), { panel } = chart;
  const head = table.createTHead().insertRow(), body = table.createTBody();
  for (const text of [panel.x_label, ...panel.series.map(name)]) {
    const cell = head.appendChild(html("th", "n", text));
    cell.scope = "col";
  }
  const columns = panel.series.map((series) => new Map(series.x.map((x, i) => [x, series.y[i]])));
  for (const x of sorted(panel.series.flatMap((series) => series.x))) {
    const row = body.insertRow();
    row.append(html("td", "n", short(x)));
    for (const column of columns) {
      const value = column.get(x);
      row.append(html("td", "n", value === undefined ? "" : told(chart, value)));
    }
  }
  box.append(table);
}

// ---- Choosing

/** Shows that range of x, in all panels of the place that have the same x: they are there to be compared. */
function zoom(chart, range) {
  for (const other of chart.place.charts) {
    if (other.panel.x_label !== chart.panel.x_label || other.panel.x_log !== chart.panel.x_log) continue;
    other.zoom = range;
    draw(other);
  }
}

/** Shows the panel of that choice in every place that has one. */
function choose(choice) {
  for (const place of places) {
    if (!place.charts.some((chart) => chart.panel.choice === choice)) continue;
    for (const chart of place.charts) {
      const shown = chart.panel.choice === choice;
      chart.figure.classList.toggle("shown", shown);
      chart.button?.setAttribute("aria-pressed", shown);
    }
  }
}

function toggle(number) {
  if (!hidden.delete(number)) hidden.add(number);
  for (const element of document.querySelectorAll(`:is(.legend, .key) > [data-method="${number}"]`)) {
    element.classList.toggle("off", hidden.has(number));
    if (element.type === "button") element.setAttribute("aria-pressed", !hidden.has(number));
  }
  charts.forEach(draw);
}

/** Fades all methods but one; null fades none. */
function bringOut(number) {
  for (const group of document.querySelectorAll(".series"))
    group.classList.toggle("dim", number !== null && !hidden.has(number) && +group.dataset.method !== number);
}

for (const button of document.querySelectorAll(".legend button")) {
  const number = +button.dataset.method;
  button.addEventListener("click", () => toggle(number));
  button.addEventListener("pointerenter", ({ pointerType }) => { if (pointerType === "mouse") bringOut(number); });
  button.addEventListener("pointerleave", () => bringOut(null));
}
for (const chart of charts) {
  listen(chart);
  chart.button?.addEventListener("click", () => choose(chart.panel.choice));
}
// Text in a diagram keeps its size, whatever the width: it is drawn anew, not stretched.
for (const place of places)
  new ResizeObserver(() => {
    if (place.width === place.element.clientWidth) return; // only its height changed, by our own drawing
    place.width = place.element.clientWidth;
    place.charts.forEach(draw);
  }).observe(place.element);
