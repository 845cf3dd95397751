"use strict";
// The list of dialogues: which ones the filters leave, and only as many elements as fit on the screen.
sorl.makeList = (rows, onSelect) => {
  const ROW = 60; // pixels, as in viewer.css
  const SPARE = 6; // rows beyond each edge of the screen
  const host = document.getElementById("list");
  const spacer = sorl.element(host, "div", "", "spacer");
  const windowed = sorl.element(host, "div", "", "window");
  let shown = []; // indices into rows
  let at = -1; // position in shown

  const line = (i, position) => {
    const row = rows[i];
    const item = sorl.element(null, "div", "", "row");
    item.id = `row-${i}`;
    item.setAttribute("role", "option");
    item.setAttribute("aria-selected", String(position === at));
    item.setAttribute("aria-setsize", String(shown.length));
    item.setAttribute("aria-posinset", String(position + 1));
    const top = sorl.element(item, "div", "", "row-top");
    const tone = row.excluded ? "excluded" : row.reward > 0 ? "good" : "bad";
    sorl.element(top, "span", sorl.reward(row.reward), `reward ${tone}`);
    sorl.element(top, "span", row.question, "question");
    const facts = sorl.element(item, "div", "", "row-facts");
    sorl.element(facts, "span", `${row.kind === "eval" ? "held-out" : "step"} ${row.step}`);
    sorl.element(facts, "span", row.stop, row.stop === "answer" ? "" : "stop-other");
    sorl.element(facts, "span", sorl.count(row.turns, "turn"));
    if (row.clipped !== null) sorl.element(facts, "span", `${(row.clipped * 100).toFixed(1)}% clipped`);
    if (row.mark) sorl.element(facts, "span", row.mark, "mark");
    item.addEventListener("click", () => select(position));
    return item;
  };

  const paint = () => {
    const first = Math.max(0, Math.floor(host.scrollTop / ROW) - SPARE);
    const last = Math.min(shown.length, Math.ceil((host.scrollTop + host.clientHeight) / ROW) + SPARE);
    windowed.style.transform = `translateY(${first * ROW}px)`;
    windowed.replaceChildren(...shown.slice(first, last).map((i, offset) => line(i, first + offset)));
    if (at >= 0) host.setAttribute("aria-activedescendant", `row-${shown[at]}`);
    else host.removeAttribute("aria-activedescendant");
  };

  const reveal = () => {
    const top = at * ROW;
    if (top < host.scrollTop) host.scrollTop = top;
    else if (top + ROW > host.scrollTop + host.clientHeight) host.scrollTop = top + ROW - host.clientHeight;
  };

  const select = (position) => {
    if (!shown.length) return;
    at = Math.min(Math.max(position, 0), shown.length - 1);
    reveal();
    paint();
    onSelect(shown[at]);
  };

  // New contents; the dialogue that was selected stays so if it is among them, else the first is.
  const fill = (indices, preferred) => {
    const before = preferred ?? shown[at];
    shown = indices;
    spacer.style.height = `${shown.length * ROW}px`;
    at = shown.indexOf(before);
    if (at < 0) host.scrollTop = 0;
    if (shown.length) select(Math.max(at, 0));
    else {
      paint();
      onSelect(null);
    }
  };

  host.addEventListener("scroll", paint, { passive: true });
  new ResizeObserver(paint).observe(host);
  return { fill, select, move: (by) => select(at + by), end: () => select(shown.length - 1) };
};

sorl.reward = (value) => (value === null ? "NaN" : String(+value.toPrecision(3)));

// What is left of the rows, and in which order. Text is searched afterwards: it may have to be unpacked.
sorl.filterRows = (rows, wanted) => {
  const left = [];
  rows.forEach((row, i) => {
    const fits =
      (!wanted.kind || row.kind === wanted.kind) &&
      (wanted.step === "" || row.step === Number(wanted.step)) &&
      (!wanted.stop || row.stop === wanted.stop) &&
      (!wanted.error ||
        (wanted.error === "any" ? row.errors.length > 0 : wanted.error === "none" ? !row.errors.length : row.errors.includes(wanted.error))) &&
      (wanted.min === "" || (row.reward !== null && row.reward >= Number(wanted.min))) &&
      (wanted.max === "" || (row.reward !== null && row.reward <= Number(wanted.max)));
    if (fits) left.push(i);
  });
  const by = {
    reward: (row) => row.reward,
    "-reward": (row) => -row.reward,
    "-clipped": (row) => -(row.clipped ?? -1),
    "-tokens": (row) => -row.tokens,
  }[wanted.sort];
  return by ? left.sort((a, b) => by(rows[a]) - by(rows[b]) || a - b) : left;
};
