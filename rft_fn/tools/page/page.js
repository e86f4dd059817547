"use strict";
// Puts the page together. Charts are drawn when they come into view, responses are read when they are asked for.

const data = JSON.parse(document.getElementById("data").textContent);
const colors = data.groups.map((_, i) => COLORS[i % COLORS.length]);
const several = data.runs.length > 1;
const hidden = new Set();
const unfolded = new Set();

function body(section) {
  return document.querySelector(`#${section} .body`);
}

function menu(label, options, onChange) {
  const select = el("select", {}, ...options.map(([value, text]) => el("option", { value }, text)));
  select.addEventListener("change", () => onChange(select.value));
  return [el("label", {}, label, " ", select), select];
}

function fillMenu(select, options) {
  const kept = select.value;
  select.replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
  if (options.some(([value]) => String(value) === kept)) select.value = kept;
}

function stored(name) {
  const found = document.getElementById(name);
  return found ? JSON.parse(found.textContent) : [];
}

// ---------- the head and the symptoms

function legend() {
  document.getElementById("title").textContent = document.title;
  if (!several) return;
  data.groups.forEach((group, i) => {
    const box = el("input", { type: "checkbox", checked: "" });
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(i);
      else hidden.add(i);
      curves();
    });
    const names = group.runs.map((r) => data.runs[r].name).join(", ");
    const label = el("label", { title: names }, box, el("span", { class: "swatch", style: `background:${colors[i]}` }), group.name);
    document.getElementById("legend").append(label);
  });
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + ".";
}

function symptoms() {
  for (const run of data.runs) {
    for (const s of run.symptoms) {
      const steps = s.first === s.last ? `step ${s.first}` : `steps ${s.first} to ${s.last}`;
      const head = `${several ? run.name + ", " : ""}${s.name.replaceAll("_", " ")}, ${steps}. `;
      const text = `${sentence(s.sentence)} What to do: ${s.remedy}.`;
      body("symptoms").append(el("p", { class: "symptom" }, el("b", {}, head), text));
    }
  }
  if (body("symptoms").childNodes.length) return;
  document.getElementById("symptoms").style.display = "none";
  document.querySelector("nav").append(el("small", {}, "no symptoms"));
}

// ---------- curves

const drawers = new WeakMap();
const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    observer.unobserve(entry.target);
    entry.target.replaceWith(drawers.get(entry.target)());
  }
}, { rootMargin: "400px" });

// A place that becomes a chart when it comes into view.
function later(draw) {
  const place = el("div", { class: "chart waiting" });
  drawers.set(place, draw);
  observer.observe(place);
  return place;
}

// A part that is closed until a reader opens it, or looks for a metric.
function folded(title, ...children) {
  const summary = el("summary", {}, title);
  const details = el("details", {}, summary, ...children);
  const name = children[0].className;
  details.open = unfolded.has(name) || document.getElementById("filter").value !== "";
  summary.addEventListener("click", () => (details.open ? unfolded.delete(name) : unfolded.add(name)));
  return details;
}

function constant(s) {
  return [...s.y, ...(s.lo || []), ...(s.hi || [])].every((v) => v === s.y[0]);
}

// The metrics that matter most on top; the others and those that never change are folded.
function curves() {
  const wanted = document.getElementById("filter").value;
  const smooth = Number(document.getElementById("smooth").value);
  const logarithmic = document.getElementById("log").checked;
  const top = el("div", { class: "grid" });
  const rooms = new Map();
  const still = [];
  for (const [name, found] of Object.entries(data.metrics)) {
    const series = found.map((s, i) => s && { ...s, name: data.groups[i].name, color: colors[i] }).filter((s, i) => s && !hidden.has(i));
    if (!name.includes(wanted) || !series.length) continue;
    const draw = () => lineChart(name, series, { smooth, logarithmic, unit: data.units[name] });
    const room = name.includes("/") ? name.split("/")[0] : "";
    if (data.top.includes(name)) top.append(later(draw));
    else if (series.every(constant)) still.push([name, found.map((s) => (s ? number(s.y[0]) : ""))]);
    else if (rooms.has(room)) rooms.get(room).append(later(draw));
    else rooms.set(room, el("div", { class: "grid" }, later(draw)));
  }
  const others = [...rooms].flatMap(([room, grid]) => [el("h3", {}, room), grid]);
  const count = others.reduce((sum, part) => sum + part.querySelectorAll(".chart").length, 0);
  const names = [...rooms.keys()].filter(Boolean).join(", ");
  const parts = [top];
  if (count) parts.push(folded(`others (${count}): ${names}`, el("div", { class: "others" }, ...others)));
  if (still.length) parts.push(folded(`with a single value (${still.length})`, table("metric", data.groups.map((group) => group.name), still)));
  body("curves").replaceChildren(...parts);
}

// ---------- distributions, time, options, pictures

function perRun() {
  data.runs.forEach((run, r) => {
    const color = colors[data.groups.findIndex((group) => group.runs.includes(r))];
    const prefix = several ? `${run.name}: ` : "";
    if (run.reward) body("spread").append(later(() => fanChart(prefix + "rewards", run.reward, color)));
    if (run.length) body("spread").append(later(() => fanChart(prefix + "lengths", run.length, color, "tokens")));
    if (run.phases.x.length) body("phases").append(later(() => stackChart(prefix + "phases", run.phases)));
    for (const [name, uri] of run.pictures) {
      body("pictures").append(el("figure", {}, el("img", { src: uri, alt: name }), el("figcaption", {}, prefix + name)));
    }
  });
  for (const section of ["spread", "phases", "pictures"]) {
    if (!body(section).childNodes.length) document.getElementById(section).style.display = "none";
  }
}

function table(first, names, rows) {
  const head = el("tr", {}, el("th", {}, first), ...names.map((name) => el("th", {}, name)));
  const lines = rows.map(([name, values]) => el("tr", {}, el("td", {}, name), ...values.map((v) => el("td", {}, v))));
  return el("div", { class: "wide" }, el("table", {}, head, ...lines));
}

function options() {
  if (data.differences.length) body("options").append(table("option", data.runs.map((run) => run.name), data.differences));
  for (const run of data.runs) {
    const rows = Object.entries(run.config).map(([name, value]) => [name, [JSON.stringify(value)]]);
    const title = several ? `all options of ${run.name}` : `${rows.length} options`;
    body("options").append(el("details", {}, el("summary", {}, title), table("option", ["value"], rows)));
  }
}

// ---------- responses, token by token

function responses() {
  const having = data.runs.map((run, r) => [r, run.name]).filter(([r]) => data.runs[r].tokens.length);
  const section = document.getElementById("responses");
  const without = data.runs.filter((run) => !run.tokens.length).map((run) => run.name);
  const why = "single tokens were not recorded. Scripts record them every --tokens-every steps; a reward model gives a response one score, and its tokens none.";
  if (without.length) section.querySelector("h2").after(el("p", { class: "without" }, `${without.join(", ")}: ${why}`));
  if (!having.length) return;
  let rows = [];
  const show = () => {
    const group = rows.filter((row) => String(row.group) === groups.value);
    const full = fullScale(group, fields.value);
    section.querySelector(".scale").replaceChildren(scaleKey(fields.value, full));
    section.querySelector(".media").replaceChildren(...group.flatMap(mediaOf));
    const prompt = group[0] && group[0].prompt ? [el("div", { class: "prompt" }, group[0].prompt)] : [];
    const cards = group.map((row) => responseCard(row, fields.value, full));
    body("responses").replaceChildren(...prompt, el("div", { class: "responses" }, ...cards));
  };
  const load = () => {
    rows = stored(`tokens-${runs.value}-${steps.value}`);
    fillMenu(groups, [...new Set(rows.map((row) => row.group))].map((g) => [g, `group ${g}`]));
    const names = Object.keys(FIELDS).filter((name) => rows.some((row) => row[name]));
    fillMenu(fields, names.map((name) => [name, FIELDS[name][0]]));
    show();
  };
  const choose = () => {
    const found = data.runs[Number(runs.value)].tokens;
    fillMenu(steps, found.map((step) => [step, `step ${step}`]));
    load();
  };
  const [runLabel, runs] = menu("Run", having, choose);
  const [stepLabel, steps] = menu("Step", [], load);
  const [groupLabel, groups] = menu("Prompt", [], show);
  const [fieldLabel, fields] = menu("Colour by", [], show);
  runLabel.hidden = having.length < 2;
  section.querySelector(".menus").append(runLabel, stepLabel, groupLabel, fieldLabel);
  choose();
  steps.selectedIndex = steps.options.length - 1;
  load();
}

// ---------- sampled responses, as text

function sampleCard(row) {
  const head = el("div", { class: "head" }, el("span", {}, row.split || "train"));
  head.append(el("span", { class: "reward" }, `reward ${number(row.reward)}`));
  const card = el("div", { class: "card" }, head, el("div", { class: "prompt" }, row.prompt), el("div", { class: "text" }, row.response));
  if (row.conversation) card.append(turns(row.conversation));
  return card;
}

function samples() {
  const having = data.runs.map((run, r) => [r, run.name]).filter(([r]) => data.runs[r].samples.length);
  const section = document.getElementById("samples");
  if (!having.length) return void (section.style.display = "none");
  const show = () => {
    const rows = stored(`samples-${runs.value}-${steps.value}`);
    body("samples").replaceChildren(el("div", { class: "responses" }, ...rows.map(sampleCard)));
  };
  const choose = () => {
    fillMenu(steps, data.runs[Number(runs.value)].samples.map((step) => [step, `step ${step}`]));
    steps.selectedIndex = steps.options.length - 1;
    show();
  };
  const [runLabel, runs] = menu("Run", having, choose);
  const [stepLabel, steps] = menu("Step", [], show);
  runLabel.hidden = having.length < 2;
  section.querySelector(".menus").append(runLabel, stepLabel);
  choose();
}

legend();
symptoms();
curves();
responses();
perRun();
options();
samples();
for (const link of document.querySelectorAll("nav a")) {
  link.hidden = document.querySelector(link.getAttribute("href")).style.display === "none";
}
for (const id of ["filter", "smooth", "log"]) document.getElementById(id).addEventListener("input", curves);
