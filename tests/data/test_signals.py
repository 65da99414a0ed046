"""Signals: sound and arrays in a folder, and in an .npz file."""

import struct
import sys

import numpy as np
import pytest
import torch

from meanshift.config import Data
from meanshift.data import UnreadableSample, open_source
from meanshift.data.folder import FolderSource
from meanshift.data.in_memory import as_source
from meanshift.data.measure import measure
from meanshift.data.signals import common_rate, read_signal
from meanshift.transforms.eval import eval_transform
from tests.support.signals import write_tones, write_wav
from tests.support.sources import open_one, titles

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_every_depth_has_values_from_minus_one_to_one(tmp_path, width, channels):
    top = 2 ** (8 * width - 1)
    samples = RANDOM.integers(-top, top, (50, channels))
    samples[:2, 0] = -top, top - 1
    file = write_wav(tmp_path / "a.wav", samples, width=width)
    expected = torch.tensor(samples.T / top, dtype=torch.float32)
    torch.testing.assert_close(read_signal(file), expected, rtol=0, atol=1e-7)


def reason(file, **options):
    with pytest.raises(UnreadableSample) as caught:
        read_signal(file, **options)
    assert caught.value.title == str(file)
    return caught.value.reason


def test_damaged_files_are_named(tmp_path):
    whole = write_wav(tmp_path / "whole.wav", np.arange(100)).read_bytes()
    cut = tmp_path / "cut.wav"
    cut.write_bytes(whole[:-20])  # still whole values
    assert reason(cut) == "ValueError: it has 180 bytes of sound, and its header says 200"
    cut.write_bytes(whole[:20])
    assert "ends within its header" in reason(cut)
    cut.write_bytes(b"")
    assert "is empty" in reason(cut)
    cut.write_bytes(b"no sound at all " * 4)
    assert "does not start with RIFF" in reason(cut)
    assert "(1, 0)" in reason(write_wav(cut, np.zeros(0, int)))
    assert "FileNotFoundError" in reason(tmp_path / "missing.wav")


def test_a_file_written_to_a_pipe_states_no_length(tmp_path):
    """As `espeak-ng --stdout` and others write it."""
    content = write_wav(tmp_path / "a.wav", np.arange(100)).read_bytes()
    header = content[:40] + struct.pack("<I", 0x7FFF_F000)
    (tmp_path / "a.wav").write_bytes(header + content[44:])
    assert read_signal(tmp_path / "a.wav").shape == (1, 100)


def test_other_sound_needs_soundfile(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    content = bytearray(write_wav(tmp_path / "a.wav", np.arange(100)).read_bytes())
    content[20:22] = struct.pack("<H", 3)  # floats
    (tmp_path / "a.wav").write_bytes(content)
    (tmp_path / "a.mp3").write_bytes(b"ID3")
    for name in ("a.wav", "a.mp3"):
        assert "pip install 'meanshift[audio]'" in reason(tmp_path / name)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int16", "uint16", "int64"])
@pytest.mark.parametrize("shape", [(70,), (1, 70), (3, 70)])
def test_arrays_keep_their_values(tmp_path, dtype, shape):
    values = RANDOM.integers(0, 40_000, shape).astype(dtype)
    np.save(tmp_path / "a.npy", values)
    signal = read_signal(tmp_path / "a.npy")
    assert signal.dtype == torch.float32
    assert np.array_equal(signal.numpy(), values.reshape(-1, 70).astype("float32"))


@pytest.mark.parametrize("values", [np.zeros((2, 3, 4)), np.zeros((2, 0)), np.array(["a"])])
def test_other_arrays_are_named(tmp_path, values):
    np.save(tmp_path / "a.npy", values)
    assert "need numbers, (channels, time)" in reason(tmp_path / "a.npy")


def test_objects_are_not_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    assert "allow_pickle" in reason(tmp_path / "a.npy")


def test_a_folder_of_sound_is_a_source_of_signals(tmp_path):
    source = FolderSource(write_tones(tmp_path / "tones", count=2))
    assert source.kind == "signal" and source.classes == ["high", "low"]
    assert titles(source) == ["high/0.wav", "high/1.wav", "low/0.wav", "low/1.wav"]
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert (source.sample_spec.kind, source.sample_spec.channels) == ("signal", 1)
    assert source.sample(1).shape == (1, 1300)
    assert not source.uniform


def test_images_beside_sound_are_a_source_of_images(tmp_path, make_images):
    write_tones(make_images(tmp_path / "mixed", {"": 2}), count=1)
    with pytest.warns(UserWarning, match=r"left out 2 other files \(2 .wav\): not known as images"):
        source = FolderSource(tmp_path / "mixed")
    assert source.kind == "image" and len(source) == 2


def test_an_empty_folder_names_the_endings_of_signals_too(tmp_path):
    with pytest.raises(ValueError, match=r"or signals \(.*\.wav\)"):
        FolderSource(tmp_path)


def test_another_sampling_rate_is_not_mixed_in(tmp_path):
    for index in range(4):
        write_wav(tmp_path / f"{index}.wav", np.arange(50), rate=16_000 if index == 0 else 8000)
    np.save(tmp_path / "4.npy", np.arange(50))
    source = FolderSource(tmp_path)
    assert source.sampling_rate == source.sample_spec.sampling_rate == 8000
    assert source.read(1).shape == source.read(4).shape == (1, 50)
    with pytest.raises(UnreadableSample, match=r"sampled at 16000 Hz, most others at 8000"):
        source.read(0)


def test_all_splits_have_the_rate_of_the_first(tmp_path):
    write_wav(tmp_path / "train" / "a.wav", np.arange(50), rate=8000)
    write_wav(tmp_path / "val" / "b.wav", np.arange(50), rate=11_025)
    splits = open_source(str(tmp_path))
    assert splits["train"].read(0).shape == (1, 50)
    with pytest.raises(UnreadableSample, match="11025"):
        splits["val"].read(0)


def test_sound_of_another_rate_than_the_networks_is_refused(tmp_path):
    for rate in (8000, 16_000):
        write_wav(tmp_path / f"{rate}" / "a.wav", np.arange(50), rate=rate)
    trained = FolderSource(tmp_path / "8000").sample_spec
    other = FolderSource(tmp_path / "16000")
    message = "takes sound of 8000 Hz, and .*16000 has 16000 Hz; convert .*ffmpeg -ar 8000"
    for source in (other, other.subset(torch.tensor([0])), as_source([tmp_path / "16000/a.wav"])):
        with pytest.raises(ValueError, match=message.replace(".*16000 has", ".* has")):
            source.adapted(trained, "RUN")
    with pytest.raises(ValueError, match=r"data\.sampling_rate: got 8000 Hz, and .* has 16000"):
        measure(other, Data(sampling_rate=8000))
    unknown = as_source([np.zeros((1, 50), np.float32)] * 2, kind="signal")
    assert unknown.adapted(trained, "RUN").sample(0).shape == (1, 50)
    assert FolderSource(tmp_path / "8000").adapted(trained, "RUN").sample(0).shape == (1, 50)


def test_the_rate_is_the_most_common_of_readable_files(tmp_path):
    files = [
        write_wav(tmp_path / f"{rate}{index}.wav", [1], rate=rate)
        for index, rate in enumerate((8000, 16_000, 16_000))
    ]
    (tmp_path / "bad.wav").write_bytes(b"")
    assert common_rate([tmp_path / "bad.wav", *files]) == 16_000
    assert common_rate([]) == 0


def test_a_folder_without_any_readable_signal_says_why(tmp_path):
    for index in range(3):
        (tmp_path / f"{index}.wav").write_bytes(b"")
    source = FolderSource(tmp_path)
    with pytest.raises(ValueError, match=r"none of the first signals can be read; .*0.wav: it is"):
        _ = source.sample_spec


@pytest.mark.parametrize("shape", [(5, 2, 70), (5, 70)], ids=["channels", "one channel"])
def test_arrays_of_signals(tmp_path, shape):
    signals = RANDOM.normal(size=shape).astype("float32")
    np.savez(tmp_path / "a.npz", signals=signals, labels=np.arange(5) % 2, signals_test=signals[:2])
    splits = open_source(str(tmp_path / "a.npz"))
    assert list(splits) == ["train", "test"]
    source = splits["train"]
    assert source.kind == "signal" and source.labels.tolist() == [0, 1, 0, 1, 0]
    expected = torch.from_numpy(signals.reshape(5, -1, 70))
    assert torch.equal(source.sample(3), expected[3])
    assert torch.equal(source.sample_batch(torch.tensor([3, 0])), expected[[3, 0]].transpose(1, 2))
    assert len(splits["test"]) == 2 and splits["test"].kind == "signal"


def test_evaluation_takes_the_middle_of_a_signal(tmp_path):
    for length in (5, 8, 20):
        np.save(tmp_path / f"{length:02d}.npy", np.arange(1, length + 1, dtype="float32"))
    short, exact, long = eval_transform(open_one(tmp_path), torch.arange(3), 8)[:, 0].tolist()
    assert short == [0, 0, 1, 2, 3, 4, 5, 0]
    assert exact == [1, 2, 3, 4, 5, 6, 7, 8]
    assert long == [7, 8, 9, 10, 11, 12, 13, 14]
