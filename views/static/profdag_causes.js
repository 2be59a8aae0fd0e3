/* An operator's time by cause: a strip on its node, a list in its details; and what percentages are of. */

const STRIP = { height: 5, inset: 8 };

const bySize = (causes) => Object.entries(causes || {}).filter(([, ns]) => ns > 0).sort((a, b) => b[1] - a[1]);
const largestCause = (n) => (bySize(n.causes)[0] || [""])[0];

/* The causes of several nodes, added up. */
function summedCauses(nodes) {
  const sum = {};
  for (const n of nodes) for (const [cause, ns] of Object.entries(n.causes || {})) sum[cause] = (sum[cause] || 0) + ns;
  return sum;
}

/* Causes along the lower edge of a node, in the order of the colours; `ink.causes` has these. */
function drawStrip(g, n, ink) {
  const total = bySize(n.causes).reduce((sum, [, ns]) => sum + ns, 0), [w, h] = dag.size, width = w - 2 * STRIP.inset;
  if (!total) return;
  let x = n.ax - width / 2;
  const y = n.ay + h / 2 - STRIP.height - 2;
  g.fillStyle = ink.panel;
  g.fillRect(x - 1, y - 1, width + 2, STRIP.height + 2);
  for (const [cause, colour] of ink.causes) {
    const part = (width * (n.causes[cause] || 0)) / total;
    if (!part) continue;
    g.fillStyle = colour;
    g.fillRect(x, y, part, STRIP.height);
    x += part;
  }
}

/* Every cause that occurs in the graph with its colour, in the order of the colours. */
function causeColours() {
  const there = summedCauses(dag.nodes);
  return dag.causes.filter((cause) => there[cause] > 0).map((cause) => [cause, causeColour(cause)]);
}

function causeList(n) {
  return bySize(n.causes).map(([cause, ns]) => el("div", { class: "cause" }, swatch(cause), `${cause} ${us(ns)}`));
}

/* What percentages are of: the step, or the operators where several steps were averaged. */
function percentBase() {
  const step = dag.token.tokens_used > 1 ? 0 : dag.token.duration_ns;
  return step > 0 ? { ns: step, name: `this step's ${us(step)}` } : { ns: dag.total, name: `the operators' ${us(dag.total)}` };
}

const percent = (ns) => ((100 * ns) / percentBase().ns).toFixed(1) + " %";
