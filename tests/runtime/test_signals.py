"""Signals that ask a run to stop: collected, or raised where there is nothing to save."""

import os
import signal

import pytest

from meanshift.runtime.signals import REQUEUE, Stopped, catch_signals, stop_at_once

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
