"""Faster R-CNN on C4 features: its parts, the paper's numbers, and what is trained."""

import math

import pytest
import torch
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork

from meanshift import config
from meanshift.evaluation.detection.model import build_detector, parameter_groups
from meanshift.evaluation.detection.settings import DetectionSettings
from meanshift.models.encoder import build_backbone
from meanshift.models.weights import fingerprint

TINY = DetectionSettings.scaled(4, size=64, batch_size=2, rois=8)


@pytest.fixture
def resnet():
    """A small backbone whose batch norms are not as initialized."""
    torch.manual_seed(0)
    settings = config.Encoder(name="resnet10", stem="small-stride2", width=0.125)
    backbone = build_backbone(settings)[0].eval()
    with torch.no_grad():
        for norm in (m for m in backbone.modules() if isinstance(m, nn.BatchNorm2d)):
            for value in (norm.weight, norm.bias, norm.running_mean):
                value.add_(0.3 * torch.randn_like(value))
            norm.running_var.uniform_(0.5, 2)
    return backbone


@pytest.fixture(scope="module")
def papers():
    """The paper's detector around a ResNet-50, for VOC's 20 classes."""
    backbone, _ = build_backbone(config.Encoder())
    return build_detector(backbone, 20, settings=DetectionSettings())


def a_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = [torch.rand(3, 64, 80, generator=generator) for _ in range(2)]
    boxes = torch.tensor([[4.0, 6.0, 40.0, 50.0], [30.0, 20.0, 70.0, 60.0]])
    return images, [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in images]


def parts(detector):
    heads = detector.roi_heads
    return heads, heads.box_head, heads.box_predictor


# Its parts


def test_the_parts_are_torchvisions(resnet):
    detector = build_detector(resnet, 2, settings=TINY)
    heads, _, predictor = parts(detector)
    assert type(detector) is FasterRCNN
    assert type(detector.rpn) is RegionProposalNetwork
    assert type(detector.rpn.anchor_generator) is AnchorGenerator
    assert type(heads) is RoIHeads
    assert type(predictor) is FastRCNNPredictor


@pytest.mark.parametrize(("stem", "stride"), [("small-stride2", 8), ("imagenet", 16), ("small", 4)])
def test_a_region_is_pooled_where_its_box_is(stem, stride):
    """On features that are coordinates: the center of each cell, in pixels of the image."""
    backbone, _ = build_backbone(config.Encoder(name="resnet10", stem=stem, width=0.125))
    pool = build_detector(backbone, 2, settings=TINY).roi_heads.box_roi_pool
    y, x = (stride * (torch.arange(count) + 0.5) for count in (20, 30))
    places = torch.stack([x.expand(20, 30), y[:, None].expand(20, 30)])[None]
    left, top, right, bottom = box = torch.tensor([2.1, 3.3, 17.7, 9.2]) * stride
    found = pool({"0": places}, [box[None]], [(20 * stride, 30 * stride)])
    assert found.shape == (1, 2, 14, 14)
    steps = (torch.arange(14) + 0.5) / 14
    across, down = left + (right - left) * steps, top + (bottom - top) * steps
    torch.testing.assert_close(found[0, 0], across.expand(14, 14), atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(found[0, 1], down[:, None].expand(14, 14), atol=1e-3, rtol=1e-5)


def test_regions_are_proposed_on_the_third_stage(resnet):
    detector = build_detector(resnet, 2, settings=TINY).eval()
    images = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        by_hand = resnet.maxpool(resnet.relu(resnet.bn1(resnet.conv1(images))))
        for stage in (resnet.layer1, resnet.layer2, resnet.layer3):
            by_hand = stage(by_hand)
        assert torch.equal(detector.backbone(images), by_hand)
    assert by_hand.shape == (2, detector.backbone.out_channels, 8, 12)


def test_the_box_head_is_the_fourth_stage_an_extra_batch_norm_and_the_mean(resnet):
    detector = build_detector(resnet, 2, settings=TINY).eval()
    _, head, _ = parts(detector)
    extra = [m for name, m in head.named_modules() if isinstance(m, nn.BatchNorm2d)
             and not name.startswith("layer4.")]  # fmt: skip
    assert len(extra) == 1 and extra[0].num_features == 64
    generator = torch.Generator().manual_seed(2)
    mean, bias = torch.randn(2, 64, generator=generator)
    variance, weight = 0.5 + torch.rand(2, 64, generator=generator)
    regions = torch.randn(5, 32, 14, 14, generator=generator)
    with torch.no_grad():
        for statistic, value in zip(
            (extra[0].running_mean, extra[0].running_var, extra[0].weight, extra[0].bias),
            (mean, variance, weight, bias),
            strict=True,
        ):
            statistic.copy_(value)
        pooled = resnet.layer4(regions).mean((2, 3))  # the norm and the mean may change places
        by_hand = (pooled - mean) / (variance + 1e-5).sqrt() * weight + bias
        torch.testing.assert_close(head(regions), by_hand, atol=1e-5, rtol=1e-5)


def test_in_training_the_extra_norm_is_over_the_regions(resnet):
    """Before the mean: over all positions of all regions, not over the means of regions."""
    detector = build_detector(resnet, 2, settings=TINY)
    _, head, _ = parts(detector)
    regions = torch.randn(6, 32, 14, 14, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        head.layer4.eval()
        head.norm.train()
        maps = resnet.layer4(regions)
        rows = maps.transpose(0, 1).flatten(1)
        mean, variance = rows.mean(1), rows.var(1, correction=0)
        by_hand = ((maps - mean[:, None, None]) / (variance + 1e-5).sqrt()[:, None, None]).mean(
            (2, 3)
        )
        torch.testing.assert_close(head(regions), by_hand, atol=1e-5, rtol=1e-5)


def test_the_box_head_sees_regions_of_14_pixels_of_the_third_stage(resnet):
    detector, seen = build_detector(resnet, 2, settings=TINY), []
    parts(detector)[1].register_forward_pre_hook(
        lambda _, arguments: seen.append(arguments[0].shape)
    )
    losses = detector.train()(*a_batch())
    assert set(losses) == {
        "loss_classifier",
        "loss_box_reg",
        "loss_objectness",
        "loss_rpn_box_reg",
    }
    assert seen == [(2 * TINY.rois, 32, 14, 14)]


def test_a_resnet_50_has_1024_channels_to_propose_on_and_2048_features_per_region(papers):
    _, head, predictor = parts(papers)
    assert papers.backbone.out_channels == 1024
    assert papers.rpn.head.conv[0][0].weight.shape == (1024, 1024, 3, 3)
    assert papers.rpn.head.cls_logits.weight.shape == (15, 1024, 1, 1)
    assert head.features == head.norm.num_features == 2048
    assert predictor.cls_score.weight.shape == (21, 2048)
    assert predictor.bbox_pred.weight.shape == (84, 2048)
    counts = [len(stage) for stage in papers.backbone if isinstance(stage, nn.Sequential)]
    assert counts == [3, 4, 6] and len(head.layer4) == 3


def test_predictors_begin_as_in_detectron2(papers):
    predictor = parts(papers)[2]
    assert float(predictor.cls_score.weight.detach().std()) == pytest.approx(0.01, rel=0.03)
    assert float(predictor.bbox_pred.weight.detach().std()) == pytest.approx(0.001, rel=0.03)
    assert not predictor.cls_score.bias.any() and not predictor.bbox_pred.bias.any()


def test_another_network_is_refused():
    backbone, _ = build_backbone(config.Encoder(name="mobilenet_v3_small"))
    with pytest.raises(ValueError, match=r"detect: needs a ResNet, .*got MobileNetV3"):
        build_detector(backbone, 2, settings=TINY)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_stages_compute_in_the_precision_and_boxes_in_float32(resnet, precision):
    detector, seen = build_detector(resnet, 2, settings=TINY, precision=precision), {}

    def watch(name):
        def record(_, __, output):
            seen[name] = output.dtype

        return record

    heads, head, predictor = parts(detector)
    watched = {
        "stage": detector.backbone[-1],
        "backbone": detector.backbone,
        "proposals": detector.rpn.head.conv,
        "regions": heads.box_roi_pool,
        "last stage": head.layer4,
        "head": head,
        "scores": predictor.cls_score,
    }
    for name, module in watched.items():
        module.register_forward_hook(watch(name))
    detector.eval()(a_batch()[0])
    assert {seen.pop("stage"), seen.pop("last stage")} == {precision}
    assert set(seen.values()) == {torch.float32} and len(seen) == 5


# The paper's numbers


def test_the_default_settings_are_the_papers():
    settings = DetectionSettings()
    assert (
        DetectionSettings.scaled() == settings == DetectionSettings.scaled(24_000, size=800)
        and settings.tag == ""
    )
    assert (settings.iterations, settings.batch_size, settings.lr) == (24_000, 16, 0.02)
    assert (settings.warmup, settings.momentum, settings.weight_decay) == (100, 0.9, 1e-4)
    assert settings.batch_norm_batches == 200
    assert settings.train_sizes == [480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800]


@pytest.mark.parametrize(
    ("step", "lr"),
    [
        (0, 0.00002),
        (50, 0.01001),
        (99, 0.0198002),
        (100, 0.02),
        (17_999, 0.02),
        (18_000, 0.002),
        (21_999, 0.002),
        (22_000, 0.0002),
        (23_999, 0.0002),
    ],
)
def test_the_learning_rate_is_the_papers(step, lr):
    assert DetectionSettings().lr_at(step) == pytest.approx(lr, rel=1e-9)


def test_the_detectors_numbers_are_detectron2s_for_c4(papers):
    heads, rpn = papers.roi_heads, papers.rpn
    assert papers.transform.min_size[-1] == 800 and papers.transform.max_size == 1333
    assert list(papers.transform.min_size) == list(range(480, 801, 32))
    assert rpn.anchor_generator.sizes == ((32, 64, 128, 256, 512),)
    assert rpn.anchor_generator.aspect_ratios == ((0.5, 1.0, 2.0),)
    assert (rpn._pre_nms_top_n, rpn._post_nms_top_n) == (
        {"training": 12_000, "testing": 6_000},
        {"training": 2_000, "testing": 1_000},
    )
    assert (rpn.nms_thresh, rpn.fg_bg_sampler.batch_size_per_image) == (0.7, 256)
    assert (rpn.fg_bg_sampler.positive_fraction, rpn.score_thresh) == (0.5, 0)
    assert (rpn.proposal_matcher.high_threshold, rpn.proposal_matcher.low_threshold) == (0.7, 0.3)
    sampler, matcher = heads.fg_bg_sampler, heads.proposal_matcher
    assert (sampler.batch_size_per_image, sampler.positive_fraction) == (512, 0.25)
    assert (matcher.high_threshold, matcher.low_threshold) == (0.5, 0.5)
    assert (heads.score_thresh, heads.nms_thresh, heads.detections_per_img) == (0.05, 0.5, 100)
    assert heads.box_coder.weights == (10.0, 10.0, 5.0, 5.0)
    assert heads.box_roi_pool.stride == 16


def test_fewer_iterations_and_smaller_images_scale_everything(resnet):
    settings = DetectionSettings.scaled(240, size=400)
    assert (settings.batch_size, settings.rois, settings.warmup) == (8, 128, 24)
    assert settings.lr == pytest.approx(0.01) and settings.tag == "-240-at-400"
    assert settings.train_sizes == list(range(240, 401, 16)) and settings.batch_norm_batches == 25
    milestones = {12: 0.005005, 23: 0.00958375, 24: 0.01, 179: 0.01, 180: 0.001, 219: 0.001}
    for step, lr in {**milestones, 220: 0.0001, 239: 0.0001}.items():
        assert settings.lr_at(step) == pytest.approx(lr, rel=1e-9), step
    detector = build_detector(resnet, 2, settings=settings)
    assert list(detector.transform.min_size) == settings.train_sizes
    assert detector.transform.max_size == 666
    assert detector.rpn.anchor_generator.sizes == ((16, 32, 64, 128, 256),)
    assert detector.rpn._pre_nms_top_n == {"training": 3_000, "testing": 1_500}
    assert detector.rpn._post_nms_top_n == {"training": 500, "testing": 250}
    assert detector.roi_heads.fg_bg_sampler.batch_size_per_image == 128


def test_results_are_named_by_what_is_not_the_papers():
    assert DetectionSettings.scaled(100, size=800).tag == "-100-at-800"
    assert DetectionSettings.scaled(lr=0.01).tag == "-24000-at-800-lr-0.01"
    assert DetectionSettings.scaled(100, size=400, batch_size=4, rois=32).tag == (
        "-100-at-400-batch-4-rois-32"
    )


@pytest.mark.parametrize(
    ("size", "rois", "proposed"), [(600, 288, (6_750, 1_125)), (100, 64, (1_500, 250))]
)
def test_smaller_images_have_fewer_regions_but_an_eighth_at_least(size, rois, proposed):
    settings = DetectionSettings.scaled(size=size)
    before, _, after, _ = settings.proposals.values()
    assert settings.rois == rois and (before, after) == proposed
    assert DetectionSettings.scaled(size=size, rois=8).proposals == settings.proposals


def test_given_settings_are_used():
    settings = DetectionSettings.scaled(5, size=64, batch_size=3, rois=7, lr=0.5)
    assert (settings.iterations, settings.size, settings.batch_size) == (5, 64, 3)
    assert (settings.rois, settings.lr, settings.warmup) == (7, 0.5, 0)
    assert [settings.lr_at(step) for step in range(5)] == pytest.approx([0.5] * 4 + [0.05])


@pytest.mark.parametrize(
    "wrong",
    [{"iterations": 0}, {"size": 31}, {"batch_size": -1}, {"rois": -2}, {"lr": 0.0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_invalid_settings_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(
        ValueError, match=f"--{name.replace('_', '-')} {wrong[name]:g}[,;].*need 1 or"
    ):
        DetectionSettings.scaled(**{"iterations": 10, **wrong})


def test_images_have_each_size_in_training_and_the_last_one_in_evaluation(resnet):
    detector = build_detector(resnet, 2, settings=TINY)
    image, resize = torch.rand(3, 100, 120), detector.transform
    torch.manual_seed(0)
    sides = [resize([image])[0].image_sizes[0] for _ in range(200)]
    assert {min(side) for side in sides} == set(TINY.train_sizes) and len(TINY.train_sizes) == 11
    assert all(side[1] == pytest.approx(1.2 * side[0], abs=1) for side in sides)
    resize.eval()
    assert {resize([image])[0].image_sizes[0] for _ in range(20)} == {(64, 76)}
    assert resize([torch.rand(3, 40, 120)])[0].image_sizes[0] == (35, 107)  # not longer than that


# What is trained


def test_everything_is_trained_and_the_evaluated_backbone_does_not_change(resnet):
    resnet.requires_grad_(False)
    before = fingerprint(resnet)
    detector = build_detector(resnet, 2, settings=TINY)
    first = {name: value.detach().clone() for name, value in detector.state_dict().items()}
    optimizer = torch.optim.SGD(parameter_groups(detector, TINY), lr=0.02, momentum=0.9)
    torch.manual_seed(0)
    for step in range(2):
        optimizer.zero_grad()
        sum(detector.train()(*a_batch(step)).values()).backward()
        optimizer.step()
    same = [
        name for name, value in detector.state_dict().items() if torch.equal(value, first[name])
    ]
    assert same == []
    trained = {name for name, _ in detector.named_parameters()}
    own = {name for name, _ in resnet.named_parameters()}
    assert len([n for n in trained if n.startswith(("backbone.", "roi_heads.box_head.l"))]) == len(
        own
    )
    assert fingerprint(resnet) == before and not resnet.training
    assert not any(value.requires_grad or value.grad is not None for value in resnet.parameters())


def test_batch_norms_have_no_weight_decay_and_everything_is_trained_once(resnet):
    detector = build_detector(resnet, 2, settings=TINY)
    optimizer = torch.optim.SGD(parameter_groups(detector, TINY), lr=0.02)
    decay = {
        id(value): group["weight_decay"]
        for group in optimizer.param_groups
        for value in group["params"]
    }
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    names = {id(value): name for name, value in detector.named_parameters()}
    assert decay.keys() == names.keys() and count == len(names)
    decay_by_name = {names[key]: value for key, value in decay.items()}
    norms = {name for name, value in decay_by_name.items() if value == 0}
    assert {value for name, value in decay_by_name.items() if name not in norms} == {1e-4}
    assert norms == {
        f"{path}.{which}"
        for path, module in detector.named_modules()
        if isinstance(module, nn.BatchNorm2d)
        for which in ("weight", "bias")
    }
    assert {"roi_heads.box_head.norm.weight", "backbone.1.bias"} <= norms and len(norms) == 26


# Initial weights


def test_initial_weights_depend_on_the_seed_only(resnet):
    torch.manual_seed(1)
    one = build_detector(resnet, 2, settings=TINY, seed=3).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    two = build_detector(resnet, 2, settings=TINY, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    other = build_detector(resnet, 2, settings=TINY, seed=4).state_dict()
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    drawn = {name for name, value in one.items() if not torch.equal(value, other[name])}
    layers = ("rpn.head.conv.0.0", "rpn.head.cls_logits", "rpn.head.bbox_pred")
    predictors = ("cls_score", "bbox_pred")
    assert drawn == {f"{layer}.weight" for layer in layers} | {
        f"roi_heads.box_predictor.{layer}.weight" for layer in predictors
    }


def test_the_backbone_starts_from_the_evaluated_weights(resnet):
    detector = build_detector(resnet, 2, settings=TINY)
    evaluated = [
        value for name, value in resnet.state_dict().items() if not name.startswith("layer4")
    ]
    taken = list(detector.backbone.state_dict().values())
    assert len(evaluated) == len(taken) and all(map(torch.equal, evaluated, taken))
    last, head = resnet.layer4.state_dict(), parts(detector)[1].layer4.state_dict()
    assert all(torch.equal(value, head[name]) for name, value in last.items())
    assert not any(math.isnan(float(v.double().sum())) for v in detector.state_dict().values())
