/* The report: curves, one epoch slider for all maps and neighbors, light and dark. */
"use strict";

(function () {
  const byId = id => document.getElementById(id);
  const root = document.documentElement;
  const report = JSON.parse(byId("report-data").textContent);
  const cssVariable = name => getComputedStyle(root).getPropertyValue(name).trim();

  function groupColor(group, groups) {
    if (group < 0) return cssVariable("--rule");
    if (groups <= 10) return cssVariable(`--c${group % 10}`);
    return `hsl(${Math.round(group * 360 / groups)} 60% ${group % 2 ? 45 : 58}%)`;
  }

  /* Curves */

  const charts = report.curves.map(curve => {
    const container = byId(curve.main ? "main-curves" : "other-curves");
    return [curve, meanshiftCurves(container, {title: curve.title, minRange: curve.min_range})];
  });

  function drawCurves() {
    for (const [curve, chart] of charts) {
      const series = curve.series.map(line => ({...line, color: cssVariable(`--c${line.color}`)}));
      chart.update({series, marks: curve.marks, lines: curve.lines, bands: curve.bands});
    }
  }

  /* Maps and neighbors. Each sheet of images is in the page once, in a style rule that all of its thumbnails share. */

  const rules = document.createElement("style");
  rules.textContent = Object.entries(report.sheets).map(([name, url]) => `.${name} { background-image: url(${url}); }`).join("");
  document.head.append(rules);

  const runs = report.runs.map((run, number) => ({...run, number})).filter(run => run.epochs);
  const epochs = [...new Set(runs.flatMap(run => run.epochs))].sort((a, b) => a - b);
  const elementOf = (run, selector) => document.querySelector(`${selector}[data-run="${run.number}"]`);
  const currentEpoch = () => epochs[+byId("epoch").value];
  const snapshotAt = (run, epoch) => Math.max(0, run.epochs.findLastIndex(known => known <= epoch));

  const epochTitle = epoch => epoch === 0 ? "before training" : `epoch ${epoch}`;

  function describe(run, row) {
    const group = run.groups[row];
    return group >= 0 ? `${run.titles[row]}, ${run.group_names[group]}` : run.titles[row];
  }

  function thumbnail(run, row, size, sameClass) {
    const element = document.createElement("span");
    const column = row % run.columns;
    const line = Math.floor(row / run.columns);
    element.className = `thumb ${run.sheet}` + (sameClass ? " same" : "");
    element.setAttribute("role", "img");
    element.setAttribute("aria-label", describe(run, row) + (sameClass ? ", same class" : ""));
    element.title = describe(run, row);
    element.dataset.row = row;
    element.style.setProperty("--size", `${size}px`);
    element.style.backgroundSize = `${run.columns * size}px auto`;
    element.style.backgroundPosition = `${-column * size}px ${-line * size}px`;
    if (run.side <= 32 && size > 48) element.style.imageRendering = "pixelated";
    return element;
  }

  function neighborLine(run, row, snapshot, container) {
    const neighbors = run.neighbors[snapshot][row];
    const width = Math.floor((container.clientWidth - 12) / (neighbors.length + 1)) - 4;
    const size = Math.max(24, Math.min(56, width));
    const isSame = other => run.colored_by === "label" && run.groups[row] >= 0 && run.groups[other] === run.groups[row];
    const line = document.createElement("div");
    line.className = "strip-line";
    line.append(thumbnail(run, row, size), ...neighbors.map(other => thumbnail(run, other, size, isSame(other))));
    return line;
  }

  function showSelected(run, snapshot) {
    const container = elementOf(run, ".selected");
    container.textContent = "";
    if (run.selected === undefined) return;
    const title = document.createElement("p");
    title.textContent = describe(run, run.selected);
    container.append(title, neighborLine(run, run.selected, snapshot, container));
  }

  function showEpoch(animate) {
    const epoch = currentEpoch();
    const text = epochTitle(epoch);
    byId("epoch-text").textContent = text;
    byId("epoch").setAttribute("aria-valuetext", text);
    for (const run of runs) {
      const snapshot = snapshotAt(run, epoch);
      elementOf(run, ".shown-epoch").textContent = `, ${epochTitle(run.epochs[snapshot])}`;
      const container = elementOf(run, ".neighbors");
      run.map.move(run.points[snapshot], {animate});
      container.replaceChildren(...run.queries.map(row => neighborLine(run, row, snapshot, container)));
      elementOf(run, ".purity").textContent = run.purity.length ?
        `; ${(100 * run.purity[snapshot]).toFixed(1)}% of the eight nearest have the same class` : "";
      showSelected(run, snapshot);
    }
  }

  function paint() {
    for (const run of runs) run.map.paint(run.groups.map(group => groupColor(group, run.group_names.length)));
    for (const dot of document.querySelectorAll("[data-group]")) dot.style.background = groupColor(+dot.dataset.group, +dot.dataset.groups);
    drawCurves();
  }

  for (const run of runs) {
    run.map = meanshiftMap(elementOf(run, "canvas"), {
      describe: row => describe(run, row),
      onSelect: row => {
        run.selected = row;
        showSelected(run, snapshotAt(run, currentEpoch()));
      },
    });
  }

  function startSlider() {
    const slider = byId("epoch");
    const last = epochs.length - 1;
    byId("slider").hidden = epochs.length < 2;
    slider.max = last;
    slider.value = last;
    slider.addEventListener("input", () => showEpoch(true));

    let timer = null;
    function setPlaying(playing) {
      byId("play").setAttribute("aria-pressed", playing);
      byId("play").textContent = playing ? "Stop" : "Play";
      clearInterval(timer);
      timer = playing ? setInterval(step, 1100) : null;
    }
    function step() {
      if (+slider.value >= last) return setPlaying(false);
      slider.value = +slider.value + 1;
      showEpoch(true);
    }
    byId("play").addEventListener("click", () => {
      if (timer) return setPlaying(false);
      if (+slider.value === last) slider.value = 0;
      showEpoch(true);
      setPlaying(true);
    });

    showEpoch(false);
    let width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      showEpoch(false);
    });
  }
  if (runs.length) startSlider();
  paint();

  /* Light, dark and paper */

  const darkPreferred = matchMedia("(prefers-color-scheme: dark)");
  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : darkPreferred.matches;
    root.dataset.theme = dark ? "light" : "dark";
    paint();
  });
  darkPreferred.addEventListener("change", paint);
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details:not([open])")) {
      details.open = true;
      details.dataset.closed = "";
    }
  });
  addEventListener("afterprint", () => {
    for (const details of document.querySelectorAll("details[data-closed]")) {
      details.open = false;
      delete details.dataset.closed;
    }
  });
})();
