/* A map of points on a canvas: drag, wheel, pinch, keyboard; points glide to new places.

   meanshiftMap(canvas, {describe(i), onHover(i or null), onPick(i)}) returns
   {move(points, {animate}), paint(colors), select(i), reset()}; points are [x0, y0, x1, y1, ...] in
   [-1, 1], colors one CSS color a point. */
"use strict";

function meanshiftMap(canvas, options) {
  const context = canvas.getContext("2d"), calm = matchMedia("(prefers-reduced-motion: reduce)");
  let shown = new Float32Array(0), from = shown, goal = shown, began = 0, frame = 0;
  let colors = [], chosen = null, over = null, scale = 1, panX = 0, panY = 0, size = 1, ratio = 1;

  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");

  const toX = x => (x * 0.95 * scale + panX + 1) / 2 * size;
  const toY = y => (y * 0.95 * scale + panY + 1) / 2 * size;

  function request() { if (!frame) frame = requestAnimationFrame(draw); }

  function draw(now) {
    frame = 0;
    const part = goal === shown ? 1 : Math.min(1, (now - began) / 600), ease = part * part * (3 - 2 * part);
    if (part < 1) {
      shown = from.map((a, i) => a + (goal[i] - a) * ease);
    } else {
      shown = goal;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, size, size);
    const radius = Math.max(1.8, Math.min(6, size / 22 / Math.sqrt(shown.length / 2 + 1) * 3.2)) * Math.min(2.2, Math.sqrt(scale));
    context.globalAlpha = 0.82;
    const groups = new Map();  // one path a color: thousands of points stay smooth
    for (let i = 0; i < shown.length / 2; i++) {
      const color = colors[i] || "#888";
      if (!groups.has(color)) groups.set(color, []);
      groups.get(color).push(i);
    }
    for (const [color, members] of groups) {
      context.fillStyle = color;
      context.beginPath();
      for (const i of members) {
        const x = toX(shown[2 * i]), y = toY(shown[2 * i + 1]);
        if (x < -9 || y < -9 || x > size + 9 || y > size + 9) continue;
        context.moveTo(x + radius, y);
        context.arc(x, y, radius, 0, 7);
      }
      context.fill();
    }
    context.globalAlpha = 1;
    const ink = getComputedStyle(canvas).getPropertyValue("--ink") || "#000";
    for (const [i, width] of [[over, 1.5], [chosen, 3]]) {
      if (i === null || 2 * i >= shown.length) continue;
      context.strokeStyle = ink;
      context.lineWidth = width;
      context.beginPath();
      context.arc(toX(shown[2 * i]), toY(shown[2 * i + 1]), radius + 3, 0, 7);
      context.stroke();
    }
    if (part < 1) request();
  }

  function find(px, py) {
    let best = null, least = 14 * 14;
    for (let i = 0; i < shown.length / 2; i++) {
      const dx = toX(shown[2 * i]) - px, dy = toY(shown[2 * i + 1]) - py, far = dx * dx + dy * dy;
      if (far < least) { least = far; best = i; }
    }
    return best;
  }

  function hover(i) {
    if (i === over) return;
    over = i;
    canvas.title = i === null || !options.describe ? "" : options.describe(i);
    if (options.onHover) options.onHover(i);
    request();
  }

  function pick(i) {
    if (i === null) return;
    select(i);
    if (options.onPick) options.onPick(i);
  }

  function zoom(by, px, py) {
    const next = Math.max(1, Math.min(40, scale * by)), x = px / size * 2 - 1, y = py / size * 2 - 1;
    panX = x - (x - panX) * next / scale;
    panY = y - (y - panY) * next / scale;
    scale = next;
    settle();
  }

  function settle() {  // the map never leaves its frame
    const far = scale - 1 + 0.2;
    panX = Math.max(-far, Math.min(far, panX));
    panY = Math.max(-far, Math.min(far, panY));
    if (scale === 1) panX = panY = 0;
    request();
  }

  const touches = new Map();
  let moved = 0, spread = 0;
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) * size / box.width, (event.clientY - box.top) * size / box.height];
  };
  canvas.addEventListener("pointerdown", event => {
    canvas.setPointerCapture(event.pointerId);
    touches.set(event.pointerId, place(event));
    moved = 0;
    spread = 0;
  });
  canvas.addEventListener("pointermove", event => {
    const [x, y] = place(event);
    if (!touches.has(event.pointerId)) return hover(find(x, y));
    const [ox, oy] = touches.get(event.pointerId);
    touches.set(event.pointerId, [x, y]);
    moved += Math.abs(x - ox) + Math.abs(y - oy);
    if (touches.size === 1 && (scale > 1 || moved > 6)) {
      panX += (x - ox) / size * 2;
      panY += (y - oy) / size * 2;
      settle();
    } else if (touches.size === 2) {
      const [[ax, ay], [bx, by]] = [...touches.values()], now = Math.hypot(ax - bx, ay - by);
      if (spread) zoom(now / spread, (ax + bx) / 2, (ay + by) / 2);
      spread = now;
    }
  });
  const lift = event => {
    if (touches.delete(event.pointerId) && event.type === "pointerup" && moved < 6) pick(find(...place(event)));
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.0015), ...place(event));
  }, {passive: false});
  canvas.addEventListener("dblclick", reset);
  canvas.addEventListener("keydown", event => {
    const count = shown.length / 2, step = 0.15;
    const keys = {
      "+": () => zoom(1.3, size / 2, size / 2), "=": () => zoom(1.3, size / 2, size / 2),
      "-": () => zoom(1 / 1.3, size / 2, size / 2), "0": reset, "Escape": reset,
      "ArrowLeft": () => { panX += step; settle(); }, "ArrowRight": () => { panX -= step; settle(); },
      "ArrowUp": () => { panY += step; settle(); }, "ArrowDown": () => { panY -= step; settle(); },
      "n": () => pick(chosen === null ? 0 : (chosen + 1) % count),
      "p": () => pick(chosen === null ? count - 1 : (chosen + count - 1) % count),
      "Enter": () => pick(over !== null ? over : chosen === null ? 0 : (chosen + 1) % count),
    };
    if (count && keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });

  function reset() { scale = 1; panX = panY = 0; request(); }
  function select(i) { chosen = i; request(); }
  function paint(next) { colors = next; request(); }
  function move(points, how) {
    goal = Float32Array.from(points);
    const glide = how && how.animate && !calm.matches && goal.length === shown.length;
    from = glide ? shown : goal;
    if (!glide) shown = goal;
    began = performance.now();
    request();
  }

  new ResizeObserver(() => {
    ratio = window.devicePixelRatio || 1;
    size = canvas.clientWidth || 1;
    canvas.width = canvas.height = Math.round(size * ratio);
    request();
  }).observe(canvas);
  return {move, paint, select, reset, where: i => [toX(shown[2 * i]), toY(shown[2 * i + 1])]};
}
