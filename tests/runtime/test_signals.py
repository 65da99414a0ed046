"""Signals that ask a run to stop: collected, or raised where there is nothing to save."""

import os
import signal

import pytest

from meanshift.runtime.signals import (
    REQUEUE,
    Stopped,
    catch_signals,
    stop_at_once,
    watch_stop_request,
)

CODES = {signal.SIGINT: 130, signal.SIGTERM: REQUEUE, signal.SIGHUP: 129}


@pytest.mark.parametrize("number", CODES)
def test_before_the_first_step_a_signal_stops_at_once(number):
    with pytest.raises(Stopped, match="the same command continues") as stopped, stop_at_once():
        signal.raise_signal(number)
    assert stopped.value.code == CODES[number]


@pytest.mark.parametrize("number", CODES)
def test_a_signal_is_collected_also_if_nobody_reads_the_output(number, monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", closed)
    before = signal.getsignal(number)
    with catch_signals(patience=60.0) as received:
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert received == [number]
    assert signal.getsignal(number) == before


def test_under_nohup_a_closed_terminal_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_at_once(), catch_signals() as received:
            signal.raise_signal(signal.SIGHUP)
        assert not received and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_file_asks_to_stop_and_one_from_before_does_not(tmp_path, capfd):
    path = tmp_path / "stop-requested"
    path.touch()
    with watch_stop_request(path, every=0.0) as requested:
        assert requested() == 0 and not path.exists()
        path.touch()
        assert requested() == signal.SIGINT
        path.unlink()
        assert requested() == signal.SIGINT  # until the step is saved
        path.touch()
    assert not path.exists()
    assert capfd.readouterr().err.count("asked to stop") == 1


def test_the_file_is_not_looked_for_in_every_step(tmp_path):
    with watch_stop_request(tmp_path / "stop-requested", every=60.0) as requested:
        (tmp_path / "stop-requested").touch()
        assert requested() == 0
