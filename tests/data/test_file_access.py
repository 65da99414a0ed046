"""Calls that may hang: errors pass through, a late result is nobody's, a fork has a thread."""

import multiprocessing
import threading

import pytest

from meanshift.data import file_access
from meanshift.data.file_access import with_timeout


def test_results_and_errors_pass_through():
    assert with_timeout(lambda: 3, "x") == 3
    with pytest.raises(KeyError, match="missing"):
        with_timeout(lambda: {}["missing"], "x")
    assert with_timeout(lambda: 4, "x") == 4


def test_a_late_result_is_not_taken_for_the_next_one(monkeypatch):
    monkeypatch.setattr(file_access, "DISK_TIMEOUT", 0.05)
    answers = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer .*'slow.jpg'"):
        with_timeout(answers.wait, "slow.jpg")
    answers.set()
    assert with_timeout(lambda: "own", "x") == "own"


def test_an_interrupted_call_does_not_answer_the_next_one(monkeypatch):
    class Interrupted:
        def get(self, timeout):
            raise KeyboardInterrupt

        def put(self, result):
            pass

    assert with_timeout(lambda: 1, "x") == 1
    monkeypatch.setattr(file_access._readers.reader, "results", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        with_timeout(lambda: 2, "x")
    assert with_timeout(lambda: 3, "x") == 3


def test_a_call_that_is_interrupted_as_it_begins_does_not_answer_the_next_one(monkeypatch):
    assert with_timeout(lambda: 1, "x") == 1
    calls = file_access._readers.reader.calls

    class Interrupted:
        def put(self, call):
            calls.put(call)
            raise KeyboardInterrupt

        def get(self):
            return calls.get()

    monkeypatch.setattr(file_access._readers.reader, "calls", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        with_timeout(lambda: 2, "x")
    assert with_timeout(lambda: 3, "x") == 3


def test_a_forked_process_reads_with_a_thread_of_its_own():
    assert with_timeout(lambda: 1, "x") == 1
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(with_timeout, (int, "x")).get(timeout=10) == 0
