/* Draws the graph that views/layout.py placed, on a canvas: pan, zoom, hover, find, colours. */

const view = { x: 0, y: 0, scale: 1, hover: null, find: "", mode: "time" };
let dag, canvas, tip, legend, near;

const us = (ns) => (ns >= 1e6 ? (ns / 1e6).toFixed(2) + " ms" : (ns / 1e3).toFixed(1) + " µs");

function parse(colour) {
  return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
}

function ramp(share) {
  const stops = cssValue("--heat").split(/\s+/).map(parse), at = Math.min(0.9999, Math.max(0, share)) * (stops.length - 1);
  const i = Math.floor(at), t = at - i;
  return stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * t));
}

function kindColours(key) {
  const names = [...new Set(dag.nodes.map((n) => n[key] || "unknown"))];
  const total = Object.fromEntries(names.map((name) => [name, 0]));
  for (const n of dag.nodes) total[n[key] || "unknown"] += n.duration_ns;
  names.sort((a, b) => total[b] - total[a]);
  const colours = slotColours();
  return new Map(names.map((name, i) => [name, parse(colours[Math.min(i, colours.length - 1)])]));
}

const shares = {
  time: (n) => Math.sqrt(n.duration_ns / dag.longest),
  waiting: (n) => n.wait_ns / Math.max(1, n.wait_ns + n.busy_ns),
};

function paint() {
  const kinds = view.mode === "backend" || view.mode === "type" ? kindColours(view.mode) : null;
  for (const n of dag.nodes) {
    const rgb = n.role === "view" ? parse(cssValue("--panel")) : kinds ? kinds.get(n[view.mode] || "unknown") : ramp(shares[view.mode](n));
    n.fill = `rgb(${rgb})`;
    n.text = 0.3 * rgb[0] + 0.59 * rgb[1] + 0.11 * rgb[2] > 140 ? "#141a22" : "#ffffff";
  }
  const chip = ([name, rgb]) => el("span", {}, Object.assign(el("i"), { style: `background: rgb(${rgb})` }), name);
  const bar = Object.assign(el("i", { class: "ramp" }), { style: `background: linear-gradient(to right, ${cssValue("--heat").split(/\s+/)})` });
  const most = view.mode === "time" ? us(dag.longest) + " (square-root scale)" : "100 % waiting for other threads";
  legend.replaceChildren(...(kinds ? [...kinds].slice(0, 12).map(chip) : [el("span", {}, "0 ", bar, most)]),
    el("span", {}, "● constant or state, one copy per reader"));
}

function blockTitle(block) {
  return block.same_as === block.title ? block.title : `${block.title}  =  ${block.same_as}`;
}

function drawBlocks(g) {
  const line = cssValue("--line"), soft = cssValue("--soft"), panel = cssValue("--panel"), colours = slotColours();
  const families = [...new Set(dag.blocks.map((b) => b.same_as))];
  for (const block of dag.blocks) {
    const colour = colours[families.indexOf(block.same_as) % colours.length];
    g.fillStyle = panel;
    g.strokeStyle = line;
    g.beginPath();
    g.roundRect(block.x, block.y, block.width, block.height, 12);
    g.fill();
    g.stroke();
    g.fillStyle = colour;
    g.fillRect(block.x + 14, block.y + 30, block.width - 28, 3);
    g.fillStyle = soft;
    g.font = `600 ${Math.min(40, Math.max(14, 12 / view.scale))}px system-ui, sans-serif`;
    g.textAlign = "left";
    g.fillText(blockTitle(block), block.x + 14, block.y + (view.scale < 0.8 ? -10 : 21), Math.max(60, block.width - 20));
  }
}

function drawEdges(g, box) {
  const [, h] = dag.size;
  const curve = ([a, b]) => {
    const from = dag.nodes[a], to = dag.nodes[b], y0 = from.y + h / 2, y1 = to.y - h / 2, bend = Math.max(24, Math.abs(y1 - y0) / 2);
    if (Math.max(from.x, to.x) < box.left || Math.min(from.x, to.x) > box.right) return;
    g.moveTo(from.x, y0);
    if (from.block === to.block) g.bezierCurveTo(from.x, y0 + bend, to.x, y1 - bend, to.x, y1);
    else g.bezierCurveTo(from.x, y0 + 40, to.x, y1 - 40, to.x, y1);
  };
  g.strokeStyle = cssValue("--soft");
  g.globalAlpha = view.hover ? 0.25 : 0.6;
  g.lineWidth = 1.2;
  g.beginPath();
  dag.edges.forEach(curve);
  g.stroke();
  g.globalAlpha = 1;
  if (!view.hover) return;
  g.strokeStyle = cssValue("--accent");
  g.lineWidth = 2.4;
  g.beginPath();
  near.get(view.hover)?.forEach((i) => curve(dag.edges[i]));
  g.stroke();
}

function drawNode(g, n, detail) {
  const [w, h] = dag.size, found = view.find && (n.name + " " + n.type).toLowerCase().includes(view.find);
  g.globalAlpha = view.find && !found ? 0.25 : 1;
  g.fillStyle = n.fill;
  g.strokeStyle = cssValue(n === view.hover || found ? "--accent" : n.role === "view" ? "--soft" : "--line");
  g.lineWidth = n === view.hover || found ? 2.5 : 1;
  g.setLineDash(n.role === "view" ? [4, 3] : []);
  g.beginPath();
  g.roundRect(n.x - w / 2, n.y - h / 2, w, h, 7);
  g.fill();
  g.stroke();
  g.setLineDash([]);
  if (detail) {
    g.fillStyle = n.role === "view" ? cssValue("--ink") : n.text;
    g.textAlign = "center";
    g.font = "600 12px system-ui, sans-serif";
    g.fillText(n.name || n.type, n.x, n.y - 3, w - 14);
    g.font = "11px system-ui, sans-serif";
    g.fillText(n.role === "view" ? "view" : `${n.type === n.name ? "" : n.type + "  "}${us(n.duration_ns)}`, n.x, n.y + 12, w - 14);
  }
  g.globalAlpha = 1;
}

function draw() {
  const g = canvas.getContext("2d"), ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  g.setTransform(1, 0, 0, 1, 0, 0);
  g.clearRect(0, 0, canvas.width, canvas.height);
  g.setTransform(view.scale * ratio, 0, 0, view.scale * ratio, view.x * ratio, view.y * ratio);
  const box = { left: -view.x / view.scale - 200, right: (width - view.x) / view.scale + 200, top: -view.y / view.scale - 60, bottom: (height - view.y) / view.scale + 60 };
  const seen = (n) => n.x > box.left && n.x < box.right && n.y > box.top && n.y < box.bottom;
  drawBlocks(g);
  drawEdges(g, box);
  for (const n of dag.nodes) if (seen(n)) drawNode(g, n, view.scale > 0.42);
  if (view.scale < 0.3) return;
  g.fillStyle = cssValue("--soft");
  for (const dot of dag.dots) {
    if (!seen(dot)) continue;
    g.beginPath();
    g.arc(dot.x, dot.y, dot === view.hover ? 6 : 4, 0, 7);
    g.fill();
  }
}

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function hit(event) {
  const r = canvas.getBoundingClientRect(), x = (event.clientX - r.left - view.x) / view.scale, y = (event.clientY - r.top - view.y) / view.scale;
  const [w, h] = dag.size;
  const dot = view.scale >= 0.3 && dag.dots.find((d) => Math.hypot(d.x - x, d.y - y) < 7);
  return dot || dag.nodes.find((n) => Math.abs(n.x - x) < w / 2 && Math.abs(n.y - y) < h / 2) || null;
}

function facts(n) {
  if (n.of !== undefined) return [["read by", dag.nodes[n.of].name], ["shape", n.shape]];
  const rows = [["type", n.type], ["shape", n.shape], ["backend", n.backend], ["layer", n.layer >= 0 ? n.layer : ""], ["expert", n.expert >= 0 ? n.expert : ""]];
  if (n.role === "view") return rows;
  const spent = n.busy_ns + n.wait_ns;
  return [...rows, ["duration", us(n.duration_ns)], ["share", ((100 * n.duration_ns) / dag.total).toFixed(2) + " % of all operators"],
    ["begins at", us(n.begin_ns)], ["waiting", spent > 0 ? ((100 * n.wait_ns) / spent).toFixed(1) + " % of the threads' time" : ""], ["major faults", n.maj_flt > 0 ? n.maj_flt : ""]];
}

function point(event) {
  view.hover = hit(event);
  tip.hidden = !view.hover;
  if (view.hover) {
    const rows = facts(view.hover).filter(([, value]) => value !== "" && value !== null && value !== undefined);
    tip.replaceChildren(el("b", {}, view.hover.name || view.hover.type), el("dl", {}, ...rows.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])));
    const r = canvas.getBoundingClientRect(), x = event.clientX - r.left + 16, y = event.clientY - r.top + 16;
    tip.style.left = Math.max(4, Math.min(x, r.width - tip.offsetWidth - 4)) + "px";
    tip.style.top = Math.max(4, Math.min(y, r.height - tip.offsetHeight - 4)) + "px";
  }
  redraw();
}

function zoom(factor, x, y) {
  const scale = Math.min(4, Math.max(0.01, view.scale * factor));
  view.x = x - ((x - view.x) * scale) / view.scale;
  view.y = y - ((y - view.y) * scale) / view.scale;
  view.scale = scale;
  redraw();
}

function fit() {
  const right = Math.max(1, ...dag.blocks.map((b) => b.x + b.width)), bottom = Math.max(1, ...dag.blocks.map((b) => b.y + b.height));
  view.scale = Math.min(1.2, (canvas.clientWidth - 40) / right, (canvas.clientHeight - 100) / bottom);
  view.x = (canvas.clientWidth - right * view.scale) / 2;
  view.y = 40;
  redraw();
}

function pointers() {
  const down = new Map();
  let spread = 0;
  const gap = () => { const [a, b] = [...down.values()]; return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY); };
  canvas.addEventListener("pointerdown", (e) => { canvas.setPointerCapture(e.pointerId); down.set(e.pointerId, e); canvas.classList.add("moving"); if (down.size === 2) spread = gap(); });
  canvas.addEventListener("pointermove", (e) => {
    const before = down.get(e.pointerId);
    if (!before) return point(e);
    if (down.size === 1) { view.x += e.clientX - before.clientX; view.y += e.clientY - before.clientY; }
    down.set(e.pointerId, e);
    if (down.size === 2) { const r = canvas.getBoundingClientRect(), now = gap(); zoom(now / spread, e.clientX - r.left, e.clientY - r.top); spread = now; }
    redraw();
  });
  const up = (e) => { down.delete(e.pointerId); canvas.classList.remove("moving"); if (e.pointerType === "touch") point(e); };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => { view.hover = null; tip.hidden = true; redraw(); });
  canvas.addEventListener("wheel", (e) => { e.preventDefault(); const r = canvas.getBoundingClientRect(); zoom(Math.exp(-e.deltaY / 400), e.clientX - r.left, e.clientY - r.top); }, { passive: false });
  canvas.addEventListener("dblclick", fit);
}

function heading() {
  const t = dag.token, title = [`token ${t.token_id}`, t.phase, t.position >= 0 ? `position ${t.position}` : "", t.duration_ns ? us(t.duration_ns) : ""].filter(Boolean).join(", ");
  const averaged = t.tokens_used > 1 ? `, mean of ${t.tokens_used} tokens` : "";
  const mode = el("select", { "aria-label": "colour by", onchange: () => { view.mode = mode.value; paint(); redraw(); } },
    ...["time", "waiting", "backend", "type"].map((m) => el("option", { value: m }, "colour by " + m)));
  const find = el("input", { type: "search", placeholder: "find", "aria-label": "find an operator", oninput: () => { view.find = find.value.toLowerCase(); redraw(); } });
  const emulator = dag.emulator ? " · NPU: HTP emulator" : "";
  return el("header", {}, el("b", {}, "ProfDAG"), el("span", { class: "about", title: dag.command }, title + averaged + emulator + " · " + dag.command), mode, find,
    el("button", { type: "button", onclick: fit }, "fit"), themeButton());
}

function prepare() {
  dag.longest = Math.max(1, ...dag.nodes.map((n) => n.duration_ns));
  dag.total = Math.max(1, dag.nodes.reduce((sum, n) => sum + n.duration_ns, 0));
  near = new Map();
  dag.edges.forEach((edge, i) => edge.forEach((k) => near.set(dag.nodes[k], [...(near.get(dag.nodes[k]) || []), i])));
}

async function start() {
  dag = JSON.parse(await unpack("data"));
  prepare();
  canvas = el("canvas", { role: "img", "aria-label": `graph of ${dag.nodes.length} operators` });
  tip = el("div", { class: "tip", hidden: "" });
  legend = el("div", { class: "legend" });
  document.body.append(heading(), el("div", { class: "stage" }, canvas, legend, tip));
  paint();
  fit();
  pointers();
  addEventListener("resize", redraw);
  themeListeners.push(() => { paint(); redraw(); });
  document.body.dataset.ready = "yes";
}

start();
