"""Exceptions and messages of the command line; imports no torch, so that it starts quickly."""

from __future__ import annotations


class SharedError(ValueError):
    """An error that every process raises, so that only the first one has to report it."""


class Note(UserWarning):
    """What a function found out and a user should know; the command line prints it as it is."""
