"use strict";

/* Draws the flame graph: a button a frame, as wide as its share; what is narrower than a pixel is left out. */
const ROW = 19, LEAST = 1, MOST_OPTIONS = 60, STRONGEST = 0.5;
const PASSES = 0.99, SHORTEST_CHAIN = 4;
let data, kind, zoomed, graph, about, folds = true;
const chosen = {};

/* The tree of the chosen weights: {frame, weight, own, children by name, parent, change}. A comparison has a row for each frame. */
function treeOf() {
  const { columns } = data.kinds[kind], root = node(null, null);
  for (let row = 0; row < columns.weight.length; row++) {
    if (Object.entries(chosen).some(([name, value]) => value >= 0 && columns[name][row] !== value)) continue;
    const weight = columns.weight[row], path = [root];
    const isWhole = !columns.unwinding || data.kinds[kind].values.unwinding[columns.unwinding[row]] === "whole";
    for (const frame of [...(isWhole ? [] : [data.names.length - 1]), ...data.stacks[columns.stack[row]]]) {
      const name = data.names[frame], at = path.at(-1);
      if (name[0] === "[" && at !== root && nameOf(at) === name) continue;
      if (!at.children.has(name)) at.children.set(name, node(frame, at));
      path.push(at.children.get(name));
    }
    const last = path.at(-1);
    if (data.changes) Object.assign(last, { weight, own: last.own + weight, change: data.changes[columns.stack[row]] });
    else last.own += weight;
    for (const at of data.changes ? path.slice(0, path.length > 2 ? 0 : 1) : path) at.weight += weight;
    if (data.changes && path.length > 2) path.at(-2).own -= weight;
  }
  return root;
}

const node = (frame, parent) => ({ frame, parent, weight: 0, own: 0, children: new Map() });
const nameOf = (at) => (at.frame === null ? "all" : data.names[at.frame]);
const shortOf = (at) => (at.frame === null ? "all" : data.short[at.frame]);
const figure = (value) => `${value.toLocaleString(undefined, { maximumFractionDigits: value < 10 ? 3 : 1 })} ${data.kinds[kind].unit}`;

/* By file; in a comparison by change, grey where the interval has no change in it. */
const isChanged = (change) => Boolean(change && (change.least > 0 || change.most < 0));
function colourOf(at) {
  if (!data.changes) return at.frame === null ? "hsl(220 15% 85%)" : `hsl(${hueOf(data.files[at.frame])} 60% 74%)`;
  if (!isChanged(at.change)) return "hsl(220 8% 84%)";
  const { base, cand, least } = at.change, strength = Math.min(1, Math.abs(cand - base) / Math.max(Math.min(cand, base), 1e-9) / STRONGEST);
  return `hsl(${least > 0 ? 8 : 212} 85% ${88 - 26 * strength}%)`;
}

const signed = (value) => `${value < 0 ? "" : "+"}${value.toPrecision(3)}`;
function changeText({ unit, base, cand, least, most, verdict }) {
  const percent = base ? ` (${signed((100 * (cand - base)) / base)} %)` : "";
  return `${base.toPrecision(3)} → ${cand.toPrecision(3)} ${unit}${percent}, 95 % interval ${signed(least)} to ${signed(most)}; ${verdict}`;
}

function describe(at, root) {
  const share = (value) => `${((100 * value) / (root.weight || 1)).toFixed(1)} %`;
  const [file, line] = at.frame === null || data.changes ? [] : [data.files[at.frame], data.lines[at.frame]];
  const own = at.own > 0 ? `; itself ${figure(at.own)}, ${share(at.own)}` : "";
  about.replaceChildren(el("b", {}, nameOf(at)), ` ${figure(at.weight)}, ${share(at.weight)} of what is shown${own}`,
    el("br"), at.change ? changeText(at.change) : [file, line].filter(Boolean).join(" · "));
}

/* A frame and those below it that do nearly all it does, each the only one that its caller calls: drawn in one row. */
function chainOf(at) {
  const chain = [at];
  for (;;) {
    const here = chain.at(-1), next = [...here.children.values()].find((child) => child.weight >= PASSES * here.weight);
    if (!next || !here.weight || isChanged(next.change) !== isChanged(at.change)) break;
    chain.push(next);
  }
  return folds && chain.length >= SHORTEST_CHAIN ? chain : [at];
}

/* Frames from the zoomed one on, and its callers at full width above. */
function draw() {
  const root = treeOf(), path = [];
  let top = root, depth = 0;
  for (const name of zoomed) {
    if (!top.children.has(name)) break;
    top = top.children.get(name);
    path.push(top);
  }
  zoomed = path.map(nameOf);
  const width = graph.clientWidth || 1000, wanted = document.querySelector(".search").value.toLowerCase(), frames = [];
  const place = (chain, x, span, level) => {
    if (span < LEAST) return;
    depth = Math.max(depth, level);
    const at = chain.at(-1), name = chain.map(nameOf).join("\n"), judged = isChanged(at.change) && ["slower", "faster"].includes(at.change.verdict);
    const button = el("button", {
      class: "frame" + (judged ? " judged" : "") + (wanted && !name.toLowerCase().includes(wanted) ? " dim" : ""),
      title: `${name}: ${at.change ? changeText(at.change) : figure(at.weight)}`,
      style: `left:${x}px;width:${span}px;top:${level * ROW}px;background:${colourOf(at)}`,
      onclick: () => zoomTo(at), onfocus: () => describe(at, root), onmouseenter: () => describe(at, root),
    }, span > 24 ? (chain.length > 1 ? `${shortOf(chain[0])} … ${shortOf(at)} (${chain.length})` : shortOf(at)) : "");
    Object.assign(button, { frame: at, first: chain[0] });
    frames.push(button);
  };
  const grow = (first, x, span, level) => {
    const chain = first === top ? [top] : chainOf(first), at = chain.at(-1);
    place(chain, x, span, level);
    let from = x;
    const children = [...at.children.values()].sort((a, b) => b.weight - a.weight);
    const whole = Math.max(at.weight, children.reduce((sum, child) => sum + child.weight, 0)) || 1;
    for (const child of children) {
      const part = (span * child.weight) / whole;
      if (part >= LEAST) grow(child, from, part, level + 1);
      from += part;
    }
  };
  const above = top === root ? [] : [root, ...path.slice(0, -1)];
  const callers = folds && above.length >= SHORTEST_CHAIN ? [above] : above.map((at) => [at]);
  callers.forEach((chain, level) => place(chain, 0, width, level));
  grow(top, 0, width, callers.length);
  graph.replaceChildren(...frames);
  graph.style.height = `${(depth + 1) * ROW}px`;
  describe(top, root);
  const hits = frames.filter((button) => wanted && !button.classList.contains("dim")).length;
  document.querySelector(".hits").textContent = wanted ? `${hits} frames` : "";
}

function zoomTo(at) {
  zoomed = [];
  for (let up = at; up.frame !== null; up = up.parent) zoomed.unshift(nameOf(up));
  draw();
  [...graph.children].find((button) => nameOf(button.frame) === (zoomed.at(-1) ?? "all"))?.focus();
}

/* Arrows move among the drawn frames: to the caller, the largest callee, and the neighbours of a row. */
function move(event) {
  const buttons = [...graph.children], at = buttons.indexOf(document.activeElement);
  if (event.key === "Escape") return zoomTo(node(null, null));
  if (at < 0 || !event.key.startsWith("Arrow")) return;
  const here = buttons[at], row = buttons.filter((b) => b.style.top === here.style.top);
  const next = {
    ArrowUp: buttons.find((b) => b.frame === here.first.parent),
    ArrowDown: buttons.find((b) => b.first.parent === here.frame),
    ArrowLeft: row[row.indexOf(here) - 1],
    ArrowRight: row[row.indexOf(here) + 1],
  }[event.key];
  event.preventDefault();
  next?.focus();
}

function select(name, values, change) {
  const options = values.map(([value, text]) => el("option", { value }, text));
  return el("label", {}, `${name} `, el("select", { onchange: (event) => change(Number(event.target.value)) }, ...options));
}

/* A number to type, where a list would be too long. */
function entry(name, texts, change) {
  const places = new Map(texts.map((text, i) => [String(text), i]));
  const typed = (event) => change(event.target.value === "" ? -1 : places.get(event.target.value) ?? texts.length);
  return el("label", {}, `${name} `, el("input", { type: "number", class: "entry", placeholder: "all", min: texts[0], max: texts.at(-1), oninput: typed }));
}

function controls() {
  const kinds = Object.keys(data.kinds), { values } = data.kinds[kind];
  for (const name of Object.keys(chosen)) delete chosen[name];
  const filters = Object.entries(values).filter(([, texts]) => texts.length > 1 || data.changes).map(([name, texts]) => {
    const change = (value) => { chosen[name] = value; draw(); }, every = data.changes ? [] : [[-1, "all"]];
    chosen[name] = data.changes ? 0 : -1;
    return texts.length > MOST_OPTIONS ? entry(name, texts, change) : select(name, [...every, ...texts.map((text, i) => [i, text === "" || text === -1 ? "none" : text])], change);
  });
  const kindOf = select(data.changes ? "as wide as in" : "of", kinds.map((name, i) => [i, name]), (i) => { kind = kinds[i]; zoomed = []; layOut(); });
  kindOf.lastChild.value = kinds.indexOf(kind);
  const search = el("input", { class: "search", type: "search", placeholder: "search functions ( / )", "aria-label": "search functions", oninput: draw });
  return el("div", { class: "controls" }, kindOf, ...filters, search, el("span", { class: "hits", role: "status" }),
    el("label", {}, el("input", { type: "checkbox", checked: folds ? "" : null, onchange: (event) => { folds = event.target.checked; draw(); } }), " chains in one row"),
    el("button", { onclick: () => zoomTo(node(null, null)) }, "zoom out (Esc)"));
}

function find(name) {
  document.querySelector(".search").value = name;
  zoomed = [];
  draw();
}

/* What a comparison says of functions; a click searches one. */
function changedFunctions() {
  if (!data.changes) return null;
  const items = data.functions.map(({ name, text, level }) => el("li", { class: level }, el("button", { onclick: () => find(name) }, text)));
  return items.length ? el("ul", { class: "changed" }, ...items) : el("p", {}, "No function's CPU time is known to have changed.");
}

function factsText() {
  if (data.changes) return data.sentence + ` CPU time by stack (${data.kinds[kind].unit}), medians over runs.` + " Red: more, blue: less, the stronger the larger; framed: a change by the rules of the comparison; grey: the 95 % interval spans no change.";
  const { summary } = data, whole = summary.whole === null ? "" : `, ${(100 * summary.whole).toFixed(1)} % with a whole stack`;
  return `${summary.samples} samples at ${summary.hz} Hz${whole}; ${summary.waits} waits of ${summary.long_wait_us / 1000} ms or longer`;
}

function layOut() {
  graph = el("div", { class: "graph", onkeydown: move, role: "group", "aria-label": "flame graph; arrows move, Enter zooms" });
  about = el("p", { class: "about" });
  document.body.replaceChildren(el("main", {}, themeButton(), el("h1", { title: data.title }, data.title),
    el("p", { class: "facts" }, factsText() + (data.emulator ? "; HTP emulator: its times are the host's, not a device's" : "")),
    ...(data.remarks ?? []).map((text) => el("p", { class: "facts" }, text)),
    changedFunctions(), controls(), about, graph));
  draw();
}

async function main() {
  data = JSON.parse(await unpack("data"));
  const kinds = Object.keys(data.kinds);
  kind = kinds.find((name) => data.kinds[name].columns.weight.length) || kinds[0];
  zoomed = [];
  layOut();
  addEventListener("resize", draw);
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.tagName === "INPUT") return;
    event.preventDefault();
    document.querySelector(".search").focus();
  });
  document.body.dataset.ready = "yes";
}

main();
