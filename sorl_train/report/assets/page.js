"use strict";
// What both pages use: text into elements, numbers as a person reads them, and the theme.
const sorl = {};

sorl.data = JSON.parse(document.getElementById("data").textContent);

// Text is always set as text: nothing of a run is ever parsed as HTML.
sorl.element = (parent, tag, text = "", className = "") => {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  if (className) made.className = className;
  if (parent) parent.appendChild(made);
  return made;
};

sorl.format = (value) => {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(3));
};

sorl.seconds = (value) => (value < 1 ? `${+(value * 1000).toPrecision(3)} ms` : `${value.toFixed(1)} s`);

sorl.count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

// --- theme: system, light or dark ---------------------------------------------------------------
(() => {
  const button = document.getElementById("theme");
  const listeners = [];
  const changed = () => listeners.forEach((listener) => listener());
  sorl.onTheme = (listener) => listeners.push(listener);
  button.addEventListener("click", () => {
    const root = document.documentElement;
    const next = { system: "light", light: "dark", dark: "system" }[root.dataset.theme || "system"];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    button.textContent = `Theme: ${next}`;
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
})();
