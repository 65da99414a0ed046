"""The live page's server: what it answers, what it refuses, and that it follows a run."""

import contextlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib import resources
from urllib.parse import quote

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from meanshift.config import Config
from meanshift.data import train_and_validation
from meanshift.models.encoder import build_backbone
from meanshift.models.features import extract_features
from meanshift.runtime import checkpoint
from meanshift.runtime.run_directory import RunDirectory
from meanshift.viz import explorer as explore
from meanshift.viz.explorer.live import POINTS
from meanshift.viz.explorer.metadata import Metadata, categories
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.explorer.search import decode
from meanshift.viz.explorer.thumbnails import Thumbnails, encode
from meanshift.viz.explorer.work import Pending, Work
from meanshift.viz.run_reader import MissingData, Run

COPY, OF = 40, 4  # of the arrays below: an image that is there twice, with another label


def arrays(path, count=60, held=20, labels=True):
    """Images of three colors, one of them copied into another class."""
    random = np.random.default_rng(0)

    def draw(n):
        kinds = np.arange(n) % 3
        tones = np.array([[200, 60, 60], [60, 180, 60], [60, 60, 200]])[kinds]
        noise = random.integers(-50, 50, (n, 16, 16, 3))
        return np.clip(tones[:, None, None] + noise, 0, 255).astype(np.uint8), kinds

    (x, y), (tx, ty) = draw(count), draw(held)
    if count > COPY:
        x[COPY] = x[OF]
    np.savez(path, **({"x_train": x, "y_train": y, "x_test": tx, "y_test": ty} if labels
                      else {"images": x}))  # fmt: skip
    return path


def make_run(folder, source, *, epochs=(0, 2), total=4, image_size=16, probe=60, held_out="auto"):
    """A run directory as training leaves it, of untrained encoders."""
    config = Config().with_overrides(
        {
            "data.source": str(source), "data.image_size": image_size, "encoder.name": "resnet10",
            "encoder.stem": "small-stride2", "encoder.width": 0.125, "method.bank_size": 64,
            "train.epochs": total, "train.snapshot_images": probe, "data.validation": held_out,
            "train.batch_size": 20,
        }
    )  # fmt: skip
    train, _ = train_and_validation(str(source), held_out, seed=0)
    about = {"source": train.fingerprint(), "images": len(train), "steps": 10 * total}
    RunDirectory(folder).begin(config, extra=about)
    for epoch in epochs:
        add_snapshot(folder, epoch)
    return folder


def add_snapshot(folder, epoch, spoil=False):
    """The moment after an epoch: weights of a seed, and the features that they give."""
    run = Run(folder)
    config, size = run.config, run.config.train.snapshot_images
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(epoch)
        network, _ = build_backbone(config.encoder, image_size=config.data.image_size)
    weights = {k: w.half() if w.is_floating_point() else w for k, w in network.state_dict().items()}
    network.load_state_dict({k: w.float() if w.is_floating_point() else w
                             for k, w in weights.items()})  # fmt: skip
    train, _ = train_and_validation(config.data.source, config.data.validation, seed=0)
    indices = torch.arange(len(train))[: min(size, len(train))]
    features = extract_features(
        network.eval(), train.subset(indices), image_size=config.data.image_size,
        device=torch.device("cpu"),
    )  # fmt: skip
    features = torch.full_like(features, torch.nan) if spoil else features
    checkpoint.write(
        folder / "snapshots" / f"epoch-{epoch:04d}.pt",
        {"format": checkpoint.FORMAT, "epoch": epoch, "indices": indices, "weights": weights,
         "features": features.half()},
    )  # fmt: skip


def log(folder, step, **figures):
    record = {"kind": "train", "step": step, "epoch": step // 10, **figures}
    RunDirectory(folder).append("metrics.jsonl", record)


@contextlib.contextmanager
def served(app, host="127.0.0.1"):
    """A real server in a thread; gives its port."""
    listening = explore.listen(host, 0)
    server = explore.server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("explore")
    folder = make_run(root / "run", arrays(root / "images.npz"))
    for step in (10, 20):
        log(folder, step, loss=1 / step, images_per_second=100.0)
    return folder


@pytest.fixture(scope="module")
def explorer(run):
    return Explorer(Run(run))


@pytest.fixture(scope="module")
def port(explorer):
    with served(explore.build(explorer)[0]) as number:
        yield number


class Answer:
    def __init__(self, response):
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]


def get(port, path, method="GET", body=None, **headers):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as line:
        line.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        return Answer(line.getresponse())


def post(port, path, body=b"", **headers):
    return get(port, path, "POST", body, **{"Origin": f"http://127.0.0.1:{port}", **headers})


def patiently(ask):
    """Ask until the work is done."""
    for _ in range(200):
        try:
            found = ask()
        except Pending:
            found = None
        if found is not None and getattr(found, "status", 200) != 202:
            return found
        time.sleep(0.05)
    raise AssertionError("never done")


def png(pixels, **options):
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "PNG", **options)
    return held.getvalue()


def image(run, index):
    return Run(run).source.read(index).permute(1, 2, 0).numpy()


# The page and its door


def test_the_page_and_all_that_it_asks_for_come_from_here(port):
    page = get(port, "/")
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    names = re.findall(r'="/assets/([^"]+)"', page.body.decode())
    assert len(names) == 7
    for name in names:
        held = get(port, f"/assets/{name}")
        assert held.status == 200
        assert "http://" not in held.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in held.body.decode()


@pytest.mark.parametrize("path", ["/", "/api/run", "/api/nothing", "/thumb/train/0", "/assets/no"])
def test_every_answer_tells_the_browser_to_be_strict(port, path):
    headers = get(port, path).headers
    assert headers["Content-Security-Policy"].startswith("default-src 'self'; img-src 'self' data:")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Access-Control-Allow-Origin" not in headers and "Server" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../explore/server.py",
        "/assets/..%2f..%2fpyproject.toml",
        "/assets/%2e%2e/%2e%2e/README.md",
        "/assets//etc/passwd",
        "/thumb/train/..%2f..%2fetc%2fpasswd",
        "/thumb/..%2f..%2f/0",
        "/thumb/train/-1",
        "/thumb/train/60",
        "/thumb/train/99999999999999999999",
        "/thumb/probe/0",
        "/thumb/train/0/../../../config.json",
        "/config.json",
        "/api/point/60",
        "/api/point/x",
    ],
)
def test_nothing_outside_the_tables_is_reached(port, path):
    assert get(port, path).status == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200), ("localhost:1234", 200), ("[::1]:80", 200), ("LOCALHOST", 200),
        ("evil.example", 403), ("127.0.0.1.evil.example", 403), ("", 403), ("192.168.0.7", 403),
    ],
)  # fmt: skip
def test_a_foreign_name_for_this_machine_is_refused(port, host, status):
    assert get(port, "/api/run", Host=host).status == status


def test_other_sites_cannot_ask(port):
    assert get(port, "/api/run", Sec_Fetch_Site="cross-site").status == 403
    assert get(port, "/thumb/train/0", Sec_Fetch_Site="same-site").status == 403
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert get(port, "/", **link).status == 200 and get(port, "/api/run", **link).status == 403
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}"):
        assert post(port, "/api/stop", Origin=origin).status == 403
    assert get(port, "/api/stop", "POST").status == 403
    assert post(port, "/api/stop").status == 200
    assert get(port, "/api/stop").status == 405 and get(port, "/api/search").status == 405


def test_bound_elsewhere_a_token_is_demanded(explorer):
    app, token = explore.build(explorer, host="0.0.0.0")
    assert len(token) >= 32 and token != explore.build(explorer, host="0.0.0.0")[1]
    with served(app) as port:
        for path in ("/", "/api/run", "/thumb/train/0", "/?token=wrong", f"/api/run?token={token}"):
            assert get(port, path).status == 401
        welcome = get(port, f"/?token={token}", Host="a.host:80")
        assert welcome.status == 303 and welcome.headers["Location"] == "/"
        cookie = welcome.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        kept = cookie.partition(";")[0]
        assert get(port, "/api/run", Cookie=kept, Host="a.host:80").status == 200
        assert get(port, "/api/run", Cookie=kept[:-1]).status == 401
        assert get(port, "/api/run", Cookie="\x01;=;" + kept.replace("=", "")).status == 401
        assert post(port, "/api/stop", Cookie=kept, Origin="http://evil.example").status == 403


@pytest.mark.parametrize(
    ("host", "safe"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.9.9.9", True),
     ("0.0.0.0", False), ("::", False), ("192.168.1.2", False), ("myhost", False)],
)  # fmt: skip
def test_only_loopback_goes_without_a_token(explorer, host, safe):
    assert (explore.build(explorer, host=host)[1] == "") == safe


def test_a_taken_port_gives_the_next_one():
    with explore.listen("127.0.0.1", 0) as first:
        taken = first.getsockname()[1]
        with explore.listen("127.0.0.1", taken) as second:
            assert taken < second.getsockname()[1] <= taken + 49
        with pytest.raises(ValueError, match="taken; give another --port"):
            explore.listen("127.0.0.1", taken, tries=1)
    with pytest.raises(ValueError, match="--port: got 65536, need 0"):
        explore.listen("127.0.0.1", 65_536)
    with pytest.raises(ValueError, match=r"cannot listen on 203\.0\.113\.1.*--host 127"):
        explore.listen("203.0.113.1", 8800)


def test_the_address_is_one_that_can_be_opened():
    assert explore.url("127.0.0.1", 8800, "") == "http://127.0.0.1:8800/"
    assert explore.url("::1", 1, "") == "http://[::1]:1/"
    assert explore.url("0.0.0.0", 1, "t") == f"http://{socket.gethostname()}:1/?token=t"


def test_an_interrupt_ends_it_with_zero(run):
    code = (
        "import sys; from pathlib import Path; from meanshift import explore;"
        f"explore.serve(Path({str(run)!r}), port=18800, browser=False)"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True) as it:
        address = it.stdout.readline().split()[-1]
        port = int(address.rstrip("/").rpartition(":")[2])
        assert get(port, "/api/run").status == 200
        assert get(port, "/api/map").status == 200  # and so t-SNE is under way
        it.send_signal(signal.SIGINT)
        out, err = it.communicate(timeout=30)
    assert (it.returncode, err) == (0, "") and out.endswith("stopped\n")


# The run


def test_the_state_tells_what_there_is(port):
    told = get(port, "/api/run").json
    assert (told["name"], told["done"], told["total"]) == ("run", 2.0, 4)
    assert told["epochs"] == [0, 2] and told["labeled"] and told["warnings"] == []
    assert told["training"] is True  # its last line is young
    assert told["left"] == pytest.approx(2 * 10 * 20 / 100)
    assert told["curves"]["loss"] == {"x": [1.0, 2.0], "y": [0.1, 0.05]}
    assert [(p["name"], p["count"]) for p in told["parts"]] == [("train", 60), ("held", 20)]


def test_an_unchanged_run_costs_nothing_and_a_changed_one_is_told(tmp_path):
    folder = make_run(tmp_path / "run", arrays(tmp_path / "p.npz"), epochs=())
    with served(explore.build(Explorer(Run(folder)))[0]) as port:
        first = get(port, "/api/run").json
        assert first["epochs"] == [] and first["done"] == 0 and not first["training"]
        assert "no snapshots" in get(port, "/api/map").error
        for path in ("/api/probe", "/api/point/0", "/api/clean?epoch=0", "/api/ready?epoch=0",
                     "/api/colors?by=cluster&epoch=0"):  # fmt: skip
            assert get(port, path).status == 404, path

        def since(version):
            return get(port, f"/api/run?since={version}")

        assert since(first["version"]).status == 204 and since(first["version"]).body == b""
        log(folder, 1, loss=2.0)
        second = since(first["version"]).json
        assert second["curves"]["loss"]["y"] == [2.0] and second["training"]
        add_snapshot(folder, 0)
        third = since(second["version"]).json
        assert third["epochs"] == [0]
        assert list(get(port, "/api/map").json["points"]) == ["0"]
        RunDirectory(folder).warn(1, "collapse", "collapse: no variety")
        fourth = since(third["version"]).json
        assert fourth["warnings"] == [
            {"kind": "collapse", "message": "collapse: no variety", "epoch": 0.1}
        ]
        add_snapshot(folder, 2)
        fifth = since(fourth["version"]).json
        assert fifth["epochs"] == [0, 2]
        assert patiently(lambda: _drawn(port, {"0", "2"}))
        assert [m["epoch"] for m in get(port, "/api/point/1").json["moments"]] == [0, 2]
        old = time.time() - 3600
        os.utime(folder / "metrics.jsonl", (old, old))
        assert since(fifth["version"]).json["training"] is False
        log(folder, 40, loss=1.0)
        assert get(port, "/api/run").json["training"] is False  # it is finished


def _drawn(port, epochs):
    told = get(port, "/api/map").json
    return told if told["kind"] == "t-SNE" and set(told["points"]) == epochs else None


def test_a_run_begun_again_in_its_folder_is_the_one_told_of(tmp_path):
    source = arrays(tmp_path / "p.npz")
    folder = make_run(tmp_path / "run", source)
    with served(explore.build(Explorer(Run(folder)))[0]) as port:
        old, point = get(port, "/api/run").json, get(port, "/api/point/0").json
        assert len(get(port, "/api/probe").json["indices"]) == 60
        shutil.rmtree(folder)
        make_run(folder, source, epochs=(0, 1), total=6, probe=30)
        new = get(port, f"/api/run?since={old['version']}").json
        assert (new["total"], new["epochs"]) == (6, [0, 1]) and new["mark"] != old["mark"]
        assert len(get(port, "/api/probe").json["indices"]) == 30
        again = get(port, "/api/point/0").json["moments"]
        assert [moment["epoch"] for moment in again] == [0, 1]
        assert again[0]["rows"] != point["moments"][0]["rows"]


def test_a_run_begun_again_with_the_same_settings_is_another(tmp_path):
    folder = make_run(tmp_path / "run", arrays(tmp_path / "p.npz"), epochs=(0,))
    before = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**before, "date": "2001-01-01"}))
    explorer = Explorer(Run(folder))
    (folder / "environment.json").write_text(json.dumps(before))
    other = explorer.current()
    assert other is not explorer and other.mark != explorer.mark


def test_a_run_that_is_continued_stays_the_one_it_was(tmp_path):
    folder = make_run(tmp_path / "run", arrays(tmp_path / "p.npz"))
    explorer = Explorer(Run(folder))
    mark = explorer.state()["mark"]
    about = json.loads((folder / "environment.json").read_text())
    RunDirectory(folder).begin(Run(folder).config, extra={"steps": 40, "source": about["source"]})
    log(folder, 30, loss=0.5)
    here = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**here, "date": "2999-01-01"}))
    assert len(here["earlier"]) == 1
    assert explorer.current() is explorer and explorer.state()["mark"] == mark
    assert Explorer(Run(folder)).mark == mark and explorer.state()["done"] == 3


def test_a_long_curve_is_thinned_and_keeps_its_ends(tmp_path):
    folder = make_run(tmp_path / "run", arrays(tmp_path / "p.npz"), epochs=(), total=1000)
    lines = [json.dumps({"kind": "train", "step": s, "epoch": 1, "loss": s, "odd": None})
             for s in range(1, 5001)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    told = Explorer(Run(folder)).state()["curves"]
    assert list(told) == ["loss"] and len(told["loss"]["y"]) == POINTS
    assert told["loss"]["y"][0] == 1 and told["loss"]["y"][-1] == 5000
    assert told["loss"]["y"] == sorted(told["loss"]["y"])


def test_many_threads_read_each_line_once(run):
    explorer, seen = Explorer(Run(run)), []
    threads = [threading.Thread(target=lambda: seen.append(explorer.state())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(told["curves"]["loss"]["x"]) for told in seen] == [2] * 8


# The map, its colors and its points


def test_the_map_is_there_at_once_and_becomes_tsne(tmp_path):
    folder = make_run(tmp_path / "run", arrays(tmp_path / "p.npz"))
    explorer = Explorer(Run(folder))
    first = explorer.map()
    assert first["kind"] == "principal directions" and first["doing"]["total"] == 2
    assert first["rows"] == list(range(60))
    assert all(len(p) == 120 and max(map(abs, p)) <= 1 for p in first["points"].values())
    assert "points" not in explorer.map(have=first["version"]) or explorer.map()["kind"] == "t-SNE"
    last = patiently(lambda: told if (told := explorer.map())["kind"] == "t-SNE" else None)
    assert last["doing"] is None and last["version"] != first["version"]
    assert list(last["points"]) == [0, 2] and last["points"] != first["points"]
    assert "points" not in explorer.map(have=last["version"])


def test_a_map_that_cannot_be_drawn_says_why_and_is_not_tried_again(tmp_path):
    folder = make_run(tmp_path / "run", arrays(tmp_path / "p.npz", count=4, held=4), probe=4)
    explorer = Explorer(Run(folder))
    told = patiently(lambda: told if (told := explorer.map())["note"] else None)
    assert told["kind"] == "principal directions" and "5 images" in told["note"]
    assert explorer.map()["doing"] is None


def test_features_that_are_no_numbers_are_no_crash(tmp_path):
    folder = make_run(tmp_path / "run", arrays(tmp_path / "p.npz"), epochs=())
    add_snapshot(folder, 0, spoil=True)
    with served(explore.build(Explorer(Run(folder)))[0]) as port:
        refused = patiently(lambda: get(port, "/api/map"))
        assert refused.status == 404 and "diverged" in refused.error
        assert get(port, "/api/run").status == 200
        assert "diverged" in get(port, "/api/point/0").error


def test_colors_by_label_cluster_and_purity(explorer):
    label = explorer.colors("label", epoch=2)
    assert label["names"] == ["0", "1", "2"] and sum(label["sizes"]) == 60
    assert label["values"] == [i % 3 for i in range(60)]
    cluster = explorer.colors("cluster", epoch=0)
    assert cluster["names"] == ["cluster 1", "cluster 2", "cluster 3"]
    assert len(cluster["values"]) == 60
    purity = explorer.colors("purity", epoch=2)
    near = explorer.run.neighbors(2, 10)[0]
    naive = [sum(int(j) % 3 == i % 3 for j in near[i]) / 10 for i in range(60)]
    assert purity["values"] == pytest.approx(naive) and (purity["low"], purity["high"]) == (0, 1)
    with pytest.raises(ValueError, match="got 'taste', need label, cluster, purity"):
        explorer.colors("taste", epoch=2)
    with pytest.raises(MissingData, match="no snapshot after epoch 1; there are 0, 2"):
        explorer.colors("purity", epoch=1)


def test_many_categories_become_twenty_and_other():
    told = categories([f"c{i // 2}" if i < 50 else None for i in range(52)] + ["c3"])
    assert len(told["names"]) == 21 and told["names"][0] == "c3"
    assert told["names"][-1] == "other (5 more)" and told["sizes"][-1] == 10
    assert told["values"][50] is None and told["values"][-1] == 0 and max(
        v for v in told["values"] if v is not None) == 20  # fmt: skip


def test_a_point_tells_its_neighbors_at_each_snapshot_and_who_stayed(explorer, run):
    told = explorer.point(OF)
    assert (told["index"], told["label"], told["title"]) == (OF, "1", f"#{OF}")
    before = set()
    for moment in told["moments"]:
        state = torch.load(run / "snapshots" / f"epoch-{moment['epoch']:04d}.pt")
        unit = F.normalize(state["features"].float(), dim=1)
        similar = (unit @ unit[OF]).tolist()
        order = sorted((i for i in range(60) if i != OF), key=lambda i: -similar[i])[:10]
        assert moment["rows"] == order and order[0] == COPY
        assert moment["distances"] == pytest.approx([1 - similar[i] for i in order], abs=1e-5)
        assert moment["stayed"] == [i in before for i in order]
        assert moment["same"] == [i % 3 == OF % 3 for i in order]
        before = set(order)
    assert any(told["moments"][1]["stayed"]) and not all(told["moments"][1]["stayed"])


def test_without_labels_there_are_clusters(tmp_path):
    folder = make_run(tmp_path / "run", arrays(tmp_path / "p.npz", labels=False))
    with served(explore.build(Explorer(Run(folder)))[0]) as port:
        assert get(port, "/api/run").json["labeled"] is False
        assert get(port, "/api/probe").json["labels"] is None
        point = get(port, "/api/point/0").json
        assert point["label"] is None and point["moments"][0]["same"] is None
        assert len(get(port, "/api/colors?by=cluster&epoch=0").json["names"]) == 10
        refused = get(port, "/api/colors?by=purity&epoch=0")
        assert refused.status == 404 and "no labels" in refused.error
        assert [p["name"] for p in get(port, "/api/run").json["parts"]] == ["train"]
        assert get(port, "/api/ready?in=held&epoch=0").error == (
            "got the images 'held', need one of probe, train"
        )


@pytest.mark.filterwarnings("ignore:.*are unlabeled:UserWarning")
def test_images_of_unknown_label_have_no_purity(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"": 12}, size=(16, 16))
    names = [f"{i:03d}.jpg" for i in range(12)]
    lines = [f"{name},{'ab'[i % 2] if i < 8 else ''}" for i, name in enumerate(names)]
    (root / "labels.csv").write_text("\n".join(["file,label", *lines]))
    explorer = Explorer(Run(make_run(tmp_path / "run", root, held_out="none")))
    purity = explorer.colors("purity", epoch=0)["values"]
    assert [value is None for value in purity] == [i >= 8 for i in range(12)]
    assert explorer.colors("label", epoch=0)["values"][8:] == [None] * 4
    assert explorer.point(9)["moments"][0]["same"] is None


def test_a_run_whose_images_are_gone_can_still_be_looked_at(tmp_path):
    source = arrays(tmp_path / "p.npz")
    folder, upload = make_run(tmp_path / "run", source), png(image_of(source, 7))
    source.unlink()
    with served(explore.build(Explorer(Run(folder)))[0]) as port:
        told = get(port, "/api/run").json
        assert "--data SOURCE" in told["lacking"] and told["parts"] == []
        assert get(port, "/api/map").status == 200
        assert get(port, "/api/point/0").json["title"] == "#0"
        assert "--data SOURCE" in get(port, "/thumb/train/0").error
        assert get(port, "/api/clean?epoch=2").status == 200
        found = post(port, "/api/search?epoch=2", upload).json["found"]
        assert found[0]["index"] == 7
        assert post(port, "/api/search?epoch=2&in=train", upload).status == 404
    moved = arrays(tmp_path / "moved.npz")
    assert Explorer(Run(folder, data=str(moved))).lacking == ""


def image_of(source, index):
    with np.load(source) as held:
        return held["x_train"][index]


# Thumbnails


def test_small_images_are_shown_pixel_by_pixel(port, run):
    told = get(port, "/thumb/train/5?side=256")
    assert told.headers["Content-Type"] == "image/png"
    assert np.array_equal(np.array(Image.open(io.BytesIO(told.body))), image(run, 5))


def test_thumbnails_are_kept_by_the_browser(port):
    mark = get(port, "/api/run").json["mark"]
    plain, marked = get(port, "/thumb/train/5"), get(port, f"/thumb/train/5?v={mark}")
    assert plain.headers["Cache-Control"] == "private, no-cache"
    assert marked.headers["Cache-Control"] == "private, max-age=31536000, immutable"
    tag = plain.headers["ETag"]
    assert mark in tag and get(port, "/thumb/train/6").headers["ETag"] != tag
    again = get(port, "/thumb/train/5", If_None_Match=tag)
    assert (again.status, again.body) == (304, b"")


def test_other_images_of_the_same_names_have_other_addresses(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a": 4, "b": 4}, size=(16, 16))
    folder = make_run(tmp_path / "run", root, held_out="none")
    mark = Explorer(Run(folder)).mark
    assert Explorer(Run(folder)).mark == mark
    make_images(root, {"a": 4, "b": 4}, size=(16, 16), seed=1)
    other = Explorer(Run(folder))
    assert other.lacking == "" and other.mark != mark


@pytest.mark.parametrize("side", ["0", "100", "4096", "x", "-64", "1e3", "²", ""])
def test_only_known_sides_are_drawn(port, side):
    assert get(port, f"/thumb/train/5?side={quote(side)}").status == 400


def test_large_images_are_made_to_fit():
    for height, width, size in ((400, 200, (64, 128)), (2, 5000, (128, 1)), (100, 100, (100, 100))):
        content, kind = encode(torch.zeros(3, height, width, dtype=torch.uint8), 128)
        assert kind == "image/jpeg" and Image.open(io.BytesIO(content)).size == size


def test_thumbnails_are_made_once_and_take_no_more_room_than_said(run, monkeypatch):
    source, read = Run(run).source, []
    plain = source.read
    monkeypatch.setattr(source, "read", lambda index: read.append(index) or plain(index))
    kept = Thumbnails(room=3000)  # a PNG of noise takes about 900 bytes
    for index in (0, 1, 0, 2, 0, 3, 4, 0, 1):
        kept.of("train", source, index, 64)
    assert read == [0, 1, 2, 3, 4, 1]
    assert sum(len(content) for content, _ in kept._kept.values()) == kept._held <= 3000


def test_an_unreadable_image_says_why(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a": 6, "b": 6}, size=(20, 24))
    folder = make_run(tmp_path / "run", root, held_out="none")
    (root / "a" / "001.jpg").write_bytes(b"not an image")
    with served(explore.build(Explorer(Run(folder)))[0]) as port:
        told = get(port, "/thumb/train/1")
        assert told.status == 404 and "001.jpg" in told.error
        assert get(port, "/thumb/train/2").headers["Content-Type"] == "image/png"
        assert post(port, "/api/search?epoch=0&of=train&index=1").status == 404


def test_names_that_are_no_text_are_told_all_the_same(tmp_path, make_images):
    odd, root = os.fsdecode(b"caf\xe9"), tmp_path / "photos"
    try:
        make_images(root, {odd: 6, "plain": 6}, size=(16, 16))
    except OSError:
        pytest.skip("this file system takes only names that are text")
    folder = make_run(tmp_path / "run", root, held_out="none", epochs=(0,))
    with served(explore.build(Explorer(Run(folder)))[0]) as port:
        assert get(port, "/api/probe").json["titles"][0] == f"{odd}/000.jpg"
        assert get(port, "/api/colors?by=label&epoch=0").json["names"] == [odd, "plain"]
        for path in ("/api/run", "/api/point/0", "/api/clean?epoch=0", "/thumb/train/0"):
            assert get(port, path).status == 200, path
        (root / odd / "001.jpg").write_bytes(b"not an image")
        assert odd in get(port, "/thumb/train/1").error


# Searching


@pytest.mark.parametrize("part", ["probe", "train"])
def test_an_uploaded_image_of_the_source_finds_itself_and_its_copy(port, run, part):
    ready = patiently(lambda: get(port, f"/api/ready?in={part}&epoch=2"))
    assert ready.status == 200
    found = post(port, f"/api/search?epoch=2&in={part}&count=5", png(image(run, OF))).json["found"]
    assert [one["index"] for one in found[:2]] == [OF, COPY] and len(found) == 5
    assert found[0]["distance"] < 1e-4 and found[1]["distance"] < 1e-4 < found[2]["distance"]
    assert (found[0]["row"], found[0]["title"], found[0]["label"]) == (OF, f"#{OF}", "1")
    same = post(port, f"/api/search?epoch=2&in={part}&count=5&of=train&index={OF}").json["found"]
    assert [one["index"] for one in same] == [one["index"] for one in found]


def test_distances_are_those_of_the_snapshots_own_weights(explorer, run):
    """Against the naive way, at each epoch; they differ between epochs."""
    seen = []
    for epoch in (0, 2):
        network, _ = build_backbone(explorer.run.config.encoder, image_size=16)
        weights = torch.load(run / "snapshots" / f"epoch-{epoch:04d}.pt")["weights"]
        network.load_state_dict({k: w.float() if w.is_floating_point() else w
                                 for k, w in weights.items()})  # fmt: skip
        held = explorer.run.held_out
        device = torch.device("cpu")
        rows = F.normalize(
            extract_features(network.eval(), held, image_size=16, device=device), dim=1
        )
        query = F.normalize(extract_features(network, explorer.run.source.subset(torch.tensor([9])),
                                    image_size=16, device=device), dim=1)  # fmt: skip
        far = (1 - query @ rows.T)[0]
        told = patiently(
            lambda epoch=epoch: explorer.search(
                explorer.run.source.read(9), part="held", epoch=epoch, count=20
            )
        )
        assert [one["index"] for one in told] == far.argsort(stable=True).tolist()
        assert [one["distance"] for one in told] == pytest.approx(far.sort().values, abs=1e-5)
        assert {one["part"] for one in told} == {"held"} and told[0]["row"] is None
        seen.append([one["index"] for one in told])
    assert seen[0] != seen[1]


def test_arrays_that_are_enlarged_for_the_encoder_find_themselves_too(tmp_path):
    source = arrays(tmp_path / "p.npz")
    explorer = Explorer(Run(make_run(tmp_path / "run", source, image_size=24, epochs=(0,))))
    found = explorer.search(decode(png(image_of(source, 8))), part="probe", epoch=0)
    assert found[0]["index"] == 8 and found[0]["distance"] < 1e-4
    twice = np.repeat(np.repeat(image_of(source, 8), 2, 0), 2, 1)
    assert explorer.search(decode(png(twice)), part="probe", epoch=0)[0]["index"] == 8


def test_files_find_themselves_and_unreadable_ones_are_left_out(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a": 6, "b": 6}, size=(40, 48))
    folder = make_run(tmp_path / "run", root, held_out="none", epochs=(0,))
    (root / "b" / "005.jpg").write_bytes(b"nothing")
    explorer = Explorer(Run(folder))
    body = (root / "b" / "002.jpg").read_bytes()
    with pytest.warns(UserWarning, match="cannot be read and are left out"):
        found = patiently(lambda: explorer.search(decode(body), part="train", epoch=0))
    assert (found[0]["title"], len(found)) == ("b/002.jpg", 11)
    assert found[0]["distance"] < 1e-4 < found[1]["distance"]


def gray16(run):
    return png(image(run, 3)[:, :, 0].astype(np.uint16) << 8)


@pytest.mark.parametrize("kind", ["gray16", "palette", "alpha", "strip", "one pixel", "rotated"])
def test_odd_images_are_read(port, run, kind):
    base = Image.fromarray(image(run, 3))
    held, given = io.BytesIO(), {}
    if kind == "rotated":
        exif = Image.Exif()
        exif[0x0112] = 6
        given["exif"] = exif
    made = {
        "palette": base.convert("P"), "alpha": base.convert("RGBA"), "rotated": base,
        "strip": Image.new("RGB", (60_000, 1)), "one pixel": Image.new("RGB", (1, 1)),
    }.get(kind)  # fmt: skip
    if made is not None:
        made.save(held, "PNG", **given)
    body = gray16(run) if kind == "gray16" else held.getvalue()
    assert post(port, "/api/search?epoch=2", body).status == 200


def blank(side):
    """Few bytes that would be many pixels."""
    held = io.BytesIO()
    Image.new("1", (side, side)).save(held, "PNG")
    return held.getvalue()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"hello, I am text", "no image was recognized; need a whole JPEG, PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image was recognized"),
        (png(np.zeros((90, 90, 3), np.uint8))[:-40], "truncated"),
        (b"\x89PNG\r\n\x1a\n" + b"\x00" * 50, "cannot be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image was recognized"),
    ],
)
def test_what_is_no_image_is_refused(port, body, words):
    told = post(port, "/api/search?epoch=2", body)
    assert told.status == 400 and words in told.error and "0x" not in told.error


@pytest.mark.parametrize("side", [10_000, 20_000])  # where Pillow warns, and where it refuses
def test_a_decompression_bomb_is_refused_before_it_is_decoded(port, monkeypatch, side):
    body, decoded = blank(side), []
    monkeypatch.setattr("meanshift.data.decode.to_rgb", decoded.append)
    told = post(port, "/api/search?epoch=2", body)
    assert len(body) < 100_000 and told.status == 400 and "decompression bomb" in told.error
    assert decoded == []


def test_an_upload_beyond_the_limit_is_refused_by_its_length_alone(port):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as line:
        line.putrequest("POST", "/api/search?epoch=2")
        line.putheader("Origin", f"http://127.0.0.1:{port}")
        line.putheader("Content-Length", str(20 * 2**20 + 1))
        line.endheaders()
        told = Answer(line.getresponse())
    assert told.status == 413 and "20 MB" in told.error


def test_an_upload_of_untold_length_is_stopped_at_the_limit(port):
    sent = 0
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as line:
        line.putrequest("POST", "/api/search?epoch=2")
        line.putheader("Origin", f"http://127.0.0.1:{port}")
        line.putheader("Transfer-Encoding", "chunked")
        line.endheaders()
        piece = bytes(2**20)
        with contextlib.suppress(OSError):
            while sent < 200:
                line.send(b"%x\r\n%s\r\n" % (len(piece), piece))
                sent += 1
        with contextlib.suppress(OSError):  # it may have hung up before we looked
            assert line.getresponse().status == 413
    assert 20 <= sent < 100


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("epoch=1", 404, "no snapshot after epoch 1; there are 0, 2"),
        ("epoch=", 400, "epoch: got ''"),
        ("epoch=-1", 400, "epoch: got '-1', need a whole number"),
        ("epoch=2&in=moon", 404, "got the images 'moon', need one of probe, train, held"),
        ("epoch=2&count=9999", 400, "count: got '9999'"),
        ("epoch=2&of=train&index=60", 404, "got image 60, need 0 to 59"),
        ("epoch=2&of=..%2f&index=0", 404, "got the images '../'"),
        ("epoch=2", 400, "index: got ''"),
        ("epoch=2&index=0", 404, "got the images ''"),
    ],
)
def test_a_wrong_search_says_what_is_needed(port, path, status, words):
    told = post(port, f"/api/search?{path}")
    assert told.status == status and words in told.error


# Cleaning


@pytest.mark.parametrize("part", ["probe", "train"])
def test_outliers_and_duplicates_are_those_of_the_naive_way(explorer, part):
    features, whose = patiently(lambda: explorer.searcher.features(part, 2))
    unit = F.normalize(features, dim=1).double()
    far = (1 - unit @ unit.T).clamp(min=0).fill_diagonal_(9)
    told = patiently(lambda: explorer.clean("outliers", part=part, epoch=2, count=100))
    mean = far.sort(1).values[:, :10].mean(1)
    assert told["total"] == len(whose) == 60
    scores = [one["score"] for one in told["items"]]
    assert scores == sorted(scores, reverse=True)
    assert {one["index"]: one["score"] for one in told["items"]} == pytest.approx(
        dict(enumerate(mean.tolist())), abs=1e-5
    )
    told = patiently(lambda: explorer.clean("duplicates", part=part, epoch=2, count=100))
    pairs = {tuple(sorted((i, int(far[i].argmin())))) for i in range(60)} - {(OF, COPY)}
    found = [(one["nearest"]["index"], one["index"]) for one in told["items"]]
    assert found[0] == (OF, COPY) and told["items"][0]["score"] < 1e-5
    assert set(found[1:]) == pairs and len(found) == len(set(found)) == told["total"]
    scores = [one["score"] for one in told["items"]]
    assert scores == sorted(scores)


def test_more_copies_than_neighbors_are_still_others(tmp_path):
    np.savez(tmp_path / "p.npz", images=np.full((30, 16, 16, 3), 90, np.uint8))
    explorer = Explorer(Run(make_run(tmp_path / "run", tmp_path / "p.npz", epochs=(0,))))
    told = patiently(lambda: explorer.clean("duplicates", part="probe", epoch=0, count=100))
    assert all(one["index"] > one["nearest"]["index"] for one in told["items"])
    assert 20 < len({one["index"] for one in told["items"]}) < 30  # one stays, whoever goes
    assert all(one["score"] < 1e-5 for one in told["items"])


def test_a_page_at_a_time(port):
    whole = get(port, "/api/clean?epoch=2&count=60").json["items"]
    assert get(port, "/api/clean?epoch=2&start=10&count=5").json["items"] == whole[10:15]
    assert get(port, "/api/clean?epoch=2&start=99").json["items"] == []
    assert "need outliers or duplicates" in get(port, "/api/clean?epoch=2&order=size").error


def test_one_image_has_nobody_to_compare_with(tmp_path):
    np.savez(tmp_path / "p.npz", images=np.zeros((1, 16, 16, 3), np.uint8))
    explorer = Explorer(Run(make_run(tmp_path / "run", tmp_path / "p.npz", epochs=(0,))))
    with pytest.raises(MissingData, match="need 2 or more"):
        explorer.clean("outliers", part="probe", epoch=0)
    assert explorer.point(0)["moments"][0]["rows"] == []


# Work in the background


def test_work_is_done_once_tells_its_progress_and_can_be_stopped():
    work, go, made = Work(patience=0.05), threading.Event(), []

    def make(told):
        told(3, 7)
        made.append(1)
        go.wait(5)
        told(4, 7)
        return "done"

    for _ in range(2):
        with pytest.raises(Pending) as pending:
            work.ask("key", "title", make)
    assert (pending.value.title, pending.value.done, pending.value.total) == ("title", 3, 7)
    go.set()
    assert patiently(lambda: work.ask("key", "title", make)) == "done" and made == [1]
    go.clear()
    with pytest.raises(Pending):
        work.ask("other", "title", make)
    work.stop()
    go.set()
    assert work.ask("third", "title", lambda _: 3) == 3  # its turn has come
    assert patiently(lambda: work.ask("other", "title", make)) == "done" and len(made) == 3


def test_of_what_waits_for_its_turn_only_the_last_is_made(monkeypatch):
    monkeypatch.setattr("meanshift.viz.explorer.work._LATELY", 0.0)
    work, made = Work(patience=0.05), []
    begun, go, others = threading.Event(), threading.Event(), set(threading.enumerate())

    def make(name):
        def do(_):
            made.append(name)
            begun.set()
            return go.wait(10) and name

        return do

    for name in ("first", "second", "third", "last"):
        with pytest.raises(Pending):
            work.ask(name, name, make(name))
        assert begun.wait(10)
    go.set()
    assert patiently(lambda: work.ask("last", "last", make("last"))) == "last"
    for thread in set(threading.enumerate()) - others:
        thread.join(10)
    assert made == ["first", "last"]


def test_who_waits_for_work_that_is_stopped_is_told_so(tmp_path, monkeypatch):
    explorer = Explorer(Run(make_run(tmp_path / "run", arrays(tmp_path / "p.npz", count=600))))
    explorer.searcher.work = Work(patience=20.0)
    begun, go, gather = threading.Event(), threading.Event(), type(explorer.run.source).read_batch

    def slowly(self, indices):
        begun.set()
        go.wait(10)
        return gather(self, indices)

    monkeypatch.setattr(type(explorer.run.source), "read_batch", slowly)
    told = []
    with served(explore.build(explorer)[0]) as port:
        ask = threading.Thread(target=lambda: told.append(get(port, "/api/ready?in=train&epoch=0")))
        ask.start()
        assert begun.wait(10) and post(port, "/api/stop").status == 200
        go.set()
        ask.join(10)
    assert told[0].status == 409 and told[0].error == "stopped"


def test_work_that_failed_is_tried_again():
    work, tries = Work(), []

    def make(_):
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("no room")
        return len(tries)

    with pytest.raises(ValueError, match="no room"):
        work.ask("key", "title", make)
    assert work.ask("key", "title", make) == 2


def test_stopping_ends_the_reading_of_images(tmp_path, monkeypatch):
    explorer = Explorer(Run(make_run(tmp_path / "run", arrays(tmp_path / "p.npz", count=600))))
    slow, gather = threading.Event(), type(explorer.run.source).read_batch

    def slowly(self, indices):
        slow.wait(5)
        return gather(self, indices)

    monkeypatch.setattr(type(explorer.run.source), "read_batch", slowly)
    with served(explore.build(explorer)[0]) as port:
        told = get(port, "/api/ready?in=train&epoch=0")
        assert told.status == 202 and told.json["pending"].startswith("Features of 600 images")
        assert post(port, "/api/stop").status == 200
        slow.set()
        for thread in [t for t in threading.enumerate() if t.name == "meanshift work"]:
            thread.join(10)
        assert list((tmp_path / "run" / "features").iterdir()) == []
        assert patiently(lambda: get(port, "/api/ready?in=train&epoch=0")).status == 200


# What users know about their images


TITLES = ["a/1.jpg", "a/2.jpg", "b/1.jpg", "b/3.jpg"]


def read_metadata(tmp_path, text, titles=TITLES):
    path = tmp_path / "about.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Metadata.read(path, titles)


def test_metadata_by_path_or_by_a_name_that_only_one_has(tmp_path):
    with pytest.warns(UserWarning, match=r"2 of its files are not among.*'1\.jpg'"):
        told = read_metadata(
            tmp_path,
            '\ufeffsite,file,age\n"B, east",a/1.jpg,3\nB,2.jpg,nan\nC,3.jpg,7.5\n\n'
            "D,1.jpg,9\nE,no,1\n",
        )
    assert told.columns == ["site", "age"]
    assert told.row(0) == {"site": "B, east", "age": "3"} and told.row(2) == {}  # 1.jpg is two
    age = told.colors("age", [0, 1, 2, 3])
    assert (age["kind"], age["low"], age["high"]) == ("scale", 3.0, 7.5)
    assert age["values"] == [3.0, None, None, 7.5]
    site = told.colors("site", [3, 0, 2])
    assert site["names"] == ["C", "B, east"] and site["values"] == [0, 1, None]
    with pytest.raises(ValueError, match="got the column 'x', need one of site, age"):
        told.colors("x", [0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "begins with 'nothing'; need a first line with the column file"),
        ("name,age\na/1.jpg,3\n", "begins with 'name,age'; need a first line"),
        ("file\na/1.jpg\n", "column file and others"),
        ("file,age,age\na/1.jpg,3,4\n", "each of its own name"),
        ("file,age\na/1.jpg,3\na/1.jpg,4\n", "line 3: a/1.jpg is there twice; give one line"),
        ("file,age\na/1.jpg,3,4\n", "line 2: 3 cells, need 2"),
        ("file,age\nx/9.jpg,3\n", "none of its files is among the 4 training images; got"),
        ("file,age\n", "got 'nothing' first, need names such as 'a/1.jpg'"),
        (b"file,age\n\xff\xfe,3\n", "not a readable CSV.*UTF-8"),
        (b"file,age\n\x00,3\n", "not a readable CSV|none of its files"),
    ],
)
def test_wrong_metadata_says_what_is_needed(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        read_metadata(tmp_path, text)


def test_metadata_colors_the_map_and_stands_beside_an_image(tmp_path, run):
    path = tmp_path / "about.csv"
    path.write_text("file,weight,=x\n" + "".join(f"#{i},{i},{i % 2}a\n" for i in range(60)))
    with served(explore.build(Explorer(Run(run), metadata=path))[0]) as port:
        assert get(port, "/api/run").json["columns"] == ["weight", "=x"]
        told = get(port, "/api/colors?epoch=2&by=" + quote("=weight")).json
        assert told["values"] == list(range(60)) and told["high"] == 59
        assert get(port, "/api/colors?epoch=2&by=" + quote("==x")).json["names"] == ["0a", "1a"]
        assert get(port, "/api/point/7").json["metadata"] == {"weight": "7", "=x": "1a"}
    with pytest.raises(ValueError, match=r"missing\.csv: not found"):
        Explorer(Run(run), metadata=tmp_path / "missing.csv")


def test_a_run_continued_with_a_harmless_change_stays_the_one_it_was(tmp_path):
    folder = make_run(tmp_path / "run", arrays(tmp_path / "p.npz"))
    explorer = Explorer(Run(folder))
    RunDirectory(folder).begin(Run(folder).config.with_overrides({"data.workers": 3}), extra={})
    assert explorer.current() is explorer and Explorer(Run(folder)).mark == explorer.mark


def test_a_run_folder_whose_name_is_no_text_can_be_explored(tmp_path):
    folder = make_run(tmp_path / os.fsdecode(b"caf\xe9"), arrays(tmp_path / "p.npz"))
    assert Explorer(Run(folder)).mark


def test_ids_of_the_live_page_stand_once():
    text = (resources.files("meanshift") / "assets/explore.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) > 20 and len(ids) == len(set(ids))


def test_a_probe_without_a_label_offers_no_colors_by_label(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "p.npz", x_train=pixels, y_train=np.where(np.arange(60) < 40, -1, 0))
    folder = make_run(tmp_path / "run", tmp_path / "p.npz", probe=30, held_out="none")
    assert Explorer(Run(folder)).state()["labeled"] is False


def test_a_stray_number_is_no_epoch(tmp_path):
    folder = make_run(tmp_path / "run", arrays(tmp_path / "p.npz"))
    for name in ("7.pt", "epoch-12.pt"):
        shutil.copy(folder / "snapshots/epoch-0000.pt", folder / "snapshots" / name)
    assert Run(folder).epochs == [0, 2]


def test_a_training_that_died_is_not_said_to_train(tmp_path):
    folder = make_run(tmp_path / "run", arrays(tmp_path / "p.npz"))
    for step in range(1, 5):
        line = {"kind": "train", "step": step, "epoch": 1, "loss": 1.0, "seconds": 5.0 * step}
        RunDirectory(folder).append("metrics.jsonl", {**line, "images_per_second": 100.0})
    explorer = Explorer(Run(folder))
    assert explorer.state()["training"] is True
    before = explorer.live.version()
    long_ago = time.time() - 120  # lines came every 5 seconds
    os.utime(folder / "metrics.jsonl", (long_ago, long_ago))
    told = explorer.state()
    assert told["training"] is False and 119 < told["quiet"] < 200
    assert explorer.live.version() != before


# Size


def test_an_array_of_100_000_images_opens_in_seconds(tmp_path):
    source = tmp_path / "many.npy"
    np.lib.format.open_memmap(source, "w+", np.uint8, (100_000, 16, 16, 3)).flush()
    folder = make_run(tmp_path / "run", source, epochs=(0,), held_out="none")
    began = time.perf_counter()
    explorer = Explorer(Run(folder))
    assert explorer.state()["parts"][0]["count"] == 100_000
    explorer.map(), explorer.thumbnail("train", 99_999, 64)
    assert time.perf_counter() - began < 20  # half a second without the shape checker


@pytest.mark.slow
def test_a_folder_of_100_000_images_opens_in_seconds(tmp_path):
    root = tmp_path / "many"
    body = png(np.zeros((16, 16, 3), np.uint8))
    for kind in range(100):
        (root / f"class {kind}").mkdir(parents=True)
        for index in range(1000):
            (root / f"class {kind}" / f"{index}.png").write_bytes(body)
    folder = make_run(tmp_path / "run", root, epochs=(0,), held_out="none")
    began = time.perf_counter()
    explorer = Explorer(Run(folder))
    assert explorer.state()["parts"][0]["count"] == 100_000
    explorer.map(), explorer.thumbnail("train", 99_999, 64)
    assert time.perf_counter() - began < 10
