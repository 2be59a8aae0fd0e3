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
  const bytes = Uint8Array.from(atob(document.getElementById("asset-" + name).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function cssValue(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function slotColours() {
  return cssValue("--slots").split(/\s+/);
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
