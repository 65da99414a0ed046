/* Outliers and duplicates on the live page: lists, selection, export. After explorer-search.js. */
"use strict";

const EXPLANATIONS = {
  outliers: "Farthest from their ten nearest neighbors first: often broken, mislabeled or rare images. The score is the mean distance to them.",
  duplicates: "Nearest pairs first: often copies. Of each pair the later image is the one that is selected. The score is the distance.",
};
const keyOf = item => `${state.order} ${item.source} ${item.index} ${item.nearest.index}`;

/* The list */

async function loadRanking({more = false} = {}) {
  const {order, epoch} = state;
  const source = $("clean-in").value;
  const number = loadRanking.number = (loadRanking.number || 0) + 1;
  const isWanted = () => number === loadRanking.number;
  for (const name of ["outliers", "duplicates"]) $(name).setAttribute("aria-pressed", name === order);
  $("clean-explanation").textContent = EXPLANATIONS[order];
  if (epoch === null) return showErrorIn("clean-status", "There is no snapshot yet.");
  if (!more) {
    state.items = [];
    $("cards").replaceChildren();
    $("more").hidden = true;
  }
  try {
    const start = state.items.length;
    const answer = await requestPatiently($("clean-status"), `/api/rank?in=${source}&epoch=${epoch}&order=${order}&start=${start}`, isWanted);
    if (!answer) return;
    state.items = state.items.concat(answer.items);
    $("cards").classList.toggle("pairs", order === "duplicates");
    $("cards").append(...answer.items.map((item, i) => itemCard(item, start + i)));
    const noun = order === "outliers" ? "images" : "pairs";
    $("clean-status").textContent = `${formatCount(state.items.length)} of ${formatCount(answer.total)} ${noun}`;
    $("more").hidden = state.items.length >= answer.total;
  } catch (error) {
    if (isWanted()) showErrorIn("clean-status", error.message);
  }
}

function itemCard(item, position) {
  const isPair = state.order === "duplicates";
  const {nearest} = item;
  const checkbox = element("input", {type: "checkbox", checked: state.selection.has(keyOf(item))});
  checkbox.setAttribute("aria-label", `${titleOf(item)}, score ${formatDistance(item.score)}, nearest ${titleOf(nearest)}`);
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
  return element("label", {className: "card"}, image, checkbox, enlargeButton, element("b", {title}, title),
    element("span", {className: "quiet"}, element("span", {}, labels), element("span", {}, formatDistance(item.score))));
}

for (const order of ["outliers", "duplicates"]) {
  $(order).addEventListener("click", () => {
    state.order = order;
    loadRanking();
  });
}
$("clean-in").addEventListener("change", () => loadRanking());
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
  const header = ["file", "label", "kind", "score", "nearest", "source"];
  const rows = [...state.selection.values()].map(item =>
    [item.title, item.label, item.kind, item.score, item.nearest.title, item.source]);
  const text = [header, ...rows].map(row => row.map(csvCell).join(",") + "\r\n").join("");
  const href = URL.createObjectURL(new Blob([text], {type: "text/csv"}));
  const download = `${state.run.name.replace(/[^\w.-]+/g, "-")}-selection.csv`;
  element("a", {href, download}).click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
});
