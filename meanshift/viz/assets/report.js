/* The report: curves, one epoch slider for all maps and neighbors, light and dark. */
"use strict";

(function () {
  const drawn = JSON.parse(document.getElementById("drawn").textContent);
  const root = document.documentElement, byId = id => document.getElementById(id);
  const style = name => getComputedStyle(root).getPropertyValue(name).trim();
  const color = (group, count) => group < 0 ? style("--rule") :
    count <= 10 ? style(`--c${group % 10}`) : `hsl(${Math.round(group * 360 / count)} 60% ${group % 2 ? 45 : 58}%)`;

  // Curves
  const charts = drawn.curves.map(curve => [curve, meanshiftCurves(byId("curve-list"), {title: curve.title, span: curve.span})]);
  function drawCurves() {
    for (const [curve, chart] of charts)
      chart.update({series: curve.series.map(one => ({...one, color: style(`--c${one.color}`)})), marks: curve.marks});
  }

  // Maps and neighbors; the images are in the page once, in a rule that every cell shares
  const rules = document.createElement("style");
  rules.textContent = Object.entries(drawn.sheets).map(([name, url]) => `.${name} { background-image: url(${url}); }`).join("");
  document.head.append(rules);
  const runs = drawn.runs.map((run, i) => run.epochs ? {...run, i} : null).filter(Boolean);
  const epochs = [...new Set(runs.flatMap(run => run.epochs))].sort((a, b) => a - b);
  const latest = (run, epoch) => Math.max(0, run.epochs.findLastIndex(known => known <= epoch));
  const within = (name, run) => document.querySelector(`${name}[data-run="${run.i}"]`);

  function thumb(run, row, show, mark) {
    const cell = document.createElement("span"), scale = show / run.side;
    const words = `${run.titles[row]}${run.groups[row] >= 0 ? ", " + run.names[run.groups[row]] : ""}`;
    cell.className = `thumb ${run.sheet}` + (mark ? " same" : "");
    cell.setAttribute("role", "img");
    cell.setAttribute("aria-label", words + (mark ? ", same class" : ""));
    cell.title = words;
    cell.dataset.row = row;
    cell.style.setProperty("--show", show + "px");
    cell.style.backgroundSize = `${run.columns * run.side * scale}px auto`;
    cell.style.backgroundPosition = `${-(row % run.columns) * show}px ${-Math.floor(row / run.columns) * show}px`;
    if (run.side <= 32 && show > 48) cell.style.imageRendering = "pixelated";
    return cell;
  }

  function line(run, row, at, show) {
    const strip = document.createElement("div");
    strip.className = "strip-line";
    strip.append(thumb(run, row, show));
    for (const other of run.near[at][row])
      strip.append(thumb(run, other, show, run.by === "label" && run.groups[row] >= 0 && run.groups[other] === run.groups[row]));
    return strip;
  }

  const room = (box, cells) => Math.max(24, Math.min(56, Math.floor((box.clientWidth - 12) / (cells + 1)) - 4));

  function showPicked(run, at) {
    const box = within(".picked", run);
    box.textContent = "";
    if (run.picked === undefined) return;
    const words = document.createElement("p");
    words.textContent = run.titles[run.picked] + (run.groups[run.picked] >= 0 ? `: ${run.names[run.groups[run.picked]]}` : "");
    box.append(words, line(run, run.picked, at, room(box, run.near[at][0].length)));
  }

  function show(animate) {
    const epoch = epochs[+byId("epoch").value];
    byId("epoch-now").textContent = epoch === 0 ? "untrained" : `epoch ${epoch}`;
    byId("epoch").setAttribute("aria-valuetext", byId("epoch-now").textContent);
    for (const run of runs) {
      const at = latest(run, epoch), box = within(".neighbors", run);
      run.map.move(run.points[at], {animate});
      box.replaceChildren(...run.queries.map(row => line(run, row, at, room(box, run.near[at][0].length))));
      within(".purity", run).textContent = run.pure.length ?
        `; after epoch ${run.epochs[at]}, ${(100 * run.pure[at]).toFixed(1)}% of the eight nearest share the class` : "";
      showPicked(run, at);
    }
  }

  function paint() {
    for (const run of runs) run.map.paint(run.groups.map(group => color(group, run.names.length)));
    for (const dot of document.querySelectorAll("[data-group]")) dot.style.background = color(+dot.dataset.group, +dot.dataset.of);
    drawCurves();
  }

  for (const run of runs) {
    run.map = meanshiftMap(within("canvas", run), {
      describe: row => run.titles[row] + (run.groups[row] >= 0 ? `, ${run.names[run.groups[row]]}` : ""),
      onPick: row => { run.picked = row; showPicked(run, latest(run, epochs[+byId("epoch").value])); },
    });
  }
  if (runs.length) {
    const slider = byId("epoch");
    byId("slider").hidden = epochs.length < 2;
    slider.max = epochs.length - 1;
    slider.value = epochs.length - 1;
    slider.addEventListener("input", () => show(true));
    let timer = null;
    const stop = () => { clearInterval(timer); timer = null; byId("play").setAttribute("aria-pressed", "false"); byId("play").textContent = "Play"; };
    byId("play").addEventListener("click", () => {
      if (timer) return stop();
      byId("play").setAttribute("aria-pressed", "true");
      byId("play").textContent = "Stop";
      if (+slider.value === epochs.length - 1) slider.value = 0;
      show(true);
      timer = setInterval(() => {
        if (+slider.value >= epochs.length - 1) return stop();
        slider.value = +slider.value + 1;
        show(true);
      }, 1100);
    });
    show(false);
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; show(false); } });
  }
  paint();

  // Light and dark, paper
  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    paint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  addEventListener("beforeprint", () => {
    for (const one of document.querySelectorAll("details:not([open])")) { one.open = true; one.dataset.closed = ""; }
  });
  addEventListener("afterprint", () => {
    for (const one of document.querySelectorAll("details[data-closed]")) { one.open = false; delete one.dataset.closed; }
  });
})();
