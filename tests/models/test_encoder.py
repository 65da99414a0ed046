"""Backbones against torchvision's, their stems and widths, and heads by the authors' rule."""

import pytest
import torch
from torch import nn
from torchvision import models

from meanshift import config
from meanshift.methods import BuildContext, MeanShift
from meanshift.models.encoder import (
    Encoder,
    build_backbone,
    memory_format,
    resnet_from_shapes,
    strides_over_one_pixel,
)
from meanshift.models.heads import mlp, mlp_from_state

RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101"]


def meta_encoder(name, *, image_size=224, dim=0, **settings):
    """An encoder on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return Encoder(config.Encoder(name=name, **settings), image_size=image_size, dim=dim)


def meta_images(size, count=2):
    return torch.empty(count, 3, size, size, device="meta")


def map_sides(backbone, size):
    """The sides of the feature maps after the stem and after the last stage."""
    stem = backbone.maxpool(backbone.relu(backbone.bn1(backbone.conv1(meta_images(size)))))
    last = stem
    for stage in (backbone.layer1, backbone.layer2, backbone.layer3, backbone.layer4):
        last = stage(last)
    return stem.shape[-1], last.shape[-1]


def leaves(network):
    return [(n, repr(m)) for n, m in network.named_modules() if not list(m.children())]


def sizes(head):
    return [(m.in_features, m.out_features) for m in head if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("name", RESNETS)
def test_full_resnets_are_torchvisions_layer_for_layer(name):
    ours = meta_encoder(name).backbone
    with torch.device("meta"):
        theirs = models.get_model(name, weights=None)
    assert [x for x in leaves(ours) if x[0] != "fc"] == [x for x in leaves(theirs) if x[0] != "fc"]
    expected = {k: v.shape for k, v in theirs.state_dict().items() if not k.startswith("fc.")}
    assert {k: v.shape for k, v in ours.state_dict().items()} == expected


def test_with_torchvisions_weights_the_features_are_torchvisions():
    theirs = models.resnet18(weights=None).eval()
    theirs.fc = nn.Identity()
    ours, features = build_backbone(config.Encoder(name="resnet18"))
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours.eval()(images), theirs(images))
    assert features == 512


@pytest.mark.parametrize(
    ("stem", "after_stem", "after_all"),
    [("imagenet", 8, 1), ("small", 32, 4), ("small-stride2", 16, 2)],
)
def test_stems_by_the_size_of_their_maps(stem, after_stem, after_all):
    backbone = meta_encoder("resnet18", stem=stem).backbone
    assert map_sides(backbone, 32) == (after_stem, after_all)
    kernel = 7 if stem == "imagenet" else 3
    assert backbone.conv1.kernel_size == (kernel, kernel)


@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_the_first_layer_is_initialized_like_torchvisions(stem):
    torch.manual_seed(0)
    backbone, _ = build_backbone(config.Encoder(name="resnet10", stem=stem))
    kernel = backbone.conv1.kernel_size[0]
    expected = (2 / (64 * kernel**2)) ** 0.5
    assert float(backbone.conv1.weight.detach().std()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("name", "width", "features"),
    [
        ("resnet18", 0.125, 64),
        ("resnet18", 0.25, 128),
        ("resnet34", 0.5, 256),
        ("resnet18", 2.0, 1024),
        ("resnet50", 0.5, 1024),
        ("resnet10", 1.0, 512),
        ("resnet18", 0.01, 8),
    ],
)
def test_width_scales_the_channels(name, width, features):
    encoder = meta_encoder(name, stem="small", width=width)
    assert encoder.features == features
    assert encoder.backbone(meta_images(32)).shape == (2, features)
    assert encoder.backbone.conv1.out_channels == max(8, 64 * width)


def test_channels_are_multiples_of_eight_for_odd_widths():
    convolutions = [
        m for m in meta_encoder("resnet18", width=0.3).modules() if isinstance(m, nn.Conv2d)
    ]
    assert convolutions
    assert all(m.out_channels % 8 == 0 for m in convolutions)


@pytest.mark.parametrize(
    ("name", "features", "hidden", "dim"),
    [("resnet50", 2048, 4096, 512), ("resnet18", 512, 1024, 128)],
)
def test_heads_by_the_authors_rule(name, features, hidden, dim):
    encoder = meta_encoder(name)
    with torch.device("meta"):
        context = BuildContext(encoder=lambda **_: encoder)
        method = MeanShift.build(config.BYOLAsym(), context)
    assert (encoder.features, encoder.hidden, encoder.dim) == (features, hidden, dim)
    assert sizes(encoder.projector) == [(features, hidden), (hidden, dim)]
    assert sizes(method.predictor) == [(dim, hidden), (hidden, dim)]


def test_a_head_is_linear_norm_relu_linear_with_biases():
    head = mlp(6, 12, 3)
    assert [type(layer) for layer in head] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert head[0].bias is not None
    assert head[3].bias is not None
    assert head[1].num_features == 12


def test_the_embedding_can_have_another_size():
    encoder = meta_encoder("resnet18", stem="small", dim=48)
    assert encoder.dim == 48
    assert encoder(meta_images(32)).shape == (2, 48)


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("alexnet", 4096),
        ("vgg11", 4096),
        ("wide_resnet50_2", 2048),
        ("resnext50_32x4d", 2048),
        ("mobilenet_v3_small", 1024),
        ("shufflenet_v2_x0_5", 1024),
        ("efficientnet_b0", 1280),
        ("convnext_tiny", 768),
        ("densenet121", 1024),
        ("swin_t", 768),
        ("vit_b_16", 768),
        ("googlenet", 1024),
        ("inception_v3", 2048),
    ],
)
def test_torchvision_backbones_are_accepted(name, features):
    encoder = meta_encoder(name).train()
    assert encoder.features == features
    assert encoder.backbone(meta_images(224)).shape == (2, features)
    assert encoder(meta_images(224)).shape == (2, features // 4)


@pytest.mark.parametrize("name", ["mobilenet_v2", "vgg11", "googlenet", "efficientnet_b0"])
def test_the_features_have_no_dropout_of_the_classifier(name):
    """It would be the last layer of the features."""
    backbone = meta_encoder(name).backbone
    drops = [path for path, m in backbone.named_modules() if isinstance(m, nn.Dropout)]
    assert drops == (["classifier.2"] if name == "vgg11" else [])  # between its hidden layers


def test_fixed_batch_norm_is_in_eval_mode_whatever_the_mode_of_the_encoder():
    encoder = Encoder(config.Encoder(name="resnet10", width=0.125, batch_norm="fixed"))
    for mode in (True, False):
        encoder.train(mode)
        norms = [m for m in encoder.backbone.modules() if isinstance(m, nn.BatchNorm2d)]
        assert norms and not any(norm.training for norm in norms)
        assert encoder.projector[1].training == mode
        assert encoder.backbone.conv1.training == mode


def test_a_vision_transformer_is_built_for_the_size_of_the_views():
    encoder = meta_encoder("vit_b_16", image_size=64)
    assert encoder(meta_images(64)).shape == (2, 192)


def test_an_image_size_that_is_no_multiple_of_the_patch_size_is_refused():
    with pytest.raises(ValueError, match=r"image_size.*100|100.*image_size"):
        meta_encoder("vit_b_16", image_size=100)


@pytest.mark.parametrize(
    ("typed", "meant"), [("resnet81", "resnet18"), ("rsenet50", "resnet50"), ("vitb16", "vit_b_16")]
)
def test_an_unknown_name_suggests_a_known_one(typed, meant):
    with pytest.raises(ValueError, match=f"got {typed!r}, need .*{meant}"):
        build_backbone(config.Encoder(name=typed))


def test_an_unknown_name_unlike_any_other_suggests_a_resnet():
    with pytest.raises(ValueError, match="resnet18 or resnet50"):
        build_backbone(config.Encoder(name="qqqq"))


@pytest.mark.parametrize("settings", [{"stem": "small"}, {"width": 0.5}])
def test_stem_and_width_of_anything_but_a_resnet_are_refused(settings):
    with pytest.raises(ValueError, match=r"encoder\.stem.*resnet18.*encoder\.width.*convnext"):
        build_backbone(config.Encoder(name="convnext_tiny", **settings))


def test_a_backbone_without_a_linear_classifier_is_refused():
    with torch.device("meta"), pytest.raises(ValueError, match="squeezenet1_0 does not end"):
        build_backbone(config.Encoder(name="squeezenet1_0"))


def test_channels_last_is_for_convolutional_networks():
    assert memory_format(meta_encoder("resnet18")) == torch.channels_last
    assert memory_format(mlp(4, 8, 2)) == torch.contiguous_format


HEADS = {
    "MSF and BYOL": lambda: mlp(6, 12, 3),
    "linear": lambda: nn.Sequential(nn.Linear(6, 3)),
    "MoCo v2": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)),
    "SimSiam": lambda: nn.Sequential(
        *(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU()),
        *(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU()),
        *(nn.Linear(6, 3), nn.BatchNorm1d(3, affine=False)),
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_rebuilt_from_its_state(name):
    torch.manual_seed(0)
    head = HEADS[name]()
    features = torch.randn(8, 6)
    head(features)  # moves the statistics of the batch norms
    rebuilt = mlp_from_state(head.state_dict())
    assert torch.equal(rebuilt.eval()(features), head.eval()(features))


NO_HEADS = {
    "nothing": {},
    "names": nn.ModuleDict({"first": nn.Linear(6, 3)}).state_dict(),
    "a convolution": nn.Sequential(nn.Linear(6, 6), nn.Conv2d(6, 3, 1)).state_dict(),
    "a layer norm": nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)).state_dict(),
    "widths that do not fit": nn.Sequential(nn.Linear(6, 5), nn.Linear(6, 3)).state_dict(),
    "no weights": nn.Sequential(nn.Linear(6, 3)).state_dict() | {"2.scale": torch.ones(3)},
}


@pytest.mark.parametrize("name", NO_HEADS)
def test_the_state_of_other_layers_is_no_head(name):
    assert mlp_from_state(NO_HEADS[name]) is None


@pytest.mark.parametrize("name", ["resnet10", "resnet18", "resnet50"])
@pytest.mark.parametrize(("stem", "width"), [("imagenet", 1.0), ("small", 0.25)])
def test_a_resnet_is_recognized_by_its_shapes(name, stem, width):
    backbone = meta_encoder(name, stem=stem, width=width).backbone
    shapes = {key: tuple(value.shape) for key, value in backbone.state_dict().items()}
    assert resnet_from_shapes(shapes) == config.Encoder(name=name, stem=stem, width=width)
    shapes["layer1.7.conv1.weight"] = (1,)
    assert resnet_from_shapes(shapes) is None


@pytest.mark.parametrize(("image_size", "expected"), [(16, True), (17, False), (32, False)])
def test_a_stride_over_one_pixel_is_recognized(image_size, expected):
    backbone, _ = build_backbone(config.Encoder(name="resnet10", width=0.125))
    backbone.layer1.train()
    backbone.layer2.eval()
    assert strides_over_one_pixel(backbone, (3, image_size, image_size)) == expected
    assert backbone.layer1.training and not backbone.layer2.training
    assert not any(m._forward_pre_hooks for m in backbone.modules())
