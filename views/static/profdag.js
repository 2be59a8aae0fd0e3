/* Draws the graph that views/profdag/layout.py placed, on a canvas: equal layers folded into cards, pan, zoom, find, colours, details.

   What stands still is drawn once into a picture larger than the window; moving shifts or scales that picture as a whole, which
   draws nothing. What the pointer is on is drawn into a second canvas above it, there only while there is such a thing. */

const view = { x: 0, y: 0, scale: 1, hover: null, chosen: null, find: "", mode: "time", path: false };
const open = new Set(), picture = { canvas: null, scale: 0, left: 0, top: 0, right: 0, bottom: 0, stale: true };
const GAP = 70, MAX_LINES = 12, DETAIL = 0.42, NAMES = 0.2, LINES = 0.12, MARGIN = 0.5, LEAST_TEXT = 11, TWO_LINES = 15;
const SUMMED = ["duration_ns", "busy_ns", "wait_ns", "maj_flt", "cycles", "load_ns"];
let dag, board, marks, tip, legend, panel, shown = { cards: [], nodes: [], edges: [], near: new Map(), of: [] };

const us = (ns) => (ns >= 1e6 ? (ns / 1e6).toFixed(2) + " ms" : (ns / 1e3).toFixed(1) + " µs");

function parse(colour) {
  return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
}

function ramp(share) {
  const stops = cssValue("--heat").split(/\s+/).map(parse), at = Math.min(0.9999, Math.max(0, Math.round(share * 32) / 32)) * (stops.length - 1);
  const i = Math.floor(at), t = at - i;
  return stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * t));
}

/* Cards: a block each, or one for all blocks of a class that is folded; its nodes then stand for one node of every layer. */
function folded(members) {
  const layers = members.map((b) => dag.members[b]);
  return layers[0].map((first, i) => {
    const each = layers.map((nodes) => nodes[i]), sum = { ...first, name: first.stem || first.name, each, critical: each.some((n) => n.critical), causes: summedCauses(each) };
    for (const key of SUMMED) if (each.some((n) => n[key] !== undefined)) sum[key] = each.reduce((s, n) => s + (n[key] || 0), 0);
    for (const key of ["gbytes_per_s", "gflops"]) if (first[key] !== undefined) sum[key] = each.reduce((s, n) => s + (n[key] || 0) * n.duration_ns, 0) / Math.max(1, sum.duration_ns);
    return sum;
  });
}

function makeCards() {
  const cards = [];
  for (const [same, members] of dag.classes) {
    const together = members.length > 1 && !open.has(same);
    for (const group of together ? [members] : members.map((b) => [b])) {
      const block = dag.blocks[group[0]], nodes = together ? folded(group) : dag.members[group[0]];
      cards.push({ same, members: group, rank: group[0], width: block.width, height: block.height, nodes, ns: nodes.reduce((s, n) => s + n.duration_ns, 0) });
    }
  }
  return cards.sort((a, b) => a.rank - b.rank);
}

function flow(cards, limit) {
  let x = 0, y = 0, line = 0, width = 0;
  for (const card of cards) {
    if (x && x + card.width > limit) { x = 0; y += line + GAP; line = 0; }
    card.x = x;
    card.y = y;
    width = Math.max(width, x + card.width);
    line = Math.max(line, card.height);
    x += card.width + GAP;
  }
  return Math.max(width, (y + line) * board.clientWidth / Math.max(1, board.clientHeight - 100));
}

const isNarrow = () => board.clientWidth < 640;

/* As many lines of cards as make the whole appear largest; on a narrow window a line each. */
function arrange(cards) {
  const total = cards.reduce((s, c) => s + c.width + GAP, 0), widest = Math.max(1, ...cards.map((c) => c.width));
  const limits = isNarrow() ? [widest] : Array.from({ length: Math.min(cards.length, MAX_LINES) }, (_, i) => Math.max(widest, total / (i + 1) + GAP));
  const best = limits.reduce((a, b) => (flow(cards, b) < flow(cards, a) ? b : a), limits[0]);
  flow(cards, best);
}

function layOut() {
  const cards = makeCards(), of = new Array(dag.nodes.length), nodes = [], near = new Map(), edges = [], seen = new Set();
  arrange(cards);
  for (const card of cards) {
    card.rows = new Map();
    for (const [i, n] of card.nodes.entries()) {
      n.ax = card.x + n.x;
      n.ay = card.y + n.y;
      card.rows.has(n.ay) ? card.rows.get(n.ay).push(n) : card.rows.set(n.ay, [n]);
      n.card = card;
      n.number = nodes.length;
      nodes.push(n);
      for (const b of card.members) of[dag.first[b][i]] = n;
    }
    card.dots = dag.dotsOf[card.rank] || [];
    for (const d of card.dots) { d.ax = card.x + d.x; d.ay = card.y + d.y; }
  }
  for (const [a, b] of dag.edges) {
    const from = of[a], to = of[b], within = from.card === to.card;
    if (within && (dag.nodes[a].block !== dag.nodes[b].block || dag.nodes[a].block !== from.card.rank)) continue;
    const key = from.number * nodes.length + to.number;
    if (seen.has(key)) continue;
    seen.add(key);
    const edge = { from, to, ...way(from, to) };
    edges.push(edge);
    for (const n of [from, to]) near.has(n) ? near.get(n).push(edge) : near.set(n, [edge]);
  }
  shown = { cards, nodes, edges, near, of };
  paint();
}

/* Colours. A mode is offered where its measure is known of any node. */
const MODES = {
  time: { value: (n) => n.duration_ns, root: true, text: us },
  waiting: { value: (n) => n.wait_ns / Math.max(1, n.wait_ns + n.busy_ns), most: 1, text: () => "100 % waiting for other threads" },
  bandwidth: { value: (n) => n.gbytes_per_s, text: (v) => v.toFixed(1) + " GB/s" },
  cycles: { value: (n) => n.cycles, root: true, text: (v) => v.toLocaleString("en") + " cycles" },
  "expert load": { value: (n) => n.load_ns, root: true, text: us },
  cause: { kind: "cause" },
  backend: { kind: "backend" },
  type: { kind: "type" },
};

function offered(mode) {
  if (mode === "cause") return dag.nodes.some(largestCause);
  return MODES[mode].kind || dag.nodes.some((n) => MODES[mode].value(n) > 0);
}

function kindColours(key) {
  if (key === "cause") return new Map([...causeColours(), ["unknown", cssValue("--line")]].map(([cause, colour]) => [cause, parse(colour)]));
  const total = new Map(), colours = slotColours();
  for (const n of dag.nodes) total.set(n[key] || "unknown", (total.get(n[key] || "unknown") || 0) + (n.duration_ns || 0));
  const names = [...total.keys()].sort((a, b) => total.get(b) - total.get(a));
  return new Map(names.map((name, i) => [name, parse(colours[Math.min(i, colours.length - 1)])]));
}

function paint() {
  const mode = MODES[view.mode], kinds = mode.kind ? kindColours(mode.kind) : null, plain = parse(cssValue("--panel")), unknown = parse(cssValue("--line"));
  const most = kinds ? 1 : mode.most || shown.nodes.reduce((m, n) => Math.max(m, mode.value(n) || 0), 0) || 1, ramps = new Map();
  const shade = (value) => {
    if (value === undefined) return unknown;
    const share = Math.round(32 * (mode.root ? Math.sqrt(value / most) : value / most));
    if (!ramps.has(share)) ramps.set(share, ramp(share / 32));
    return ramps.get(share);
  };
  for (const n of shown.nodes) {
    const rgb = n.role === "view" ? plain : kinds ? kinds.get((mode.kind === "cause" ? largestCause(n) : n[mode.kind]) || "unknown") : shade(mode.value(n));
    n.fill = `rgb(${rgb})`;
    n.text = 0.3 * rgb[0] + 0.59 * rgb[1] + 0.11 * rgb[2] > 140 ? "#141a22" : "#ffffff";
  }
  const chip = ([name, rgb]) => el("span", {}, Object.assign(el("i"), { style: `background: rgb(${rgb})` }), name);
  const bar = Object.assign(el("i", { class: "ramp" }), { style: `background: linear-gradient(to right, ${cssValue("--heat").split(/\s+/)})` });
  const scale = () => el("span", {}, "0 ", bar, mode.text(most) + (mode.root ? " (square-root scale)" : ""));
  const strip = view.mode === "cause" ? [] : causeColours().map(([cause]) => el("span", {}, swatch(cause), cause));
  legend.replaceChildren(...(kinds ? [...kinds].slice(0, 14).map(chip) : [scale()]), ...(strip.length ? [el("span", { class: "strip" }, "strips:"), ...strip] : []), el("span", {}, "● constant or state, one copy per reader"));
  picture.stale = true;
}

function cardTitle(card) {
  const title = dag.blocks[card.rank].title, many = card.members.length;
  const last = dag.blocks[card.members[many - 1]].title.replace("layer ", "");
  const name = many > 1 ? `${title} … ${last} (${many} equal layers)` : title;
  return `${dag.classes.get(card.same).length > 1 ? (many > 1 ? "▸ " : "▾ ") : ""}${name}  ${percent(card.ns)}`;
}

function drawCard(g, card, ink) {
  g.fillStyle = ink.panel;
  g.strokeStyle = ink.line;
  for (let i = Math.min(3, card.members.length) - 1; i >= 0; i--) {
    g.beginPath();
    g.roundRect(card.x + 7 * i, card.y - 7 * i, card.width, card.height, 12);
    g.fill();
    g.stroke();
  }
  g.fillStyle = ink.slots[ink.families.indexOf(card.same) % ink.slots.length];
  g.fillRect(card.x + 14, card.y + 30, card.width - 28, 3);
  g.fillStyle = ink.soft;
  g.font = `600 ${Math.min(60, Math.max(14, 12 / view.scale))}px system-ui, sans-serif`;
  g.textAlign = "left";
  g.fillText(cardTitle(card), card.x + 14, card.y + (view.scale < 0.8 ? -10 - 7 * Math.min(2, card.members.length - 1) : 21), Math.max(60, card.width - 20));
}

/* Edges run between the cards and between the operators of a row, never over them where there is a way. */
const LANE = 12, CLEARANCE = 8;

function isOuter(n, side) {
  return n.card.rows.get(n.ay).every((other) => side * (n.ax - other.ax) >= 0);
}

/* The place nearest to x at which a row can be passed. */
function passage(row, x) {
  const half = dag.size[0] / 2 + CLEARANCE, free = (at) => row.every((n) => Math.abs(n.ax - at) >= half);
  if (free(x)) return x;
  return row.flatMap((n) => [n.ax - half, n.ax + half]).filter(free).reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
}

/* Where an edge passes the rows between its ends: [x, upper, lower] each. */
function passages(from, to) {
  const h = dag.size[1] / 2, rows = [from.card, ...(to.card === from.card ? [] : [to.card])].flatMap((card) => [...card.rows]);
  return rows.filter(([y]) => y > from.ay && y < to.ay).sort(([a], [b]) => a - b).map(([y, row]) => {
    const straight = from.ax + ((to.ax - from.ax) * (y - from.ay)) / (to.ay - from.ay);
    return [passage(row, straight), y - h, y + h];
  });
}

/* Corners of the way to a card that stands beside: out to the gap behind the card, along above the other's line, in from its left. */
function detour(from, to) {
  const [w, h] = dag.size, out = from.card.x + from.card.width + GAP / 2, into = to.card.x - GAP / 2, above = to.card.y - GAP / 2;
  const leave = isOuter(from, 1) ? [[from.ax + w / 2, from.ay]] : [[from.ax, from.ay + h / 2], [from.ax, from.ay + h / 2 + LANE]];
  const enter = isOuter(to, -1) ? [[to.ax - w / 2, to.ay]] : [[to.ax, to.ay - h / 2 - LANE], [to.ax, to.ay - h / 2]];
  const beside = Math.abs(out - into) < 1;
  return [...leave, [out, leave.at(-1)[1]], ...(beside ? [] : [[out, above], [into, above]]), [into, enter[0][1]], ...enter];
}

function way(from, to) {
  const stacked = to.card !== from.card && to.card.x < from.card.x + from.card.width && to.card.y > from.card.y;
  return from.card === to.card || stacked ? { passages: passages(from, to) } : { corners: detour(from, to) };
}

function curve(g, { from, to, corners, passages }) {
  const straight = view.scale < DETAIL, [, h] = dag.size;
  if (corners) {
    g.moveTo(...corners[0]);
    for (let i = 1; i < corners.length - 1; i++) straight ? g.lineTo(...corners[i]) : g.arcTo(...corners[i], ...corners[i + 1], 10);
    return g.lineTo(...corners.at(-1));
  }
  let [x, y] = [from.ax, from.ay + h / 2];
  g.moveTo(x, y);
  for (const [next, top, bottom] of [...passages, [to.ax, to.ay - h / 2, to.ay - h / 2]]) {
    const bend = Math.max(LANE, Math.abs(top - y) / 2);
    straight ? g.lineTo(next, top) : g.bezierCurveTo(x, y + bend, next, top - bend, next, top);
    g.lineTo(next, bottom);
    [x, y] = [next, bottom];
  }
}

function drawEdges(g, box, ink) {
  g.strokeStyle = ink.soft;
  g.globalAlpha = view.path ? 0.2 : 0.6;
  g.lineWidth = Math.max(1.2, 0.4 / view.scale);
  g.beginPath();
  for (const edge of shown.edges) {
    const { from, to } = edge;
    const [left, right] = [Math.min(from.card.x, to.card.x) - GAP, Math.max(from.card.x + from.card.width, to.card.x + to.card.width) + GAP];
    if (right < box.left || left > box.right || Math.max(from.ay, to.ay) < box.top || Math.min(from.ay, to.ay, to.card.y - GAP) > box.bottom) continue;
    curve(g, edge);
  }
  g.stroke();
  g.globalAlpha = 1;
}

const matches = (n) => (n.each || [n]).some((one) => (one.name + " " + one.type).toLowerCase().includes(view.find));
const faint = (n) => (view.find && !matches(n)) || (view.path && !n.critical);

/* Far away a node is a spot of its colour: all spots of one colour in one go. */
function drawSpots(g, nodes, ink) {
  const [w, h] = dag.size, spots = new Map();
  for (const n of nodes) {
    const key = n.fill + faint(n);
    if (!spots.has(key)) spots.set(key, []);
    spots.get(key).push(n);
  }
  for (const group of spots.values()) {
    g.globalAlpha = faint(group[0]) ? 0.2 : 1;
    g.fillStyle = group[0].fill;
    for (const n of group) g.fillRect(n.ax - w / 2, n.ay - h / 2, w, h);
  }
  g.globalAlpha = 1;
  if (view.scale < LINES) return;
  /* Near enough that the palest ones, and views, need an edge to be seen on their card. */
  g.strokeStyle = ink.line;
  g.lineWidth = 1 / view.scale;
  g.beginPath();
  for (const n of nodes) g.rect(n.ax - w / 2, n.ay - h / 2, w, h);
  g.stroke();
  if (view.scale * sharper < (isNarrow() ? LEAST_TEXT / (0.8 * h) : NAMES)) return; // paper shows smaller letters than a screen
  g.font = `600 ${Math.min(0.8 * h, Math.max(0.62 * h, LEAST_TEXT / view.scale))}px system-ui, sans-serif`;
  g.textAlign = "center";
  for (const n of nodes) {
    g.globalAlpha = faint(n) ? 0.25 : 1;
    g.fillStyle = n.role === "view" ? ink.ink : n.text;
    g.fillText(n.type || n.name, n.ax, n.ay + h * 0.22, w - 8);
  }
  g.globalAlpha = 1;
}

function drawNode(g, n, ink) {
  const [w, h] = dag.size, found = (view.find && matches(n)) || (view.path && n.critical);
  g.globalAlpha = faint(n) ? 0.25 : 1;
  g.fillStyle = n.fill;
  g.strokeStyle = found ? ink.accent : n.role === "view" ? ink.soft : ink.line;
  g.lineWidth = found ? 2.5 : 1;
  g.setLineDash(n.role === "view" ? [4, 3] : []);
  g.beginPath();
  g.roundRect(n.ax - w / 2, n.ay - h / 2, w, h, 7);
  g.fill();
  g.stroke();
  g.setLineDash([]);
  g.fillStyle = n.role === "view" ? ink.ink : n.text;
  g.textAlign = "center";
  const size = Math.max(12, LEAST_TEXT / view.scale), lines = size <= TWO_LINES;
  g.font = `600 ${size}px system-ui, sans-serif`;
  g.fillText(n.name || n.type, n.ax, n.ay + (lines ? -5 : 0.2 * size - 2), w - 14);
  g.font = `${Math.max(11, LEAST_TEXT / view.scale)}px system-ui, sans-serif`;
  const layers = n.each ? ` in ${n.each.length} layers` : "";
  if (lines) g.fillText(n.role === "view" ? "view" : `${n.type === n.name ? "" : n.type + "  "}${us(n.duration_ns)}${layers}`, n.ax, n.ay + 9, w - 14);
  drawStrip(g, n, ink);
  g.globalAlpha = 1;
}

function drawAll(g, box) {
  const ink = Object.fromEntries(["panel", "line", "soft", "ink", "accent"].map((name) => [name, cssValue("--" + name)]));
  ink.slots = slotColours();
  ink.causes = causeColours();
  ink.families = [...dag.classes.keys()];
  const cards = shown.cards.filter((c) => c.x < box.right && c.x + c.width > box.left && c.y - 30 < box.bottom && c.y + c.height > box.top);
  for (const card of cards) drawCard(g, card, ink);
  if (view.scale >= LINES || shown.edges.length < 4000) drawEdges(g, box, ink);
  const [w, h] = dag.size, seen = (n) => n.ax > box.left - w && n.ax < box.right + w && n.ay > box.top - h && n.ay < box.bottom + h;
  for (const card of cards) {
    const nodes = card.nodes.filter(seen);
    if (view.scale < DETAIL) drawSpots(g, nodes, ink);
    else for (const n of nodes) drawNode(g, n, ink);
    if (view.scale < 0.3) continue;
    g.fillStyle = ink.soft;
    for (const dot of card.dots.filter(seen)) { g.beginPath(); g.arc(dot.ax, dot.ay, 4, 0, 7); g.fill(); }
  }
}

function inWindow() {
  const { clientWidth: width, clientHeight: height } = board;
  return { left: -view.x / view.scale, top: -view.y / view.scale, right: (width - view.x) / view.scale, bottom: (height - view.y) / view.scale };
}

let sharper = 1, onScreen;
/* A canvas of so many CSS pixels, ready to draw in the graph's own units; `left` and `top` are where it begins. */
function drawingOn(node, width, height, left, top) {
  const ratio = sharper * (devicePixelRatio || 1), w = Math.round(width * ratio), h = Math.round(height * ratio), zoom = view.scale * ratio;
  if (node.width !== w || node.height !== h) Object.assign(node, { width: w, height: h });
  Object.assign(node.style, { width: w / ratio + "px", height: h / ratio + "px" });
  const g = node.getContext("2d", { alpha: node !== picture.canvas, willReadFrequently: true });
  g.setTransform(1, 0, 0, 1, 0, 0);
  g.clearRect(0, 0, w, h);
  if (node === picture.canvas) { g.fillStyle = cssValue("--ground"); g.fillRect(0, 0, w, h); }
  g.setTransform(zoom, 0, 0, zoom, -left * zoom, -top * zoom);
  return g;
}

/* Draw the picture anew: the window and half of it around. */
function renew() {
  const box = inWindow(), dx = (box.right - box.left) * MARGIN, dy = (box.bottom - box.top) * MARGIN;
  Object.assign(picture, { scale: view.scale, left: box.left - dx, top: box.top - dy, right: box.right + dx, bottom: box.bottom + dy, stale: false });
  const width = (picture.right - picture.left) * view.scale, height = (picture.bottom - picture.top) * view.scale;
  drawAll(drawingOn(picture.canvas, width, height, picture.left, picture.top), picture);
}

let settle = 0, size = "";
function draw() {
  if (size !== (size = `${board.clientWidth} ${board.clientHeight} ${devicePixelRatio}`)) picture.stale = true;
  const box = inWindow(), outside = box.left < picture.left || box.right > picture.right || box.top < picture.top || box.bottom > picture.bottom;
  if (picture.stale || (picture.scale === view.scale && outside)) renew();
  else if (picture.scale !== view.scale) {
    clearTimeout(settle);
    settle = setTimeout(() => { picture.stale = true; redraw(); }, 90);
  }
  const x = view.x + picture.left * view.scale, y = view.y + picture.top * view.scale, zoomed = view.scale / picture.scale;
  picture.canvas.style.transform = zoomed === 1 ? `translate(${Math.round(x)}px, ${Math.round(y)}px)` : `translate(${x}px, ${y}px) scale(${zoomed})`;
  mark();
}

/* What the pointer is on, and what was clicked. */
function mark() {
  const marked = [...new Set([view.hover, view.chosen])].filter((n) => n && n.ax !== undefined);
  marks.hidden = !marked.length;
  if (marks.hidden) return;
  const [w, h] = dag.size, { left, top } = inWindow(), g = drawingOn(marks, board.clientWidth, board.clientHeight, left, top);
  g.strokeStyle = cssValue("--accent");
  for (const n of marked) {
    g.lineWidth = 2.4;
    g.beginPath();
    (shown.near.get(n) || []).forEach((edge) => curve(g, edge));
    if (n.of === undefined) g.roundRect(n.ax - w / 2, n.ay - h / 2, w, h, 7);
    else { g.moveTo(n.ax + 6, n.ay); g.arc(n.ax, n.ay, 6, 0, 7); }
    g.stroke();
  }
}

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function restyle() {
  paint();
  redraw();
}

function at(event) {
  const r = board.getBoundingClientRect();
  return [(event.clientX - r.left - view.x) / view.scale, (event.clientY - r.top - view.y) / view.scale];
}

function hit(event) {
  const [x, y] = at(event), [w, h] = dag.size;
  const card = shown.cards.find((c) => x >= c.x && x <= c.x + c.width && y >= c.y && y <= c.y + c.height + 10);
  if (!card) return null;
  const dot = view.scale >= 0.3 && card.dots.find((d) => Math.hypot(d.ax - x, d.ay - y) < 7);
  return dot || card.nodes.find((n) => Math.abs(n.ax - x) < w / 2 && Math.abs(n.ay - y) < h / 2) || null;
}

function titleHit(event) {
  const [x, y] = at(event), reach = view.scale < 0.8 ? [-14 - 40 / view.scale, 34] : [0, 34];
  return shown.cards.find((c) => x >= c.x && x <= c.x + c.width && y >= c.y + reach[0] && y <= c.y + reach[1] && dag.classes.get(c.same).length > 1);
}

function facts(n) {
  if (n.of !== undefined) return [["read by", dag.nodes[n.of].name], ["shape", n.shape]];
  const rows = [["stands for", n.each ? `${n.each.length} equal layers, summed` : ""], ["type", n.type], ["shape", n.shape], ["backend", n.backend], ["layer", n.each || n.layer < 0 ? "" : n.layer], ["expert", n.each || n.expert < 0 ? "" : n.expert]];
  if (n.role === "view") return rows;
  const spent = n.busy_ns + n.wait_ns;
  return [...rows, ["duration", us(n.duration_ns)], ["share", `${percent(n.duration_ns)} of ${percentBase().name}`], ["causes", causeList(n)],
    ["begins at", n.each ? "" : us(n.begin_ns)], ["waiting", spent > 0 ? ((100 * n.wait_ns) / spent).toFixed(1) + " % of the threads' time" : ""],
    ["bandwidth", n.gbytes_per_s > 0 ? n.gbytes_per_s.toFixed(2) + " GB/s" : ""], ["speed", n.gflops > 0 ? n.gflops.toFixed(2) + " GFLOP/s" : ""],
    ["cycles", n.cycles > 0 ? Math.round(n.cycles).toLocaleString("en") : ""], ["loading its expert", n.load_ns > 0 ? us(n.load_ns) : ""],
    ["major faults", n.maj_flt > 0 ? n.maj_flt : ""], ["critical path", n.critical ? "yes" : ""]];
}

function described(n) {
  const rows = facts(n).filter(([, value]) => value !== "" && value !== null && value !== undefined && value.length !== 0);
  return [el("b", {}, n.name || n.type), el("dl", {}, ...rows.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, ...[v].flat())]))];
}

function point(event) {
  view.hover = hit(event);
  tip.hidden = !view.hover;
  if (view.hover) {
    tip.replaceChildren(...described(view.hover));
    const r = board.getBoundingClientRect(), x = event.clientX - r.left + 16, y = event.clientY - r.top + 16;
    tip.style.left = Math.max(4, Math.min(x, r.width - tip.offsetWidth - 4)) + "px";
    tip.style.top = Math.max(4, Math.min(y, r.height - tip.offsetHeight - 4)) + "px";
  }
  redraw();
}

/* Keep a node's details, with the way into the timeline. */
function choose(n) {
  view.chosen = n;
  panel.hidden = !n;
  if (n) {
    const moments = n.of !== undefined || n.begin_ns === undefined || dag.token.begin_boot_ns === undefined ? [] : (n.each || [n]).slice(0, 12);
    const links = moments.map((one) => timelineLink(dag.token.begin_boot_ns + one.begin_ns, one.duration_ns, n.each ? `layer ${one.layer} ↗` : "show in the timeline ↗"));
    panel.replaceChildren(el("button", { type: "button", "aria-label": "close", onclick: () => choose(null) }, "✕"), ...described(n), el("p", { class: "links" }, ...links));
  }
  redraw();
}

function toggle(same) {
  open.has(same) ? open.delete(same) : open.add(same);
  view.hover = null;
  tip.hidden = true;
  choose(null);
  layOut();
  redraw();
}

function foldAll(fold) {
  open.clear();
  if (!fold) for (const same of dag.classes.keys()) open.add(same);
  choose(null);
  layOut();
  fit();
}

function centre(n) {
  view.scale = Math.max(view.scale, 0.7);
  view.x = board.clientWidth / 2 - n.ax * view.scale;
  view.y = board.clientHeight / 2 - n.ay * view.scale;
  picture.stale = true;
}

/* Go to the next operator whose name or type holds the text; its card opens where the layer is folded away. */
let turn = 0;
function goTo() {
  const found = dag.nodes.filter((n) => view.find && (n.name + " " + n.type).toLowerCase().includes(view.find));
  if (!found.length) return;
  const n = found[turn++ % found.length], block = dag.blocks[n.block];
  if (shown.of[n.place].each && n.block !== shown.of[n.place].card.rank) { open.add(block.same_as); layOut(); }
  const seen = shown.of[n.place];
  centre(seen);
  choose(seen);
}

function zoom(factor, x, y) {
  const scale = Math.min(4, Math.max(0.01, view.scale * factor));
  view.x = x - ((x - view.x) * scale) / view.scale;
  view.y = y - ((y - view.y) * scale) / view.scale;
  view.scale = scale;
  redraw();
}

function fit() {
  const right = shown.cards.reduce((m, c) => Math.max(m, c.x + c.width), 1), bottom = shown.cards.reduce((m, c) => Math.max(m, c.y + c.height), 1);
  view.scale = Math.min(1.2, (board.clientWidth - 40) / right, isNarrow() ? 1.2 : (board.clientHeight - 100) / bottom);
  view.x = (board.clientWidth - right * view.scale) / 2;
  view.y = isNarrow() ? 24 : 50;
  picture.stale = true;
  redraw();
}

/* The whole graph on one page, within the margins of A4 and Letter alike; what is drawn is finer than a screen shows it. */
const PAPER = { width: "950px", height: "680px" }, FINER = 3;
function toPaper() {
  onScreen = { x: view.x, y: view.y, scale: view.scale };
  sharper = FINER;
  Object.assign(document.body.style, PAPER);
  fit();
  draw();
}

function toScreen() {
  sharper = 1;
  Object.assign(document.body.style, { width: "", height: "" });
  Object.assign(view, onScreen);
  picture.stale = true;
  redraw();
}

function pointers() {
  const down = new Map();
  let spread = 0, moved = 0;
  const gap = () => { const [a, b] = [...down.values()]; return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY); };
  board.addEventListener("pointerdown", (e) => { board.setPointerCapture(e.pointerId); down.set(e.pointerId, e); moved = 0; board.classList.add("moving"); if (down.size === 2) spread = gap(); });
  board.addEventListener("pointermove", (e) => {
    const before = down.get(e.pointerId);
    if (!before) return point(e);
    moved += Math.abs(e.clientX - before.clientX) + Math.abs(e.clientY - before.clientY);
    if (down.size === 1) { view.x += e.clientX - before.clientX; view.y += e.clientY - before.clientY; }
    down.set(e.pointerId, e);
    if (down.size === 2) { const r = board.getBoundingClientRect(), now = gap(); zoom(now / spread, e.clientX - r.left, e.clientY - r.top); spread = now; }
    redraw();
  });
  const up = (e) => { down.delete(e.pointerId); board.classList.remove("moving"); if (e.pointerType === "touch") point(e); };
  board.addEventListener("pointerup", up);
  board.addEventListener("pointercancel", up);
  board.addEventListener("click", (e) => { if (moved > 5) return; const n = hit(e), card = n ? null : titleHit(e); card ? toggle(card.same) : choose(n); });
  board.addEventListener("pointerleave", () => { view.hover = null; tip.hidden = true; redraw(); });
  board.addEventListener("wheel", (e) => { e.preventDefault(); const r = board.getBoundingClientRect(); zoom(Math.exp(-e.deltaY / 400), e.clientX - r.left, e.clientY - r.top); }, { passive: false });
  board.addEventListener("dblclick", fit);
}

/* Arrow keys go from operator to operator in the order of time, Enter opens a folded card, + and - zoom, Escape closes the details. */
const KEYS = {
  ArrowRight: () => step(1), ArrowDown: () => step(1), ArrowLeft: () => step(-1), ArrowUp: () => step(-1),
  Enter: () => view.chosen && view.chosen.card && toggle(view.chosen.card.same), "+": () => zoom(1.25, board.clientWidth / 2, board.clientHeight / 2),
  "-": () => zoom(0.8, board.clientWidth / 2, board.clientHeight / 2), Escape: () => choose(null),
};

function step(by) {
  const all = shown.nodes, now = all.indexOf(view.chosen);
  const next = all[now < 0 ? (by > 0 ? 0 : all.length - 1) : (now + by + all.length) % all.length];
  centre(next);
  choose(next);
}

function keys() {
  board.addEventListener("keydown", (e) => {
    if (!KEYS[e.key] || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    KEYS[e.key]();
  });
}

function heading() {
  const t = dag.token, title = [`step ${t.token_id}`, t.phase, t.position >= 0 ? `position ${t.position}` : ""].filter(Boolean).join(", ");
  const averaged = (t.tokens_used > 1 ? `, mean of ${t.tokens_used} steps` : "") + ` · percentages of ${percentBase().name}`;
  const mode = el("select", { "aria-label": "colour by", onchange: () => { view.mode = mode.value; restyle(); } },
    ...Object.keys(MODES).filter(offered).map((m) => el("option", { value: m }, "colour by " + m)));
  const find = el("input", { type: "search", placeholder: "find", title: "Enter goes there", "aria-label": "find an operator",
    oninput: () => { view.find = find.value.toLowerCase(); turn = 0; picture.stale = true; redraw(); }, onkeydown: (e) => { if (e.key === "Enter") goTo(); } });
  const path = el("button", { type: "button", id: "path", "aria-pressed": "false", title: "the longest chain of operators that need each other",
    onclick: () => { view.path = !view.path; path.setAttribute("aria-pressed", view.path); picture.stale = true; redraw(); } }, `critical path ${us(dag.critical_ns)}`);
  const emulator = dag.emulator ? " · NPU: HTP emulator" : "", layered = [...dag.classes.values()].some((members) => members.length > 1);
  const button = (id, text, onclick) => el("button", { type: "button", id, onclick }, text);
  return el("header", {}, el("h1", {}, "ProfDAG"), el("span", { class: "about", title: dag.command }, title + averaged + emulator + " · " + dag.command), mode, find, path,
    ...(layered ? [button("expand", "expand all", () => foldAll(false)), button("fold", "fold all", () => foldAll(true))] : []), button("fit", "fit", () => { layOut(); fit(); }), themeButton());
}

function prepare() {
  dag.total = Math.max(1, dag.nodes.reduce((sum, n) => sum + (n.duration_ns || 0), 0));
  dag.members = dag.blocks.map(() => []);
  dag.first = dag.blocks.map(() => []);
  dag.nodes.forEach((n, i) => { n.place = i; dag.members[n.block].push(n); dag.first[n.block].push(i); });
  dag.classes = new Map();
  dag.blocks.forEach((b, i) => (dag.classes.has(b.same_as) ? dag.classes.get(b.same_as).push(i) : dag.classes.set(b.same_as, [i])));
  dag.dotsOf = {};
  for (const dot of dag.dots) (dag.dotsOf[dag.nodes[dot.of].block] ||= []).push(dot);
}

async function start() {
  dag = JSON.parse(await unpack("data"));
  prepare();
  picture.canvas = el("canvas");
  marks = el("canvas", { hidden: "" });
  board = el("div", { class: "board", role: "application", tabindex: 0, "aria-label": `graph of ${dag.nodes.length} operators; arrow keys go from one to the next` }, picture.canvas, marks);
  tip = el("div", { class: "tip", hidden: "" });
  panel = el("div", { class: "tip panel", "aria-live": "polite", hidden: "" });
  legend = el("div", { class: "legend" });
  document.body.append(heading(), el("main", { class: "stage" }, board, legend, tip, panel));
  layOut();
  fit();
  pointers();
  keys();
  addEventListener("resize", redraw);
  themeListeners.push(restyle);
  printing(toPaper, toScreen);
  requestAnimationFrame(() => requestAnimationFrame(() => { document.body.dataset.ready = "yes"; document.body.dataset.painted = performance.now().toFixed(0); }));
}

start();
