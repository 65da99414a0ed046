/* The live page: asks the server on this machine, never another one. */
"use strict";

const $ = id => document.getElementById(id);
const UPLOAD = 20 * 2 ** 20;
const state = {
  run: null, probe: null, map: null, epoch: null, follow: true, point: null, chosen: null, colours: null, only: null,
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

function picture(one, side, alt) {
  const node = h("img", {alt, loading: "lazy", decoding: "async"});
  node.onload = () => node.classList.toggle("exact", node.naturalWidth <= 64 && node.naturalHeight <= 64);
  node.onerror = () => { node.classList.add("gone"); node.title = "cannot be read"; };
  if (state.run.lacking) node.classList.add("gone"); else node.src = source(one, side);
  return node;
}

const far = value => value === null ? "?" : value < 1e-6 ? "0" : value < 0.001 ? value.toExponential(1) : value.toFixed(value < 0.1 ? 4 : 3);
const called = one => one.label ? `${one.title}, ${one.label}` : one.title;
const span = seconds => seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;

/* Tabs */

const tabs = [...document.querySelectorAll("[role=tab]")];
function open(name) {
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
  tab.addEventListener("click", () => open(tab.id.slice(4)));
  tab.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (step) { const next = tabs[(i + step + tabs.length) % tabs.length]; next.focus(); open(next.id.slice(4)); }
  });
});

/* The run, followed */

async function follow() {
  let pause = document.hidden ? 10000 : 2000;
  try {
    const told = await ask(`/api/run?since=${state.run ? state.run.version : ""}`);
    banner("stopped", "");
    if (told) {
      const before = state.run;
      state.run = told;
      showRun();
      if (!before || before.epochs.join() !== told.epochs.join()) await newEpochs();
    }
  } catch (error) {
    banner("stopped", error instanceof TypeError ? "The server does not answer; this page shows what it said last." : error.message, "note");
  }
  setTimeout(follow, pause);
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
    `${run.training ? "training" : "not training now"} · epoch ${done.toFixed(1)} of ${run.total}` +
    (run.training && run.left ? ` · about ${span(run.left)} left` : "");
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
  const epoch = state.follow || !epochs.includes(state.epoch) ? latest : state.epoch;
  $("epoch").max = epochs.length - 1;
  for (const select of document.querySelectorAll(".when")) {
    select.replaceChildren(...epochs.map(one => h("option", {value: one}, one)));
  }
  const moved = epoch !== state.epoch;
  setEpoch(epoch);
  if (moved || state.colours === null) await recolour();
  await drawMap();
  if (state.chosen !== null) pick(state.chosen);
}

function offer() {
  const choices = [["cluster", "cluster"]];
  if (state.run.labelled) choices.unshift(["label", "label"], ["purity", "purity of the 10 nearest"]);
  for (const column of state.run.columns) choices.push([`=${column}`, column]);
  $("colour").replaceChildren(...choices.map(([value, text]) => h("option", {value}, text)));
  const parts = [{name: "probe", title: "the map's pictures", count: state.probe.indices.length}, ...state.run.parts];
  for (const select of document.querySelectorAll(".where")) {
    select.replaceChildren(...parts.map(one => h("option", {value: one.name}, `${one.title} (${one.count.toLocaleString("en")})`)));
  }
}

/* The map */

const rowOf = i => state.map.rows[i];
const wordOf = row => {
  const {titles, labels, classes} = state.probe;
  return labels && labels[row] >= 0 ? `${titles[row]}, ${classes[labels[row]]}` : titles[row];
};
const chart = meanshiftMap($("canvas"), {
  describe: () => "",
  onHover: i => {
    const box = $("hover");
    box.hidden = i === null;
    if (i === null) return;
    const row = rowOf(i), [x, y] = chart.where(i), wide = $("canvas").clientWidth;
    box.replaceChildren(picture(trained(state.probe.indices[row]), 128, ""), wordOf(row));
    box.style.left = `${x > wide / 2 ? x - 145 : x + 16}px`;
    box.style.top = `${Math.max(0, Math.min(y - 60, wide - 170))}px`;
  },
  onPick: i => pick(rowOf(i)),
});

async function drawMap() {
  const told = await ask(`/api/map?have=${state.map ? state.map.version : ""}`);
  const first = !state.map;
  if (told.points) { state.map = told; place(!first); paint(); }
  $("drawn").textContent = (told.doing ? `${state.map.kind}; t-SNE is being drawn, ${told.doing.done} of ${told.doing.total}` : state.map.kind) +
    (told.note ? ` (${told.note})` : "") + (state.map.points[state.epoch] ? "" : `; epoch ${state.epoch} follows`);
  clearTimeout(drawMap.again);
  if (told.doing) drawMap.again = setTimeout(() => drawMap().catch(() => {}), 1000);
}

function place(animate) {
  if (!state.map) return;
  const drawn = Object.keys(state.map.points).map(Number), before = drawn.filter(one => one <= state.epoch);
  const epoch = before.length ? Math.max(...before) : Math.min(...drawn);
  chart.move(state.map.points[epoch], {animate});
  const at = state.chosen === null ? -1 : state.map.rows.indexOf(state.chosen);
  chart.select(at < 0 ? null : at);
}

function setEpoch(epoch) {
  state.epoch = epoch;
  const epochs = state.run.epochs, at = epochs.indexOf(epoch);
  state.follow = at === epochs.length - 1;
  $("epoch").value = at;
  $("epoch").setAttribute("aria-valuetext", `epoch ${epoch}`);
  $("epoch-text").textContent = `epoch ${epoch} of ${state.run.total}`;
  for (const select of document.querySelectorAll(".when")) select.value = epoch;
  place(true);
  for (const strip of document.querySelectorAll(".strip")) strip.classList.toggle("now", +strip.dataset.epoch === epoch);
}

function chooseEpoch(epoch) {
  if (epoch === state.epoch) return;
  setEpoch(epoch);
  if ($("colour").value === "purity") recolour();
  if (state.query) search();
  if (state.shown.length) { if ($("clean").hidden) state.shown = []; else clean(); }
}
$("epoch").addEventListener("input", () => chooseEpoch(state.run.epochs[+$("epoch").value]));
for (const select of document.querySelectorAll(".when")) select.addEventListener("change", () => chooseEpoch(+select.value));
$("whole").addEventListener("click", () => chart.reset());
$("play").addEventListener("click", () => {
  if (play.timer) return play.stop();
  const epochs = state.run.epochs;
  let at = state.epoch === epochs[epochs.length - 1] ? -1 : epochs.indexOf(state.epoch);
  const step = () => { at += 1; chooseEpoch(state.run.epochs[at]); if (at + 1 >= state.run.epochs.length) play.stop(); };
  $("play").textContent = "❚❚";
  $("play").setAttribute("aria-label", "Pause");
  play.timer = setInterval(step, 1100);
  step();
});
const play = {timer: 0, stop() {
  clearInterval(play.timer);
  play.timer = 0;
  $("play").textContent = "▶";
  $("play").setAttribute("aria-label", "Play through the epochs");
}};

/* Colours */

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const STOPS = ["#5b3f99", "#3f6bb0", "#25929a", "#4fb567", "#d8b72e"];
const hex = colour => [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
const mix = (a, b, share) => { const [x, y] = [hex(a), hex(b)]; return "#" + x.map((v, i) => Math.round(v + (y[i] - v) * share).toString(16).padStart(2, "0")).join(""); };
const onScale = share => { const at = Math.max(0, Math.min(0.9999, share)) * (STOPS.length - 1), i = Math.floor(at); return mix(STOPS[i], STOPS[i + 1], Math.round((at - i) * 8) / 8); };
const ofCategory = i => i < 10 ? css(`--c${i}`) : i < 20 ? mix(css(`--c${i % 10}`), css("--ink"), 0.45) : css("--quiet");

async function recolour() {
  const by = $("colour").value, told = await ask(`/api/colours?by=${encodeURIComponent(by)}&epoch=${state.epoch}`);
  if (!state.colours || state.colours.by !== by) state.only = null;
  state.colours = {...told, by};
  showLegend();
  paint();
}

function paint() {
  if (!state.map || !state.colours) return;
  const {kind, values, low, high} = state.colours, none = css("--rule"), width = high - low || 1, known = [];
  chart.paint(state.map.rows.map(row => {
    const value = values[row];
    if (value === null) return none;
    if (kind === "scale") return onScale((value - low) / width);
    if (state.only !== null && value !== state.only) return none;
    return known[value] = known[value] || ofCategory(value);
  }));
}

function showLegend() {
  const told = state.colours, missing = told.values.filter(value => value === null).length;
  if (told.kind === "scale") {
    const bar = h("i"), short = value => +value.toPrecision(4);
    bar.style.background = `linear-gradient(90deg, ${STOPS.join()})`;
    $("legend").replaceChildren(h("div", {className: "scale"}, `${short(told.low)}`, bar, `${short(told.high)}`),
      missing ? h("small", {}, `grey: ${missing} without a value`) : "");
    return;
  }
  const entries = told.names.map((name, i) => {
    const dot = h("i"), pressed = state.only === i;
    dot.style.background = ofCategory(i);
    const button = h("button", {title: "Show only these"}, dot, `${name} `, h("small", {}, told.sizes[i]));
    button.setAttribute("aria-pressed", pressed);
    button.onclick = () => { state.only = pressed ? null : i; showLegend(); paint(); };
    return h("li", {}, button);
  });
  $("legend").replaceChildren(h("ul", {className: "legend"}, ...entries), missing ? h("small", {}, `grey: ${missing} without a value`) : "");
}
$("colour").addEventListener("change", () => recolour());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (state.colours) { showLegend(); paint(); } });

/* A picture and its neighbours */

async function pick(row) {
  state.chosen = row;
  const at = state.map ? state.map.rows.indexOf(row) : -1;
  chart.select(at < 0 ? null : at);
  const told = await ask(`/api/point/${row}`);
  if (state.chosen !== row) return;
  state.point = told;
  $("use").disabled = Boolean(state.run.lacking);
  const facts = h("dl");
  if (told.label) facts.append(h("dt", {}, "label"), h("dd", {}, told.label));
  for (const [name, value] of Object.entries(told.metadata)) if (value) facts.append(h("dt", {}, name), h("dd", {}, value));
  const enlarge = h("button", {onclick: () => enlargeAll([told])}, "Enlarge");
  const seek = h("button", {onclick: () => { open("search"); useSelected(); }, disabled: Boolean(state.run.lacking)}, "Search with it");
  const strips = told.moments.map((moment, which) => {
    const stayed = moment.stayed.filter(Boolean).length, same = moment.same ? moment.same.filter(Boolean).length : null;
    const words = [same === null ? "" : `${same} same label`, which ? `${stayed} stayed` : ""].filter(Boolean).join(" · ");
    const strip = h("div", {className: "strip"}, h("header", {},
      h("button", {onclick: () => chooseEpoch(moment.epoch), title: "Show the map after this epoch"}, `epoch ${moment.epoch}`), words),
      h("ol", {}, ...moment.rows.map((other, i) => {
        const said = `${wordOf(other)}, distance ${far(moment.distances[i])}${moment.stayed[i] ? ", stayed" : ""}`;
        const button = h("button", {className: "near", title: said, onclick: () => pick(other)},
          picture(trained(state.probe.indices[other]), 64, said));
        button.classList.toggle("same", Boolean(moment.same && moment.same[i]));
        button.classList.toggle("stayed", moment.stayed[i]);
        return h("li", {}, button);
      })));
    strip.dataset.epoch = moment.epoch;
    strip.classList.toggle("now", moment.epoch === state.epoch);
    return strip;
  });
  $("detail").replaceChildren(
    h("div", {className: "large"}, picture(told, 256, called(told)), h("div", {}, h("h2", {}, told.title), facts, h("p", {className: "controls"}, enlarge, seek))),
    h("div", {className: "strips"}, ...strips),
    h("p", {className: "quiet hint"}, ...(told.label ? [h("span", {className: "line"}), " same label  "] : []),
      h("span", {className: "dot"}), " was a neighbour at the snapshot before"));
}

function enlargeAll(pictures, words) {
  const dialog = $("large");
  const close = h("button", {onclick: () => dialog.close(), autofocus: true}, "Close");
  const shown = pictures.map(one => {
    const tools = [];
    if (one.row !== null && one.row !== undefined) tools.push(h("button", {onclick: () => { dialog.close(); open("map"); pick(one.row); }}, "Show on the map"));
    tools.push(h("button", {onclick: () => { dialog.close(); open("search"); searchWith(one); }, disabled: Boolean(state.run.lacking)}, "Search with it"));
    return h("figure", {}, picture(one, 768, called(one)), h("figcaption", {}, called(one), h("div", {className: "controls"}, ...tools)));
  });
  dialog.replaceChildren(h("div", {className: "both"}, ...shown), words ? h("p", {className: "quiet"}, words) : "", h("p", {}, close));
  dialog.showModal();
}
$("large").addEventListener("click", event => { if (event.target === $("large")) $("large").close(); });

/* Work that takes long: asked for again until it is there */

async function patiently(where, path, wanted) {
  for (;;) {
    const told = await ask(path);
    if (!wanted()) return null;
    if (!told.pending) { where.textContent = ""; return told; }
    const bar = h("progress", told.total ? {max: told.total, value: told.done} : {});
    const stop = h("button", {onclick: () => { where.textContent = "Stopped."; patiently.stopped = performance.now(); ask("/api/stop", {method: "POST"}); }}, "Stop");
    const amount = told.total ? `, ${told.done.toLocaleString("en")} of ${told.total.toLocaleString("en")}` : "";
    const asked = performance.now();
    where.replaceChildren(h("div", {className: "doing"}, `${told.pending}${amount}`, bar, stop));
    await new Promise(resolve => setTimeout(resolve, 500));
    if (patiently.stopped > asked || !wanted()) return null;
  }
}

/* Search */

function useSelected() { if (state.point) searchWith(state.point); }

function searchWith(one) {
  state.query = {of: one.part, index: one.index};
  $("query").replaceChildren(h("div", {}, picture(one, 256, called(one)), h("p", {}, called(one))));
  search();
}

function searchFile(file) {
  if (!file) return;
  if (file.size > UPLOAD) { wrong("search-status", `${file.name} is larger than 20 MB; make it smaller`); return; }
  const seen = h("img", {alt: `The picture to search with, ${file.name}`, src: URL.createObjectURL(file)});
  seen.onload = () => { seen.classList.toggle("exact", seen.naturalWidth <= 64); URL.revokeObjectURL(seen.src); };
  seen.onerror = () => seen.remove();  // the server may still know how to read it
  state.query = {file};
  $("query").replaceChildren(h("div", {}, seen, h("p", {}, file.name)));
  search();
}

function wrong(id, text) { $(id).replaceChildren(h("span", {className: "wrong"}, text)); }

async function search() {
  const query = state.query, where = $("search-in").value, epoch = state.epoch, turn = search.turn = (search.turn || 0) + 1;
  if (epoch === null) return wrong("search-status", "There is no snapshot yet to search with.");
  const wanted = () => turn === search.turn;
  $("found").replaceChildren();
  try {
    const ready = await patiently($("search-status"), `/api/ready?in=${where}&epoch=${epoch}`, wanted);
    if (!ready) return;
    const of = query.file ? "" : `&of=${query.of}&index=${query.index}`;
    const told = await ask(`/api/search?in=${where}&epoch=${epoch}${of}`, {method: "POST", body: query.file || ""});
    if (!wanted()) return;
    $("search-status").textContent = `${told.found.length} nearest after epoch ${epoch}, nearest first`;
    $("found").replaceChildren(...told.found.map(one => h("button", {className: "card", onclick: () => enlargeAll([one], `distance ${far(one.distance)}`)},
      picture(one, 128, called(one)), h("b", {title: one.title}, one.title),
      h("span", {className: "quiet"}, h("span", {}, one.label || ""), h("span", {}, far(one.distance))))));
  } catch (error) { if (wanted()) wrong("search-status", error.message); }
}

$("file").addEventListener("change", () => { searchFile($("file").files[0]); $("file").value = ""; });
$("use").addEventListener("click", useSelected);
$("search-in").addEventListener("change", () => { if (state.query) search(); });
addEventListener("dragover", event => { event.preventDefault(); $("drop").classList.add("over"); });
addEventListener("dragleave", () => $("drop").classList.remove("over"));
addEventListener("drop", event => {
  event.preventDefault();
  $("drop").classList.remove("over");
  if (event.dataTransfer.files.length) { open("search"); searchFile(event.dataTransfer.files[0]); }
});
addEventListener("paste", event => {
  const file = [...event.clipboardData.files].find(one => one.type.startsWith("image/"));
  if (file) { open("search"); searchFile(file); }
});

/* Clean */

const ABOUT = {
  outliers: "Farthest from their ten nearest neighbours first: often broken, mislabelled or rare pictures. The score is the mean distance to them.",
  duplicates: "Nearest pairs first: often copies. Of each pair the later picture is the one that is selected. The score is the distance.",
};
const keyOf = item => `${state.order} ${item.part} ${item.index} ${item.nearest.index}`;

async function clean(more) {
  const {order, epoch} = state, where = $("clean-in").value, turn = clean.turn = (clean.turn || 0) + 1;
  const wanted = () => turn === clean.turn, start = more ? state.shown.length : 0;
  for (const name of ["outliers", "duplicates"]) $(name).setAttribute("aria-pressed", name === order);
  $("clean-about").textContent = ABOUT[order];
  if (epoch === null) return wrong("clean-status", "There is no snapshot yet.");
  if (!more) { state.shown = []; $("cards").replaceChildren(); $("more").hidden = true; }
  try {
    const told = await patiently($("clean-status"), `/api/clean?in=${where}&epoch=${epoch}&order=${order}&start=${start}`, wanted);
    if (!told) return;
    const at = state.shown.length;
    state.shown = state.shown.concat(told.items);
    state.total = told.total;
    $("cards").classList.toggle("pairs", order === "duplicates");
    $("cards").append(...told.items.map((item, i) => card(item, at + i)));
    $("clean-status").textContent = `${state.shown.length.toLocaleString("en")} of ${told.total.toLocaleString("en")} ${order === "outliers" ? "pictures" : "pairs"}`;
    $("more").hidden = state.shown.length >= told.total;
  } catch (error) { if (wanted()) wrong("clean-status", error.message); }
}

function card(item, at) {
  const pair = state.order === "duplicates", both = [item, item.nearest];
  const box = h("input", {type: "checkbox", checked: state.selected.has(keyOf(item))});
  box.setAttribute("aria-label", `${called(item)}, score ${far(item.score)}, nearest ${called(item.nearest)}`);
  box.dataset.at = at;
  const look = h("button", {className: "look", title: "Enlarge, beside its nearest"}, "⤢");
  look.setAttribute("aria-label", `Enlarge ${item.title} beside its nearest`);
  look.onclick = event => { event.preventDefault(); enlargeAll(both, `distance ${far(item.distance)}`); };
  const seen = pair ? h("div", {className: "two"}, picture(item, 128, ""), picture(item.nearest, 128, "")) : picture(item, 128, "");
  const title = pair ? `${item.title} — ${item.nearest.title}` : item.title;
  const labels = pair && item.label !== item.nearest.label ? `${item.label || "?"} / ${item.nearest.label || "?"}` : item.label || "";
  return h("label", {className: "card"}, seen, box, look, h("b", {title}, title),
    h("span", {className: "quiet"}, h("span", {}, labels), h("span", {}, far(item.score))));
}

function choose(from, to, on) {
  for (let at = Math.min(from, to); at <= Math.max(from, to); at++) {
    const item = state.shown[at];
    $("cards").children[at].querySelector("input").checked = on;
    if (on) state.selected.set(keyOf(item), {...item, kind: state.order.slice(0, -1)}); else state.selected.delete(keyOf(item));
  }
  counted();
}
function counted() {
  $("export").textContent = `Export selection (${state.selected.size}) as CSV`;
  $("export").disabled = !state.selected.size;
}
let shift = false;
$("cards").addEventListener("click", event => { shift = event.shiftKey; if (shift && event.target.tagName !== "INPUT") getSelection().removeAllRanges(); }, true);
$("cards").addEventListener("change", event => {
  const at = +event.target.dataset.at;
  choose(shift ? Math.min(state.last, state.shown.length - 1) : at, at, event.target.checked);
  state.last = at;
});
$("cards").addEventListener("keydown", event => {
  if (event.target.tagName !== "INPUT") return;
  const boxes = [...$("cards").querySelectorAll("input")], at = +event.target.dataset.at;
  const wide = getComputedStyle($("cards")).gridTemplateColumns.split(" ").length;
  const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide}[event.key];
  if (event.key === "Enter") { event.preventDefault(); event.target.parentElement.querySelector(".look").click(); }
  if (!step) return;
  event.preventDefault();
  const next = Math.max(0, Math.min(boxes.length - 1, at + step));
  if (event.shiftKey) choose(at, next, true);
  state.last = next;
  boxes[next].focus();
});
for (const name of ["outliers", "duplicates"]) $(name).addEventListener("click", () => { state.order = name; clean(); });
$("clean-in").addEventListener("change", () => clean());
$("more").addEventListener("click", () => clean(true));
$("all").addEventListener("click", () => { if (state.shown.length) choose(0, state.shown.length - 1, true); });
$("none").addEventListener("click", () => {
  state.selected.clear();
  for (const box of $("cards").querySelectorAll("input")) box.checked = false;
  counted();
});

/* A cell that begins like a formula would be run by a spreadsheet: an apostrophe keeps it text. */
const cell = value => {
  const text = value === null || value === undefined ? "" : String(value);
  return `"${(/^[=+\-@\t\r]/.test(text) ? "'" + text : text).replaceAll('"', '""')}"`;
};
$("export").addEventListener("click", () => {
  const rows = [...state.selected.values()].map(one => [one.title, one.label, one.kind, one.score, one.nearest.title, one.part === "held" ? "held-out" : "training"]);
  const text = [["file", "label", "kind", "score", "nearest", "part"], ...rows].map(row => row.map(cell).join(",")).join("\r\n") + "\r\n";
  const link = h("a", {href: URL.createObjectURL(new Blob([text], {type: "text/csv"})), download: `${state.run.name.replace(/[^\w.-]+/g, "-")}-selection.csv`});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
});

/* Curves */

const CHARTS = [
  ["Loss", ["loss"]], ["Agreement of the views", ["agreement"]], ["Purity of the neighbours", ["purity", "purity_weak", "purity_strong"]],
  ["k-NN on held-out pictures, %", ["1-NN", "20-NN"]], ["Effective rank", ["effective_rank", "feature_rank"]], ["Spread", ["spread"]],
  ["Neighbours kept since the snapshot before", ["neighbours_kept"]], ["Purity counting the other view", ["purity_with_self"]], ["Learning rate", ["lr"]], ["Pictures a second", ["pictures_per_second"]],
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
      return {name: name.replaceAll("_", " "), x: known.map(at => curves[name].x[at]), y: known.map(at => curves[name].y[at]), colour: `var(--c${i})`};
    }).filter(one => one.x.length);
    if (!series.length) continue;
    if (drawn.has(title)) drawn.get(title).update({series, marks}); else drawn.set(title, meanshiftCurves($("charts"), {title, series, marks}));
  }
  $("no-curves").hidden = drawn.size > 0;
  $("settings").replaceChildren(...state.run.settings.map(([name, value]) => h("tr", {}, h("th", {scope: "row"}, name), h("td", {}, value))));
  $("warnings").replaceChildren(...(warnings.length ? warnings.map(one => h("li", {}, `epoch ${one.epoch.toFixed(1)}: ${one.message}`)) : [h("li", {}, "none")]));
}

open(location.hash.slice(1));
addEventListener("hashchange", () => open(location.hash.slice(1)));
follow();
