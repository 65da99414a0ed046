/* Labels on the live page: given by clicks and keys, a probe fitted to them, what to label next. After explorer-clean.js. */
"use strict";

const label = {
  state: null,  // answer of /api/labels
  given: new Map(),  // label of each image, by its index in the training source
  probe: null,  // answer of /api/label/probe
  images: [],  // the list that is shown
  total: 0,  // images of the list, of which the first are shown
  current: 0,  // position in the list
  selection: new Set(),  // indices of images, also of those of the list that are not shown
  mapIndices: [],  // selected on the map
  neighborsOf: null,  // image whose neighbors are listed
  loading: false,  // another list: a key must not label an image that nobody has seen
  sending: Promise.resolve(),
  waiting: 0,  // labels that are not saved yet
};
const MAX_LISTED = 200;
const EXPLANATIONS_OF_LISTS = {
  proposed: "Typical images of clusters without a label; later those that the probe is least sure of.",
  selected: "Selected on the map, by lasso, cluster or neighbors.",
  neighbors: "Nearest first.",
  predicted: "Predicted as this class, least confident first.",
};

/* The labels and their state */

async function showLabels() {
  if (!state.run || !state.images) {
    if (state.run) $("label-status").textContent = "Labels need a snapshot; there is none yet.";
    setTimeout(() => $("label").hidden || showLabels(), 200);
    return;
  }
  if (state.run.missing) {
    $("label-status").textContent = "Labels need the images, which are missing.";
    return;
  }
  fillLabelSelects();
  if (label.state) return;
  await pollLabels();
  if (!label.state) return;
  showSaved();
  loadImages();
}

async function pollLabels() {
  clearTimeout(pollLabels.timer);
  try {
    if (!$("label").hidden && !document.hidden && !label.waiting) {
      const answer = await request(`/api/labels?since=${label.state ? label.state.version : -1}`);
      if (answer && !label.waiting) {
        if (label.state) $("label-status").textContent = "Changed on another page.";
        takeLabels(answer);
      }
    }
  } catch (error) {
    showError(error);
  }
  pollLabels.timer = setTimeout(pollLabels, 2000);
}

function takeLabels(answer) {
  const isFirst = !label.state;
  label.state = answer;
  label.given = new Map(answer.given);
  if (isFirst) {
    const onMap = new Set(state.images.indices);
    if (answer.given.some(([index]) => !onMap.has(index))) $("label-in").value = "train";
  }
  const colorings = state.run.colorings;
  if (answer.version && !colorings.some(([value]) => value === "given")) {
    colorings.push(["given", "given label"], ["predicted", "prediction"]);
    fillColorings();
  }
  if (["given", "predicted"].includes($("color").value)) loadColors().catch(showError);
  $("label-command").textContent = answer.command;
  $("label-undo").disabled = !answer.undoable;
  $("label-undo").textContent = answer.undoable ? `Undo ${describeAction(answer.undoable)}` : "Undo";
  $("label-notes").replaceChildren(...answer.notes.map(note => element("p", {className: "error"}, note)));
  $("label-names").replaceChildren(...answer.classes.map(({name}) => element("option", {value: name})));
  fillLabelSelects();
  showClasses();
  showCards();
  loadProbe();
}

const describeAction = ({label: name, count}) => `${name === null ? "removal" : name}${count > 1 ? ` (${formatCount(count)} images)` : ""}`;

function showSaved() {
  const count = label.given.size;
  $("label-status").textContent = label.waiting ? "Saving …" : `${formatCount(count)} label${count === 1 ? "" : "s"}, all saved.`;
}

function send(change) {  // one after the other, so that each is sent with the newest version
  label.waiting += 1;
  showSaved();
  label.sending = label.sending.then(() => post(change)).catch(error => {
    const reason = error instanceof TypeError ? "the server does not answer" : error.message;
    showErrorIn("label-status", `Not saved: ${reason}`);
  });
  return label.sending;
}

async function post(change) {
  try {
    const body = JSON.stringify({seen: label.state.version, ...change});
    const response = await fetch("/api/labels", {method: "POST", body});
    const answer = await response.json();
    label.waiting -= 1;
    if (response.status === 409) takeLabels(answer.state);
    if (!response.ok) throw new Error(answer.error);
    takeLabels(answer);
    showSaved();
  } catch (error) {
    if (error instanceof TypeError || error instanceof SyntaxError) label.waiting -= 1;
    throw error;
  }
}

/* Giving labels */

function targets() {
  if (label.selection.size) return [...label.selection];
  const image = label.images[label.current];
  return image ? [image.index] : [];
}

function setLoading(loading) {
  label.loading = loading;
  $("label-images").setAttribute("aria-busy", loading);
}

async function giveLabel(name) {
  const indices = targets();
  if (!indices.length || !label.state || label.loading) return;
  label.selection.clear();
  const given = new Set(indices);
  const isOpen = image => !label.given.has(image.index) && !given.has(image.index);
  const open = [...label.images.keys()].filter(i => isOpen(label.images[i]));
  const next = open.find(i => i > label.current);
  if (name !== null && open.length) label.current = next === undefined ? open[0] : next;
  showCards();
  if (document.activeElement.closest("#label-images")) focusCard();
  const isLast = name !== null && !open.length && $("label-list").value === "proposed";
  setLoading(isLast);
  await send({indices, label: name});
  const isDone = label.images.every(image => label.given.has(image.index));
  if (isLast && isDone) await loadImages();
  else if (isLast) setLoading(false);
}

function undoLabel() {
  if (label.state && label.state.undoable) send({undo: label.state.undoable.id});
}

$("label-form").addEventListener("submit", event => {
  event.preventDefault();
  const name = $("label-name").value.trim();
  if (!name) return;
  $("label-name").value = "";
  giveLabel(name);
  focusCard();
});
$("label-name").addEventListener("keydown", event => {
  if (event.key === "Escape") focusCard();
});
$("label-undo").addEventListener("click", undoLabel);
$("label-remove").addEventListener("click", () => giveLabel(null));

/* Classes and predictions */

const classNumber = name => label.state ? label.state.classes.findIndex(known => known.name === name) : -1;

function classDot(name) {
  const dot = element("i");
  dot.style.background = categoryColor(Math.max(0, classNumber(name)));
  return dot;
}

function showClasses() {
  const predicted = label.probe ? label.probe.predicted : {};
  $("label-classes").replaceChildren(...label.state.classes.map(({name, given}, i) => {
    const key = i < 9 ? element("kbd", {}, i + 1) : element("span");
    const button = element("button", {onclick: () => giveLabel(name), title: `Label ${name}; ${given} have this label`}, key, classDot(name), element("b", {}, name), element("small", {}, formatCount(given)));
    const show = element("button", {onclick: () => listPredicted(name), disabled: !predicted[name], title: "Show the images that are predicted as this class"}, `Show ${formatCount(predicted[name] || 0)}`);
    show.setAttribute("aria-label", `Show the ${predicted[name] || 0} images predicted as ${name}`);
    return element("div", {className: "label-class"}, button, show);
  }));
  if (!label.state.classes.length) $("label-classes").append(element("p", {className: "quiet"}, "No class yet: name the first one."));
}

async function loadProbe() {
  const number = loadProbe.number = (loadProbe.number || 0) + 1;
  const isWanted = () => number === loadProbe.number;
  const source = $("label-in").value;
  try {
    const probe = await requestPatiently($("label-list-status"), `/api/label/probe?in=${source}`, isWanted);
    if (!probe) return;
    label.probe = probe;
    showClasses();
    await loadPredictions(source, isWanted);
    const accuracy = await requestPatiently($("label-accuracy"), `/api/label/accuracy?in=${source}`, isWanted);
    if (accuracy) showAccuracy(accuracy);
  } catch (error) {
    if (isWanted()) showErrorIn("label-accuracy", error.message);
  }
}

async function loadPredictions(source, isWanted) {  // of the images that are shown, which stay
  if (!label.images.length) return;
  const indices = label.images.map(image => image.index).join();
  const answer = await request(`/api/label/images?kind=selected&in=${source}&indices=${indices}`);
  if (!isWanted() || answer.pending) return;
  const known = new Map(answer.images.map(image => [image.index, image]));
  for (const image of label.images) Object.assign(image, known.get(image.index));
  showCards();
}

function showAccuracy({given, labels, needed, accuracy, interval, expected}) {
  const outside = label.probe.outside ? ` ${formatCount(label.probe.outside)} labels are of images that are not among these, so the saved classifier does not change: choose all training images.` : "";
  if (accuracy === null) {
    $("label-accuracy").textContent = `Too few labels to tell: need ${needed}, each of a class with another label, and two classes.${outside}`;
    return;
  }
  const [low, high] = interval.map(value => value.toFixed(0));
  let advice = labels < needed ? `Label ${needed - labels} more to learn what more labels bring.` : "Label 10 more to learn what more labels bring.";
  if (expected !== null) {
    const gain = expected - accuracy;
    advice = gain < 1 ? "More labels would bring little." : `${formatCount(given)} more labels would bring about ${expected.toFixed(0)}%.`;
  }
  $("label-accuracy").replaceChildren(
    element("p", {}, element("b", {}, `${accuracy.toFixed(0)}%`), ` of held-out labels are predicted, by cross-validation over ${formatCount(labels)} labels (95% interval ${low} to ${high}%).${outside}`),
    element("p", {}, advice));
}

/* The list */

function fillLabelSelects() {
  const lists = [["proposed", "what to label next"]];
  if (label.mapIndices.length) lists.push(["selected", `selected on the map (${formatCount(label.mapIndices.length)})`]);
  if (label.neighborsOf) lists.push(["neighbors", `neighbors of ${label.neighborsOf.title}`]);
  for (const {name} of label.state ? label.state.classes : []) lists.push([`predicted ${name}`, `predicted: ${name}`]);
  fillSelect($("label-list"), lists);
  const sources = [["snapshot", `the map's images (${formatCount(state.images.indices.length)})`]];
  const train = state.run.sources.find(source => source.name === "train");
  if (train && train.count > state.images.indices.length) sources.push(["train", `all training images (${formatCount(train.count)})`]);
  fillSelect($("label-in"), sources);
}

function fillSelect(select, options) {
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => element("option", {value}, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

function showList(value) {
  fillLabelSelects();
  $("label-list").value = value;
  return loadImages();
}

const listPredicted = name => showList(`predicted ${name}`);

async function loadImages() {
  const number = loadImages.number = (loadImages.number || 0) + 1;
  const isWanted = () => number === loadImages.number;
  const [kind, ...rest] = $("label-list").value.split(" ");
  const query = new URLSearchParams({kind, in: $("label-in").value});
  if (kind === "selected") query.set("indices", label.mapIndices.slice(0, MAX_LISTED).join());
  if (kind === "neighbors") query.set("index", label.neighborsOf.index);
  if (kind === "predicted") query.set("label", rest.join(" "));
  setLoading(true);
  try {
    const answer = await requestPatiently($("label-list-status"), `/api/label/images?${query}`, isWanted);
    if (!answer) return;
    $("label-explanation").textContent = EXPLANATIONS_OF_LISTS[kind];
    label.images = answer.images;
    label.current = Math.max(0, label.images.findIndex(image => !label.given.has(image.index)));
    label.selection = new Set(kind === "selected" ? label.mapIndices : []);
    label.total = kind === "selected" ? label.mapIndices.length : label.images.length;
    if (!label.images.length) $("label-list-status").textContent = "No image is left to label here.";
    else if (label.total > label.images.length) $("label-list-status").textContent = `The first ${label.images.length} of ${formatCount(label.total)} are shown; a label goes to all that are selected.`;
    const hadFocus = [document.body, ...$("label-images").children].includes(document.activeElement);
    $("label-images").replaceChildren();
    showCards();
    if (hadFocus) focusCard();
  } catch (error) {
    if (isWanted()) showErrorIn("label-list-status", error.message);
  } finally {
    if (isWanted()) setLoading(false);
  }
}

function showCards() {
  const cards = $("label-images").children;
  label.images.forEach((image, i) => {
    const card = cards[i] || $("label-images").appendChild(labelCard(image, i));
    const given = label.given.get(image.index);
    const predicted = image.predicted ? `${image.predicted} ${Math.round(100 * image.confidence)}%` : "";
    card.lastChild.replaceChildren(
      given === undefined ? element("span", {className: "quiet"}, element("span", {}, predicted || "no label")) :
        element("span", {className: "given"}, classDot(given), element("span", {}, given)));
    card.setAttribute("aria-selected", label.selection.has(image.index));
    card.setAttribute("aria-label", [titleOf(image), given === undefined ? "no label" : `labeled ${given}`, predicted && `predicted ${predicted}`].filter(Boolean).join(", "));
    card.classList.toggle("current", i === label.current);
    card.tabIndex = i === label.current ? 0 : -1;
  });
  while (cards.length > label.images.length) cards[cards.length - 1].remove();
  showCurrent();
}

function labelCard(image, position) {
  const card = element("div", {className: "card label-image", role: "option"}, imageElement(image, 128, ""), element("b", {title: image.title}, image.title), element("div"));
  card.dataset.position = position;
  return card;
}

function showCurrent() {
  const image = label.images[label.current];
  const count = label.selection.size;
  $("label-all").disabled = $("label-neighbors").disabled = !image;
  $("label-remove").disabled = !targets().some(index => label.given.has(index));
  if (!image) return $("label-current").replaceChildren();
  const shown = $("label-current").querySelector("img");
  const picture = shown && +shown.dataset.index === image.index ? shown : imageElement(image, 256, titleOf(image));
  picture.dataset.index = image.index;
  const facts = [image.label && `label of the source: ${image.label}`, image.predicted && `predicted: ${image.predicted}, confidence ${Math.round(100 * image.confidence)}%`].filter(fact => fact && !count);
  $("label-current").replaceChildren(picture, element("b", {}, count ? `${formatCount(count)} image${count === 1 ? "" : "s"} selected` : image.title), element("span", {className: "quiet"}, facts.join(" · ")));
}

function focusCard() {
  const card = $("label-images").children[label.current];
  if (card) card.focus();
}

function moveTo(position, {select = false} = {}) {
  const last = label.images.length - 1;
  const next = Math.max(0, Math.min(last, position));
  if (last < 0) return;
  if (select) {
    const [from, to] = [Math.min(label.current, next), Math.max(label.current, next)];
    for (let i = from; i <= to; i++) label.selection.add(label.images[i].index);
  }
  label.current = next;
  showCards();
  focusCard();
}

function toggleSelected() {
  const {index} = label.images[label.current] || {};
  if (index === undefined || label.loading) return;
  if (!label.selection.delete(index)) label.selection.add(index);
  showCards();
}

function selectAllListed() {
  if (label.loading) return;
  const isWhole = label.images.every(image => label.selection.has(image.index));
  label.selection = new Set(isWhole ? [] : label.images.map(image => image.index));
  showCards();
}

function listNeighbors() {
  label.neighborsOf = label.images[label.current] || null;
  if (label.neighborsOf) showList("neighbors");
}

$("label-images").addEventListener("click", event => {
  const card = event.target.closest(".label-image");
  if (!card) return;
  moveTo(+card.dataset.position, {select: event.shiftKey});
  if (event.ctrlKey || event.metaKey) toggleSelected();
});
$("label-list").addEventListener("change", loadImages);
$("label-in").addEventListener("change", () => {
  loadImages();
  loadProbe();
});
$("label-neighbors").addEventListener("click", listNeighbors);
$("label-all").addEventListener("click", selectAllListed);

/* Keys */

const LABEL_KEYS = {
  Enter: () => $("label-name").focus(),
  " ": toggleSelected,
  a: selectAllListed,
  n: listNeighbors,
  u: undoLabel,
  x: () => giveLabel(null),
  Delete: () => giveLabel(null),
  Escape: () => {
    label.selection.clear();
    showCards();
  },
};

addEventListener("keydown", event => {
  if ($("label").hidden || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, dialog")) return;
  const onCard = event.target === document.body || event.target.closest("#label-images");
  const columns = getComputedStyle($("label-images")).gridTemplateColumns.split(" ").length;
  const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns}[event.key];
  const known = /^[1-9]$/.test(event.key) && label.state && label.state.classes[event.key - 1];
  const isLetter = /^[anux]$/.test(event.key);
  if (known) giveLabel(known.name);
  else if (onCard && step) moveTo(label.current + step, {select: event.shiftKey});
  else if (LABEL_KEYS[event.key] && (onCard || isLetter)) LABEL_KEYS[event.key]();
  else return;
  event.preventDefault();
});

/* From the map */

document.addEventListener("rows-selected", event => {
  label.mapIndices = event.detail.rows.map(row => state.images.indices[row]);
  $("label-rows").hidden = !label.mapIndices.length || Boolean(state.run.missing);
});
$("label-rows").addEventListener("click", () => {
  showTab("label");
  showList("selected");
});
