"""Run the notebooks and store their outputs in them: `make notebooks`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
_BAR = re.compile(r"\d+%\||step \d+/\d+.*\|")  # a progress bar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as quickstart [all]")
    args = parser.parse_args()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not args.names or path.stem in args.names:
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(run_notebook(path, Path(folder)), path)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def run_notebook(path: Path, folder: Path) -> Any:
    """Run a notebook in a folder, with this Python and its commands; return it with its outputs."""
    notebook: Any = nbformat.read(path, as_version=4)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress"  # bars are texts without ipywidgets
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=1200, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = clean_outputs(cell.outputs)
    return notebook


def clean_outputs(outputs: list[Any]) -> list[Any]:
    """Outputs with the text of each stream in one piece, as it ends on a screen, without bars."""
    texts: dict[str, Any] = {}
    cleaned = []
    for output in outputs:
        if output.output_type != "stream":
            cleaned.append(output)
        elif output.name in texts:
            texts[output.name].text += output.text
        else:
            texts[output.name] = output
            cleaned.append(output)
    for output in texts.values():
        lines = [line.rstrip().rpartition("\r")[2] for line in output.text.split("\n")]
        kept = [line for line in lines if not _BAR.search(line)]
        output.text = re.sub(r"\n{2,}", "\n", "\n".join(kept)).strip("\n")
    return [output for output in cleaned if output.output_type != "stream" or output.text]


if __name__ == "__main__":
    main()
