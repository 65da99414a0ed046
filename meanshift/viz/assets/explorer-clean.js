/* Outliers, duplicates and doubtful labels on the live page: lists, selection, export. After explorer-search.js. */
"use strict";

const EXPLANATIONS = {
  outliers: "Farthest from their ten nearest neighbors first: often broken, mislabeled or rare images. The score is the mean distance to them.",
  duplicates: "Pairs whose distance is below the threshold, nearest first. Of each pair the later image is the one that is selected. The score is the distance.",
  labels: "Images whose label differs from that of most of their ten nearest neighbors: often a wrong label. The score is the share of the neighbors' votes, weighted by similarity, for the label after the arrow.",
};
const NOUNS = {outliers: "images", duplicates: "pairs", labels: "doubtful labels"};
const keyOf = item => `${state.order} ${item.source} ${item.index} ${item.nearest.index}`;

/* The list */

async function loadRanking({more = false} = {}) {
  const {order} = state;
  const source = $("clean-in").value;
  const number = loadRanking.number = (loadRanking.number || 0) + 1;
  const isWanted = () => number === loadRanking.number;
  for (const name in NOUNS) $(name).setAttribute("aria-pressed", name === order);
  $("clean-explanation").textContent = EXPLANATIONS[order];
  if (!state.images) return showErrorIn("clean-status", "There is no snapshot yet.");
  if (!more) {
    state.items = [];
    state.itemsEpoch = chosenEpoch($("clean-epoch"));
    $("cards").replaceChildren();
    $("more").hidden = true;
    $("pairs").hidden = order !== "duplicates" || !state.pairs;  // the slider keeps its focus
  }
  const epoch = state.itemsEpoch;
  $("clean-status").update = null;
  try {
    const start = state.items.length;
    const answer = await requestPatiently($("clean-status"), `/api/rank?in=${source}&epoch=${epoch}&order=${order}&start=${start}`, isWanted);
    if (!answer) return;
    let {total, items} = answer;
    if (order === "duplicates") {
      showPairs(answer.histogram, `${source} ${epoch}`);
      total = state.pairs.below[+$("threshold").value];
      items = items.slice(0, total - start);
    }
    state.items = state.items.concat(items);
    $("cards").classList.toggle("pairs", order === "duplicates");
    $("cards").append(...items.map((item, i) => itemCard(item, start + i)));
    const text = answer.note || `${formatCount(state.items.length)} of ${formatCount(total)} ${NOUNS[order]}`;
    showResults($("clean-status"), text, epoch, $("clean-epoch"), () => loadRanking());
    $("more").hidden = state.items.length >= total;
  } catch (error) {
    if (isWanted()) showErrorIn("clean-status", error.message);
  }
}

/* The threshold of the duplicates, on a histogram of the distances */

function showPairs(histogram, name) {
  if (state.pairs === null || state.pairs.name !== name) {
    $("threshold").max = histogram.edges.length - 1;
    $("threshold").value = histogram.start;
  }
  state.pairs = {...histogram, name};
  const counts = histogram.below.map((below, i) => below - (i ? histogram.below[i - 1] : 0));
  const highest = Math.max(...counts);
  $("histogram").replaceChildren(...counts.map(count => {
    const bar = element("i");
    bar.style.height = count ? `${4 + 96 * count / highest}%` : "0";
    return bar;
  }));
  $("farthest").textContent = formatDistance(histogram.edges[histogram.edges.length - 1]);
  $("pairs").hidden = false;
  showThreshold();
}

function showThreshold() {
  const {edges, below} = state.pairs;
  const position = +$("threshold").value;
  [...$("histogram").children].forEach((bar, i) => bar.classList.toggle("below", i <= position));
  const text = `${formatCount(below[position])} pair${below[position] === 1 ? "" : "s"} below ${formatDistance(edges[position])}`;
  $("threshold-text").textContent = text;
  $("threshold").setAttribute("aria-valuetext", text);
}

$("threshold").addEventListener("input", showThreshold);
$("threshold").addEventListener("change", () => loadRanking());

function itemCard(item, position) {
  const isPair = state.order === "duplicates";
  const {nearest} = item;
  const checkbox = element("input", {type: "checkbox", checked: state.selection.has(keyOf(item))});
  const about = item.suggested ? `neighbors: ${item.suggested}` : `nearest ${titleOf(nearest)}${item.exact ? ", exact copy" : ""}`;
  checkbox.setAttribute("aria-label", `${titleOf(item)}, score ${formatDistance(item.score)}, ${about}`);
  checkbox.dataset.position = position;
  const enlargeButton = element("button", {className: "enlarge", title: "Enlarge, beside its nearest"}, "⤢");
  enlargeButton.setAttribute("aria-label", `Enlarge ${item.title} beside its nearest`);
  enlargeButton.onclick = event => {
    event.preventDefault();
    enlarge([item, nearest], `distance ${formatDistance(item.distance)}`);
  };
  let image = imageElement(item, 128, "");
  let title = item.title;
  let labels = item.label || "";
  if (isPair) {
    image = element("div", {className: "two"}, image, imageElement(nearest, 128, ""));
    title = `${item.title} — ${nearest.title}`;
    if (item.label !== nearest.label) labels = `${item.label || "?"} / ${nearest.label || "?"}`;
  }
  if (item.suggested) labels = `${item.label} → ${item.suggested}`;
  const score = item.suggested ? `${Math.round(100 * item.score)}%` : formatDistance(item.score);
  const exact = item.exact ? element("em", {title: "All pixels are the same"}, "exact copy") : null;
  return element("label", {className: "card"}, image, checkbox, enlargeButton, element("b", {title}, title), exact,
    element("span", {className: "quiet"}, element("span", {title: labels}, labels), element("span", {}, score)));
}

for (const order in NOUNS) {
  $(order).addEventListener("click", () => {
    state.order = order;
    loadRanking();
  });
}
for (const id of ["clean-in", "clean-epoch"]) $(id).addEventListener("change", () => loadRanking());
$("more").addEventListener("click", () => loadRanking({more: true}));

/* The selection */

function selectRange(from, to, selected) {
  for (let position = Math.min(from, to); position <= Math.max(from, to); position++) {
    const item = state.items[position];
    $("cards").children[position].querySelector("input").checked = selected;
    if (selected) state.selection.set(keyOf(item), {...item, kind: state.order.slice(0, -1)});
    else state.selection.delete(keyOf(item));
  }
  showSelectionSize();
}

function showSelectionSize() {
  $("export").textContent = `Export selection (${state.selection.size}) as CSV`;
  $("export").disabled = !state.selection.size;
}

let shiftPressed = false;
$("cards").addEventListener("click", event => {
  shiftPressed = event.shiftKey;
  if (shiftPressed && event.target.tagName !== "INPUT") getSelection().removeAllRanges();
}, true);
$("cards").addEventListener("change", event => {
  const position = +event.target.dataset.position;
  const from = shiftPressed ? Math.min(state.lastClicked, state.items.length - 1) : position;
  selectRange(from, position, event.target.checked);
  state.lastClicked = position;
});
$("cards").addEventListener("keydown", event => {
  if (event.target.tagName !== "INPUT") return;
  if (event.key === "Enter") {
    event.preventDefault();
    event.target.parentElement.querySelector(".enlarge").click();
  }
  const columns = getComputedStyle($("cards")).gridTemplateColumns.split(" ").length;
  const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns}[event.key];
  if (!step) return;
  event.preventDefault();
  const checkboxes = [...$("cards").querySelectorAll("input")];
  const position = +event.target.dataset.position;
  const next = Math.max(0, Math.min(checkboxes.length - 1, position + step));
  if (event.shiftKey) selectRange(position, next, true);
  state.lastClicked = next;
  checkboxes[next].focus();
});
$("select-all").addEventListener("click", () => {
  if (state.items.length) selectRange(0, state.items.length - 1, true);
});
$("clear-selection").addEventListener("click", () => {
  state.selection.clear();
  for (const checkbox of $("cards").querySelectorAll("input")) checkbox.checked = false;
  showSelectionSize();
});

/* Export */

function csvCell(value) {
  const text = value === null || value === undefined ? "" : String(value);
  const isFormula = /^[=+\-@\t\r]/.test(text);  // a spreadsheet would run it: an apostrophe makes it a text
  return `"${(isFormula ? "'" + text : text).replaceAll('"', '""')}"`;
}

$("export").addEventListener("click", () => {
  const header = ["file", "label", "kind", "score", "nearest", "source", "suggested"];
  const rows = [...state.selection.values()].map(item =>
    [item.title, item.label, item.kind, item.score, item.nearest.title, item.source, item.suggested]);
  const text = [header, ...rows].map(row => row.map(csvCell).join(",") + "\r\n").join("");
  const href = URL.createObjectURL(new Blob([text], {type: "text/csv"}));
  const download = `${state.run.name.replace(/[^\w.-]+/g, "-")}-selection.csv`;
  element("a", {href, download}).click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
});
