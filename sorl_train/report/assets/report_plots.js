"use strict";
// One plot a figure, drawn by uPlot; all share a cursor and the switches of report.js.
sorl.plots = (() => {
  const { element, format, lines, data } = sorl;
  const { steps } = lines;
  const HEIGHT = 190;
  const FEW = 6; // lines whose values are all written above a plot; of more, only the nearest one's
  const DASHES = [{ style: "solid", dash: [] }, { style: "dashed", dash: [7, 4] }, { style: "dotted", dash: [2, 3] }];
  const made = [];

  // --- colours: uPlot draws on a canvas, so it needs the theme's colours as values ---------------------------------
  const probe = element(document.body, "span");
  probe.hidden = true;
  let colours = {};
  const colour = (name) => {
    if (!(name in colours)) {
      probe.style.color = `var(--${name})`;
      colours[name] = getComputedStyle(probe).color;
    }
    return colours[name];
  };

  // --- curves: of each line that is shown, each metric of the figure that is on ------------------------------------
  const present = (figure) => Object.keys(figure.metrics).filter(
    (name) => data.runs.some((run) => (run.values[name] || []).some((value) => value !== null)),
  );

  const curvesOf = (figure, off) => {
    const several = lines.all().length > 1;
    const names = present(figure);
    return names.filter((name) => !off.has(name)).flatMap((name, order) => lines.shown().map((line) => ({
      line,
      name,
      ink: several ? lines.ink(line) : `c${names.indexOf(name) % 8}`,
      ...DASHES[several ? order % DASHES.length : 0],
      ...lines.values(line, figure, name),
    }))).filter((curve) => curve.middle.some((value) => value !== null));
  };

  const deltaOf = (figure) => {
    const deltas = new Set(data.runs.map((run) => run.delta).filter((delta) => delta !== null));
    return figure.marks === "delta" && deltas.size === 1 ? [...deltas][0] : null;
  };

  // --- what uPlot is told --------------------------------------------------------------------------------------------
  const range = (figure, curves, delta) => (u, low, high) => {
    if (figure.axis === "share") return [-0.02, 1.02];
    if (low === null) return figure.axis === "log" ? [0.1, 10] : [0, 1];
    const [first, last] = u.series[0].idxs || [0, steps.length - 1];
    for (const curve of curves.filter((c) => c.low)) {
      for (let i = first; i <= last; i += 1) {
        if (curve.low[i] !== null) [low, high] = [Math.min(low, curve.low[i]), Math.max(high, curve.high[i])];
      }
    }
    if (delta !== null) [low, high] = [Math.min(low, delta), Math.max(high, delta)];
    if (figure.axis === "log") return uPlot.rangeLog(low, high, 10, true);
    if (low >= 0 && (low < high / 2 || high - low < high / 10)) low = 0; // noise is not blown up to a trend
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    return [low === 0 ? 0 : low - pad, high + pad];
  };

  const clipped = (u, paint) => {
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    u.ctx.clip();
    paint(u.ctx);
    u.ctx.restore();
  };

  const drawBands = (curves) => (u) => clipped(u, (ctx) => {
    curves.forEach((curve, c) => {
      if (!curve.low) return;
      const at = steps.map((_, i) => i).filter((i) => curve.low[i] !== null);
      const x = (i) => u.valToPos(steps[i], "x", true);
      ctx.beginPath();
      at.forEach((i) => ctx.lineTo(x(i), u.valToPos(curve.high[i], "y", true)));
      at.reverse().forEach((i) => ctx.lineTo(x(i), u.valToPos(curve.low[i], "y", true)));
      ctx.closePath();
      ctx.globalAlpha = 0.16 * (u.series[c + 1].alpha ?? 1);
      ctx.fillStyle = colour(curve.ink);
      ctx.fill();
    });
  });

  const rule = (u, ctx, ink, from, to) => {
    ctx.strokeStyle = colour(ink);
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([5, 4].map((length) => length * devicePixelRatio));
    ctx.beginPath();
    ctx.moveTo(...from);
    ctx.lineTo(...to);
    ctx.stroke();
  };

  const drawDelta = (delta) => (u) => clipped(u, (ctx) => {
    const y = u.valToPos(delta, "y", true);
    rule(u, ctx, "muted", [u.bbox.left, y], [u.bbox.left + u.bbox.width, y]);
  });

  const alarmsOf = (line) => line.members.flatMap((r) => data.runs[r].alarms);

  const drawAlarms = (u) => clipped(u, (ctx) => {
    for (const line of lines.shown()) {
      const ink = lines.all().length > 1 ? lines.ink(line) : "bad";
      for (const step of alarmsOf(line)) {
        const x = Math.round(u.valToPos(step, "x", true));
        const { top, height } = u.bbox;
        const side = 4.5 * devicePixelRatio;
        rule(u, ctx, ink, [x, top], [x, top + height]);
        ctx.fillStyle = colour(ink);
        ctx.beginPath();
        ctx.moveTo(x - side, top);
        ctx.lineTo(x + side, top);
        ctx.lineTo(x, top + 1.6 * side);
        ctx.fill();
      }
    }
  });

  // Values that a broken line would not show, having none to go on to: points, whether or not the others are.
  const alone = (curve) => {
    const pieces = [[]];
    curve.middle.forEach((value, i) => {
      if (value !== null) pieces[pieces.length - 1].push(i);
      else if (curve.broken[i]) pieces.push([]);
    });
    return pieces.filter((piece) => piece.length === 1).flat();
  };

  const options = (figure, curves, delta, width, onCursor, onFocus) => {
    const axis = {
      stroke: () => colour("muted"),
      font: "11.5px system-ui, sans-serif",
      grid: { stroke: () => colour("grid"), width: 1 },
      ticks: { show: false },
    };
    const many = curves.length > 24;
    const decades = (_, ticks) => ticks.map((v) => (Math.abs(Math.log10(v) % 1) < 1e-9 ? v : null));
    const grid = figure.axis === "log" ? { ...axis.grid, filter: decades } : axis.grid;
    return {
      width,
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      focus: { alpha: 0.22 },
      cursor: {
        sync: { key: "steps", scales: ["x", null] },
        y: false,
        points: { size: many ? 0 : 7 },
        focus: { prox: lines.shown().length > 1 ? 16 : -1 },
      },
      scales: { x: { time: false }, y: { distr: figure.axis === "log" ? 3 : 1, range: range(figure, curves, delta) } },
      axes: [
        { ...axis, size: 28, values: (_, ticks) => ticks.map((v) => (Number.isInteger(v) ? v : "")) },
        { ...axis, grid, size: 54, values: (_, ticks) => ticks.map((v) => (v === null ? "" : format(v))) },
      ],
      series: [{}, ...curves.map((curve) => ({
        stroke: () => colour(curve.ink),
        width: many ? 1.1 : 1.75,
        dash: curve.dash,
        points: {
          size: 5,
          fill: () => colour(curve.ink),
          show: !many && curve.middle.filter((v) => v !== null).length <= 25,
          filter: (_, s, show) => (show ? null : alone(curve)),
        },
      }))],
      hooks: {
        setCursor: [onCursor],
        setSeries: [onFocus],
        drawAxes: [drawBands(curves)],
        draw: [...(delta === null ? [] : [drawDelta(delta)]), ...(figure.marks === "alarms" ? [drawAlarms] : [])],
      },
    };
  };

  // --- names and values above a plot ------------------------------------------------------------------------------
  const swatch = (parent, curve) => {
    element(parent, "i").style.borderTop = `2.5px ${curve.style} var(--${curve.ink})`;
  };

  // A button a metric, and beside it a value for each line; ``write(index, focused)`` fills the values in.
  const readout = (host, figure, off, curves, toggle) => {
    const several = lines.all().length > 1;
    const names = present(figure);
    const button = (parent, name) => {
      const made = element(parent, "button", figure.metrics[name] || "value", off.has(name) ? "off" : "");
      made.type = "button";
      made.title = "hide or show";
      made.setAttribute("aria-pressed", String(!off.has(name)));
      made.addEventListener("click", () => toggle(name));
      return made;
    };
    host.replaceChildren();
    const cells = [];
    const few = lines.shown().length <= FEW;
    for (const name of names.filter((n) => !several || !off.has(n))) {
      const row = element(host, "div", "", "curve");
      const mine = curves.map((curve, c) => [curve, c]).filter(([curve]) => curve.name === name);
      if (!several && mine.length) swatch(row, mine[0][0]);
      if (names.length > 1 || !several) button(row, name);
      for (const [curve, c] of several && !few ? [] : mine) {
        const cell = element(row, "span", "", "value");
        cell.title = curve.line.label;
        if (several) swatch(cell, curve);
        cells.push({ c, node: element(cell, "b"), cell });
      }
    }
    const rest = several ? names.filter((name) => off.has(name)) : [];
    if (rest.length) {
      const row = element(host, "div", "", "more-curves");
      rest.forEach((name) => button(row, name));
    }
    const nearest = several && !few ? element(host, "p", "", "nearest") : null;

    // The value under the cursor, or, greyed, the one before it where a curve has none there.
    const known = (curve, last) => {
      let i = last;
      while (i >= 0 && curve.middle[i] === null) i -= 1;
      return i;
    };
    const shown = (curve, i, last) => (curve.off[last] ? "0" : i < 0 ? "–" : format(curve.middle[i]));
    const rangeAt = ({ low, high }, i) => (i < 0 || !low ? "" : `${format(low[i])} to ${format(high[i])}`);
    return (index, focused) => {
      const hovering = typeof index === "number";
      const last = hovering ? index : steps.length - 1;
      for (const { c, node, cell } of cells) {
        const i = known(curves[c], last);
        node.textContent = shown(curves[c], i, last);
        node.title = rangeAt(curves[c], i);
        node.classList.toggle("earlier", hovering && i !== last && !curves[c].off[last]);
        cell.classList.toggle("focused", several && c === focused);
      }
      if (!nearest) return;
      nearest.replaceChildren();
      const curve = curves[focused];
      if (!curve) return void element(nearest, "span", "point at a line to read it", "muted");
      const i = known(curve, last);
      swatch(nearest, curve);
      element(nearest, "b", shown(curve, i, last));
      nearest.append(` ${curve.line.label}${curve.low ? ` (${rangeAt(curve, i)})` : ""}`);
    };
  };

  // --- a figure ------------------------------------------------------------------------------------------------------
  const draw = (parent, figure) => {
    const frame = element(parent, "figure");
    frame.id = `figure-${figure.id}`;
    const caption = element(frame, "figcaption");
    const title = element(caption, "h3", figure.title);
    const at = element(title, "span", "", "at");
    if (figure.about) element(caption, "p", figure.about);
    const note = element(caption, "p");
    const values = element(caption, "div", "", "readout");
    const host = element(frame, "div", "", "plot");
    host.setAttribute("role", "img");
    host.setAttribute("aria-label", `${figure.title} over training steps`);
    const names = present(figure);
    const off = new Set(lines.all().length > 1 ? names.slice(1) : []); // of several lines, one metric at a time
    let plot = null;
    let write = () => {};
    let focused = -1;

    const read = (u) => {
      const index = u && u.cursor.left >= 0 ? u.cursor.idx : null;
      const alarm = typeof index === "number" && figure.marks === "alarms" && lines.shown().some((line) => alarmsOf(line).includes(steps[index]));
      at.textContent = typeof index === "number" ? `step ${steps[index]}${alarm ? " · alarm" : ""}` : "latest";
      write(index, focused);
    };
    const focus = (u, series, change) => {
      if (!change.focus) return;
      focused = series === null ? -1 : series - 1;
      read(u);
    };
    const build = () => {
      const zoom = plot && [plot.scales.x.min, plot.scales.x.max];
      plot?.destroy();
      const curves = curvesOf(figure, off);
      const delta = deltaOf(figure);
      const zeros = !curves.length && figure.axis === "log" && names.some((name) => !off.has(name));
      note.textContent = zeros ? "All 0 so far: a logarithmic axis cannot show that." : "";
      focused = -1;
      write = readout(values, figure, off, curves, (name) => {
        if (!off.delete(name)) off.add(name);
        build();
      });
      // uPlot draws a line on over steps that are undefined, and breaks it where they are null.
      const points = [steps, ...curves.map((curve) => curve.middle.map((value, i) => (value === null && !curve.broken[i] ? undefined : value)))];
      plot = new uPlot(options(figure, curves, delta, host.clientWidth, read, focus), points, host);
      if (zoom && zoom[0] !== null && (zoom[0] > steps[0] || zoom[1] < steps[steps.length - 1])) {
        plot.setScale("x", { min: zoom[0], max: zoom[1] });
      }
      read(null);
    };
    build();
    new ResizeObserver(() => plot.setSize({ width: host.clientWidth, height: HEIGHT })).observe(host);
    made.push({ build, redraw: () => plot.redraw(false, true) });
  };

  sorl.onTheme(() => {
    colours = {};
    made.forEach((figure) => figure.redraw());
  });
  return { draw, refresh: () => made.forEach((figure) => figure.build()) };
})();
