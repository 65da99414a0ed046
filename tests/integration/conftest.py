"""The images and the teacher with which every method is tried."""

import pytest

from tests.support.every_method import train_teacher, write_images


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def teacher(source, tmp_path_factory):
    return train_teacher(source, tmp_path_factory.mktemp("teacher"))
