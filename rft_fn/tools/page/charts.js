"use strict";
// Charts as SVG: lines with bands, stacked bars, fans of quantiles. Every chart shows its numbers on hover.

const SVG = "http://www.w3.org/2000/svg";
const COLORS = ["#1f6fb2", "#d65a14", "#2b8a57", "#8e44ad", "#b8860b", "#c2255c", "#0b7285", "#6b7280", "#66a80f", "#495057"];
const FEW = 30; // points of a line that are marked
const SIZE = { width: 360, height: 184, left: 48, right: 8, top: 8, bottom: 22 };

// An element with attributes and children; texts are children too.
function el(name, attributes, ...children) {
  const found = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) found.setAttribute(key, value);
  found.append(...children);
  return found;
}

function shape(name, attributes, text) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== undefined) found.textContent = text;
  return found;
}

// A number as one reads it: four digits.
function number(x) {
  if (x === null || x === undefined) return "none";
  if (x !== 0 && (Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3)) return x.toExponential(2);
  return String(Number(x.toPrecision(4)));
}

function showTip(event, text) {
  const tip = document.getElementById("tip");
  tip.textContent = text;
  tip.style.display = "block";
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 6);
  const above = event.clientY + 18 + tip.offsetHeight > window.innerHeight;
  tip.style.left = Math.max(left, 4) + "px";
  tip.style.top = (above ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18) + "px";
}

function hideTip() {
  document.getElementById("tip").style.display = "none";
}

// Round numbers between two limits: at most count + 1, and seldom under half as many.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((k) => k * power >= rough);
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-9; x += step) found.push(Number(x.toPrecision(12)));
  return found;
}

// The same between two positive limits, for a logarithmic axis: powers of ten, and 2 and 5 between a few of them.
function logarithmicTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 1) return ticks(low, high, count);
  const every = Math.ceil(decades / count);
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) {
    for (const k of decades < 3 ? [1, 2, 5] : [1]) found.push(Number((k * 10 ** power).toPrecision(12)));
  }
  return found.filter((v) => v >= low * (1 - 1e-9) && v <= high * (1 + 1e-9));
}

// The least and the largest of many numbers, without those that are none.
function limits(values) {
  let low = Infinity, high = -Infinity;
  for (const x of values) {
    if (x === null || !Number.isFinite(x)) continue;
    low = Math.min(low, x);
    high = Math.max(high, x);
  }
  if (low > high) return [0, 1];
  if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  return [low, high];
}

// An empty chart over steps, with axes: {root, svg, x, y} with the scales from numbers to pixels.
function axes(title, [x0, x1], [y0, y1], { unit = "", logarithmic = false } = {}) {
  const root = el("div", { class: "chart" }, el("h4", {}, title), el("small", {}, unit));
  const svg = shape("svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img", "aria-label": title });
  root.append(svg);
  const bottom = SIZE.height - SIZE.bottom;
  const right = SIZE.width - SIZE.right;
  const to = logarithmic ? Math.log10 : (v) => v;
  const x = (v) => SIZE.left + ((v - x0) / (x1 - x0 || 1)) * (right - SIZE.left);
  const y = (v) => bottom - ((to(v) - to(y0)) / (to(y1) - to(y0) || 1)) * (bottom - SIZE.top);
  const marks = (logarithmic ? logarithmicTicks : ticks)(y0, y1, 8);
  for (const v of marks) {
    svg.append(shape("line", { class: "axis", x1: SIZE.left, x2: right, y1: y(v), y2: y(v) }));
    svg.append(shape("text", { x: SIZE.left - 5, y: y(v) + 3, "text-anchor": "end" }, String(v).length < 8 ? String(v) : number(v)));
  }
  svg.append(shape("text", { x: 0, y: SIZE.height - 7 }, "step"));
  for (const v of ticks(x0, x1, 7).filter(Number.isInteger)) {
    svg.append(shape("text", { x: x(v), y: SIZE.height - 7, "text-anchor": "middle" }, v));
  }
  return { root, svg, x, y };
}

function path(points) {
  return points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
}

// The index of the number in a rising list that is nearest to v.
function nearest(list, v) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] < v) low = middle;
    else high = middle;
  }
  return Math.abs(list[low] - v) <= Math.abs(list[high] - v) ? low : high;
}

// Show the text of the step under the pointer, with a line through it.
function hover({ root, svg }, [x0, x1], x, textAt) {
  const cross = shape("line", { class: "cross", y1: SIZE.top, y2: SIZE.height - SIZE.bottom, visibility: "hidden" });
  svg.append(cross);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const scale = Math.min(box.width / SIZE.width, box.height / SIZE.height);
    const inside = (event.clientX - box.left - (box.width - SIZE.width * scale) / 2) / scale;
    const step = x0 + ((inside - SIZE.left) / (SIZE.width - SIZE.left - SIZE.right)) * (x1 - x0);
    const [at, text] = textAt(Math.min(Math.max(step, x0), x1));
    cross.setAttribute("x1", x(at));
    cross.setAttribute("x2", x(at));
    cross.setAttribute("visibility", "visible");
    showTip(event, text);
  });
  svg.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    hideTip();
  });
  return root;
}

// The mean around each value, over `span` values where there are as many: it lags behind nothing.
function smoothed(y, span) {
  const half = Math.round(span / 2);
  return y.map((_, i) => {
    const part = y.slice(Math.max(i - half, 0), i + half + 1);
    return part.reduce((a, b) => a + b, 0) / part.length;
  });
}

// Lines over steps. `series`: {name, color, x, y, lo, hi}; `smooth` is the share of a line that a running mean is over.
function lineChart(title, series, { smooth = 0, logarithmic = false, unit = "" } = {}) {
  const all = series.flatMap((s) => [...s.y, ...(s.lo || []), ...(s.hi || [])]);
  const log = logarithmic && all.some((v) => v > 0);
  const shown = log ? all.filter((v) => v > 0) : all;
  const xs = limits(series.flatMap((s) => s.x));
  const ys = limits(shown);
  const chart = axes(title, xs, ys, { unit, logarithmic: log });
  const at = (v) => chart.y(log ? Math.max(v, ys[0]) : v);
  for (const s of series) {
    if (s.lo) {
      const edge = [...s.x.map((v, i) => [chart.x(v), at(s.hi[i])]), ...s.x.map((v, i) => [chart.x(v), at(s.lo[i])]).reverse()];
      chart.svg.append(shape("path", { class: "band", d: path(edge) + "Z", fill: s.color, opacity: 0.18 }));
    }
    const draw = (y, width, opacity) => chart.svg.append(shape("path", { class: "line", d: path(s.x.map((v, i) => [chart.x(v), at(y[i])])), fill: "none", stroke: s.color, "stroke-width": width, "vector-effect": "non-scaling-stroke", opacity }));
    const span = s.x.length < FEW ? 1 : Math.round(s.x.length * smooth);
    if (span < 2) draw(s.y, 1.5, 1);
    else {
      draw(s.y, 0.7, 0.3);
      draw(smoothed(s.y, span), 1.8, 1);
    }
    if (s.x.length < FEW) s.x.forEach((v, i) => chart.svg.append(shape("circle", { cx: chart.x(v), cy: at(s.y[i]), r: 2, fill: s.color })));
  }
  return hover(chart, xs, chart.x, (step) => {
    const lines = series.map((s) => {
      const i = nearest(s.x, step);
      const band = s.lo ? `  [${number(s.lo[i])}, ${number(s.hi[i])}]` : "";
      return [s.x[i], `${number(s.y[i])}${band}  ${s.name}` + (s.x[i] === s.x[nearest(series[0].x, step)] ? "" : ` (step ${s.x[i]})`)];
    });
    return [lines[0][0], [`step ${lines[0][0]}`, ...lines.map((line) => line[1])].join("\n")];
  });
}

// Quantiles over steps: two bands, the extremes as thin lines, the median as a thick one.
function fanChart(title, { x, q }, color, unit) {
  const xs = limits(x);
  const chart = axes(title, xs, limits(q.flat()), { unit });
  const last = q.length - 1;
  const line = (k) => x.map((v, i) => [chart.x(v), chart.y(q[k][i])]);
  for (let k = 1; k < last / 2; k++) {
    const edge = [...line(last - k), ...line(k).reverse()];
    chart.svg.append(shape("path", { class: "band", d: path(edge) + "Z", fill: color, opacity: 0.2 }));
  }
  if (x.length === 1) line(0).forEach(([a], i) => q.forEach((level) => chart.svg.append(shape("circle", { cx: a, cy: chart.y(level[i]), r: 2, fill: color }))));
  for (const k of [0, last / 2, last]) {
    const width = k === last / 2 ? 1.8 : 0.6;
    chart.svg.append(shape("path", { class: "line", d: path(line(k)), fill: "none", stroke: color, "stroke-width": width }));
  }
  const names = ["min", "10%", "25%", "50%", "75%", "90%", "max"];
  return hover(chart, xs, chart.x, (step) => {
    const i = nearest(x, step);
    return [x[i], [`step ${x[i]}`, ...names.map((name, k) => `${name.padEnd(4)} ${number(q[k][i])}`).reverse()].join("\n")];
  });
}

// Seconds by phase, stacked over steps; the bar at x is of `size` steps from there.
function stackChart(title, { x, size, names, fills, seconds }) {
  const xs = [x[0] - 0.5, x[x.length - 1] + size - 0.5];
  const totals = seconds.map((parts) => parts.reduce((a, b) => a + b, 0));
  const chart = axes(title, xs, [0, Math.max(...totals) || 1], { unit: "seconds" });
  seconds.forEach((parts, i) => {
    let floor = 0;
    parts.forEach((part, k) => {
      const bar = { class: "bar", x: chart.x(x[i] - 0.5 + size * 0.05), width: Math.max(chart.x(size * 0.9) - chart.x(0), 0.5) };
      chart.svg.append(shape("rect", { ...bar, y: chart.y(floor + part), height: chart.y(floor) - chart.y(floor + part), fill: fills[k] }));
      floor += part;
    });
  });
  const key = el("div", {}, ...names.map((name, k) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = fills[k];
    return el("small", { class: "key" }, swatch, name);
  }));
  chart.root.append(key);
  return hover(chart, xs, chart.x, (step) => {
    const i = Math.min(Math.floor((step - xs[0]) / size), x.length - 1);
    const lines = names.map((name, k) => `${number(seconds[i][k])} s  ${name}`).reverse();
    const steps = size > 1 ? `steps ${x[i]} to ${x[i] + size - 1}` : `step ${x[i]}`;
    return [x[i] + (size - 1) / 2, [`${steps}: ${number(totals[i])} s`, ...lines].join("\n")];
  });
}
