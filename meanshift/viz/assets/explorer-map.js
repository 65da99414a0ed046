/* The map of the live page: points, epochs, colors, and an image with its neighbors. After explorer.js. */
"use strict";

/* The map */

const rowOf = i => state.map.rows[i];

function titleOfRow(row) {
  const {titles, labels, classes} = state.images;
  return labels && labels[row] >= 0 ? `${titles[row]}, ${classes[labels[row]]}` : titles[row];
}

const mapView = meanshiftMap($("canvas"), {
  describe: () => "",
  onHover: i => {
    const box = $("hover");
    box.hidden = i === null;
    if (i === null) return;
    const row = rowOf(i);
    const [x, y] = mapView.position(i);
    const width = $("canvas").clientWidth;
    box.replaceChildren(imageElement(trainingImage(state.images.indices[row]), 128, ""), titleOfRow(row));
    box.style.left = `${x > width / 2 ? x - 145 : x + 16}px`;
    box.style.top = `${Math.max(0, Math.min(y - 60, width - 170))}px`;
  },
  onSelect: i => selectRow(rowOf(i)).catch(showError),
});

async function loadMap() {
  let answer;
  try {
    answer = await request(`/api/map?have=${state.map ? state.map.version : ""}`);
  } catch (error) {
    if (error instanceof TypeError) throw error;
    $("map-status").textContent = error.message;  // the rest of the page can still be used
    return;
  }
  const isFirst = !state.map;
  if (answer.points) {
    state.map = answer;
    placePoints(!isFirst);
    paint();
  }
  $("map-status").textContent = [state.map.kind, describeWork(answer)].filter(Boolean).join("; ");
  clearTimeout(loadMap.timer);
  if (answer.progress) loadMap.timer = setTimeout(() => loadMap().catch(showError), 1000);
}

function describeWork(answer) {
  if (state.map.kind === "t-SNE") return state.map.points[state.epoch] ? "" : `the map of epoch ${state.epoch} is being computed`;
  if (answer.progress) return `t-SNE is being computed, ${answer.progress.done} of ${answer.progress.total}`;
  return answer.note;
}

function placePoints(animate) {
  if (!state.map) return;
  const epochs = Object.keys(state.map.points).map(Number);
  const earlier = epochs.filter(epoch => epoch <= state.epoch);
  mapView.move(state.map.points[earlier.length ? Math.max(...earlier) : Math.min(...epochs)], {animate});
  markSelected();
}

function markSelected() {
  const i = state.map && state.selectedRow !== null ? state.map.rows.indexOf(state.selectedRow) : -1;
  mapView.select(i < 0 ? null : i);
}

$("reset-map").addEventListener("click", () => mapView.reset());

/* Epochs */

function setEpoch(epoch) {
  const epochs = state.run.snapshot_epochs;
  const position = epochs.indexOf(epoch);
  state.epoch = epoch;
  state.follow = position === epochs.length - 1;
  $("epoch").value = position;
  $("epoch").setAttribute("aria-valuetext", `epoch ${epoch}`);
  $("epoch-text").textContent = `epoch ${epoch} of ${state.run.epochs}`;
  for (const select of document.querySelectorAll(".epoch-select")) select.value = epoch;
  for (const strip of document.querySelectorAll(".strip")) strip.classList.toggle("current", +strip.dataset.epoch === epoch);
  placePoints(true);
}

function changeEpoch(epoch) {
  if (epoch === state.epoch) return;
  setEpoch(epoch);
  if ($("color").value === "purity") loadColors().catch(showError);
  if (state.query) runSearch();
  if (!state.items.length) return;
  if ($("clean").hidden) state.items = [];
  else loadRanking();
}

$("epoch").addEventListener("input", () => changeEpoch(state.run.snapshot_epochs[+$("epoch").value]));
for (const select of document.querySelectorAll(".epoch-select")) select.addEventListener("change", () => changeEpoch(+select.value));

const player = {
  timer: 0,
  position: 0,
  start() {
    const epochs = state.run.snapshot_epochs;
    const isLast = state.epoch === epochs[epochs.length - 1];
    player.position = isLast ? -1 : epochs.indexOf(state.epoch);
    player.setTimer(setInterval(player.step, 1100));
    player.step();
  },
  step() {
    player.position += 1;
    changeEpoch(state.run.snapshot_epochs[player.position]);
    if (player.position + 1 >= state.run.snapshot_epochs.length) player.stop();
  },
  stop() {
    clearInterval(player.timer);
    player.setTimer(0);
  },
  setTimer(timer) {
    player.timer = timer;
    $("play").textContent = timer ? "❚❚" : "▶";
    $("play").setAttribute("aria-label", timer ? "Pause" : "Play through the epochs");
  },
};
$("play").addEventListener("click", () => {
  if (player.timer) player.stop();
  else player.start();
});

/* Colors */

const STOPS = ["#5b3f99", "#3f6bb0", "#25929a", "#4fb567", "#d8b72e"];
const cssVariable = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const channels = color => [1, 3, 5].map(start => parseInt(color.slice(start, start + 2), 16));

function mixColors(first, second, fraction) {
  const other = channels(second);
  const mixed = channels(first).map((value, i) => Math.round(value + (other[i] - value) * fraction));
  return "#" + mixed.map(value => value.toString(16).padStart(2, "0")).join("");
}

function scaleColor(fraction) {
  const position = Math.max(0, Math.min(0.9999, fraction)) * (STOPS.length - 1);
  const stop = Math.floor(position);
  return mixColors(STOPS[stop], STOPS[stop + 1], Math.round((position - stop) * 8) / 8);
}

function categoryColor(number) {
  if (number < 10) return cssVariable(`--c${number}`);
  return number < 20 ? mixColors(cssVariable(`--c${number % 10}`), cssVariable("--ink"), 0.45) : cssVariable("--quiet");
}

async function loadColors() {
  const by = $("color").value;
  const {epoch} = state;
  const colors = await request(`/api/colors?by=${encodeURIComponent(by)}&epoch=${epoch}`);
  if ($("color").value !== by || state.epoch !== epoch) return;  // another was chosen meanwhile
  if (!state.colors || state.colors.by !== by) state.onlyCategory = null;
  state.colors = {...colors, by};
  showLegend();
  paint();
}

function paint() {
  if (!state.map || !state.colors) return;
  const {kind, values, low, high} = state.colors;
  const unknown = cssVariable("--rule");
  const known = [];
  mapView.paint(state.map.rows.map(row => {
    const value = values[row];
    if (value === null) return unknown;
    if (kind === "scale") return scaleColor((value - low) / (high - low || 1));
    if (state.onlyCategory !== null && value !== state.onlyCategory) return unknown;
    return known[value] = known[value] || categoryColor(value);
  }));
}

function showLegend() {
  const {kind, values} = state.colors;
  const unknown = values.filter(value => value === null).length;
  const note = unknown ? element("small", {}, `gray: ${unknown} without a value`) : "";
  $("legend").replaceChildren(kind === "scale" ? scaleLegend() : categoryLegend(), note);
}

function scaleLegend() {
  const {low, high} = state.colors;
  const bar = element("i");
  bar.style.background = `linear-gradient(90deg, ${STOPS.join()})`;
  return element("div", {className: "scale"}, `${+low.toPrecision(4)}`, bar, `${+high.toPrecision(4)}`);
}

function categoryLegend() {
  const {names, sizes} = state.colors;
  return element("ul", {className: "legend"}, ...names.map((name, number) => {
    const pressed = state.onlyCategory === number;
    const dot = element("i");
    dot.style.background = categoryColor(number);
    const button = element("button", {title: "Show only these"}, dot, `${name} `, element("small", {}, sizes[number]));
    button.setAttribute("aria-pressed", pressed);
    button.onclick = () => {
      state.onlyCategory = pressed ? null : number;
      showLegend();
      paint();
    };
    return element("li", {}, button);
  }));
}

$("color").addEventListener("change", () => loadColors().catch(showError));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (!state.colors) return;
  showLegend();
  paint();
});

/* An image and its neighbors */

async function selectRow(row) {
  state.selectedRow = row;
  markSelected();
  const image = await request(`/api/point/${row}`);
  if (state.selectedRow !== row) return;  // another was selected meanwhile
  state.selectedImage = image;
  $("announcement").textContent = `Selected ${titleOf(image)}`;
  $("use-selected").disabled = Boolean(state.run.missing);
  const legend = image.label ? [element("span", {className: "line"}), " same label "] : [];
  $("detail").replaceChildren(
    selectedImageElement(image),
    element("div", {className: "strips"}, ...image.snapshots.map(neighborStrip)),
    element("p", {className: "quiet hint"}, ...legend, element("span", {className: "dot"}), " was a neighbor at the snapshot before"),
  );
}

function selectedImageElement(image) {
  const facts = element("dl");
  if (image.label) facts.append(element("dt", {}, "label"), element("dd", {}, image.label));
  for (const [name, value] of Object.entries(image.metadata)) {
    if (value) facts.append(element("dt", {}, name), element("dd", {}, value));
  }
  const enlargeButton = element("button", {onclick: () => enlarge([image])}, "Enlarge");
  const text = element("div", {}, element("h2", {}, image.title), facts, element("p", {className: "controls"}, enlargeButton, searchButton(image)));
  return element("div", {className: "selected-image"}, imageElement(image, 256, titleOf(image)), text);
}

function searchButton(image) {
  const onclick = () => {
    $("enlarged").close();
    showTab("search");
    searchWith(image);
  };
  return element("button", {onclick, disabled: Boolean(state.run.missing)}, "Search with it");
}

function neighborStrip(snapshot, number) {
  const count = flags => flags.filter(Boolean).length;
  const summary = [
    snapshot.same_label ? `${count(snapshot.same_label)} same label` : "",
    number ? `${count(snapshot.kept)} kept` : "",
  ].filter(Boolean).join(" · ");
  const epochButton = element("button", {onclick: () => changeEpoch(snapshot.epoch), title: "Show the map after this epoch"}, `epoch ${snapshot.epoch}`);
  const neighbors = snapshot.rows.map((row, i) => {
    const title = `${titleOfRow(row)}, distance ${formatDistance(snapshot.distances[i])}${snapshot.kept[i] ? ", kept" : ""}`;
    const image = imageElement(trainingImage(state.images.indices[row]), 64, title);
    const button = element("button", {className: "neighbor", title, onclick: () => selectRow(row).catch(showError)}, image);
    button.classList.toggle("same", Boolean(snapshot.same_label && snapshot.same_label[i]));
    button.classList.toggle("kept", snapshot.kept[i]);
    return element("li", {}, button);
  });
  const strip = element("div", {className: "strip"}, element("header", {}, epochButton, summary), element("ol", {}, ...neighbors));
  strip.dataset.epoch = snapshot.epoch;
  strip.classList.toggle("current", snapshot.epoch === state.epoch);
  return strip;
}

/* Enlarged images */

function enlarge(images, note) {
  const dialog = $("enlarged");
  const figures = images.map(image => {
    const buttons = element("div", {className: "controls"});
    if (image.row !== null && image.row !== undefined) buttons.append(mapButton(image));
    buttons.append(searchButton(image));
    return element("figure", {}, imageElement(image, 768, titleOf(image)), element("figcaption", {}, titleOf(image), buttons));
  });
  dialog.replaceChildren(
    element("div", {className: "figures"}, ...figures),
    note ? element("p", {className: "quiet"}, note) : "",
    element("p", {}, element("button", {onclick: () => dialog.close(), autofocus: true}, "Close")),
  );
  dialog.showModal();
}

function mapButton(image) {
  const onclick = () => {
    $("enlarged").close();
    showTab("map");
    selectRow(image.row).catch(showError);
  };
  return element("button", {onclick}, "Show on the map");
}

$("enlarged").addEventListener("click", event => {
  if (event.target === $("enlarged")) $("enlarged").close();
});
