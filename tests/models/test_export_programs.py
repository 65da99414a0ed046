"""Exports read by the real onnxruntime, timm and huggingface_hub."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import torch

import meanshift as ms
from meanshift.models.encoder import build_backbone
from meanshift.models.export import export_weights
from meanshift.models.export.counterparts import _SAME_NAMES
from meanshift.models.export.verify import verify
from meanshift.models.weights import fingerprint, load_weights
from tests.support.runs import write_checkpoint, write_run, write_solid_images
from tests.support.signals import write_tones

pytestmark = pytest.mark.extras

RESNET18 = {"encoder__name": "resnet18", "encoder__stem": "imagenet", "encoder__width": 1.0}
VECTORS = {
    "encoder__name": "mlp",
    "encoder__stem": "imagenet",
    "data__kind": "vector",
    "data__channels": 8,
    "data__mean": (0.0,) * 8,
    "data__std": (1.0,) * 8,
    "data__range": (0.0, 1.0),
    "data__dtype": "float32",
}
SIGNALS = {
    **VECTORS,
    "encoder__name": "conv1d",
    "data__kind": "signal",
    "data__channels": 1,
    "data__mean": (0.0,),
    "data__std": (1.0,),
    "data__image_size": 1024,
}


@pytest.fixture
def source(tmp_path):
    return write_solid_images(tmp_path)


def make_run(folder, source, **settings):
    return write_checkpoint(write_run(folder, source, **settings))


def write_samples(folder, settings):
    """Vectors of 8 columns, or signals."""
    if settings["data__kind"] == "signal":
        return write_tones(folder / "tones")
    vectors = np.random.default_rng(0).normal(size=(20, 8)).astype("float32")
    np.savez(folder / "samples.npz", x_train=vectors)
    return folder / "samples.npz"


# ONNX


def test_onnx_is_verified_and_carries_its_preprocessing(source, tmp_path, call):
    import onnxruntime

    run = make_run(tmp_path / "run", source, encoder__output="whitened")
    code, out, err = call("export", run, "--format", "onnx", "--verify")
    assert code == 0, err
    assert len(re.findall(r"largest difference \S+, largest feature \S+ \(16 samples", out)) == 2
    path = run / "export/model.onnx"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["mean"]) == [0.485, 0.456, 0.406]
    assert json.loads(metadata["std"]) == [0.229, 0.224, 0.225]
    assert json.loads(metadata["range"]) == [0, 255]
    sizes = [json.loads(metadata[name]) for name in ("channels", "image_size", "resize")]
    assert sizes == [3, 16, 18]
    assert metadata["crop"] == "center" and "short side to 18" in metadata["rule"]
    assert metadata["weights"] == fingerprint(ms.load_encoder(run))
    assert metadata["run"] == str(run) and metadata["meanshift"] == ms.__version__
    content = path.read_bytes()
    assert os.fsencode(Path(torch.__file__).parent) not in content
    assert b"stack_trace" not in content
    # What the metadata says gives the features of `embed`.
    pixels = np.load(source)["x_train"]
    unit = pixels.transpose(0, 3, 1, 2).astype("float32") / 255
    mean, std = (np.float32(json.loads(metadata[name]))[:, None, None] for name in ("mean", "std"))
    (features,) = session.run(None, {"images": (unit - mean) / std})
    expected = ms.load(run).embed(pixels)
    assert np.abs(features - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("settings", [VECTORS, SIGNALS], ids=["vectors", "signals"])
def test_other_kinds_are_exported_to_onnx(tmp_path, settings, call):
    samples = write_samples(tmp_path, settings)
    run = make_run(tmp_path / "run", samples, **settings)
    code, out, err = call("export", run, "--format", "onnx", "--verify")
    assert code == 0, err
    assert " samples of " in out and f'{{"{settings["data__kind"]}s": images}}' in err
    samples.rename(tmp_path / "elsewhere")
    code, _, err = call("export", run, "--format", "onnx", "--out", tmp_path / "new.onnx")
    assert code == 2 and "give others: --data SOURCE" in err
    assert not (tmp_path / "new.onnx").exists()


def test_verify_sees_one_changed_weight_of_a_graph(source, tmp_path):
    import onnx
    from onnx import numpy_helper

    run = make_run(tmp_path / "run", source)
    job = export_weights(load_weights(run), format="onnx", check=True)
    model = onnx.load(job.out)
    weight = next(each for each in model.graph.initializer if len(each.dims) == 4)
    changed = numpy_helper.to_array(weight).copy()
    changed.flat[0] += 1
    weight.CopyFrom(numpy_helper.from_array(changed, weight.name))
    onnx.save(model, job.out)
    with pytest.raises(ValueError, match=r"read by onnxruntime: .* is not that of"):
        verify("onnxruntime", job.programs["onnxruntime"], job)
    job.out.write_bytes(job.out.read_bytes()[:1000])
    with pytest.raises(ValueError, match="onnxruntime cannot read what was exported"):
        verify("onnxruntime", job.programs["onnxruntime"], job)


def test_a_graph_that_differs_from_torch_never_appears(source, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", source)
    monkeypatch.setattr("meanshift.models.export.reference.TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="is not that of"):
        export_weights(load_weights(run), format="onnx")
    assert not (run / "export").exists()


def test_images_that_are_gone_are_replaced_by_those_of_the_package(source, tmp_path):
    run = make_run(tmp_path / "run", source)
    source.unlink()
    with pytest.warns(UserWarning, match="images of `sample`"):
        job = export_weights(load_weights(run), format="onnx")
    assert "16 samples of sample" in job.checks[0]


# timm


@pytest.mark.parametrize("name", _SAME_NAMES)
def test_timm_has_the_same_parameters(name):
    """On the meta device: names and shapes; the features are compared below."""
    import timm

    from meanshift.config import Encoder

    with torch.device("meta"):
        ours = build_backbone(Encoder(name=name))[0].state_dict()
        theirs = timm.create_model(name, num_classes=0).state_dict()
    assert {key: value.shape for key, value in ours.items()} == {
        key: value.shape for key, value in theirs.items()
    }


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d", "densenet121"])
def test_timm_computes_the_same_features(name, source, tmp_path):
    settings = {**RESNET18, "encoder__name": name, "data__image_size": 64}
    job = export_weights(
        load_weights(make_run(tmp_path / "run", source, **settings)), format="timm"
    )
    scope = {"images": job.reference.samples.numpy()}
    exec(job.programs["timm"], scope)
    assert torch.equal(scope["features"], job.reference.features)


@pytest.mark.parametrize("output", ["plain", "whitened"])
def test_a_hugging_face_folder_is_verified_by_both_programs(source, tmp_path, call, output):
    import timm

    settings = {**RESNET18, "encoder__output": output, "data__image_size": 32}
    run = make_run(tmp_path / "run", source, **settings)
    code, out, err = call("export", run, "--format", "huggingface", "--verify")
    assert code == 0, err
    assert "read by meanshift: largest difference 0," in out and "read by timm" in out
    folder = run / "export/huggingface"
    network = timm.create_model(f"local-dir:{folder}", pretrained=True)
    data = timm.data.resolve_model_data_config(network)
    resize, crop, *_ = timm.data.create_transform(**data, is_training=False).transforms
    assert (resize.size, tuple(crop.size)) == (37, (32, 32))
    assert (*data["mean"], data["interpolation"]) == (0.485, 0.456, 0.406, "bilinear")
    assert fingerprint(ms.load_encoder(f"hf:{folder}")) == fingerprint(ms.load_encoder(run))
    classes = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=3)
    assert torch.equal(
        classes.conv1.weight,
        ms.load_encoder(run).state_dict()[
            "conv1.weight" if output == "plain" else "network.conv1.weight"
        ],
    )


@pytest.mark.parametrize("output", ["plain", "whitened"])
@pytest.mark.parametrize("name", ["convnext_atto", "vit_tiny_patch16_224"])
def test_encoders_of_timm_go_back_to_timm(name, output, source, tmp_path):
    settings = {
        **RESNET18,
        "encoder__name": f"timm:{name}",
        "encoder__output": output,
        "data__image_size": 64,
    }
    weights = load_weights(make_run(tmp_path / "run", source, **settings))
    for format in ("timm", "huggingface"):
        job = export_weights(weights, format=format)
        for program, code in job.programs.items():
            scope = {"images": job.reference.samples.numpy()}
            exec(code, scope)
            job.reference.compare(scope["features"].numpy(), program)


def test_timm_takes_other_channels(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 5), dtype=np.uint8)
    np.savez(tmp_path / "bands.npz", x_train=pixels)
    settings = {
        **RESNET18,
        "data__image_size": 32,
        "data__channels": 5,
        "data__mean": (0.5,) * 5,
        "data__std": (0.25,) * 5,
    }
    run = make_run(tmp_path / "run", tmp_path / "bands.npz", **settings)
    job = export_weights(load_weights(run), format="huggingface", check=True)
    assert len(job.checks) == 2
    with pytest.raises(ValueError, match=r"does not have resnet18 of 5 channels; .* timm, or"):
        export_weights(load_weights(run), format="torchvision")


def test_other_parameter_names_are_refused(source, tmp_path):
    settings = {**RESNET18, "encoder__name": "convnext_tiny", "data__image_size": 32}
    run = make_run(tmp_path / "run", source, **settings)
    with pytest.raises(ValueError, match="timm does not have convnext_tiny; type --format torch"):
        export_weights(load_weights(run), format="timm")


# The Hub


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the Hub's protocol that downloads a file: `resolve`, and its headers."""

    folder = None

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        path = unquote(urlsplit(self.path).path)
        match = re.fullmatch(r"/someone/model/resolve/[^/]+/(.+)", path)
        file = self.folder / match[1] if match else None
        if file is not None and file.is_file():
            content = file.read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", "0123456789abcdef0123456789abcdef01234567")
            self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:040x}"')
        elif path == "/api/datasets/someone/data":
            content = b'{"id": "someone/data"}'
            self.send_response(200)
        else:
            content = b"{}"
            self.send_response(404)
            known = match is not None
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(source, tmp_path):
    """A server with the model `someone/model` and the dataset `someone/data`."""
    run = make_run(tmp_path / "run", source)
    folder = export_weights(load_weights(run), tmp_path / "served", format="huggingface").out
    handler = type("Handler", (Hub,), {"folder": folder})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server, folder, run
    server.shutdown()
    server.server_close()
    thread.join()


def load_from(server, tmp_path, *names):
    """Load models in a fresh process whose Hub is the server; the lines that it prints."""
    script = """
import sys, meanshift
from meanshift.models.weights import fingerprint
for name in sys.argv[1:]:
    try:
        print(fingerprint(meanshift.load_encoder(f"hf:{name}")))
    except (ValueError, OSError) as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *names],
        env={
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "NO_PROXY": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return done.stdout.splitlines()


def test_a_model_is_loaded_from_the_hub(hub, tmp_path):
    server, folder, run = hub
    names = ["someone/model", "someone/model@v2", "someone/data", "someone/gone", "a/b/c"]
    first, revision, dataset, gone, invalid = load_from(server, tmp_path, *names)
    assert first == revision == fingerprint(ms.load_encoder(run))
    assert dataset.endswith("it is a dataset: give it as images, --data hf:someone/data")
    assert "no such folder, and no such model; check the name" in gone
    assert "no such folder, and no name of a repository" in invalid
    (folder / "model.safetensors").unlink()
    (missing,) = load_from(server, tmp_path / "other", "someone/model")
    assert "hf:someone/model: has no model.safetensors" in missing
    server.shutdown()
    server.server_close()
    (cached,) = load_from(server, tmp_path, "someone/model")
    assert cached == first
    (offline,) = load_from(server, tmp_path / "empty", "someone/model")
    assert "hf:someone/model: " in offline and "type the command again" in offline
