"""Models of Hugging Face that `meanshift export` has written: a folder, or a repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meanshift.runtime import checksum
from meanshift.runtime.extras import require

CONFIG_FILE = "config.json"
MODEL_FILE = "model.safetensors"
CONFIG_KEY = "meanshift"
"""of our own settings in config.json"""

_DATASET_FILES = ("dataset_dict.json", "dataset_info.json", "state.json")


def find_model(name: str) -> Path:
    """The complete file of weights of a folder, or else of a repository on the Hub.

    A revision may follow the name of a repository: `owner/name@v2`.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        config, model = folder / CONFIG_FILE, folder / MODEL_FILE
        _check_folder(folder)
    else:
        config, model = _download(name, CONFIG_FILE), _download(name, MODEL_FILE)
    described = read_config(config)
    if checksum.recorded(model) != described.get("checksum"):
        raise ValueError(
            f"{model}: is not the file that {CONFIG_FILE} describes: an export was interrupted, or "
            f"one of both was replaced; type again: meanshift export RUN --format huggingface"
        )
    return model


def read_config(path: Path) -> dict[str, Any]:
    """What our own part of a config.json says."""
    try:
        described = json.loads(path.read_bytes())[CONFIG_KEY]
        return dict(described)
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path}: is not of meanshift; need what `meanshift export RUN --format huggingface` "
            f"writes, or give the file of weights itself, such as {path.with_name(MODEL_FILE)}"
        ) from None


def _check_folder(folder: Path) -> None:
    """Refuse a folder without the two files that are needed."""
    missing = [each for each in (CONFIG_FILE, MODEL_FILE) if not (folder / each).is_file()]
    if not missing:
        return
    if any((folder / each).exists() for each in _DATASET_FILES) or any(folder.glob("*.parquet")):
        raise ValueError(f"hf:{folder}: is a dataset; give it as images: --data hf:{folder}")
    raise ValueError(
        f"hf:{folder}: has no {' and no '.join(missing)}, so it is no complete export; type: "
        f"meanshift export RUN --format huggingface --out {folder}"
    )


def _download(name: str, file: str) -> Path:
    """A file of a repository, from the cache of `huggingface_hub` if it has not changed."""
    require("huggingface_hub", extra="huggingface", what="models of the Hugging Face Hub")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    repository, _, revision = name.partition("@")
    try:
        return Path(hf_hub_download(repository, file, revision=revision or None))
    except HFValidationError:
        raise ValueError(
            f"hf:{name}: no such folder, and no name of a repository; need hf:FOLDER or "
            f"hf:OWNER/NAME"
        ) from None
    except RepositoryNotFoundError:
        advice = (
            f"it is a dataset: give it as images, --data hf:{name}"
            if _is_dataset(repository)
            else "check the name (a private one needs: hf auth login)"
        )
        raise ValueError(f"hf:{name}: no such folder, and no such model; {advice}") from None
    except LocalEntryNotFoundError as error:
        raise OSError(
            f"hf:{name}: no such folder, and the Hub cannot be reached ({_first_line(error)}); "
            f"check the network, then type the command again"
        ) from None
    except EntryNotFoundError:
        raise ValueError(
            f"hf:{name}: has no {file}; need a repository with what `meanshift export RUN "
            f"--format huggingface` writes"
        ) from None
    except Exception as error:  # of the library, of its HTTP client, of the system
        raise OSError(
            f"hf:{name}: {file} could not be downloaded ({_first_line(error)}); check the name "
            f"and the network, then type the command again"
        ) from None


def _is_dataset(repository: str) -> bool:
    from huggingface_hub import HfApi

    try:
        return bool(HfApi().repo_exists(repository, repo_type="dataset"))
    except Exception:  # the first error is the one to report
        return False


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(". ")
