"""Runs for the live page, with the weights of untrained encoders, and a server that shows them."""

import contextlib
import http.client
import io
import json
import threading
import time

import numpy as np
import torch
from PIL import Image

from meanshift.config import Config
from meanshift.data import train_and_validation
from meanshift.models.encoder import build_backbone
from meanshift.models.features import extract_features
from meanshift.runtime import checkpoint
from meanshift.runtime.run_directory import RunDirectory
from meanshift.viz.explorer import server
from meanshift.viz.explorer.background import Pending
from meanshift.viz.run_reader import Run

ORIGINAL = 4
COPY = 40  # the same image as ORIGINAL, with another label


def write_arrays(path, count=60, validation=20, labels=True):
    """Noisy images of three colors; one of them is there twice."""
    rng = np.random.default_rng(0)

    def draw(number):
        kinds = np.arange(number) % 3
        tones = np.array([[200, 60, 60], [60, 180, 60], [60, 60, 200]])[kinds]
        noise = rng.integers(-50, 50, (number, 16, 16, 3))
        return np.clip(tones[:, None, None] + noise, 0, 255).astype(np.uint8), kinds

    images, kinds = draw(count)
    validation_images, validation_kinds = draw(validation)
    if count > COPY:
        images[COPY] = images[ORIGINAL]
    if labels:
        np.savez(
            path,
            x_train=images,
            y_train=kinds,
            x_test=validation_images,
            y_test=validation_kinds,
        )
    else:
        np.savez(path, images=images)
    return path


def write_live_run(
    folder,
    source,
    *,
    epochs=(0, 2),
    total=4,
    image_size=16,
    snapshot_images=60,
    validation="auto",
    **settings,
):
    """A run directory as training leaves it; further settings as `method__module=...`."""
    overrides = {
        "data.source": str(source),
        "data.image_size": image_size,
        "data.validation": validation,
        "encoder.name": "resnet10",
        "encoder.stem": "small-stride2",
        "encoder.width": 0.125,
        "train.epochs": total,
        "train.snapshot_images": snapshot_images,
        "train.batch_size": 20,
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    config = Config().with_overrides(overrides)
    train, _ = train_and_validation(str(source), validation, seed=0)
    extra = {"source": train.fingerprint(), "images": len(train), "steps": 10 * total}
    RunDirectory(folder).begin(config, extra=extra)
    for epoch in epochs:
        write_live_snapshot(folder, epoch)
    return folder


def write_live_snapshot(folder, epoch, *, diverged=False, seed=None, count=None):
    """The snapshot after an epoch: random weights, and the features that they give."""
    config = Run(folder).config
    image_size = config.data.image_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(epoch if seed is None else seed)
        backbone, _ = build_backbone(config.encoder, image_size=image_size)
    weights = {
        name: value.half() if value.is_floating_point() else value
        for name, value in backbone.state_dict().items()
    }
    load_weights(backbone, weights)
    train, _ = train_and_validation(config.data.source, config.data.validation, seed=0)
    indices = torch.arange(len(train))[: count or config.train.snapshot_images]
    features = extract_features(
        backbone.eval(), train.subset(indices), image_size=image_size, device=torch.device("cpu")
    )
    if diverged:
        features = torch.full_like(features, torch.nan)
    content = {
        "format": checkpoint.FORMAT,
        "epoch": epoch,
        "indices": indices,
        "weights": weights,
        "features": features.half(),
    }
    checkpoint.write(folder / "snapshots" / f"epoch-{epoch:04d}.pt", content)


def load_weights(backbone, weights):
    """Load the half-precision weights of a snapshot."""
    backbone.load_state_dict(
        {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}
    )


def log(folder, step, **metrics):
    """Append a line to metrics.jsonl."""
    record = {"kind": "train", "step": step, "epoch": step // 10, **metrics}
    RunDirectory(folder).append("metrics.jsonl", record)


@contextlib.contextmanager
def serving(app, host="127.0.0.1"):
    """Run a real server in a thread; gives its port."""
    sock = server.listen(host, 0)
    instance = server.make_server(app)
    thread = threading.Thread(target=instance.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield sock.getsockname()[1]
    finally:
        instance.should_exit = True
        thread.join()


def serving_explorer(explorer):
    """Run the server of an explorer in a thread; gives its port."""
    return serving(server.build_app(explorer)[0])


def encode_png(pixels, **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", **options)
    return buffer.getvalue()


def read_pixels(run, index):
    """The pixels of a training image of a run."""
    return Run(run).source.read(index).permute(1, 2, 0).numpy()


class Answer:
    """The whole response of a server."""

    def __init__(self, response):
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]


def get(port, path, method="GET", body=None, **headers):
    """A request to the server; headers as `Sec_Fetch_Site="none"`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, headers)
        return Answer(connection.getresponse())


def post(port, path, body=b"", **headers):
    return get(port, path, "POST", body, **{"Origin": f"http://127.0.0.1:{port}", **headers})


def wait_for(ask):
    """Ask until there is an answer that is not pending."""
    for _ in range(200):
        try:
            answer = ask()
        except Pending:
            answer = None
        if answer is not None and getattr(answer, "status", 200) != 202:
            return answer
        time.sleep(0.05)
    raise AssertionError("there was no answer within 10 seconds")
