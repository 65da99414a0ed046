/* The live page's search and cleaning. After explore.js. */
"use strict";

/* Work that takes long: asked for again until it is there */

async function patiently(where, path, wanted) {
  for (;;) {
    const told = await ask(path);
    if (!wanted()) return null;
    if (!told.pending) { where.textContent = ""; return told; }
    const bar = h("progress", told.total ? {max: told.total, value: told.done} : {});
    const stop = h("button", {onclick: () => { where.textContent = "Stopped."; patiently.stopped = performance.now(); ask("/api/stop", {method: "POST"}).catch(complain); }}, "Stop");
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
  $("query").replaceChildren(h("div", {}, image(one, 256, called(one)), h("p", {}, called(one))));
  search();
}

function searchFile(file) {
  if (!file) return;
  if (file.size > UPLOAD) { wrong("search-status", `${file.name} is larger than 20 MB; make it smaller`); return; }
  const seen = h("img", {alt: `The image to search with, ${file.name}`, src: URL.createObjectURL(file)});
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
      image(one, 128, called(one)), h("b", {title: one.title}, one.title),
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
  if (event.dataTransfer.files.length) { show("search"); searchFile(event.dataTransfer.files[0]); }
});
addEventListener("paste", event => {
  const file = [...event.clipboardData.files].find(one => one.type.startsWith("image/"));
  if (file) { show("search"); searchFile(file); }
});

/* Clean */

const ABOUT = {
  outliers: "Farthest from their ten nearest neighbors first: often broken, mislabeled or rare images. The score is the mean distance to them.",
  duplicates: "Nearest pairs first: often copies. Of each pair the later image is the one that is selected. The score is the distance.",
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
    $("clean-status").textContent = `${state.shown.length.toLocaleString("en")} of ${told.total.toLocaleString("en")} ${order === "outliers" ? "images" : "pairs"}`;
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
  const seen = pair ? h("div", {className: "two"}, image(item, 128, ""), image(item.nearest, 128, "")) : image(item, 128, "");
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
