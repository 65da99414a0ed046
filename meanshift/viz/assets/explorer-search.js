/* The search of the live page, and waiting for long computations. After explorer.js. */
"use strict";

const MAX_UPLOAD = 20 * 2 ** 20;

/* Long computations: ask again until the answer is there */

async function requestPatiently(status, path, isWanted) {
  for (;;) {
    const answer = await request(path);
    if (!isWanted()) return null;
    if (!answer.pending) {
      status.textContent = "";
      return answer;
    }
    const asked = performance.now();
    status.replaceChildren(taskElement(status, answer));
    await new Promise(resolve => setTimeout(resolve, 500));
    if (requestPatiently.stopped > asked || !isWanted()) return null;
  }
}

function taskElement(status, {pending, done, total}) {
  const onclick = () => {
    status.textContent = "Stopped.";
    requestPatiently.stopped = performance.now();
    request("/api/stop", {method: "POST"}).catch(showError);
  };
  const progress = total ? `, ${formatCount(done)} of ${formatCount(total)}` : "";
  const bar = element("progress", total ? {max: total, value: done} : {});
  return element("div", {className: "task"}, `${pending}${progress}`, bar, element("button", {onclick}, "Stop"));
}

function showErrorIn(id, message) {
  $(id).replaceChildren(element("span", {className: "error"}, message));
}

/* The snapshot whose features are compared: results stay those of their epoch until a newer one is asked for */

const chosenEpoch = select => select.value === "" ? newestEpoch() : +select.value;

function showResults(status, text, epoch, select, load) {
  status.update = () => {
    const newest = newestEpoch();
    const isOld = select.value === "" && epoch !== newest;
    const button = element("button", {onclick: load}, `Use epoch ${newest}`);
    status.replaceChildren(`${text}; features after epoch ${epoch}`, epoch === newest ? " (newest)" : "", isOld ? " " : "", isOld ? button : "");
  };
  status.update();
}

/* Search */

function searchWith(image) {
  state.query = {source: image.source, index: image.index};
  $("query").replaceChildren(element("div", {}, imageElement(image, 256, titleOf(image)), element("p", {}, titleOf(image))));
  runSearch();
}

function searchWithFile(file) {
  if (!file) return;
  if (file.size > MAX_UPLOAD) return showErrorIn("search-status", `${file.name} is larger than 20 MB; make it smaller`);
  const preview = element("img", {alt: `The image to search with, ${file.name}`, src: URL.createObjectURL(file)});
  preview.onload = () => {
    preview.classList.toggle("pixelated", preview.naturalWidth <= 64);
    URL.revokeObjectURL(preview.src);
  };
  preview.onerror = () => preview.remove();  // the server may still be able to read it
  state.query = {file};
  $("query").replaceChildren(element("div", {}, preview, element("p", {}, file.name)));
  runSearch();
}

async function runSearch() {
  const {query} = state;
  const source = $("search-in").value;
  const number = runSearch.number = (runSearch.number || 0) + 1;
  const isWanted = () => number === runSearch.number;
  if (!state.images) return showErrorIn("search-status", "There is no snapshot yet to search with.");
  const epoch = chosenEpoch($("search-epoch"));
  $("found").replaceChildren();
  $("search-status").update = null;
  try {
    const prepared = await requestPatiently($("search-status"), `/api/prepare?in=${source}&epoch=${epoch}`, isWanted);
    if (!prepared) return;
    const image = query.file ? "" : `&of=${query.source}&index=${query.index}`;
    const {found} = await request(`/api/search?in=${source}&epoch=${epoch}${image}`, {method: "POST", body: query.file || ""});
    if (!isWanted()) return;
    const text = `${formatCount(found.length)} images, nearest first`;
    if (source === "index") $("search-status").textContent = `${text}; features of the index`;
    else showResults($("search-status"), text, epoch, $("search-epoch"), runSearch);
    $("found").replaceChildren(...found.map(foundCard));
  } catch (error) {
    if (isWanted()) showErrorIn("search-status", error.message);
  }
}

function foundCard(image) {
  const distance = formatDistance(image.distance);
  return element("button", {className: "card", onclick: () => enlarge([image], `distance ${distance}`)},
    imageElement(image, 128, titleOf(image)),
    element("b", {title: image.title}, image.title),
    element("span", {className: "quiet"}, element("span", {}, image.label || ""), element("span", {}, distance)));
}

$("file").addEventListener("change", () => {
  searchWithFile($("file").files[0]);
  $("file").value = "";
});
$("use-selected").addEventListener("click", () => {
  if (state.selectedImage) searchWith(state.selectedImage);
});
for (const id of ["search-in", "search-epoch"]) {
  $(id).addEventListener("change", () => {
    $("search-epoch").disabled = $("search-in").value === "index";  // it has weights of its own
    if (state.query) runSearch();
  });
}
addEventListener("dragover", event => {
  event.preventDefault();
  $("drop").classList.add("over");
});
addEventListener("dragleave", () => $("drop").classList.remove("over"));
addEventListener("drop", event => {
  event.preventDefault();
  $("drop").classList.remove("over");
  if (!event.dataTransfer.files.length) return;
  showTab("search");
  searchWithFile(event.dataTransfer.files[0]);
});
addEventListener("paste", event => {
  const file = [...event.clipboardData.files].find(candidate => candidate.type.startsWith("image/"));
  if (!file) return;
  showTab("search");
  searchWithFile(file);
});
