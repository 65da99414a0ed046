/* A map of points on a canvas, for mouse, touch and keyboard; points glide to new places.

   meanshiftMap(canvas, {describe(i), onHover(i or null), onSelect(i)}) returns
   {move(points, {animate}), paint(colors), select(i), reset(), position(i)}; points are [x0, y0, x1, y1, ...]
   in [-1, 1], colors one CSS color per point. */
"use strict";

function meanshiftMap(canvas, options) {
  const GLIDE = 600;  // milliseconds
  const MAX_ZOOM = 40;
  const REACH = 14;  // pixels from the pointer within which a point is found
  const context = canvas.getContext("2d");
  const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
  let shown = new Float32Array(0);
  let start = shown;
  let goal = shown;
  let startTime = 0;
  let frame = 0;
  let colors = [];
  let selected = null;
  let hovered = null;
  let scale = 1;
  let panX = 0;
  let panY = 0;
  let size = 1;
  let pixelRatio = 1;

  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");

  const toX = x => (x * 0.95 * scale + panX + 1) / 2 * size;
  const toY = y => (y * 0.95 * scale + panY + 1) / 2 * size;
  const position = i => [toX(shown[2 * i]), toY(shown[2 * i + 1])];
  const count = () => shown.length / 2;

  function requestDraw() {
    if (!frame) frame = requestAnimationFrame(draw);
  }

  function draw(now) {
    frame = 0;
    const progress = goal === shown ? 1 : Math.min(1, (now - startTime) / GLIDE);
    const eased = progress * progress * (3 - 2 * progress);
    shown = progress < 1 ? start.map((from, i) => from + (goal[i] - from) * eased) : goal;
    context.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
    context.clearRect(0, 0, size, size);
    const radius = Math.max(1.8, Math.min(6, size / 22 / Math.sqrt(count() + 1) * 3.2)) * Math.min(2.2, Math.sqrt(scale));
    drawPoints(radius);
    drawRing(hovered, radius, 1.5);
    drawRing(selected, radius, 3);
    if (progress < 1) requestDraw();
  }

  function drawPoints(radius) {
    const byColor = new Map();  // one path per color: thousands of points stay smooth
    for (let i = 0; i < count(); i++) {
      const color = colors[i] || "#888";
      if (!byColor.has(color)) byColor.set(color, []);
      byColor.get(color).push(i);
    }
    context.globalAlpha = 0.82;
    for (const [color, members] of byColor) {
      context.fillStyle = color;
      context.beginPath();
      for (const i of members) {
        const [x, y] = position(i);
        if (x < -9 || y < -9 || x > size + 9 || y > size + 9) continue;
        context.moveTo(x + radius, y);
        context.arc(x, y, radius, 0, 7);
      }
      context.fill();
    }
    context.globalAlpha = 1;
  }

  function drawRing(i, radius, width) {
    if (i === null || i >= count()) return;
    context.strokeStyle = getComputedStyle(canvas).getPropertyValue("--ink") || "#000";
    context.lineWidth = width;
    context.beginPath();
    context.arc(...position(i), radius + 3, 0, 7);
    context.stroke();
  }

  function nearestTo(x, y) {
    let nearest = null;
    let least = REACH * REACH;
    for (let i = 0; i < count(); i++) {
      const [px, py] = position(i);
      const distance = (px - x) ** 2 + (py - y) ** 2;
      if (distance < least) {
        least = distance;
        nearest = i;
      }
    }
    return nearest;
  }

  function hover(i) {
    if (i === hovered) return;
    hovered = i;
    canvas.title = i === null || !options.describe ? "" : options.describe(i);
    if (options.onHover) options.onHover(i);
    requestDraw();
  }

  function choose(i) {
    if (i === null) return;
    select(i);
    if (options.onSelect) options.onSelect(i);
  }

  function zoom(factor, px, py) {
    const next = Math.max(1, Math.min(MAX_ZOOM, scale * factor));
    const x = px / size * 2 - 1;
    const y = py / size * 2 - 1;
    panX = x - (x - panX) * next / scale;
    panY = y - (y - panY) * next / scale;
    scale = next;
    keepInFrame();
  }

  function pan(dx, dy) {
    panX += dx;
    panY += dy;
    keepInFrame();
  }

  function keepInFrame() {
    const limit = scale - 1 + 0.2;
    panX = scale === 1 ? 0 : Math.max(-limit, Math.min(limit, panX));
    panY = scale === 1 ? 0 : Math.max(-limit, Math.min(limit, panY));
    requestDraw();
  }

  const pointers = new Map();  // those that are down, by their id
  let dragged = 0;  // pixels since the first one went down
  let pinchDistance = 0;
  function locate(event) {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) * size / box.width, (event.clientY - box.top) * size / box.height];
  }
  canvas.addEventListener("pointerdown", event => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, locate(event));
    dragged = 0;
    pinchDistance = 0;
  });
  canvas.addEventListener("pointermove", event => {
    const [x, y] = locate(event);
    if (!pointers.has(event.pointerId)) return hover(nearestTo(x, y));
    const [oldX, oldY] = pointers.get(event.pointerId);
    pointers.set(event.pointerId, [x, y]);
    dragged += Math.abs(x - oldX) + Math.abs(y - oldY);
    if (pointers.size === 1 && (scale > 1 || dragged > 6)) {
      pan((x - oldX) / size * 2, (y - oldY) / size * 2);
    } else if (pointers.size === 2) {
      const [[ax, ay], [bx, by]] = [...pointers.values()];
      const distance = Math.hypot(ax - bx, ay - by);
      if (pinchDistance) zoom(distance / pinchDistance, (ax + bx) / 2, (ay + by) / 2);
      pinchDistance = distance;
    }
  });
  function onLift(event) {
    const wasDown = pointers.delete(event.pointerId);
    if (wasDown && event.type === "pointerup" && dragged < 6) choose(nearestTo(...locate(event)));
  }
  canvas.addEventListener("pointerup", onLift);
  canvas.addEventListener("pointercancel", onLift);
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.0015), ...locate(event));
  }, {passive: false});
  canvas.addEventListener("dblclick", reset);

  const next = () => selected === null ? 0 : (selected + 1) % count();
  const previous = () => selected === null ? count() - 1 : (selected + count() - 1) % count();
  const KEYS = {
    "+": () => zoom(1.3, size / 2, size / 2),
    "=": () => zoom(1.3, size / 2, size / 2),
    "-": () => zoom(1 / 1.3, size / 2, size / 2),
    "0": reset,
    "Escape": reset,
    "ArrowLeft": () => pan(0.15, 0),
    "ArrowRight": () => pan(-0.15, 0),
    "ArrowUp": () => pan(0, 0.15),
    "ArrowDown": () => pan(0, -0.15),
    "n": () => choose(next()),
    "p": () => choose(previous()),
    "Enter": () => choose(hovered === null ? next() : hovered),
  };
  canvas.addEventListener("keydown", event => {
    if (!count() || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });

  function reset() {
    scale = 1;
    panX = 0;
    panY = 0;
    requestDraw();
  }

  function select(i) {
    selected = i;
    requestDraw();
  }

  function paint(pointColors) {
    colors = pointColors;
    requestDraw();
  }

  function move(points, how) {
    goal = Float32Array.from(points);
    const glide = how && how.animate && !reducedMotion.matches && goal.length === shown.length;
    start = glide ? shown : goal;
    if (!glide) shown = goal;
    startTime = performance.now();
    requestDraw();
  }

  new ResizeObserver(() => {
    pixelRatio = window.devicePixelRatio || 1;
    size = canvas.clientWidth || 1;
    canvas.width = Math.round(size * pixelRatio);
    canvas.height = canvas.width;
    requestDraw();
  }).observe(canvas);
  return {move, paint, select, reset, position};
}
