/* The live page: state, requests, tabs, following the run, curves. It asks only the server that it came from. */
"use strict";

const $ = id => document.getElementById(id);
const BLANK = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==";  // shows the gray behind it
const state = {
  run: null,  // answer of /api/run
  stale: false,  // the run has snapshots that the page does not show yet
  images: null,  // answer of /api/images
  map: null,  // answer of /api/map
  epoch: null,
  follow: true,  // go to each new snapshot
  selectedRow: null,  // whose image and neighbors are shown
  selectedRows: new Set(),  // by lasso and the like; each change is an event, rows-selected
  selectedImage: null,  // answer of /api/point
  colors: null,  // answer of /api/colors
  onlyCategory: null,
  query: null,  // {file} or {source, index}
  order: "outliers",
  items: [],  // the list that is being cleaned
  itemsEpoch: null,
  pairs: null,  // {edges, below, start} of the duplicates: how many are below each distance
  selection: new Map(),
  lastClicked: 0,
};

/* Elements, requests and texts */

function element(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties || {})) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

async function request(path, options) {
  const response = await fetch(path, options);
  if (response.status === 204) return null;
  const isJSON = (response.headers.get("content-type") || "").includes("json");
  const answer = isJSON ? await response.json() : {error: await response.text()};
  if (!response.ok) throw new Error(answer.error || `the server answered ${response.status}`);
  return answer;
}

const trainingImage = index => ({source: "train", index});
const thumbnailURL = (image, side) => `/thumbnail/${image.source}/${image.index}?side=${side}&v=${state.run.cache_key}`;

function imageElement(image, side, alt) {
  const node = element("img", {alt, loading: "lazy", decoding: "async"});
  node.onload = () => node.classList.toggle("pixelated", node.naturalWidth <= 64 && node.naturalHeight <= 64);
  node.onerror = () => {
    node.onerror = null;
    node.src = BLANK;
    node.title = "cannot be read";
  };
  node.src = state.run.missing ? BLANK : thumbnailURL(image, side);
  return node;
}

const titleOf = image => image.label ? `${image.title}, ${image.label}` : image.title;
const formatCount = number => number.toLocaleString("en");

function formatDistance(value) {
  if (value === null) return "?";
  if (value < 1e-6) return "0";
  return value < 0.001 ? value.toExponential(1) : value.toFixed(value < 0.1 ? 4 : 3);
}

function formatDuration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/* Tabs */

const tabs = [...document.querySelectorAll("[role=tab]")];

function showTab(name) {
  const known = tabs.some(tab => tab.id === `tab-${name}`) ? name : "map";
  for (const tab of tabs) {
    const selected = tab.id === `tab-${known}`;
    tab.setAttribute("aria-selected", selected);
    tab.tabIndex = selected ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !selected;
  }
  history.replaceState(null, "", `#${known}`);
  if (known === "label") showLabels();
  if (known === "clean" && state.epoch !== null && !state.items.length) loadRanking();
}

tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => showTab(tab.id.slice(4)));
  tab.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!step) return;
    const next = tabs[(i + step + tabs.length) % tabs.length];
    next.focus();
    showTab(next.id.slice(4));
  });
});

/* Banners */

function setBanner(key, text, className = "alarm") {
  const id = `banner-${key}`;
  const old = $(id);
  if (old && old.textContent === text) return;
  if (old) old.remove();
  if (text) $("banners").append(element("p", {id, className}, text));
}

function showError(error) {
  if (error instanceof TypeError) {  // of fetch: there was no answer
    setBanner("offline", "The server does not answer; this page shows its last answer.", "note");
    return;
  }
  setBanner("error", error.message, "note");
  clearTimeout(showError.timer);
  showError.timer = setTimeout(() => setBanner("error", ""), 15000);
}

/* Following the run */

async function followRun() {
  try {
    const run = await request(`/api/run?since=${state.run ? state.run.version : ""}`);
    if (run) {
      const previous = state.run;
      const isOther = previous && (previous.name !== run.name || previous.cache_key !== run.cache_key);
      const isRetaken = previous && previous.snapshot_epochs.some(epoch => previous.snapshot_keys[epoch] !== run.snapshot_keys[epoch]);
      if (isOther || isRetaken) return location.reload();  // another run is served at this address, or other snapshots
      state.run = run;
      showRun();
      state.stale = state.stale || !previous || previous.snapshot_epochs.join() !== run.snapshot_epochs.join();
    }
    if (state.stale) await showSnapshots();
    state.stale = false;
    setBanner("offline", "");
  } catch (error) {
    showError(error);
  }
  setTimeout(followRun, document.hidden ? 10000 : 2000);
}

function describeProgress(run) {
  if (Number.isInteger(run.stop)) return `stopped at epoch ${run.epochs_done.toFixed(1)} of ${run.epochs}`;
  if (run.epochs_done >= run.epochs) return `finished, ${run.epochs} epoch${run.epochs === 1 ? "" : "s"}`;
  const progress = `epoch ${run.epochs_done.toFixed(1)} of ${run.epochs}`;
  if (!run.training) {
    const silence = run.seconds_silent === null ? "nothing logged yet" : `nothing logged for ${formatDuration(run.seconds_silent)}`;
    return `${silence}: stopped? The command that started it continues it · ${progress}`;
  }
  return `training · ${progress}` + (run.seconds_left ? ` · about ${formatDuration(run.seconds_left)} left` : "");
}

function showRun() {
  const run = state.run;
  const finished = run.epochs_done >= run.epochs;
  document.title = `${run.name} · meanshift`;
  $("name").textContent = run.name;
  $("bar").value = Math.min(1, run.epochs_done / run.epochs);
  $("progress").textContent = describeProgress(run);
  const trainingState = finished ? "finished" : run.training ? "training" : "not training now";
  if ($("training-state").textContent !== trainingState) $("training-state").textContent = trainingState;  // announced once
  const collapse = run.warnings.filter(warning => warning.kind === "collapse").pop();
  setBanner("collapse", collapse ? `After ${collapse.epoch.toFixed(1)} epochs: ${collapse.message}` : "");
  setBanner("missing", run.missing, "note");
  const hasSnapshots = run.snapshot_epochs.length > 0;
  $("waiting").textContent = finished ? "This run has no snapshots; they are taken while training, with --train.snapshots 6." :
    "Waiting for the first snapshot. The curves are already there.";
  $("waiting").hidden = hasSnapshots;
  $("map-content").hidden = !hasSnapshots;
  showLive();
  fillColorings();
  showCurves();
}

async function showSnapshots() {
  const epochs = state.run.snapshot_epochs;
  if (!epochs.length) return;
  if (!state.images) {
    state.images = await request("/api/images");
    fillSelects();
  }
  $("epoch").max = epochs.length - 1;
  fillEpochSelects();
  const epoch = epochs.includes(state.epoch) && !state.follow ? state.epoch : newestEpoch();
  const moved = epoch !== state.epoch;
  setEpoch(epoch);
  if (moved || state.colors === null) await loadColors();
  await loadMap();
  await selectRow(state.selectedRow === null ? state.images.typical : state.selectedRow);
  if (!$("clean").hidden && !state.items.length) loadRanking();
}

const newestEpoch = () => state.run.snapshot_epochs[state.run.snapshot_epochs.length - 1];

function fillEpochSelects() {  // of search and cleaning, which use the newest unless another is chosen
  for (const select of document.querySelectorAll(".epoch-select")) {
    const chosen = select.value;
    const epochs = state.run.snapshot_epochs.map(epoch => element("option", {value: epoch}, epoch));
    select.replaceChildren(element("option", {value: ""}, `the newest, ${newestEpoch()}`), ...epochs);
    if (state.run.snapshot_epochs.includes(+chosen)) select.value = chosen;
  }
  for (const id of ["search-status", "clean-status"]) if ($(id).update) $(id).update();
}

function fillColorings() {
  const chosen = $("color").value;
  $("color").replaceChildren(...state.run.colorings.map(([value, text]) => element("option", {value}, text)));
  if (state.run.colorings.some(([value]) => value === chosen)) $("color").value = chosen;
}

function fillSelects() {
  const snapshot = {name: "snapshot", title: "the map's images", count: state.images.indices.length};
  for (const select of document.querySelectorAll(".source-select")) {
    const index = state.run.index && select.id === "search-in" ? [state.run.index] : [];  // it can only be searched
    select.replaceChildren(...[...index, snapshot, ...state.run.sources].map(source =>
      element("option", {value: source.name}, `${source.title} (${formatCount(source.count)})`)));
  }
  $("search-epoch").disabled = Boolean(state.run.index);
}

/* While it trains: the newest metrics, and a button that stops it */

const LIVE_METRICS = [["loss", "Loss"], ["20-NN", "20-NN, %"], ["1-NN", "1-NN, %"], ["effective_rank", "Effective rank"]];

function showLive() {
  const {curves, stop, training} = state.run;
  $("live").hidden = !training;
  $("stop-training").disabled = stop === "requested";
  const saved = Number.isInteger(stop) ? `Stopped and saved at step ${formatCount(stop)}; the same command continues.` : "";
  setBanner("stop", stop === "requested" ? "Stopping: the training finishes its step and saves." : saved, "note");
  $("live-metrics").replaceChildren(...LIVE_METRICS.filter(([name]) => curves[name] && curves[name].y.length).map(([name, title]) => {
    const {x, y} = curves[name];
    const newest = element("b", {}, +y[y.length - 1].toPrecision(3));
    return element("div", {className: "live-metric"}, element("span", {}, title), newest, sparkline(x, y));
  }));
}

function sparkline(x, y) {
  const SVG = "http://www.w3.org/2000/svg";
  const [low, high] = [Math.min(...y), Math.max(...y)];
  const width = x[x.length - 1] - x[0] || 1;
  const points = x.map((value, i) => `${100 * (value - x[0]) / width},${22 - 20 * (y[i] - low) / (high - low || 1)}`);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return svg;
}

$("stop-training").addEventListener("click", () => {
  $("confirm-stop").returnValue = "";
  $("confirm-stop").showModal();
  $("keep-training").focus();
});
$("confirm-stop").addEventListener("close", () => {
  if ($("confirm-stop").returnValue !== "stop") return;
  $("stop-training").disabled = true;
  request("/api/stop-training", {method: "POST"}).catch(showError);
});

/* Curves */

const CHARTS = [  // minRange: the smallest range of the axis, so that a small change looks small
  {title: "Loss", metrics: ["loss"]},
  {title: "Agreement of the views", metrics: ["agreement"], minRange: 0.1},
  {title: "Purity of the neighbors", metrics: ["purity", "purity_weak", "purity_strong"], minRange: 0.1},
  {title: "20-NN on validation images, %", metrics: ["20-NN"], minRange: 10},
  {title: "1-NN on validation images, %", metrics: ["1-NN"], minRange: 10},
  {title: "Effective rank", metrics: ["effective_rank", "feature_rank"]},
  {title: "RankMe", metrics: ["rankme", "feature_rankme"]},
  {title: "Spread", metrics: ["spread"], minRange: 0.1},
  {title: "Neighbors kept since the snapshot before", metrics: ["neighbors_kept"], minRange: 0.1},
  {title: "Learning rate", metrics: ["lr"]},
  {title: "Images per second", metrics: ["images_per_second"]},
];
const charts = new Map();

function chartsOf(curves) {  // the known ones, then one for each other metric that varies
  const known = new Set(CHARTS.flatMap(chart => chart.metrics));
  const others = Object.keys(curves).filter(name => !known.has(name) && new Set(curves[name].y).size > 1);
  return [...CHARTS, ...others.map(name => ({title: name.replaceAll("_", " "), metrics: [name]}))];
}

function showCurves() {
  const {curves, warnings, baselines, rank_bands} = state.run;
  const marks = warnings.filter(warning => warning.kind === "collapse").map(warning => ({x: warning.epoch, text: "collapse"}));
  for (const {title, metrics, minRange} of chartsOf(curves)) {
    const series = metrics.filter(name => curves[name]).map((name, i) => ({name: name.replaceAll("_", " "), ...curves[name], color: `var(--c${i})`}));
    if (!series.length) continue;
    const lines = baselines[metrics[0]] || [];
    const bands = metrics[0] === "effective_rank" ? rank_bands : [];
    if (charts.has(title)) charts.get(title).update({series, marks, lines, bands});
    else charts.set(title, meanshiftCurves($("charts"), {title, series, marks, lines, bands, minRange}));
  }
  $("no-curves").hidden = charts.size > 0;
  $("settings").replaceChildren(...state.run.settings.map(([name, value]) =>
    element("tr", {}, element("th", {scope: "row"}, name), element("td", {}, value))));
  const messages = warnings.map(warning => `epoch ${warning.epoch.toFixed(1)}: ${warning.message}`);
  $("warnings").replaceChildren(...(messages.length ? messages : ["none"]).map(message => element("li", {}, message)));
}

addEventListener("DOMContentLoaded", () => {  // when the other scripts are there
  showTab(location.hash.slice(1));
  addEventListener("hashchange", () => showTab(location.hash.slice(1)));
  followRun();
});
