/* The block `time` of views/report/time_bars.py: a bar per phase, causes above, the parts of each cause beneath it. */

const short = (ms) => (ms >= 100 ? Math.round(ms).toLocaleString("en") : ms >= 0.1 ? ms.toPrecision(3) : Number(ms.toPrecision(2))) + " ms";
const shareOf = (ms, total) => { const share = (100 * ms) / total; return (share >= 9.95 ? share.toFixed(0) : share.toFixed(1)) + " %"; };
const sum = (parts) => parts.reduce((total, [, ms]) => total + ms, 0);
const LEAST_SHARE = 0.005, PALEST = 55;

/* A piece of a bar, with the longest of the texts that fits. */
function piece(ms, total, about, texts) {
  const node = el("div", { class: "piece", title: about, "data-texts": JSON.stringify(texts) }, el("span"));
  node.style.width = (100 * ms) / total + "%";
  return node;
}

function causePiece([cause, parts], total) {
  const ms = sum(parts), about = `${cause}: ${short(ms)}, ${shareOf(ms, total)} of the step`;
  const group = el("div", { class: "group", "data-cause": cause }), head = piece(ms, ms, about, [`${cause} ${shareOf(ms, total)}`, cause, shareOf(ms, total)]);
  group.style.width = (100 * ms) / total + "%";
  const row = el("div", { class: "parts" }, ...parts.map(([part, one]) => piece(one, ms, `${cause} in ${part}: ${short(one)}, ${shareOf(one, total)} of the step`, [`${part} ${short(one)}`, part])));
  group.append(head, row);
  return group;
}

/* Ticks at 1, 2 or 5 of a power of ten, at most so many. */
function ticks(total, most) {
  const raw = total / most, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].map((n) => n * power).find((n) => total / n <= most);
  return Array.from({ length: Math.floor(total / step + 1e-9) + 1 }, (_, i) => Number((i * step).toPrecision(6)));
}

function msAxis(total) {
  const at = ticks(total, NARROW.matches ? 4 : 8);
  return el("div", { class: "axis" }, ...at.map((ms, i) => {
    const mark = el("span", {}, ms.toLocaleString("en", { maximumFractionDigits: 6 }) + (i === at.length - 1 ? " ms" : ""));
    mark.style.left = (100 * ms) / total + "%";
    if (ms > 0.9 * total) mark.className = "last";
    return mark;
  }));
}

function stepBar(bar) {
  const said = bar.causes.map(([cause, parts]) => [cause, sum(parts)]).sort((a, b) => b[1] - a[1]);
  const shown = said.filter(([, ms]) => ms >= LEAST_SHARE * bar.ms), rest = said.length - shown.length;
  const chips = shown.map(([cause, ms]) => el("li", {}, swatch(cause), el("b", {}, cause), ` ${short(ms)} · ${shareOf(ms, bar.ms)}`));
  if (rest) chips.push(el("li", {}, `${rest} smaller: ${short(sum(said) - sum(shown))}`));
  const told = `${bar.title} ${short(bar.ms)}: ` + shown.map(([cause, ms]) => `${cause} ${short(ms)}, ${shareOf(ms, bar.ms)}`).join("; ");
  const picture = el("div", { class: "bar", role: "img", "aria-label": told }, ...bar.causes.map((one) => causePiece(one, bar.ms)));
  return el("div", { class: "step" }, el("h4", {}, `${bar.title}: `, el("strong", {}, short(bar.ms)), el("small", {}, bar.steps > 1 ? `, mean of ${bar.steps.toLocaleString("en")}` : "")),
    picture, msAxis(bar.ms), el("ul", { class: "causes" }, ...chips));
}

/* A part is a shade of its cause, paler from part to part; colours and the ink on them follow the theme. */
function paintBars(block) {
  const ground = cssValue("--panel");
  for (const group of block.querySelectorAll(".group")) {
    const colour = causeColour(group.dataset.cause), parts = group.querySelectorAll(".parts .piece");
    paintPiece(group.firstChild, colour);
    parts.forEach((part, i) => paintPiece(part, mixed(colour, ground, (PALEST * (i + 1)) / (100 * (parts.length + 1)))));
  }
}

function paintPiece(node, colour) {
  Object.assign(node.style, { background: colour, color: readableOn(colour) });
}

function fitTexts(block) {
  for (const node of block.querySelectorAll(".piece")) {
    const text = node.firstChild;
    text.textContent = "";
    if (node.clientWidth < 24) continue;
    for (const one of JSON.parse(node.dataset.texts)) {
      text.textContent = one;
      if (text.offsetWidth <= node.clientWidth - 6) break;
      text.textContent = "";
    }
  }
}

function everyPart(bars) {
  const rows = bars.flatMap((bar) => bar.causes.flatMap(([cause, parts]) => parts.map(([part, ms]) => [bar.title, cause, part, ms, (100 * ms) / bar.ms])));
  const columns = [["text", "step"], ["cause", "cause"], ["text", "part"], ["bar", "ms"], ["number", "% of the step"]].map(([kind, name]) => ({ kind, name }));
  return el("details", { class: "query" }, el("summary", {}, "figures"), table({ title: "Every cause and part", columns, rows, total: rows.length }));
}

function time(block) {
  const node = el("div", { class: "block time" }, el("h3", {}, block.title), el("p", { class: "note" }, "Above: what the step's time went to. Beneath: in which part of the model. Each bar has its own scale."),
    ...block.bars.map(stepBar), everyPart(block.bars), queryOf(block));
  paintBars(node);
  themeListeners.push(() => paintBars(node));
  new ResizeObserver(() => fitTexts(node)).observe(node);
  return node;
}
