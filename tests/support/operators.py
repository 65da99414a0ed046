"""Images and comparisons for the tests of image operators and of views."""

import functools

import torch

from meanshift.data import open_source

COUNT = 200


@functools.cache
def sample_images():
    """Images of all classes, (200, 32, 32, 3)."""
    return open_source("sample")["train"].read_batch(torch.arange(0, 10_000, 10_000 // COUNT))


def to_planes(images):
    return images.permute(0, 3, 1, 2).float() / 255


def wide(images):
    """The same pixels as images that are not square, (200, 24, 40, 3)."""
    return torch.cat([images, images.flip(2)], 2)[:, 4:28, 12:52].contiguous()


def matching_fraction(got, expected):
    """The fraction of values that are within 1/255 of each other."""
    assert got.shape == expected.shape
    return ((got - expected).abs() <= 1 / 255 + 1e-6).double().mean()


def each(operator, images, *parameters):
    """A torchvision operator on each image, with the image's own parameters."""
    return torch.stack([operator(*one) for one in zip(images, *parameters, strict=True)])
