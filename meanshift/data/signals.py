"""Files of signals: .wav by the standard library, other sound by soundfile, and .npy arrays."""

from __future__ import annotations

import contextlib
import wave
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from meanshift.data.convert import torch_dtype
from meanshift.data.file_access import DiskTimeout, Stream, open_regular
from meanshift.data.remote_folder import RemotePath
from meanshift.data.unreadable import UnreadableSample
from meanshift.runtime.extras import require

SUFFIXES = frozenset(".wav .flac .ogg .mp3 .npy".split())
_WIDTHS = {
    1: ("u1", 128.0, 128.0),
    2: ("<i2", 0.0, 2.0**15),
    4: ("<i4", 0.0, 2.0**31),
}
_UNKNOWN_LENGTH = 0x7F00_0000  # bytes: programs that write to a pipe state more than that
_LOOKED_AT = 32  # files whose sampling rate is read


def read_signal(file: Path | RemotePath, *, rate: int = 0) -> Float[Tensor, "channels time"]:
    """Read a signal; sound has values in -1 to 1, arrays are as they are.

    Sound of another sampling rate than `rate` counts as unreadable; arrays have none.
    """
    values, found = _read(file)
    if rate and found and found != rate:
        raise UnreadableSample(
            str(file), f"sampled at {found} Hz, most others at {rate}; convert it (ffmpeg -ar)"
        )
    if values.ndim == 1:
        values = values[None]
    if values.ndim != 2 or not values.size or values.dtype.kind not in "buif":
        raise UnreadableSample(
            str(file), f"an array of {values.shape} {values.dtype}; need numbers, (channels, time)"
        )
    return torch.from_numpy(torch_dtype(values)).float()


def common_rate(files: Sequence[Path | RemotePath]) -> int:
    """The most common sampling rate of the first files, in Hz; 0 where none has one."""
    rates = Counter[int]()
    for file in files[:_LOOKED_AT]:
        with contextlib.suppress(UnreadableSample):
            rates[_read(file)[1]] += 1
    del rates[0]  # arrays
    return rates.most_common(1)[0][0] if rates else 0


def _read(file: Path | RemotePath) -> tuple[np.ndarray, int]:
    """The values of a file, and its sampling rate; 0 for an array."""
    try:
        opened = open_regular(file)
        if file.suffix.lower() == ".npy":
            return np.load(opened), 0
        return _read_sound(file, opened)
    except (DiskTimeout, UnreadableSample):
        raise
    except EOFError:
        raise UnreadableSample(str(file), "it is empty, or ends within its header") from None
    except Exception as error:  # damaged files raise anything
        raise UnreadableSample(str(file), f"{type(error).__name__}: {error}") from None


def _read_sound(file: Path | RemotePath, opened: Stream) -> tuple[np.ndarray, int]:
    if file.suffix.lower() == ".wav":
        try:
            return _read_wav(opened)
        except wave.Error as error:  # compressed, or of floats
            if str(error).startswith("file does not start"):
                raise
            opened.seek(0)
    try:
        require("soundfile", extra="audio", what="sound that is not plain .wav")
    except ValueError as missing:
        raise UnreadableSample(str(file), str(missing)) from None
    import soundfile

    values, rate = soundfile.read(opened, dtype="float32", always_2d=True)
    return np.asarray(values).T, int(rate)


def _read_wav(opened: Stream) -> tuple[np.ndarray, int]:
    with wave.open(opened) as sound:
        width = sound.getsampwidth()
        channels = sound.getnchannels()
        rate = sound.getframerate()
        length = sound.getnframes() * channels * width
        content = sound.readframes(sound.getnframes())
    if len(content) < length < _UNKNOWN_LENGTH:
        raise ValueError(f"it has {len(content)} bytes of sound, and its header says {length}")
    if width == 3:  # 24 bits: the upper three bytes of 32
        padded = np.zeros((len(content) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        content, width = padded.tobytes(), 4
    dtype, middle, scale = _WIDTHS[width]
    values = (np.frombuffer(content, dtype).astype(np.float32) - middle) / scale
    return values.reshape(-1, channels).T, rate
