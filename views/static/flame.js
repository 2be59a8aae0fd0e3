"use strict";

/* Draws the flame graph: a button a frame, as wide as its share; what is narrower than a pixel is left out. */
const ROW = 19, LEAST = 1;
let data, kind, zoomed, graph, about;
const chosen = {};

/* The tree of the chosen weights: {frame, weight, own, children by frame, parent}. */
function treeOf() {
  const { columns } = data.kinds[kind], root = node(null, null);
  for (let row = 0; row < columns.weight.length; row++) {
    if (Object.entries(chosen).some(([name, value]) => value >= 0 && columns[name][row] !== value)) continue;
    let at = root;
    at.weight += columns.weight[row];
    for (const frame of data.stacks[columns.stack[row]]) {
      const name = data.names[frame];
      if (!at.children.has(name)) at.children.set(name, node(frame, at));
      at = at.children.get(name);
      at.weight += columns.weight[row];
    }
    at.own += columns.weight[row];
  }
  return root;
}

const node = (frame, parent) => ({ frame, parent, weight: 0, own: 0, children: new Map() });
const nameOf = (at) => (at.frame === null ? "all" : data.names[at.frame]);
const figure = (value) => `${value.toLocaleString(undefined, { maximumFractionDigits: 1 })} ${data.kinds[kind].unit}`;

function hueOf(text) {
  let hash = 0;
  for (const letter of text) hash = (hash * 31 + letter.charCodeAt(0)) >>> 0;
  return hash % 360;
}

function describe(at, root) {
  const share = (value) => `${((100 * value) / (root.weight || 1)).toFixed(1)} %`;
  const file = at.frame === null ? "" : data.files[at.frame], line = at.frame === null ? "" : data.lines[at.frame];
  about.replaceChildren(el("b", {}, nameOf(at)), ` ${figure(at.weight)}, ${share(at.weight)} of what is shown; itself ${figure(at.own)}, ${share(at.own)}`,
    el("br"), [file, line].filter(Boolean).join(" · "));
}

/* Frames from the zoomed one on, and its callers at full width below. */
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
  const place = (at, x, span, level) => {
    if (span < LEAST) return;
    depth = Math.max(depth, level);
    const hue = hueOf(at.frame === null ? "" : data.files[at.frame]), name = nameOf(at);
    const button = el("button", {
      class: "frame" + (wanted && !name.toLowerCase().includes(wanted) ? " dim" : ""), title: `${name}: ${figure(at.weight)}`,
      style: `left:${x}px;width:${span}px;top:${level * ROW}px;background:hsl(${hue} 60% ${at.frame === null ? 85 : 74}%)`,
      onclick: () => zoomTo(at), onfocus: () => describe(at, root), onmouseenter: () => describe(at, root),
    }, span > 24 ? name : "");
    button.frame = at;
    frames.push(button);
  };
  const grow = (at, x, span, level) => {
    place(at, x, span, level);
    let from = x;
    for (const child of [...at.children.values()].sort((a, b) => b.weight - a.weight)) {
      const part = at.weight ? (span * child.weight) / at.weight : 0;
      if (part >= LEAST) grow(child, from, part, level + 1);
      from += part;
    }
  };
  const above = top === root ? [] : [root, ...path.slice(0, -1)];
  above.forEach((at, level) => place(at, 0, width, level));
  grow(top, 0, width, above.length);
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
  graph.querySelectorAll(".frame")[zoomed.length]?.focus();
}

/* Arrows move among the drawn frames: to the caller, the largest callee, and the neighbours of a row. */
function move(event) {
  const buttons = [...graph.children], at = buttons.indexOf(document.activeElement);
  if (event.key === "Escape") return zoomTo(node(null, null));
  if (at < 0 || !event.key.startsWith("Arrow")) return;
  const here = buttons[at], row = buttons.filter((b) => b.style.top === here.style.top);
  const next = {
    ArrowUp: buttons.find((b) => b.frame === here.frame.parent),
    ArrowDown: buttons.find((b) => b.frame.parent === here.frame),
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

function controls() {
  const kinds = Object.keys(data.kinds), { values } = data.kinds[kind];
  const filters = Object.entries(values).map(([name, texts]) => {
    chosen[name] = -1;
    return select(name, [[-1, "all"], ...texts.map((text, i) => [i, text || "none"])], (value) => { chosen[name] = value; draw(); });
  });
  const kindOf = select("of", kinds.map((name, i) => [i, name]), (i) => { kind = kinds[i]; zoomed = []; layOut(); });
  kindOf.lastChild.value = kinds.indexOf(kind);
  const search = el("input", { class: "search", type: "search", placeholder: "search functions", "aria-label": "search functions", oninput: draw });
  return el("div", { class: "controls" }, kindOf, ...filters, search, el("span", { class: "hits", role: "status" }),
    el("button", { onclick: () => zoomTo(node(null, null)) }, "zoom out (Esc)"));
}

function layOut() {
  const { summary } = data;
  graph = el("div", { class: "graph", onkeydown: move, role: "group", "aria-label": "flame graph; arrows move, Enter zooms" });
  about = el("p", { class: "about" });
  const whole = summary.whole === null ? "" : `, ${(100 * summary.whole).toFixed(1)} % with a whole stack`;
  document.body.replaceChildren(el("main", {}, el("h1", {}, data.command, " ", themeButton()),
    el("p", { class: "facts" }, `${summary.samples} samples at ${summary.hz} Hz${whole}; ${summary.waits} waits of ${summary.long_wait_us / 1000} ms or longer` +
      (data.emulator ? "; HTP emulator: its times are the host's, not a device's" : "")),
    controls(), graph, about));
  draw();
}

async function main() {
  data = JSON.parse(await unpack("data"));
  kind = data.summary.samples ? "samples" : "waits";
  zoomed = [];
  layOut();
  addEventListener("resize", draw);
  document.body.dataset.ready = "yes";
}

main();
