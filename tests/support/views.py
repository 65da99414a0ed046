"""Transforms that several tests need."""

from meanshift.config import Views
from meanshift.transforms.augment import MultiViewTransform


def two_views(seed=0, size=16, views=None):
    """The weak target view and the strong online view of MSF."""
    views = views or Views()
    specs = (
        views.spec("target", "weak", index=0),
        views.spec("online", "strong", index=1),
    )
    return MultiViewTransform(specs, seed, size)
