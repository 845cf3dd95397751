"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const several = data.runs.length > 1;
  const steps = [...new Set(data.runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
  const plots = [];
  const LINES = [{ line: "solid", dash: [] }, { line: "dashed", dash: [7, 4] }, { line: "dotted", dash: [2, 3] }];

  // --- colours: uPlot draws on a canvas, so it needs the theme's colours as values -----------------------------
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  let colours = {};
  const colour = (name) => {
    if (!(name in colours)) {
      probe.style.color = `var(--${name})`;
      colours[name] = getComputedStyle(probe).color;
    }
    return colours[name];
  };

  // --- one figure ----------------------------------------------------------------------------------------------
  const element = (parent, tag, text = "", className = "") => {
    const made = parent.appendChild(document.createElement(tag));
    made.textContent = text;
    made.className = className;
    return made;
  };

  const format = (value) => {
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(+value.toPrecision(3));
  };

  // Every curve of every run that has values. One run: a colour a curve. Several: a colour a run, dashes tell curves.
  const curvesOf = (figure) => data.runs.flatMap((run, r) => {
    const present = Object.keys(figure.curves).filter((name) => (run.values[name] || []).some((v) => v !== null));
    return present.map((name) => {
      const order = Object.keys(figure.curves).indexOf(name);
      const at = new Map(run.steps.map((step, i) => [step, run.values[name][i]]));
      const usable = (value) => value !== undefined && value !== null && (figure.axis !== "log" || value > 0);
      return {
        run: r,
        name,
        ink: `c${(several ? r : order) % 8}`,
        ...LINES[several ? order % LINES.length : 0],
        values: steps.map((step) => (usable(at.get(step)) ? at.get(step) : null)),
      };
    });
  });

  const deltaOf = (figure) => {
    const deltas = new Set(data.runs.map((run) => run.delta));
    return figure.delta && deltas.size === 1 && typeof data.runs[0].delta === "number" ? data.runs[0].delta : null;
  };

  const range = (figure, delta) => (_, low, high) => {
    if (figure.axis === "share") return [-0.02, 1.02];
    if (low === null) return figure.axis === "log" ? [0.1, 10] : [0, 1];
    if (delta !== null) [low, high] = [Math.min(low, delta), Math.max(high, delta)];
    if (figure.axis === "log") return uPlot.rangeLog(low, high, 10, true);
    if (low >= 0 && (low < high / 2 || high - low < high / 10)) low = 0; // noise is not blown up to a trend
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    return [low === 0 ? 0 : low - pad, high + pad];
  };

  const drawDelta = (delta) => (u) => {
    const y = u.valToPos(delta, "y", true);
    if (y < u.bbox.top || y > u.bbox.top + u.bbox.height) return;
    u.ctx.save();
    u.ctx.strokeStyle = colour("muted");
    u.ctx.setLineDash([5, 4].map((length) => length * devicePixelRatio));
    u.ctx.beginPath();
    u.ctx.moveTo(u.bbox.left, y);
    u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
    u.ctx.stroke();
    u.ctx.restore();
  };

  const options = (figure, curves, delta, width, onHover) => {
    const axis = {
      stroke: () => colour("muted"),
      font: "11.5px system-ui, sans-serif",
      grid: { stroke: () => colour("grid"), width: 1 },
      ticks: { show: false },
    };
    return {
      width,
      height: 190,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "steps", scales: ["x", null] }, y: false, points: { size: 7 } },
      scales: {
        x: { time: false },
        y: { distr: figure.axis === "log" ? 3 : 1, range: range(figure, delta) },
      },
      axes: [
        { ...axis, size: 28, values: (_, ticks) => ticks.map((v) => (Number.isInteger(v) ? v : "")) },
        { ...axis, size: 52, values: (_, ticks) => ticks.map((v) => (v === null ? "" : format(v))) },
      ],
      series: [{}, ...curves.map((curve) => ({
        stroke: () => colour(curve.ink),
        width: 1.75,
        dash: curve.dash,
        spanGaps: true,
        points: { size: 5, fill: () => colour(curve.ink), show: curve.values.filter((v) => v !== null).length <= 25 },
      }))],
      hooks: { setCursor: [onHover], draw: delta === null ? [] : [drawDelta(delta)] },
    };
  };

  const draw = (parent, figure) => {
    const curves = curvesOf(figure);
    const delta = deltaOf(figure);
    const frame = element(parent, "figure");
    frame.id = `figure-${figure.id}`;
    const caption = element(frame, "figcaption");
    const title = element(caption, "h3", figure.title);
    const at = element(title, "span", "", "at");
    element(caption, "p", figure.about);
    const readout = element(caption, "div", "", "readout");
    const rows = {}; // one a curve, with a value for each run
    const buttons = curves.map((curve, i) => {
      const label = figure.curves[curve.name];
      const row = rows[curve.name] ||= element(readout, "div");
      if (several && !row.childElementCount) element(row, "span", label);
      const button = element(row, "button");
      button.type = "button";
      button.title = several ? `${data.runs[curve.run].label}, hide or show` : "hide or show";
      const swatch = element(button, "i");
      swatch.style.borderTop = `2.5px ${curve.line} var(--${curve.ink})`;
      if (!several) element(button, "span", label);
      element(button, "b");
      button.addEventListener("click", () => {
        const show = button.classList.contains("off");
        button.classList.toggle("off", !show);
        plot.setSeries(i + 1, { show });
      });
      return button;
    });

    // The value under the cursor, or, greyed, the one before it where a curve has none there.
    const read = (index) => {
      const hovering = typeof index === "number";
      const last = hovering ? index : steps.length - 1;
      at.textContent = hovering ? `step ${steps[index]}` : "latest";
      curves.forEach((curve, i) => {
        let known = last;
        while (known >= 0 && curve.values[known] === null) known -= 1;
        const value = buttons[i].lastElementChild;
        value.textContent = known < 0 ? "–" : format(curve.values[known]);
        value.classList.toggle("earlier", hovering && known !== last);
      });
    };

    const host = element(frame, "div", "", "plot");
    host.setAttribute("role", "img");
    host.setAttribute("aria-label", `${figure.title} over training steps`);
    const plot = new uPlot(
      options(figure, curves, delta, host.clientWidth, (u) => read(u.cursor.left < 0 ? null : u.cursor.idx)),
      [steps, ...curves.map((curve) => curve.values)],
      host,
    );
    read(null);
    new ResizeObserver(() => plot.setSize({ width: host.clientWidth, height: 190 })).observe(host);
    plots.push({ plot, curves, buttons });
  };

  data.figures.forEach((figure) => draw(document.getElementById(figure.section), figure));

  const more = document.getElementById("more");
  if (more) {
    const host = document.getElementById("more-figures");
    const fill = () => { // only once it is open: a plot needs to be on the page to know its width
      if (more.open && !host.childElementCount) data.more.forEach((figure) => draw(host, figure));
    };
    more.addEventListener("toggle", fill);
    fill();
  }

  // --- runs shown and hidden -----------------------------------------------------------------------------------
  document.querySelectorAll(".run-toggle").forEach((box) => box.addEventListener("change", () => {
    for (const { plot, curves, buttons } of plots) {
      curves.forEach((curve, i) => {
        if (curve.run !== Number(box.dataset.run)) return;
        buttons[i].classList.toggle("off", !box.checked);
        plot.setSeries(i + 1, { show: box.checked });
      });
    }
  }));

  // --- theme ---------------------------------------------------------------------------------------------------
  const button = document.getElementById("theme");
  const repaint = () => {
    colours = {};
    plots.forEach(({ plot }) => plot.redraw(false, true));
  };
  button.addEventListener("click", () => {
    const root = document.documentElement;
    const next = { system: "light", light: "dark", dark: "system" }[root.dataset.theme || "system"];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    button.textContent = `Theme: ${next}`;
    repaint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
})();
