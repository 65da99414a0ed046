/* Small line charts that can be hovered, touched and read by keyboard.

   meanshiftCurves(container, {title, series: [{name, x, y, color, dashed}], marks: [{x, text}], format, span})
   returns {update({series, marks})}; `span` is the least range that the vertical axis shows. */
"use strict";

function meanshiftCurves(container, options) {
  const W = 340, H = 170, left = 40, right = 8, top = 10, bottom = 22;
  const NS = "http://www.w3.org/2000/svg";
  const format = options.format || (value =>
    Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") :
    Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) :
    Math.abs(value) >= 0.1 || value === 0 ? value.toFixed(2) : value.toPrecision(2));

  const figure = document.createElement("figure");
  figure.className = "curve";
  const caption = document.createElement("figcaption"), readout = document.createElement("output");
  caption.append(options.title, readout);
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.setAttribute("role", "img");
  svg.tabIndex = 0;
  figure.append(caption, svg);
  container.append(figure);

  let series = [], marks = [], xs = [], at = null, scaleX, scaleY;

  function make(name, attributes, text) {
    const node = document.createElementNS(NS, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    svg.append(node);
    return node;
  }

  function ticks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw * 0.999);
    const found = [];
    for (let t = Math.ceil(low / step - 1e-9); t * step <= high + step * 1e-9; t++) found.push(t * step);
    return found;
  }

  function draw() {
    const pointed = at === null ? null : xs[at];
    svg.textContent = "";
    const shown = series.filter(one => one.x.length);
    if (!shown.length) return;
    const everyX = shown.flatMap(one => [one.x[0], one.x[one.x.length - 1]]);
    let [x0, x1] = [Math.min(0, ...everyX), Math.max(...everyX)];
    let [y0, y1] = [Infinity, -Infinity];
    for (const one of shown) for (const y of one.y) { y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
    if (x1 <= x0) x1 = x0 + 1;
    const short = (options.span || 0) - (y1 - y0);  // a small change must not look like a large one
    if (short > 0) { y0 -= short / 2; y1 += short / 2; }
    const span = y1 - y0, room = Math.max(span * 0.06, Math.abs(y1) * 1e-3) || 1;
    const zero = y0 >= 0 && y0 - room < 0;
    y0 = zero ? 0 : y0 - room;
    y1 += room;
    scaleX = x => left + (x - x0) / (x1 - x0) * (W - left - right);
    scaleY = y => H - bottom - (y - y0) / (y1 - y0) * (H - top - bottom);
    for (const tick of ticks(y0, y1, 3)) {
      make("line", {class: "grid", x1: left, x2: W - right, y1: scaleY(tick), y2: scaleY(tick)});
      make("text", {x: left - 5, y: scaleY(tick) + 4, "text-anchor": "end"}, format(tick));
    }
    for (const tick of ticks(x0, x1, 5)) make("text", {x: scaleX(tick), y: H - 6, "text-anchor": "middle"}, +tick.toFixed(6));
    for (const one of shown) {
      const d = one.x.map((x, i) => `${i ? "L" : "M"}${scaleX(x).toFixed(1)} ${scaleY(one.y[i]).toFixed(1)}`).join("");
      make("path", {d, stroke: one.color, ...(one.dashed ? {"stroke-dasharray": "4 3"} : {})});
      if (one.x.length === 1) make("circle", {cx: scaleX(one.x[0]), cy: scaleY(one.y[0]), r: 3, fill: one.color});
    }
    for (const mark of marks) {
      make("line", {class: "mark", x1: scaleX(mark.x), x2: scaleX(mark.x), y1: top, y2: H - bottom});
      const end = scaleX(mark.x) > W / 2;
      make("text", {class: "mark-text", x: scaleX(mark.x) + (end ? -4 : 4), y: top + 9, "text-anchor": end ? "end" : "start"}, mark.text);
    }
    make("line", {class: "cursor", y1: top, y2: H - bottom});
    xs = [...new Set(shown.flatMap(one => one.x))].sort((a, b) => a - b);
    const words = shown.map(one => `${one.name || options.title}: ${format(one.y[0])} at ${round(one.x[0])}, ` +
      `${format(one.y[one.y.length - 1])} at ${round(one.x[one.x.length - 1])}`);
    svg.setAttribute("aria-label", `${options.title} by epoch. ${words.join("; ")}. ${marks.map(m => m.text).join("; ")}`);
    if (pointed === null) rest(); else point(nearest(xs, pointed));
  }

  const round = x => +x.toFixed(2);

  function nearest(list, x) {
    let low = 0, high = list.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (list[mid] < x) low = mid; else high = mid; }
    return Math.abs(list[low] - x) <= Math.abs(list[high] - x) ? low : high;
  }

  function read(before, x) {  // the values at x, each with its color where there are several
    const shown = series.filter(one => one.x.length);
    readout.replaceChildren(before, ...shown.flatMap((one, i) => {
      const value = format(one.y[nearest(one.x, x)]);
      if (series.length < 2) return [value];
      const key = document.createElement("i");
      key.className = "key";
      key.style.background = one.color;
      return [i ? " " : "", key, `${one.name} ${value}`];
    }));
  }

  function rest() {  // no cursor: the newest values
    at = null;
    const cursor = svg.querySelector(".cursor");
    if (cursor) cursor.style.visibility = "hidden";
    if (xs.length) read("", xs[xs.length - 1]);
  }

  function point(index) {
    at = index;
    const cursor = svg.querySelector(".cursor"), x = xs[at];
    cursor.style.visibility = "visible";
    cursor.setAttribute("x1", scaleX(x));
    cursor.setAttribute("x2", scaleX(x));
    read(`epoch ${round(x)}: `, x);
  }

  function hover(event) {
    if (!xs.length) return;
    const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) / box.width * W;
    const x = (px - left) / (W - left - right) * (xs[xs.length - 1] - Math.min(0, xs[0])) + Math.min(0, xs[0]);
    point(nearest(xs, x));
  }
  svg.addEventListener("pointermove", hover);
  svg.addEventListener("pointerdown", hover);
  svg.addEventListener("pointerleave", rest);
  svg.addEventListener("blur", rest);
  svg.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!step || !xs.length) return;
    event.preventDefault();
    point(Math.max(0, Math.min(xs.length - 1, (at === null ? xs.length - 1 : at) + step)));
  });

  function update(next) {
    if (next.series) series = next.series;
    if (next.marks) marks = next.marks;
    figure.classList.toggle("many", series.length > 1);
    draw();
  }
  update({series: options.series || [], marks: options.marks || []});
  return {update, figure};
}
