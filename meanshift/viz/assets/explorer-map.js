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
    const {clientWidth: width, clientHeight: height} = $("canvas");
    box.replaceChildren(imageElement(trainingImage(state.images.indices[row]), 128, ""), titleOfRow(row));
    box.style.left = `${x > width / 2 ? x - 145 : x + 16}px`;
    box.style.top = `${Math.max(0, Math.min(y - 60, height - 170))}px`;
  },
  onSelect: i => selectRow(rowOf(i)).catch(showError),
  thumbnail: i => thumbnails.get(rowOf(i)),
  onLasso: points => selectRows(points.map(rowOf).filter(isShown)),
  keys: {
    l: () => $("lasso").click(),
    s: () => selectNeighbors(),
    c: () => selectGroup(),
    Escape: () => state.selectedRows.size ? selectRows([]) : mapView.reset(),
  },
});

/* Thumbnails of the points in view, many in one image, once the map is zoomed */

const SHEET = {rows: 64, columns: 8, side: 64, atOnce: 2, kept: 96};
const thumbnails = {
  places: new Map(),  // of each row in its sheet; null while it is loaded
  sheets: [],  // lists of rows, the oldest first
  missing: new Set(),
  loading: 0,
  get(row) {
    if (this.places.has(row) || state.run.missing) return this.places.get(row);
    if (!this.missing.size) setTimeout(() => this.load());  // when the whole view was asked for
    this.missing.add(row);
    return null;
  },
  load() {
    const rows = [...this.missing];
    this.missing.clear();  // what is still in view is asked for again
    while (rows.length && this.loading < SHEET.atOnce) this.loadSheet(rows.splice(0, SHEET.rows));
  },
  async loadSheet(rows) {
    this.loading++;
    for (const row of rows) this.places.set(row, null);
    try {
      const image = element("img", {src: `/sheet?rows=${rows.join()}&v=${state.run.cache_key}`});
      await image.decode();
      const {columns, side} = SHEET;
      rows.forEach((row, i) => this.places.set(row, {image, side, x: i % columns * side, y: Math.floor(i / columns) * side}));
      this.sheets.push(rows);
      if (this.sheets.length > SHEET.kept) for (const row of this.sheets.shift()) this.places.delete(row);
    } catch {
      for (const row of rows) this.places.delete(row);
      showError(new Error("The thumbnails of the map cannot be loaded."));
    }
    this.loading--;
    mapView.redraw();
  },
};

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
  $("map-status").textContent = [describeMap(), describeWork(answer)].filter(Boolean).join("; ");
  clearTimeout(loadMap.timer);
  if (answer.progress) loadMap.timer = setTimeout(() => loadMap().catch(showError), 1000);
}

function describeMap() {
  const {kind, rows, placed} = state.map;
  if (!placed) return kind;
  return `${kind} of ${formatCount(rows.length - placed)} images; the other ${formatCount(placed)} lie at their nearest among them`;
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
  ringRows();
}

function markSelected() {
  const i = state.map && state.selectedRow !== null ? state.map.rows.indexOf(state.selectedRow) : -1;
  mapView.select(i < 0 ? null : i);
}

$("reset-map").addEventListener("click", () => mapView.reset());

/* Selected rows: by lasso, by neighbors, by class or cluster */

const isShown = row => state.onlyCategory === null || state.colors.values[row] === state.onlyCategory;

function selectRows(rows) {
  state.selectedRows = new Set(rows);
  const count = state.selectedRows.size;
  $("rows-selected").textContent = count ? `${formatCount(count)} image${count === 1 ? "" : "s"} selected` : "Shift and drag selects images.";
  $("clear-rows").hidden = !count;
  ringRows();
  document.dispatchEvent(new CustomEvent("rows-selected", {detail: {rows: [...state.selectedRows]}}));
}

function ringRows() {
  const points = [];
  if (state.map && state.selectedRows.size) {
    state.map.rows.forEach((row, i) => {
      if (state.selectedRows.has(row)) points.push(i);
    });
  }
  mapView.ring(points);
}

function selectNeighbors() {  // at the epoch of the map
  if (!state.selectedImage) return;
  const shown = state.selectedImage.snapshots.find(snapshot => snapshot.epoch === state.epoch);
  if (shown) selectRows([state.selectedRow, ...shown.rows]);
}

function groupOf(row) {  // its class, or what else the map is colored by: {name, rows} or null
  if (row === null || !state.colors || state.colors.kind === "scale") return null;
  const isLabel = state.colors.by === "label";  // of which the legend merges rare ones
  const values = isLabel ? state.images.labels : state.colors.values;
  const names = isLabel ? state.images.classes : state.colors.names;
  if (values[row] === null || values[row] < 0) return null;
  return {name: names[values[row]], rows: values.flatMap((value, other) => value === values[row] ? [other] : [])};
}

function selectGroup() {
  const group = groupOf(state.selectedRow);
  if (group) selectRows(group.rows);
}

$("lasso").addEventListener("click", () => {
  const active = $("lasso").getAttribute("aria-pressed") !== "true";
  $("lasso").setAttribute("aria-pressed", active);
  mapView.setLasso(active);
});
$("clear-rows").addEventListener("click", () => {
  selectRows([]);
  $("canvas").focus();
});

/* Epochs */

function setEpoch(epoch) {
  const epochs = state.run.snapshot_epochs;
  const position = epochs.indexOf(epoch);
  state.epoch = epoch;
  state.follow = position === epochs.length - 1;
  $("epoch").value = position;
  $("epoch").setAttribute("aria-valuetext", `epoch ${epoch}`);
  $("epoch-text").textContent = `epoch ${epoch} of ${state.run.epochs}`;
  for (const strip of document.querySelectorAll(".strip")) strip.classList.toggle("current", +strip.dataset.epoch === epoch);
  placePoints(true);
}

function changeEpoch(epoch) {
  if (epoch === state.epoch) return;
  setEpoch(epoch);
  if ($("color").value === "purity") loadColors().catch(showError);
}

$("epoch").addEventListener("input", () => changeEpoch(state.run.snapshot_epochs[+$("epoch").value]));

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
  const isWanted = () => $("color").value === by && (by !== "purity" || state.epoch === epoch);
  const path = `/api/colors?by=${encodeURIComponent(by)}&epoch=${epoch}`;
  const colors = await requestPatiently($("color-status"), path, isWanted);
  if (!colors) return;  // another was chosen meanwhile
  if (!state.colors || state.colors.by !== by) state.onlyCategory = null;
  state.colors = {...colors, by};
  showLegend();
  paint();
  nameGroupButton();
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
    element("div", {className: "strips"}, ...image.snapshots.map(neighborStrip).reverse()),
    element("p", {className: "quiet hint"}, ...legend, element("span", {className: "dot"}), " was a neighbor at the snapshot before"),
  );
  nameGroupButton();
}

function nameGroupButton() {
  const button = $("select-group");
  if (!button) return;
  const group = groupOf(state.selectedRow);
  button.hidden = !group;
  if (group) button.textContent = `Select all of ${group.name}`;
}

function selectedImageElement(image) {
  const facts = element("dl");
  if (image.label) facts.append(element("dt", {}, "label"), element("dd", {}, image.label));
  for (const [name, value] of Object.entries(image.metadata)) {
    if (value) facts.append(element("dt", {}, name), element("dd", {}, value));
  }
  const enlargeButton = element("button", {onclick: () => enlarge([image])}, "Enlarge");
  const neighborsButton = element("button", {onclick: selectNeighbors, title: "Key s on the map"}, "Select its neighbors");
  const groupButton = element("button", {id: "select-group", onclick: selectGroup, title: "Key c on the map"});
  const text = element("div", {}, element("h2", {}, image.title), facts);
  const buttons = element("p", {className: "controls"}, enlargeButton, searchButton(image), neighborsButton, groupButton);
  return element("div", {className: "selected-image"}, imageElement(image, 256, titleOf(image)), text, buttons);
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
