/* A map of points on a canvas, for mouse, touch and keyboard; points glide to new places.

   meanshiftMap(canvas, {describe(i), onHover(i or null), onSelect(i), onLasso(list of i), thumbnail(i), keys}) returns
   {move(points, {animate}), paint(colors), select(i), ring(list of i), setLasso(active), reset(), redraw(), position(i)};
   points are [x0, y0, x1, y1, ...] in [-1, 1], colors one CSS color per point. With `thumbnail`, which returns
   {image, x, y, side} or null, the points of a zoomed map are shown as images. `keys` are further {key: action}. */
"use strict";

function meanshiftMap(canvas, options) {
  const GLIDE = 600;  // milliseconds
  const MAX_ZOOM = 80;
  const REACH = 14;  // pixels from the pointer within which a point is found
  const OPACITY = 0.82;
  const THUMBNAIL_ZOOM = 1.6;
  const THUMBNAIL_SIDES = [24, 56];  // pixels
  const MIN_ROOM = 12;  // pixels between points, on average, from which thumbnails are shown
  const context = canvas.getContext("2d");
  const layer = document.createElement("canvas");  // all that does not change while the pointer moves
  const layerContext = layer.getContext("2d");
  const swatch = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const channels = new Map();  // red, green and blue of each CSS color
  const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
  let shown = new Float32Array(0);
  let start = shown;
  let goal = shown;
  let startTime = 0;
  let frame = 0;
  let layerIsCurrent = false;
  let colors = [];
  let ringed = [];
  let thumbnailSide = 0;  // pixels; 0 if points are shown
  let withThumbnail = new Set();
  let selected = null;
  let hovered = null;
  let scale = 1;
  let panX = 0;
  let panY = 0;
  let width = 1;
  let height = 1;
  let size = 1;  // of the square that the map fits in
  let pixelRatio = 1;
  let grid = null;

  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");

  const toX = x => (x * 0.95 * scale + panX) / 2 * size + width / 2;
  const toY = y => (y * 0.95 * scale + panY) / 2 * size + height / 2;
  const fromX = x => ((x - width / 2) / size * 2 - panX) / 0.95 / scale;
  const fromY = y => ((y - height / 2) / size * 2 - panY) / 0.95 / scale;
  const position = i => [toX(shown[2 * i]), toY(shown[2 * i + 1])];
  const count = () => shown.length / 2;
  const radiusOfPoints = () => Math.max(1.1, Math.min(6, size / 22 / Math.sqrt(count() + 1) * 3.2)) * Math.min(2.2, Math.sqrt(scale));

  /* Which points are where: lists of points by cell of a square grid */

  function gridOfPoints() {
    if (grid) return grid;
    const columns = Math.max(1, Math.min(256, Math.ceil(Math.sqrt(count()))));
    const cellOf = value => Math.max(0, Math.min(columns - 1, Math.floor((value + 1) / 2 * columns)));
    const starts = new Uint32Array(columns * columns + 1);
    const cells = new Uint32Array(count());
    for (let i = 0; i < count(); i++) {
      cells[i] = cellOf(shown[2 * i + 1]) * columns + cellOf(shown[2 * i]);
      starts[cells[i] + 1]++;
    }
    for (let cell = 0; cell < columns * columns; cell++) starts[cell + 1] += starts[cell];
    const next = starts.slice();
    const members = new Uint32Array(count());
    for (let i = 0; i < count(); i++) members[next[cells[i]]++] = i;
    grid = {columns, cellOf, starts, members};
    return grid;
  }

  function forEachWithin(left, top, right, bottom, visit) {  // a rectangle in pixels; may visit a few points beside it
    const {columns, cellOf, starts, members} = gridOfPoints();
    const [first, last] = [cellOf(fromX(left)), cellOf(fromX(right))];
    for (let line = cellOf(fromY(top)); line <= cellOf(fromY(bottom)); line++) {
      const end = starts[line * columns + last + 1];
      for (let at = starts[line * columns + first]; at < end; at++) visit(members[at]);
    }
  }

  function nearestTo(x, y) {
    const reach = Math.max(REACH, thumbnailSide / 2);
    let nearest = null;
    let least = reach * reach;
    forEachWithin(x - reach, y - reach, x + reach, y + reach, i => {
      const distance = (toX(shown[2 * i]) - x) ** 2 + (toY(shown[2 * i + 1]) - y) ** 2;
      if (distance < least || (distance === least && i < nearest)) {
        least = distance;
        nearest = i;
      }
    });
    return nearest;
  }

  /* Drawing */

  function requestDraw(changesLayer = true) {
    if (changesLayer) layerIsCurrent = false;
    if (!frame) frame = requestAnimationFrame(draw);
  }

  function draw(now) {
    frame = 0;
    const progress = goal === shown ? 1 : Math.min(1, (now - startTime) / GLIDE);
    if (goal !== shown) {
      const eased = progress * progress * (3 - 2 * progress);
      shown = progress < 1 ? start.map((from, i) => from + (goal[i] - from) * eased) : goal;
      grid = null;
      layerIsCurrent = false;
    }
    if (!layerIsCurrent) drawLayer(progress === 1);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(layer, 0, 0);
    context.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
    drawRings(context, [hovered], 1.5);
    drawRings(context, [selected], 3);
    drawLasso();
    if (progress < 1) requestDraw();
  }

  function drawLayer(isStill) {
    layerIsCurrent = true;
    layerContext.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
    const found = [];
    forEachWithin(-9, -9, width + 9, height + 9, i => found.push(i));
    const visible = Uint32Array.from(found).sort();  // later points lie above earlier ones
    drawPoints(visible);
    thumbnailSide = 0;
    withThumbnail = new Set();
    if (options.thumbnail && isStill && scale >= THUMBNAIL_ZOOM) drawThumbnails(visible);
    drawRings(layerContext, ringed, 1.5, 1.5);
  }

  /* Points are blended into the pixels here: 50,000 calls of the canvas would take a fifth of a second. */

  function channelsOf(color) {
    if (!channels.has(color)) {
      swatch.fillStyle = "#888";  // stays if the color is not known
      swatch.fillStyle = color;
      swatch.fillRect(0, 0, 1, 1);
      channels.set(color, swatch.getImageData(0, 0, 1, 1).data);
    }
    return channels.get(color);
  }

  function discAt(radius, fractionX, fractionY) {  // [dx, dy, opacity, ...] around a point inside its pixel
    const pixels = [];
    const reach = Math.ceil(radius + 1);
    for (let dy = -reach; dy <= reach; dy++) {
      for (let dx = -reach; dx <= reach; dx++) {
        const distance = Math.hypot(dx + 0.5 - fractionX, dy + 0.5 - fractionY);
        const opacity = Math.min(1, radius + 0.5 - distance) * OPACITY;
        if (opacity > 0.02) pixels.push(dx, dy, opacity);
      }
    }
    return pixels;
  }

  function drawPoints(visible) {
    const image = layerContext.createImageData(layer.width, layer.height);
    const discs = [];  // for each quarter of a pixel
    const radius = radiusOfPoints() * pixelRatio;
    for (const i of visible) {
      const x = toX(shown[2 * i]) * pixelRatio;
      const y = toY(shown[2 * i + 1]) * pixelRatio;
      const [left, top] = [Math.floor(x), Math.floor(y)];
      const [quarterX, quarterY] = [Math.floor((x - left) * 4), Math.floor((y - top) * 4)];
      const number = quarterY * 4 + quarterX;
      discs[number] = discs[number] || discAt(radius, (quarterX + 0.5) / 4, (quarterY + 0.5) / 4);
      blend(image, left, top, discs[number], channelsOf(colors[i] || "#888"));
    }
    layerContext.putImageData(image, 0, 0);
  }

  function blend({data, width: columns, height: lines}, left, top, disc, color) {
    for (let k = 0; k < disc.length; k += 3) {
      const x = left + disc[k];
      const y = top + disc[k + 1];
      if (x < 0 || y < 0 || x >= columns || y >= lines) continue;
      const at = 4 * (y * columns + x);
      const opacity = disc[k + 2];
      const below = data[at + 3] / 255 * (1 - opacity);
      const sum = opacity + below;
      for (let channel = 0; channel < 3; channel++) {
        data[at + channel] = (color[channel] * opacity + data[at + channel] * below) / sum;
      }
      data[at + 3] = sum * 255;
    }
  }

  function drawThumbnails(visible) {  // those with room; the others stay points
    const [least, most] = THUMBNAIL_SIDES;
    const room = Math.sqrt(width * height / Math.max(1, visible.length));
    if (room < MIN_ROOM) return;
    const side = Math.max(least, Math.min(most, 0.8 * room));
    thumbnailSide = side;
    const columns = Math.ceil(width / side) + 2;
    const taken = new Map();  // the points of thumbnails, by cell of the size of a thumbnail
    for (const i of visible) {
      const [x, y] = position(i);
      const cell = Math.floor(y / side) * columns + Math.floor(x / side);
      const around = [-columns - 1, -columns, -columns + 1, -1, 0, 1, columns - 1, columns, columns + 1];
      const isFree = around.every(step => {
        const other = taken.get(cell + step);
        return !other || Math.max(Math.abs(other[0] - x), Math.abs(other[1] - y)) >= side;
      });
      if (!isFree) continue;
      taken.set(cell, [x, y]);
      const thumbnail = options.thumbnail(i);
      if (!thumbnail) continue;
      withThumbnail.add(i);
      layerContext.fillStyle = colors[i] || "#888";
      layerContext.fillRect(x - side / 2, y - side / 2, side, side);
      layerContext.imageSmoothingEnabled = thumbnail.side > side;
      layerContext.drawImage(thumbnail.image, thumbnail.x, thumbnail.y, thumbnail.side, thumbnail.side,
        x - side / 2 + 2, y - side / 2 + 2, side - 4, side - 4);
    }
  }

  function drawRings(target, points, lineWidth, gap = 3) {
    target.strokeStyle = getComputedStyle(canvas).getPropertyValue("--ink") || "#000";
    target.lineWidth = lineWidth;
    target.beginPath();
    for (const i of points) {
      if (i === null || i >= count()) continue;
      const [x, y] = position(i);
      const radius = radiusOfPoints() + gap;
      target.moveTo(x + radius, y);
      if (withThumbnail.has(i)) target.rect(x - thumbnailSide / 2, y - thumbnailSide / 2, thumbnailSide, thumbnailSide);
      else target.arc(x, y, radius, 0, 7);
    }
    target.stroke();
  }

  /* The lasso */

  let lassoActive = false;
  let lasso = null;  // its corners in pixels, [x0, y0, x1, y1, ...]

  function drawLasso() {
    if (!lasso) return;
    context.strokeStyle = getComputedStyle(canvas).getPropertyValue("--accent") || "#000";
    context.lineWidth = 2;
    context.setLineDash([6, 4]);
    context.beginPath();
    for (let at = 0; at < lasso.length; at += 2) context.lineTo(lasso[at], lasso[at + 1]);
    context.closePath();
    context.stroke();
    context.setLineDash([]);
  }

  function isInLasso(x, y) {
    let inside = false;
    for (let at = 0, before = lasso.length - 2; at < lasso.length; before = at, at += 2) {
      const [ax, ay, bx, by] = [lasso[at], lasso[at + 1], lasso[before], lasso[before + 1]];
      if (ay > y !== by > y && x < (bx - ax) * (y - ay) / (by - ay) + ax) inside = !inside;
    }
    return inside;
  }

  function pointsInLasso() {
    const xs = lasso.filter((_, at) => at % 2 === 0);
    const ys = lasso.filter((_, at) => at % 2 === 1);
    const found = [];
    forEachWithin(Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys), i => {
      if (isInLasso(...position(i))) found.push(i);
    });
    return found.sort((a, b) => a - b);
  }

  function setLasso(active) {
    lassoActive = active;
    canvas.classList.toggle("lasso", active);
  }

  /* Moving about */

  function hover(i) {
    if (i === hovered) return;
    hovered = i;
    canvas.title = i === null || !options.describe ? "" : options.describe(i);
    if (options.onHover) options.onHover(i);
    requestDraw(false);
  }

  function choose(i) {
    if (i === null) return;
    select(i);
    if (options.onSelect) options.onSelect(i);
  }

  function zoom(factor, px, py) {
    const next = Math.max(1, Math.min(MAX_ZOOM, scale * factor));
    const x = (px - width / 2) / size * 2;
    const y = (py - height / 2) / size * 2;
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
    return [event.clientX - box.left - canvas.clientLeft, event.clientY - box.top - canvas.clientTop];
  }
  canvas.addEventListener("pointerdown", event => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, locate(event));
    dragged = 0;
    pinchDistance = 0;
    hover(null);
    lasso = null;  // of two fingers none draws
    if (options.onLasso && pointers.size === 1 && (lassoActive || event.shiftKey)) lasso = locate(event);
  });
  canvas.addEventListener("pointermove", event => {
    const [x, y] = locate(event);
    if (!pointers.has(event.pointerId)) return hover(nearestTo(x, y));
    const [oldX, oldY] = pointers.get(event.pointerId);
    pointers.set(event.pointerId, [x, y]);
    dragged += Math.abs(x - oldX) + Math.abs(y - oldY);
    if (lasso) {
      lasso.push(x, y);
      requestDraw(false);
    } else if (pointers.size === 1 && (scale > 1 || dragged > 6)) {
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
    const isClick = dragged < 6;
    if (lasso && !isClick && event.type === "pointerup") options.onLasso(pointsInLasso());
    else if (wasDown && event.type === "pointerup" && isClick) choose(nearestTo(...locate(event)));
    lasso = null;
    requestDraw(false);
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
    "+": () => zoom(1.3, width / 2, height / 2),
    "=": () => zoom(1.3, width / 2, height / 2),
    "-": () => zoom(1 / 1.3, width / 2, height / 2),
    "0": reset,
    "Escape": reset,
    "ArrowLeft": () => pan(0.15, 0),
    "ArrowRight": () => pan(-0.15, 0),
    "ArrowUp": () => pan(0, 0.15),
    "ArrowDown": () => pan(0, -0.15),
    "n": () => choose(next()),
    "p": () => choose(previous()),
    "Enter": () => choose(hovered === null ? next() : hovered),
    ...options.keys,
  };
  canvas.addEventListener("keydown", event => {
    if (!count() || !KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
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
    requestDraw(false);
  }

  function ring(points) {
    ringed = points;
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
    grid = null;
    startTime = performance.now();
    requestDraw();
  }

  new ResizeObserver(() => {
    pixelRatio = window.devicePixelRatio || 1;
    width = canvas.clientWidth || 1;
    height = canvas.clientHeight || 1;
    size = Math.min(width, height);
    canvas.width = Math.round(width * pixelRatio);
    canvas.height = Math.round(height * pixelRatio);
    layer.width = canvas.width;
    layer.height = canvas.height;
    requestDraw();
  }).observe(canvas);
  return {move, paint, select, ring, setLasso, reset, redraw: requestDraw, position};
}
