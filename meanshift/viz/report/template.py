"""Rendering the HTML templates of `assets/` into pages that need no other file."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from meanshift.runtime.extras import require

ASSETS = Path(__file__).parents[1] / "assets"


def render(template: str, **values: Any) -> str:
    """Render a template; `asset(NAME)` in it inserts a stylesheet or a script."""
    require("jinja2", extra="report", what="pages")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["asset"] = lambda name: (ASSETS / name).read_text()
    environment.globals["version"] = metadata.version("meanshift")
    return environment.get_template(template).render(**values)
