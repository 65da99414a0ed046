"""A method outside of the program with other views than MSF and no neighbors; it cannot train.

Chosen by `--method.module tests.support.three_views:ThreeViews`.
"""

from dataclasses import dataclass, replace

from meanshift.config import MethodSettings
from meanshift.methods import Method

MODULE = "tests.support.three_views:ThreeViews"


class ThreeViews(Method):
    """One weak view of the whole image and two small strong ones."""

    @dataclass(frozen=True, kw_only=True)
    class Settings(MethodSettings):
        name: str = "three-views"
        """name of the method"""

    @classmethod
    def views(cls, settings, operators):
        local = operators.spec("local", "strong", index=1)
        return (
            operators.spec("global", "weak", index=0),
            replace(local, count=2, size=8),
        )
