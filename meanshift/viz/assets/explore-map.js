/* The live page's map: points, colors, and an image with its neighbors. After explore.js. */
"use strict";

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
    box.replaceChildren(image(trained(state.probe.indices[row]), 128, ""), wordOf(row));
    box.style.left = `${x > wide / 2 ? x - 145 : x + 16}px`;
    box.style.top = `${Math.max(0, Math.min(y - 60, wide - 170))}px`;
  },
  onPick: i => pick(rowOf(i)).catch(complain),
});

async function drawMap() {
  let told;
  try {
    told = await ask(`/api/map?have=${state.map ? state.map.version : ""}`);
  } catch (error) {
    if (error instanceof TypeError) throw error;
    $("drawn").textContent = error.message;  // the rest of the page can still be used
    return;
  }
  const first = !state.map;
  if (told.points) { state.map = told; place(!first); paint(); }
  const {kind, points} = state.map, behind = points[state.epoch] ? "" : `the map of epoch ${state.epoch} is being drawn`;
  const coming = kind === "t-SNE" ? behind : told.doing ? `t-SNE is being drawn, ${told.doing.done} of ${told.doing.total}` : told.note;
  $("drawn").textContent = [kind, coming].filter(Boolean).join("; ");
  clearTimeout(drawMap.again);
  if (told.doing) drawMap.again = setTimeout(() => drawMap().catch(complain), 1000);
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
  if ($("color").value === "purity") recolor().catch(complain);
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

/* Colors */

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const STOPS = ["#5b3f99", "#3f6bb0", "#25929a", "#4fb567", "#d8b72e"];
const hex = color => [1, 3, 5].map(at => parseInt(color.slice(at, at + 2), 16));
const mix = (a, b, share) => { const [x, y] = [hex(a), hex(b)]; return "#" + x.map((v, i) => Math.round(v + (y[i] - v) * share).toString(16).padStart(2, "0")).join(""); };
const onScale = share => { const at = Math.max(0, Math.min(0.9999, share)) * (STOPS.length - 1), i = Math.floor(at); return mix(STOPS[i], STOPS[i + 1], Math.round((at - i) * 8) / 8); };
const ofCategory = i => i < 10 ? css(`--c${i}`) : i < 20 ? mix(css(`--c${i % 10}`), css("--ink"), 0.45) : css("--quiet");

async function recolor() {
  const by = $("color").value, {epoch} = state, told = await ask(`/api/colors?by=${encodeURIComponent(by)}&epoch=${epoch}`);
  if ($("color").value !== by || state.epoch !== epoch) return;  // another was chosen meanwhile
  if (!state.colors || state.colors.by !== by) state.only = null;
  state.colors = {...told, by};
  showLegend();
  paint();
}

function paint() {
  if (!state.map || !state.colors) return;
  const {kind, values, low, high} = state.colors, none = css("--rule"), width = high - low || 1, known = [];
  chart.paint(state.map.rows.map(row => {
    const value = values[row];
    if (value === null) return none;
    if (kind === "scale") return onScale((value - low) / width);
    if (state.only !== null && value !== state.only) return none;
    return known[value] = known[value] || ofCategory(value);
  }));
}

function showLegend() {
  const told = state.colors, missing = told.values.filter(value => value === null).length;
  if (told.kind === "scale") {
    const bar = h("i"), short = value => +value.toPrecision(4);
    bar.style.background = `linear-gradient(90deg, ${STOPS.join()})`;
    $("legend").replaceChildren(h("div", {className: "scale"}, `${short(told.low)}`, bar, `${short(told.high)}`),
      missing ? h("small", {}, `gray: ${missing} without a value`) : "");
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
  $("legend").replaceChildren(h("ul", {className: "legend"}, ...entries), missing ? h("small", {}, `gray: ${missing} without a value`) : "");
}
$("color").addEventListener("change", () => recolor().catch(complain));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (state.colors) { showLegend(); paint(); } });

/* An image and its neighbors */

async function pick(row) {
  state.chosen = row;
  const at = state.map ? state.map.rows.indexOf(row) : -1;
  chart.select(at < 0 ? null : at);
  const told = await ask(`/api/point/${row}`);
  if (state.chosen !== row) return;
  state.point = told;
  $("said").textContent = `Selected ${called(told)}`;
  $("use").disabled = Boolean(state.run.lacking);
  const facts = h("dl");
  if (told.label) facts.append(h("dt", {}, "label"), h("dd", {}, told.label));
  for (const [name, value] of Object.entries(told.metadata)) if (value) facts.append(h("dt", {}, name), h("dd", {}, value));
  const enlarge = h("button", {onclick: () => enlargeAll([told])}, "Enlarge");
  const seek = h("button", {onclick: () => { show("search"); useSelected(); }, disabled: Boolean(state.run.lacking)}, "Search with it");
  const strips = told.moments.map((moment, which) => {
    const stayed = moment.stayed.filter(Boolean).length, same = moment.same ? moment.same.filter(Boolean).length : null;
    const words = [same === null ? "" : `${same} same label`, which ? `${stayed} stayed` : ""].filter(Boolean).join(" · ");
    const strip = h("div", {className: "strip"}, h("header", {},
      h("button", {onclick: () => chooseEpoch(moment.epoch), title: "Show the map after this epoch"}, `epoch ${moment.epoch}`), words),
      h("ol", {}, ...moment.rows.map((other, i) => {
        const said = `${wordOf(other)}, distance ${far(moment.distances[i])}${moment.stayed[i] ? ", stayed" : ""}`;
        const button = h("button", {className: "near", title: said, onclick: () => pick(other).catch(complain)},
          image(trained(state.probe.indices[other]), 64, said));
        button.classList.toggle("same", Boolean(moment.same && moment.same[i]));
        button.classList.toggle("stayed", moment.stayed[i]);
        return h("li", {}, button);
      })));
    strip.dataset.epoch = moment.epoch;
    strip.classList.toggle("now", moment.epoch === state.epoch);
    return strip;
  });
  $("detail").replaceChildren(
    h("div", {className: "large"}, image(told, 256, called(told)), h("div", {}, h("h2", {}, told.title), facts, h("p", {className: "controls"}, enlarge, seek))),
    h("div", {className: "strips"}, ...strips),
    h("p", {className: "quiet hint"}, ...(told.label ? [h("span", {className: "line"}), " same label  "] : []),
      h("span", {className: "dot"}), " was a neighbor at the snapshot before"));
}

function enlargeAll(images, words) {
  const dialog = $("large");
  const close = h("button", {onclick: () => dialog.close(), autofocus: true}, "Close");
  const shown = images.map(one => {
    const tools = [];
    if (one.row !== null && one.row !== undefined) tools.push(h("button", {onclick: () => { dialog.close(); show("map"); pick(one.row).catch(complain); }}, "Show on the map"));
    tools.push(h("button", {onclick: () => { dialog.close(); show("search"); searchWith(one); }, disabled: Boolean(state.run.lacking)}, "Search with it"));
    return h("figure", {}, image(one, 768, called(one)), h("figcaption", {}, called(one), h("div", {className: "controls"}, ...tools)));
  });
  dialog.replaceChildren(h("div", {className: "both"}, ...shown), words ? h("p", {className: "quiet"}, words) : "", h("p", {}, close));
  dialog.showModal();
}
$("large").addEventListener("click", event => { if (event.target === $("large")) $("large").close(); });
