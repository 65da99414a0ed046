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
  selectedRow: null,
  selectedImage: null,  // answer of /api/point
  colors: null,  // answer of /api/colors
  onlyCategory: null,
  query: null,  // {file} or {source, index}
  order: "outliers",
  items: [],  // the list that is being cleaned
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
  for (const select of document.querySelectorAll(".epoch-select")) {
    select.replaceChildren(...epochs.map(epoch => element("option", {value: epoch}, epoch)));
  }
  const hasResults = state.query || state.items.length;  // they stay those of their epoch
  const stays = epochs.includes(state.epoch) && (!state.follow || hasResults);
  const epoch = stays ? state.epoch : epochs[epochs.length - 1];
  const moved = epoch !== state.epoch;
  const following = state.follow;
  setEpoch(epoch);
  state.follow = following;  // results that keep their epoch do not end the following
  if (moved || state.colors === null) await loadColors();
  await loadMap();
  if (state.selectedRow !== null) await selectRow(state.selectedRow);
  if (!$("clean").hidden && !state.items.length) loadRanking();
}

function fillSelects() {
  const colorings = [["cluster", "cluster"]];
  if (state.run.labeled) colorings.unshift(["label", "label"], ["purity", "purity of the 10 nearest"]);
  for (const column of state.run.columns) colorings.push([`=${column}`, column]);
  $("color").replaceChildren(...colorings.map(([value, text]) => element("option", {value}, text)));
  const snapshot = {name: "snapshot", title: "the map's images", count: state.images.indices.length};
  for (const select of document.querySelectorAll(".source-select")) {
    select.replaceChildren(...[snapshot, ...state.run.sources].map(source =>
      element("option", {value: source.name}, `${source.title} (${formatCount(source.count)})`)));
  }
}

/* Curves */

const CHARTS = [  // minRange: the smallest range of the axis, so that a small change looks small
  {title: "Loss", metrics: ["loss"]},
  {title: "Agreement of the views", metrics: ["agreement"], minRange: 0.1},
  {title: "Purity of the neighbors", metrics: ["purity", "purity_weak", "purity_strong"], minRange: 0.1},
  {title: "k-NN on validation images, %", metrics: ["1-NN", "20-NN"], minRange: 10},
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
  const {curves, warnings} = state.run;
  const marks = warnings.filter(warning => warning.kind === "collapse").map(warning => ({x: warning.epoch, text: "collapse"}));
  for (const {title, metrics, minRange} of chartsOf(curves)) {
    const series = metrics.filter(name => curves[name]).map((name, i) => ({name: name.replaceAll("_", " "), ...curves[name], color: `var(--c${i})`}));
    if (!series.length) continue;
    if (charts.has(title)) charts.get(title).update({series, marks});
    else charts.set(title, meanshiftCurves($("charts"), {title, series, marks, minRange}));
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
