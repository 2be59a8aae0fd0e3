"use strict";

/* An element: attributes by name, children as elements or text. Text never becomes markup. */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return node;
}

/* The text of a packed asset (gzip, base64). */
async function unpack(name) {
  const packed = atob(document.getElementById("asset-" + name).textContent), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/* Where ui.perfetto.dev shows a stretch of the trace that `moescope open RUN` serves. */
function timelineLink(begin, duration, text) {
  const margin = Math.max(1000, duration * 0.15), from = Math.round(begin - margin), to = Math.round(begin + duration + margin);
  const url = `https://ui.perfetto.dev/#!/?url=http://127.0.0.1:9001/trace.pftrace&visStart=${from}&visEnd=${to}`;
  return el("a", { class: "moment", href: url, target: "_blank", rel: "noopener", title: "in the timeline; needs: moescope open RUN" }, text || "show ↗");
}

function cssValue(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function slotColours() {
  return cssValue("--slots").split(/\s+/);
}

/* The CSS variable with the colour of a cause of time (views/colours.py), and the colour itself in the current theme. */
const causeName = (cause) => "--cause-" + cause.replaceAll(" ", "-");
const causeColour = (cause) => cssValue(causeName(cause)) || cssValue("--cause-residual");
const swatch = (cause) => el("i", { style: `background: var(${causeName(cause)})` });

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

/* One colour with a share of another in it. */
function mixed(colour, other, share) {
  const b = channels(other);
  return "#" + channels(colour).map((a, i) => Math.round(a + (b[i] - a) * share).toString(16).padStart(2, "0")).join("");
}

/* Black or white, whichever stands out more: at a relative luminance of 0.179 both do alike. */
function readableOn(colour) {
  const [r, g, b] = channels(colour).map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

/* A hue for each text. */
function hueOf(text) {
  let hash = 0;
  for (const letter of text) hash = (hash * 31 + letter.charCodeAt(0)) >>> 0;
  return hash % 360;
}

function remembered() {
  try { return localStorage.getItem("moescope-theme"); } catch { return null; }
}

function remember(theme) {
  try { localStorage.setItem("moescope-theme", theme); } catch { /* a page from disk may not store */ }
}

const dark = matchMedia("(prefers-color-scheme: dark)");
let themeListeners = [];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const listener of themeListeners) listener(theme);
}

/* Paper is white and as large as it is: what was drawn does not follow by itself. `fit` draws for it, `back` for the window. */
function printing(fit, back) {
  let before;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    setTheme("light");
    fit();
  });
  addEventListener("afterprint", () => {
    setTheme(before);
    back();
  });
}

function themeButton() {
  const flip = () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    remember(theme);
    setTheme(theme);
  };
  return el("button", { type: "button", id: "theme", onclick: flip, title: "Switch between light and dark" }, "Light / dark");
}

setTheme(remembered() || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => remembered() || setTheme(dark.matches ? "dark" : "light"));
