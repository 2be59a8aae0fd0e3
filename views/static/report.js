/* Draws the document that views/report/report.py made: sections of blocks. */

const charts = [], NARROW = matchMedia("(max-width: 640px)");

function digits(value) {
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1000) return 0;
  return size >= 100 ? 1 : size >= 1 ? 2 : 3;
}

function cellText(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? value.toLocaleString("en", { minimumFractionDigits: digits(value), maximumFractionDigits: digits(value) }) : value;
}

/* A sentence whose numbers stay with their units and names. */
const withUnits = (text) => String(text).replace(/\b(p\d\d|n) (?=\d)/g, "$1\u00a0").replace(/(\d) (?=%|[mnµ]?s\b|tok\/s|bytes\b|[KMG]iB\b)/g, "$1\u00a0");

/* A text that breaks at its dots only. */
const unbroken = (text) => String(text).replaceAll(" ", "\u00a0").replaceAll("\u00a0·\u00a0", " · ");

function cards(block) {
  const card = (item) => el("div", { class: "card" }, el("small", {}, item.label), el("strong", {}, unbroken(item.value)), el("small", {}, item.note));
  return el("div", { class: "block cards" }, ...block.items.map(card));
}

/* How to get the figures oneself: the statement, opened on demand. */
function queryOf(block) {
  const what = block.query ? "query" : block.command ? "command" : null;
  return what ? el("details", { class: "query" }, el("summary", {}, what), el("code", {}, block[what])) : null;
}

/* A link into the timeline behind a text, if there is a moment. */
function momentOf(at, text) {
  return at ? [" ", timelineLink(at[0], at[1], text)] : [];
}

function findings(block) {
  const share = (item) => {
    if (!item.share) return null;
    const bar = el("span", { class: "share", title: "share of step time" }, el("i"), `${(100 * item.share).toFixed(0)} %`);
    bar.firstChild.style.width = 100 * item.share + "%";
    return bar;
  };
  const line = (item) => el("li", item.cause ? { class: "cause", style: `--mark: var(${causeName(item.cause)})` } : { class: item.level }, share(item), el("span", {}, withUnits(item.text)), ...momentOf(item.at, "the longest in the timeline ↗"), queryOf(item));
  return el("div", { class: "block" }, block.title ? el("h3", {}, block.title) : null, el("ul", { class: "findings" }, ...block.items.map(line)));
}

function pairs(block) {
  return el("dl", { class: "block" }, ...block.items.flatMap(([label, value, at]) => [el("dt", {}, label), el("dd", {}, withUnits(value), ...momentOf(at))]));
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null) return -1;
  if (b === null) return 1;
  if (Array.isArray(a)) return a[0] - b[0];
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

const NAMES = ["text", "cause"];

function row(values, columns, most) {
  return el("tr", {}, ...values.map((value, i) => {
    const kind = columns[i].kind;
    if (kind === "moment") return el("td", { class: "moment" }, value ? timelineLink(value[0], value[1]) : "");
    const name = NAMES.includes(kind), mark = kind === "cause" && value ? swatch(value) : null;
    const cell = el("td", { class: name ? "text" : "number", title: name ? value : null }, mark, cellText(value));
    if (kind === "bar" && most[i] > 0) {
      const share = (100 * value) / most[i];
      cell.style.background = `linear-gradient(to left, var(--bar) ${share}%, transparent ${share}%)`;
    }
    return cell;
  }));
}

function table(block) {
  const body = el("tbody"), tools = el("div", { class: "tools" }), count = el("span");
  const state = { column: -1, down: true, all: block.rows.length <= 20, find: "" };
  const most = block.columns.map((c, i) => (c.kind === "bar" ? Math.max(...block.rows.map((r) => r[i] || 0)) : 0));
  const heads = block.columns.map((column, i) => el("th", { class: NAMES.includes(column.kind) ? "text" : column.kind === "moment" ? "moment" : "number", scope: "col" },
    el("button", { type: "button", onclick: () => sort(i) }, column.name)));
  function fill() {
    let rows = block.rows.filter((r) => !state.find || r.some((v) => typeof v === "string" && v.toLowerCase().includes(state.find)));
    if (state.column >= 0) rows = [...rows].sort((a, b) => compare(a[state.column], b[state.column]) * (state.down ? -1 : 1));
    const visible = state.all || state.find ? rows : rows.slice(0, 15);
    body.replaceChildren(...visible.map((r) => row(r, block.columns, most)));
    count.textContent = `${visible.length} of ${block.total} rows` + (block.total > block.rows.length ? `; the first ${block.rows.length} are in this file` : "");
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== state.column ? "none" : state.down ? "descending" : "ascending"));
  }
  function sort(i) {
    state.down = state.column === i ? !state.down : !NAMES.includes(block.columns[i].kind);
    state.column = i;
    fill();
  }
  if (!state.all) {
    const find = el("input", { type: "search", placeholder: "find", "aria-label": "find in the table", oninput: () => { state.find = find.value.toLowerCase(); fill(); } });
    const more = el("button", { type: "button", onclick: () => { state.all = !state.all; more.textContent = state.all ? "show fewer" : "show all"; fill(); } }, "show all");
    tools.append(find, more, count);
  }
  fill();
  return el("div", { class: "block" }, block.title ? el("h3", {}, block.title) : null, state.all ? null : tools,
    ...scrolling(el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body), block.title || "table"), queryOf(block));
}

/* What may be wider than the page, below a line that says so where it is. */
function scrolling(content, name) {
  const hint = el("p", { class: "note hint", hidden: "" }, "← scrolls sideways →"), region = el("div", { class: "wide" }, content);
  const edges = () => {
    region.classList.toggle("more-left", region.scrollLeft > 1);
    region.classList.toggle("more-right", region.scrollLeft + region.clientWidth < region.scrollWidth - 1);
  };
  region.addEventListener("scroll", edges);
  new ResizeObserver(() => {
    hint.hidden = region.scrollWidth <= region.clientWidth;
    const said = hint.hidden ? {} : { tabindex: 0, role: "region", "aria-label": `${name}, scrolls sideways` };
    for (const key of ["tabindex", "role", "aria-label"]) key in said ? region.setAttribute(key, said[key]) : region.removeAttribute(key);
    edges();
  }).observe(region);
  return [hint, region];
}

function themed(traces) {
  const colours = slotColours();
  return traces.map((trace) => {
    const { slot, cause, sizes, ...rest } = trace, colour = cause ? causeColour(cause) : colours[(slot ?? 0) % colours.length];
    if (trace.type === "heatmap") return { ...rest, colorscale: cssValue("--heat").split(/\s+/).map((c, i, all) => [i / (all.length - 1), c]) };
    if (trace.type === "bar") return { ...rest, marker: { color: colour } };
    const filled = trace.stackgroup ? { fillcolor: colour } : {};
    return { ...rest, ...filled, line: { width: 1.5, ...rest.line, color: colour }, marker: { color: colour, size: sizes || (trace.mode === "markers" ? 6 : 4), opacity: trace.mode === "markers" ? 0.75 : 1 } };
  });
}

/* The legend stands below the buttons of the chart, which are wide where it is. */
const hasLegend = (item) => item.layout.showlegend !== false && item.traces.filter((t) => t.name).length > (item.traces.some((t) => t.showlegend) ? 0 : 1);
const BUTTONS = 22;

const ARRAYS = { f8: Float64Array, f4: Float32Array, i4: Int32Array, u2: Uint16Array, u1: Uint8Array };

/* Values as the page holds them: a list, or bytes as base64. */
function listed(values) {
  return Array.isArray(values) || !values ? values || [] : [...new ARRAYS[values.dtype](Uint8Array.from(atob(values.bdata), (c) => c.charCodeAt(0)).buffer)];
}

/* Full numbers at 1, 2 and 5 of each power of ten, at the powers alone where they are many; nothing leaves it to Plotly. */
function logTicks(values) {
  const some = values.filter((v) => v > 0);
  if (!some.length) return undefined;
  const low = Math.floor(Math.log10(Math.min(...some))) - 1, high = Math.ceil(Math.log10(Math.max(...some))) + 1;
  const steps = high - low > 5 ? [1] : [1, 2, 5];
  const at = Array.from({ length: high - low + 1 }, (_, i) => steps.map((s) => s * 10 ** (low + i))).flat();
  return { tickmode: "array", tickvals: at, ticktext: at.map((v) => (v >= 1e6 || v < 1e-4 ? v.toExponential(0) : Number(v.toPrecision(1)).toLocaleString("en", { maximumFractionDigits: 6 }))) };
}

/* Ticks as given, the most important first, without those that come too near to another. */
function spacedTicks({ range, tickvals, ticktext }) {
  const gap = (range[1] - range[0]) / (NARROW.matches ? 4 : 12), kept = [];
  tickvals.forEach((at, i) => { if (kept.every((other) => Math.abs(tickvals[other] - at) >= gap)) kept.push(i); });
  return { tickvals: kept.map((i) => tickvals[i]), ticktext: kept.map((i) => ticktext[i]) };
}

/* Names beside bars in at most two lines, so that a narrow page has room for the bars. */
const LINE = 22, SECOND_LINE = 13;
function wrappedNames(traces) {
  const names = [...new Set(traces.flatMap((t) => listed(t.y)))];
  if (!NARROW.matches || !names.some((name) => typeof name === "string" && name.length > LINE)) return {};
  const wrapped = (name) => {
    const cut = name.length > LINE ? name.lastIndexOf(" ", LINE) : 0;
    return cut < 1 ? shortened(name, LINE) : name.slice(0, cut).replace(/ ·$/, "") + "<br>" + shortened(name.slice(cut + 1).replace(/^· /, ""), LINE);
  };
  return { tickmode: "array", tickvals: names, ticktext: names.map((name) => wrapped(String(name))) };
}

function themedLayout(layout, height, top, traces) {
  const ink = cssValue("--ink"), grid = cssValue("--line"), soft = cssValue("--soft");
  const axis = (given, key) => ({ gridcolor: grid, zerolinecolor: (given || {}).zeroline ? soft : grid, linecolor: grid, tickcolor: grid, automargin: true, tickfont: { size: NARROW.matches ? 11 : 12 }, ...(key === "y" ? wrappedNames(traces) : {}), ...((given || {}).type === "log" ? logTicks(traces.flatMap((t) => listed(t[key]))) : {}), ...given, ...((given || {}).tickvals ? spacedTicks(given) : {}), title: { standoff: 8, ...(given || {}).title, font: { color: soft } } });
  return {
    ...layout, shapes: (layout.shapes || []).map((s) => ({ ...s, line: { ...s.line, color: cssValue("--bad") } })), height, margin: { l: 56, r: 12, t: top, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: ink }, xaxis: axis(layout.xaxis, "x"), yaxis: axis(layout.yaxis, "y"), ...(layout.xaxis2 ? { xaxis2: axis(layout.xaxis2, "x") } : {}),
    modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: cssValue("--accent") },
    legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0 }, hoverlabel: { bgcolor: cssValue("--panel"), bordercolor: grid, font: { color: ink } },
  };
}

const CONFIG = { displaylogo: false, displayModeBar: "hover", responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

/* On a phone the legend stands line by line, and names in two lines: the chart grows by them. */
function draw(item) {
  const lines = NARROW.matches ? item.traces.filter((t) => t.name && item.layout.showlegend !== false).length : 0;
  const names = (wrappedNames(item.traces).tickvals || []).length;
  const room = !NARROW.matches && hasLegend(item) ? BUTTONS : 0;
  Plotly.react(item.node, themed(item.traces), themedLayout(item.layout, item.height + 19 * lines + SECOND_LINE * names + room, 32 + room, item.traces), CONFIG);
}

function chart(block) {
  const node = el("div", { class: "chart", role: "group", "aria-label": block.title });
  node.style.minHeight = block.height + "px";
  charts.push({ node, traces: block.traces, layout: block.layout, height: block.height });
  return el("div", { class: "block" }, el("h3", {}, block.title), block.note ? el("p", { class: "note" }, withUnits(block.note)) : null, node, queryOf(block));
}

function heat(block) {
  const item = { node: el("div", { class: "chart", role: "group", "aria-label": block.title }), traces: [], layout: {}, height: 420 };
  const layer = el("select", { "aria-label": "layer", onchange: () => show(true) }, ...block.layers.map((l, i) => el("option", { value: i }, "layer " + l)));
  const kinds = Object.keys(block.matrices[0]);
  const kind = el("select", { "aria-label": "what", onchange: () => show(true) }, ...kinds.map((k) => el("option", { value: k }, k)));
  const step = block.steps_per_column;
  function show(redraw) {
    const z = block.matrices[layer.value || 0][kind.value || kinds[0]];
    const height = Number(z.shape.split(", ")[0]);
    item.height = Math.max(220, Math.min(640, 100 + 9 * height));
    const hover = `${step > 1 ? "steps from" : "step"} %{x}, expert %{y}: %{z}<extra></extra>`;
    const share = block.density[layer.value || 0], about = { y: share.map((_, e) => e), x: share, orientation: "h", slot: 1, xaxis: "x2", showlegend: false };
    item.traces = [{ type: "heatmap", z, x: block.columns, hovertemplate: hover, colorbar: { thickness: 10, outlinewidth: 0, x: 1.01 } },
      { type: "bar", ...about, hovertemplate: "expert %{y}: active in %{x:.1f} % of steps<extra></extra>" }];
    item.layout = { xaxis: { title: { text: "step" }, showgrid: false, domain: [0, 0.82] }, xaxis2: { title: { text: "% of steps" }, domain: [0.85, 1], rangemode: "tozero" },
      yaxis: { title: { text: "expert" }, showgrid: false, autorange: "reversed" } };
    if (redraw) draw(item);
  }
  show(false);
  charts.push(item);
  const remark = step > 1 ? `each column is the sum of ${step} steps` : `${block.steps} steps`;
  return el("div", { class: "block" }, el("h3", {}, block.title), el("div", { class: "tools" }, layer, kind, remark), item.node, queryOf(block));
}

/* The top of a flame graph; the whole one is a page of its own. */
function flame(block) {
  const frame = ([level, x, width, name, about]) => el("span", { class: "frame", title: about, style: `left:${x}%;width:${width}%;top:${19 * level}px;background:hsl(${hueOf(name)} 60% 74%)` }, width > 2 ? name : "");
  const graph = el("div", { class: "frames", role: "img", "aria-label": block.title }, ...block.frames.map(frame));
  graph.style.height = 19 * (1 + Math.max(0, ...block.frames.map(([level]) => level))) + "px";
  return el("div", { class: "block" }, el("h3", {}, block.title), el("p", { class: "note" }, withUnits(block.note), " ", el("a", { href: "flame.html" }, "The whole flame graph, with filters")), graph);
}

/* SVG elements; text never becomes markup. */
function svg(name, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function shortened(text, most) {
  return text.length > most ? text.slice(0, most - 1) + "…" : text;
}

function graphCard(card, choose) {
  const [width, height] = card.node;
  const lines = card.edges.map(([x1, y1, x2, y2]) => svg("path", { class: "edge", d: `M${x1} ${y1} C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}` }));
  const nodes = card.nodes.map((node) => {
    const box = svg("rect", { x: node.x - width / 2, y: node.y - height / 2, width, height, rx: 6, style: `--strength: ${node.strength}%` });
    const first = svg("text", { x: node.x, y: node.y - (node.second ? 3 : -4) }, shortened(node.type, 21));
    const group = svg("g", { class: `op ${node.verdict}`, tabindex: node.verdict ? 0 : -1, role: "button" }, svg("title", {}, node.about.map((pair) => pair.join(": ")).join("\n")), box, first);
    if (node.second) group.append(svg("text", { class: "second", x: node.x, y: node.y + 13 }, shortened(node.second, 26)));
    group.addEventListener("click", () => choose(group, node));
    group.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(group, node); });
    return group;
  });
  const picture = svg("svg", { viewBox: `0 ${card.top} ${card.width} ${card.height}`, role: "group", "aria-label": card.title }, ...lines, ...nodes);
  picture.style.width = card.width + "px";
  return el("figure", { class: "layer" }, el("figcaption", {}, card.title), ...scrolling(picture, card.title));
}

/* Operators on cards, coloured by change; a chosen one is explained beneath. */
function graph(block) {
  const about = el("dl", { class: "about", hidden: "" });
  function choose(group, node) {
    for (const other of cards.querySelectorAll(".chosen")) other.classList.remove("chosen");
    group.classList.add("chosen");
    about.replaceChildren(...node.about.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
    about.hidden = false;
  }
  const cards = el("div", { class: "layers", tabindex: 0, role: "region", "aria-label": block.title }, ...block.cards.map((card) => graphCard(card, choose)));
  const kinds = [["slower", "slower"], ["faster", "faster"], ["appeared", "appeared"], ["vanished", "vanished"], ["changed", "other dims or backend"], ["", "not known to have changed"]];
  const legend = el("p", { class: "legend" }, ...kinds.map(([kind, text]) => el("span", {}, el("i", { class: kind }), text)), "Choose an operator for its figures.");
  const left = block.left ? el("p", { class: "note" }, `${block.left} more layers are left out.`) : null;
  return el("div", { class: "block" }, el("h3", {}, block.title), el("p", { class: "note" }, block.note), legend, about, cards, left);
}

const BLOCKS = { note: (block) => el("p", { class: "note" }, withUnits(block.text)), cards, findings, pairs, table, chart, heat, flame, graph, time };

/* A section that folds; it opens when something links to it. */
function section(s) {
  const head = el("summary", {}, el("h2", { id: "title-" + s.name }, s.title));
  return el("section", { id: s.name, "aria-labelledby": "title-" + s.name }, el("details", { class: "fold", open: "" }, head, ...s.blocks.map((b) => BLOCKS[b.kind](b))));
}

function unfold(sections) {
  for (const one of sections) one.querySelector("details.fold").open = true;
}

function page(report) {
  const links = report.sections.map((s) => el("a", { href: "#" + s.name, onclick: () => unfold([document.getElementById(s.name)]) }, s.title));
  const lead = report.lead ? el("p", { class: "lead" }, report.lead) : null;
  document.body.append(el("a", { class: "skip", href: "#main" }, "skip to the figures"),
    el("header", {}, el("b", {}, "MoEScope"), el("nav", { "aria-label": "sections" }, ...links), themeButton()),
    el("main", { id: "main" }, el("h1", {}, report.title), lead, ...report.sections.map(section)));
}

const PAPER_WIDTH = 676;
function resized(size) {
  charts.forEach((item) => Plotly.relayout(item.node, size));
}

async function start() {
  page(JSON.parse(await unpack("data")));
  if (charts.length) {
    document.head.append(Object.assign(document.createElement("script"), { textContent: await unpack("plotly") }));
    charts.forEach(draw);
    themeListeners.push(() => charts.forEach(draw));
  }
  printing(() => { unfold(document.querySelectorAll("section")); resized({ width: PAPER_WIDTH }); }, () => resized({ width: null, autosize: true }));
  document.body.dataset.ready = "yes";
}

start();
