"""Files of sound."""

import wave

import numpy as np


def write_wav(path, samples, *, width=2, rate=8000):
    """Write integers (time,) or (time, channels) as a .wav file of `width` bytes a value."""
    samples = np.asarray(samples)
    path.parent.mkdir(parents=True, exist_ok=True)
    offset = 128 if width == 1 else 0  # 8 bits are unsigned
    content = b"".join(
        int(value + offset).to_bytes(width, "little", signed=width > 1) for value in samples.flat
    )
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(content)
    return path


def write_tones(root, count=6, length=1200):
    """Low and high tones, `count` of each, of differing lengths."""
    noise = np.random.default_rng(0)
    for name, frequency in (("low", 200), ("high", 900)):
        for index in range(count):
            time = np.arange(length + 100 * index) / 8000
            tone = np.sin(2 * np.pi * frequency * noise.uniform(0.9, 1.1) * time)
            write_wav(root / name / f"{index}.wav", (12_000 * tone).astype(int))
    return root
