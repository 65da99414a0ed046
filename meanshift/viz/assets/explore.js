/* The live page: asks the server on this machine, never another one. */
"use strict";

const $ = id => document.getElementById(id);
const UPLOAD = 20 * 2 ** 20;
const NOTHING = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==";  // shows the gray behind it
const state = {
  run: null, stale: false, probe: null, map: null, epoch: null, follow: true, point: null, chosen: null, colors: null, only: null,
  query: null, order: "outliers", shown: [], total: 0, selected: new Map(), last: 0,
};

function h(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties || {})) {
    if (key in node) node[key] = value; else node.setAttribute(key, value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

async function ask(path, options) {
  const response = await fetch(path, options);
  if (response.status === 204) return null;
  const told = (response.headers.get("content-type") || "").includes("json") ? await response.json() : {error: await response.text()};
  if (!response.ok) throw new Error(told.error || `the server answered ${response.status}`);
  return told;
}

const trained = index => ({part: "train", index});
const source = (one, side) => `/thumb/${one.part}/${one.index}?side=${side}&v=${state.run.mark}`;

function image(one, side, alt) {
  const node = h("img", {alt, loading: "lazy", decoding: "async"});
  node.onload = () => node.classList.toggle("exact", node.naturalWidth <= 64 && node.naturalHeight <= 64);
  node.onerror = () => { node.onerror = null; node.src = NOTHING; node.title = "cannot be read"; };
  node.src = state.run.lacking ? NOTHING : source(one, side);
  return node;
}

const far = value => value === null ? "?" : value < 1e-6 ? "0" : value < 0.001 ? value.toExponential(1) : value.toFixed(value < 0.1 ? 4 : 3);
const called = one => one.label ? `${one.title}, ${one.label}` : one.title;
const span = seconds => seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;

/* Tabs */

const tabs = [...document.querySelectorAll("[role=tab]")];
function show(name) {
  const known = tabs.some(tab => tab.id === `tab-${name}`) ? name : "map";
  for (const tab of tabs) {
    const on = tab.id === `tab-${known}`;
    tab.setAttribute("aria-selected", on);
    tab.tabIndex = on ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !on;
  }
  history.replaceState(null, "", `#${known}`);
  if (known === "clean" && state.epoch !== null && !state.shown.length) clean();
}
tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => show(tab.id.slice(4)));
  tab.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (step) { const next = tabs[(i + step + tabs.length) % tabs.length]; next.focus(); show(next.id.slice(4)); }
  });
});

/* The run, followed */

async function follow() {
  try {
    const told = await ask(`/api/run?since=${state.run ? state.run.version : ""}`);
    if (told) {
      const before = state.run;
      if (before && (before.name !== told.name || before.mark !== told.mark)) return location.reload();  // another run is served here
      state.run = told;
      showRun();
      state.stale = state.stale || !before || before.epochs.join() !== told.epochs.join();
    }
    if (state.stale) await newEpochs();
    state.stale = false;
    banner("stopped", "");
  } catch (error) { complain(error); }
  setTimeout(follow, document.hidden ? 10000 : 2000);
}

function complain(error) {
  if (error instanceof TypeError) return banner("stopped", "The server does not answer; this page shows what it said last.", "note");
  banner("failed", error.message, "note");
  clearTimeout(complain.timer);
  complain.timer = setTimeout(() => banner("failed", ""), 15000);
}

function banner(key, text, kind) {
  const id = `banner-${key}`, old = $(id);
  if (old && old.textContent === text) return;
  if (old) old.remove();
  if (text) $("banners").append(h("p", {id, className: kind || "alarm"}, text));
}

function showRun() {
  const run = state.run, done = Math.min(run.done, run.total);
  document.title = `${run.name} · meanshift`;
  $("name").textContent = run.name;
  $("bar").value = done / run.total;
  const ended = done >= run.total;
  $("progress").textContent = ended ? `finished, ${run.total} epochs` :
    `${run.training ? "training" : `no news for ${run.quiet === null ? "ever" : span(run.quiet)}: stopped? The command that began it continues it`} · epoch ${done.toFixed(1)} of ${run.total}` +
    (run.training && run.left ? ` · about ${span(run.left)} left` : "");
  const words = ended ? "finished" : run.training ? "training" : "not training now";
  if ($("now").textContent !== words) $("now").textContent = words;  // said once, not at every look
  const alarm = run.warnings.filter(warning => warning.kind === "collapse").pop();
  banner("collapse", alarm ? `After ${alarm.epoch.toFixed(1)} epochs: ${alarm.message}` : "");
  banner("lacking", run.lacking, "note");
  $("waiting").textContent = run.training || !ended && !run.epochs.length ? "Waiting for the first snapshot. The curves are already there." :
    "This run keeps no snapshots; they are taken while training, with --train.snapshots 6.";
  $("waiting").hidden = run.epochs.length > 0;
  $("mapped").hidden = !run.epochs.length;
  showCurves();
}

async function newEpochs() {
  const epochs = state.run.epochs;
  if (!epochs.length) return;
  if (!state.probe) {
    state.probe = await ask("/api/probe");
    offer();
  }
  const latest = epochs[epochs.length - 1];
  const asked = state.query || state.shown.length;  // results stay those of the epoch they were asked for
  const epoch = state.follow && !asked || !epochs.includes(state.epoch) ? latest : state.epoch;
  $("epoch").max = epochs.length - 1;
  for (const select of document.querySelectorAll(".when")) {
    select.replaceChildren(...epochs.map(one => h("option", {value: one}, one)));
  }
  const moved = epoch !== state.epoch;
  const following = state.follow;
  setEpoch(epoch);
  state.follow = following;  // a list that holds its epoch does not end the following
  if (moved || state.colors === null) await recolor();
  await drawMap();
  if (state.chosen !== null) await pick(state.chosen);
  if (!$("clean").hidden && !state.shown.length) clean();
}

function offer() {
  const choices = [["cluster", "cluster"]];
  if (state.run.labeled) choices.unshift(["label", "label"], ["purity", "purity of the 10 nearest"]);
  for (const column of state.run.columns) choices.push([`=${column}`, column]);
  $("color").replaceChildren(...choices.map(([value, text]) => h("option", {value}, text)));
  const parts = [{name: "probe", title: "the map's images", count: state.probe.indices.length}, ...state.run.parts];
  for (const select of document.querySelectorAll(".where")) {
    select.replaceChildren(...parts.map(one => h("option", {value: one.name}, `${one.title} (${one.count.toLocaleString("en")})`)));
  }
}

/* Curves */

const CHARTS = [
  ["Loss", ["loss"]], ["Agreement of the views", ["agreement"]], ["Purity of the neighbors", ["purity", "purity_weak", "purity_strong"]],
  ["k-NN on held-out images, %", ["1-NN", "20-NN"]], ["Effective rank", ["effective_rank", "feature_rank"]], ["Spread", ["spread"]],
  ["Neighbors kept since the snapshot before", ["neighbors_kept"]], ["Learning rate", ["lr"]], ["Images a second", ["images_per_second"]],
];
const drawn = new Map();

function showCurves() {
  const {curves, warnings} = state.run, left = new Set(Object.keys(curves));
  const marks = warnings.filter(one => one.kind === "collapse").map(one => ({x: one.epoch, text: "collapse"}));
  for (const names of CHARTS.map(one => one[1])) names.forEach(name => left.delete(name));
  const varied = [...left].filter(name => new Set(curves[name].y).size > 1);
  for (const [title, names] of [...CHARTS, ...varied.map(name => [name.replaceAll("_", " "), [name]])]) {
    const series = names.filter(name => curves[name]).map((name, i) => {
      const known = curves[name].y.map((value, at) => value === null ? -1 : at).filter(at => at >= 0);
      return {name: name.replaceAll("_", " "), x: known.map(at => curves[name].x[at]), y: known.map(at => curves[name].y[at]), color: `var(--c${i})`};
    }).filter(one => one.x.length);
    if (!series.length) continue;
    if (drawn.has(title)) drawn.get(title).update({series, marks}); else drawn.set(title, meanshiftCurves($("charts"), {title, series, marks}));
  }
  $("no-curves").hidden = drawn.size > 0;
  $("settings").replaceChildren(...state.run.settings.map(([name, value]) => h("tr", {}, h("th", {scope: "row"}, name), h("td", {}, value))));
  $("warnings").replaceChildren(...(warnings.length ? warnings.map(one => h("li", {}, `epoch ${one.epoch.toFixed(1)}: ${one.message}`)) : [h("li", {}, "none")]));
}

addEventListener("DOMContentLoaded", () => {  // when the other scripts are there
  show(location.hash.slice(1));
  addEventListener("hashchange", () => show(location.hash.slice(1)));
  follow();
});
