"""Unreadable images: their replacement, their report, and how many are too many."""

import pytest
import torch

from meanshift.data import UnreadableSample
from meanshift.data.bad_files import BadFiles, read_or_replace, refuse_too_many
from meanshift.runtime.errors import SharedError

BLANK = torch.full((3, 8, 8), 128, dtype=torch.uint8)


class Images:
    """Images of one value each, some of them unreadable."""

    def __init__(self, bad=()):
        self.bad = bad

    def read(self, index):
        if index in self.bad:
            raise UnreadableSample(f"#{index}", "broken")
        return torch.full((3, 2, 2), index, dtype=torch.uint8)


def test_a_readable_image_is_not_replaced():
    image, used_index, errors = read_or_replace(Images().read, 4, [5], blank=BLANK)
    assert (int(image[0, 0, 0]), used_index, errors) == (4, 4, [])


def test_the_first_readable_replacement_is_used():
    image, used_index, errors = read_or_replace(Images({4, 5}).read, 4, [5, 6, 7], blank=BLANK)
    assert (int(image[0, 0, 0]), used_index) == (6, 6)
    assert [error.title for error in errors] == ["#4", "#5"]


def test_replacements_are_not_computed_without_need():
    def fail():
        raise AssertionError
        yield

    assert read_or_replace(Images().read, 4, fail(), blank=BLANK).used_index == 4


def test_without_a_readable_replacement_the_image_is_blank():
    image, used_index, errors = read_or_replace(Images({4, 5}).read, 4, [5], blank=BLANK)
    assert image is BLANK
    assert used_index == 4
    assert len(errors) == 2


@pytest.mark.parametrize(
    ("bad", "size", "spare", "refused"),
    [
        (1, 100, 0, False),
        (2, 100, 0, True),
        (1, 99, 0, True),
        (1, 99, 1, False),
        (2, 99, 1, True),
        (0, 1, 0, False),
        (1, 1, 1, True),  # never all of them
    ],
)
def test_too_many_unreadable_images_are_refused(bad, size, spare, refused):
    options = {"max_fraction": 0.01, "spare": spare, "name": "toy", "advice": "repair them"}
    if not refused:
        refuse_too_many(bad, size, **options)
        return
    with pytest.raises(ValueError, match=f"toy: {bad} of {size} images .*at most 1% may: repair"):
        refuse_too_many(bad, size, **options)


def test_a_run_reports_each_file_once_and_stops_at_too_many():
    bad_files = BadFiles(0.1, 20)
    assert bad_files.summary() == ""
    assert bad_files.add([("a", "torn"), ("b", "empty"), ("a", "torn")]) == [
        ("a", "torn"),
        ("b", "empty"),
    ]
    assert bad_files.add([("a", "torn")]) == []
    bad_files.check()
    assert "2 of 20 images" in bad_files.summary()
    bad_files.add([("c", "gone")])
    with pytest.raises(SharedError, match="3 of 20 images cannot be read") as caught:
        bad_files.check()
    assert "a: torn" in str(caught.value) and "c: gone" in str(caught.value)


@pytest.mark.parametrize("first", [1, 5, 6])
def test_only_the_first_files_are_printed(first):
    bad_files = BadFiles(0.0, 1000)
    printed = []
    for batch in (range(first), range(first, 300), range(300, 400), [0]):
        printed += bad_files.messages(bad_files.add([(f"{i}.jpg", "torn") for i in batch]))
    assert printed == [
        *(f"{i}.jpg cannot be read (torn); replaced by another image" for i in range(5)),
        "more images cannot be read; warnings.jsonl lists them all",
    ]
    with pytest.raises(SharedError, match="400 of 1000 images") as caught:
        bad_files.check()
    assert "4.jpg: torn\n  and 395 more, all of them in warnings.jsonl\n" in str(caught.value)
    assert "400 of 1000 images" in bad_files.summary()
