"use strict";
// Responses with every token coloured by a number that the run recorded for it.

// name: [label, how it is coloured, what it is]
const FIELDS = JSON.parse(document.getElementById("fields").textContent);
const ORDER = ["logp", "old_logp", "ratio", "change", "adv", "w", "push", "clipped", "entropy", "mismatch", "ref_gap"];

// The number that a token is coloured by, 0 for no colour.
function level(kind, value) {
  if (value === null || value === undefined) return null;
  if (kind === "ratio") return Math.log(Math.max(value, 1e-9));
  if (kind === "surprise") return -value;
  return value;
}

// The value that has the full colour: larger than 95 of 100 others.
function fullScale(rows, name) {
  const kind = FIELDS[name][1];
  const sizes = rows.flatMap((row) => (row[name] || []).map((v) => level(kind, v))).filter((v) => v !== null).map(Math.abs);
  sizes.sort((a, b) => a - b);
  return sizes[Math.floor(0.95 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1;
}

function color(kind, value, full) {
  const size = level(kind, value);
  if (size === null || size === 0) return "";
  const alpha = Math.min(Math.abs(size) / full, 1) * 0.7;
  const hue = kind === "amount" || kind === "surprise" ? "much" : kind === "flag" || size < 0 ? "bad" : "good";
  return `rgba(var(--rgb-${hue}), ${alpha.toFixed(3)})`;
}

// All numbers of a token.
function tokenText(row, i) {
  const lines = [JSON.stringify(row.pieces[i])];
  if (!row.mask[i]) return lines.concat("not in the mask: read, not sampled").join("\n");
  for (const name of ORDER) {
    if (row[name]) lines.push(`${name.padEnd(9)} ${number(row[name][i])}`);
  }
  return lines.join("\n");
}

function tokenSpans(row, name, full) {
  const text = el("div", { class: "text" });
  const kind = FIELDS[name][1];
  row.pieces.forEach((piece, i) => {
    const shown = piece.replace(/\n/g, "↵\n") || "·";
    const token = el("span", { class: row.mask[i] ? "tok" : "tok unlearned" }, shown);
    if (row.mask[i] && row[name]) token.style.background = color(kind, row[name][i], full);
    token.addEventListener("mousemove", (event) => showTip(event, tokenText(row, i)));
    token.addEventListener("mouseleave", hideTip);
    text.append(token);
  });
  return text;
}

// The turns of a conversation with their roles.
function turns(conversation) {
  const found = el("details", {}, el("summary", {}, `conversation of ${conversation.length} turns`));
  for (const turn of conversation) {
    const said = typeof turn.content === "string" ? turn.content : JSON.stringify(turn.content ?? turn);
    found.append(el("div", { class: "turn" }, el("span", { class: "role" }, turn.role || ""), said));
  }
  return found;
}

function responseCard(row, name, full) {
  const head = el("div", { class: "head" }, el("span", {}, row.name || `response ${row.sample}`));
  if (row.reward !== undefined) head.append(el("span", { class: "reward" }, `reward ${number(row.reward)}`));
  const card = el("div", { class: "card" }, head, tokenSpans(row, name, full));
  if (row.conversation) card.append(turns(row.conversation));
  return card;
}

// What the colours of a field mean, with the value of the full colour.
function scaleKey(name, full) {
  const [label, kind, meaning] = FIELDS[name];
  const ramp = (from, to) => el("span", { class: "ramp", style: `background:linear-gradient(90deg,${from},${to})` });
  const good = "rgba(var(--rgb-good),.7)", bad = "rgba(var(--rgb-bad),.7)", much = "rgba(var(--rgb-much),.7)";
  const found = el("span", {}, `${label}: ${meaning}. `);
  if (kind === "flag") return found;
  const ends = kind === "ratio" ? [number(Math.exp(-full)), number(Math.exp(full))] : [number(-full), number(full)];
  if (kind === "signed" || kind === "ratio") found.append(ends[0], ramp(bad, "transparent"), ramp("transparent", good), ends[1]);
  else found.append("0", ramp("transparent", much), number(full));
  return found;
}

// Images as they are, sounds to be played.
function mediaOf(row) {
  return (row.media || []).map(([kind, name, uri]) => {
    let shown = el("span", {}, "(no longer there)");
    if (uri && kind === "audio") shown = el("audio", { controls: "", src: uri });
    else if (uri) shown = el("img", { src: uri, alt: name });
    return el("figure", {}, shown, el("figcaption", {}, name));
  });
}
