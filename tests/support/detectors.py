"""Tiny detectors and what they are trained on, for the tests of detection."""

import torch

from meanshift import config
from meanshift.evaluation.context import EncoderContext
from meanshift.evaluation.detection.batches import inputs, train_batches
from meanshift.evaluation.detection.model import build_detector
from meanshift.evaluation.detection.settings import DetectionSettings
from meanshift.evaluation.detection.train import checkpoint_folder, train_detector
from meanshift.models.encoder import build_backbone
from meanshift.models.weights import Weights, export
from meanshift.runtime import checkpoint, distributed

SMALL = config.Encoder(name="resnet10", stem="small-stride2", width=0.125)
TINY = DetectionSettings.scaled(3, size=64, batch_size=2, rois=8)
TINY_OPTIONS = ("--iterations", "2", "--size", "64", "--batch-size", "2", "--rois", "8")
CPU = torch.device("cpu")


def small_backbone(seed=0):
    torch.manual_seed(seed)
    return build_backbone(SMALL)[0].eval()


def write_weights(path, seed=0):
    """Export a small backbone to a file, as a user names it."""
    settings = config.Config(data=config.Data(image_size=64), encoder=SMALL)
    weights = Weights("made", small_backbone(seed), "made", 64, path.parent, config=settings)
    return export(weights, path)


def detection_context(output_dir, *, backbone=None, **options):
    weights = Weights("made", backbone or small_backbone(), "made in a test", 64, output_dir)
    return EncoderContext(weights, device="cpu", **options)


def trained_detector(context, train, settings=TINY, seed=0):
    """A detector after its iterations, the log of its training, and its last checkpoint."""
    detector = build_detector(context.backbone, len(train.classes), settings=settings, seed=seed)
    log = train_detector(context, detector, train, settings, seed)
    state, unreadable = checkpoint.latest(checkpoint_folder(context, train, settings, seed))
    assert not unreadable
    return detector, log, state


def training_inputs(train, settings, seed=0, *, start=0, workers=0):
    """By position in training: the image's index, its pixels and its target."""
    found = {}
    rank, world = distributed.rank(), distributed.world_size()
    stop = settings.iterations
    batches = train_batches(train, settings, seed=seed, start=start, stop=stop, workers=workers)
    for step, samples in batches:
        pairs = inputs(train, samples, settings, seed=seed, step=step, device=CPU)
        for number, (sample, image, target) in enumerate(zip(samples, *pairs, strict=True)):
            position = step * settings.batch_size + rank + world * number
            found[position] = (sample[1], image, target)
    return found
