/* Small line charts that can be read by mouse, touch and keyboard.

   meanshiftCurves(container, {title, series: [{name, x, y, mean, color, dashed}], marks: [{x, text}], lines: [{y, text}],
   bands: [{from, to, text, kind}], format, minRange}) returns {update({series, marks, lines, bands})}.
   `mean` is a running mean of y, in front of which y is faint; `lines` are horizontal; a band's `kind` is bad, poor or good;
   `minRange` is the smallest range of the vertical axis. */
"use strict";

function meanshiftCurves(container, options) {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 340, HEIGHT = 170;
  const LEFT = 40, RIGHT = 8, TOP = 10, BOTTOM = 22;

  const format = options.format || (value => {
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    if (size >= 100) return value.toFixed(0);
    if (size >= 10) return value.toFixed(1);
    return size >= 0.1 || value === 0 ? value.toFixed(2) : value.toPrecision(2);
  });
  const formatEpoch = x => +x.toFixed(2);

  const figure = document.createElement("figure");
  figure.className = "curve";
  const caption = document.createElement("figcaption");
  const readout = document.createElement("output");
  caption.append(options.title, readout);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("role", "img");
  svg.tabIndex = 0;
  figure.append(caption, svg);
  container.append(figure);

  let series = [];
  let marks = [];
  let lines = [];
  let bands = [];
  let epochs = [];  // of all series, in rising order
  let selected = null;  // position in `epochs`
  let toX, toY;

  const visibleSeries = () => series.filter(line => line.x.length);
  const lastOf = list => list[list.length - 1];
  const shownValues = line => line.mean || line.y;

  function add(name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    svg.append(node);
  }

  function ticks(low, high, count) {
    const exact = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(exact));
    const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= exact * 0.999);
    const values = [];
    for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number++) values.push(number * step);
    return values.map(value => ({value, label: tickLabel(value, step)}));
  }

  function tickLabel(value, step) {  // as many digits as neighboring ticks need to differ
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
    if (decimals <= 4) return value.toFixed(decimals);
    return Math.abs(value) < step / 2 ? "0" : value.toExponential(0);
  }

  function rangeX(lines) {
    const ends = lines.flatMap(line => [line.x[0], lastOf(line.x)]);
    const low = Math.min(0, ...ends);
    const high = Math.max(...ends);
    return [low, high > low ? high : low + 1];
  }

  function rangeY(shown) {
    let low = bands.length ? 0 : Infinity, high = -Infinity;
    for (const y of [...shown.flatMap(line => line.y), ...lines.map(line => line.y)]) {
      low = Math.min(low, y);
      high = Math.max(high, y);
    }
    const shortfall = (options.minRange || 0) - (high - low);
    if (shortfall > 0) {
      low -= shortfall / 2;
      high += shortfall / 2;
    }
    const margin = Math.max((high - low) * 0.06, Math.abs(high) * 1e-3) || 1;
    const startsAtZero = low >= 0 && low - margin < 0;
    return [startsAtZero ? 0 : low - margin, high + margin];
  }

  function drawAxes([x0, x1], [y0, y1]) {
    for (const tick of ticks(y0, y1, 3)) {
      const y = toY(tick.value);
      add("line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y});
      add("text", {x: LEFT - 5, y: y + 4, "text-anchor": "end"}, tick.label);
    }
    for (const tick of ticks(x0, x1, 5)) {
      add("text", {x: toX(tick.value), y: HEIGHT - 6, "text-anchor": "middle"}, tick.label);
    }
  }

  function drawPath(line, values, more) {
    const points = line.x.map((x, i) => `${toX(x).toFixed(1)} ${toY(values[i]).toFixed(1)}`);
    const dashes = line.dashed ? {"stroke-dasharray": "4 3"} : {};
    add("path", {d: `M${points.join("L")}`, stroke: line.color, ...dashes, ...more});
  }

  function drawSeries(line) {
    if (line.mean) drawPath(line, line.y, {class: "raw"});
    drawPath(line, shownValues(line), {});
    if (line.x.length === 1) add("circle", {cx: toX(line.x[0]), cy: toY(line.y[0]), r: 3, fill: line.color});
  }

  function drawBands([y0, y1]) {
    for (const band of bands) {
      const top = toY(Math.min(band.to, y1)), bottom = toY(Math.max(band.from, y0));
      if (bottom <= top) continue;
      add("rect", {class: `band ${band.kind}`, x: LEFT, width: WIDTH - LEFT - RIGHT, y: top, height: bottom - top});
      if (bottom - top > 12) add("text", {class: "line-text", x: WIDTH - RIGHT - 4, y: top + 11, "text-anchor": "end"}, band.text);
    }
  }

  function drawLines() {  // with labels that do not cover each other
    let free = HEIGHT - BOTTOM - 2;
    for (const line of [...lines].sort((a, b) => a.y - b.y)) {
      const y = toY(line.y);
      free = Math.min(free, y - 3);
      add("line", {class: "baseline", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y});
      add("text", {class: "line-text", x: WIDTH - RIGHT - 4, y: free, "text-anchor": "end"}, line.text);
      free -= 12;
    }
  }

  function drawMark(mark) {
    const x = toX(mark.x);
    const onTheRight = x > WIDTH / 2;
    add("line", {class: "mark", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM});
    add("text", {class: "mark-text", x: x + (onTheRight ? -4 : 4), y: TOP + 9, "text-anchor": onTheRight ? "end" : "start"}, mark.text);
  }

  function draw() {
    const epochBefore = selected === null ? null : epochs[selected];
    svg.textContent = "";
    const shown = visibleSeries();
    if (!shown.length) return;
    const [x0, x1] = rangeX(shown);
    const [y0, y1] = rangeY(shown);
    toX = x => LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT);
    toY = y => HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);
    drawBands([y0, y1]);
    drawAxes([x0, x1], [y0, y1]);
    shown.forEach(drawSeries);
    drawLines();
    marks.forEach(drawMark);
    add("line", {class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM});
    epochs = [...new Set(shown.flatMap(line => line.x))].sort((a, b) => a - b);
    const ends = shown.map(line => `${line.name || options.title}: ${format(line.y[0])} at ${formatEpoch(line.x[0])}, ` +
      `${format(lastOf(line.y))} at ${formatEpoch(lastOf(line.x))}`);
    const extra = [...lines, ...marks].map(each => each.text).join("; ");
    svg.setAttribute("aria-label", `${options.title} by epoch. ${ends.join("; ")}. ${extra}`);
    if (epochBefore === null) deselect();
    else select(nearest(epochs, epochBefore));
  }

  function nearest(sorted, x) {
    let low = 0, high = sorted.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < x) low = middle;
      else high = middle;
    }
    return Math.abs(sorted[low] - x) <= Math.abs(sorted[high] - x) ? low : high;
  }

  function showValues(prefix, x) {  // with the color and name of each series if there are several
    const average = series.some(line => line.mean) ? "mean " : "";
    readout.replaceChildren(prefix, average, ...visibleSeries().flatMap((line, i) => {
      const value = format(shownValues(line)[nearest(line.x, x)]);
      if (series.length < 2) return [value];
      const key = document.createElement("i");
      key.className = "key";
      key.style.background = line.color;
      return [i ? " " : "", key, `${line.name} ${value}`];
    }));
  }

  function deselect() {  // hide the cursor and show the newest values
    selected = null;
    const cursor = svg.querySelector(".cursor");
    if (cursor) cursor.style.visibility = "hidden";
    if (epochs.length) showValues("", lastOf(epochs));
  }

  function select(position) {
    selected = position;
    const x = epochs[position];
    const cursor = svg.querySelector(".cursor");
    cursor.style.visibility = "visible";
    cursor.setAttribute("x1", toX(x));
    cursor.setAttribute("x2", toX(x));
    showValues(`epoch ${formatEpoch(x)}: `, x);
  }

  function onPointer(event) {
    if (!epochs.length) return;
    const box = svg.getBoundingClientRect();
    const pixel = (event.clientX - box.left) / box.width * WIDTH;
    const low = Math.min(0, epochs[0]);
    const x = low + (pixel - LEFT) / (WIDTH - LEFT - RIGHT) * (lastOf(epochs) - low);
    select(nearest(epochs, x));
  }
  svg.addEventListener("pointermove", onPointer);
  svg.addEventListener("pointerdown", onPointer);
  svg.addEventListener("pointerleave", deselect);
  svg.addEventListener("blur", deselect);
  svg.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!step || !epochs.length) return;
    event.preventDefault();
    const last = epochs.length - 1;
    select(Math.max(0, Math.min(last, (selected === null ? last : selected) + step)));
  });

  function update(next) {
    if (next.series) series = next.series;
    if (next.marks) marks = next.marks;
    if (next.lines) lines = next.lines;
    if (next.bands) bands = next.bands;
    figure.classList.toggle("many", series.length > 1);
    draw();
  }
  update({series: options.series || [], marks: options.marks, lines: options.lines, bands: options.bands});
  return {update};
}
