"""Transforms that several tests need."""

from meanshift.config import Views
from meanshift.runtime import rng
from meanshift.transforms.augment import MultiViewTransform


def two_views(seed=0, size=16, views=None):
    """The weak target view and the strong online view of MSF."""
    views = views or Views()
    specs = (
        views.spec("target", "weak", stream=rng.TARGET),
        views.spec("online", "strong", stream=rng.ONLINE),
    )
    return MultiViewTransform(specs, seed, size)
