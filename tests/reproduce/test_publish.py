"""Tables inside a document: only the text between their markers changes."""

from meanshift.reproduce import publish

DOCUMENT = """# Results
Written by hand.
<!-- reproduce cpu-cifar10 k -->
old
<!-- end -->
More by hand.
<!-- reproduce cpu-cifar10 main -->
<!-- end -->
"""


def test_only_the_text_between_markers_is_replaced(tmp_path):
    path = tmp_path / "results.md"
    path.write_text(DOCUMENT)
    tables = {"k": "| k=5 | 67.2 |", "main": "| MSF | 67.3 |", "bank": "| 256 rows | 1 |"}
    assert publish.update(path, "cpu-cifar10", tables) == ["k", "main"]
    text = path.read_text()
    assert "old" not in text and "256 rows" not in text
    assert text.index("k=5") < text.index("More by hand") < text.index("| MSF |")
    assert publish.update(path, "cpu-cifar10", tables) == ["k", "main"] and path.read_text() == text


def test_another_archive_and_an_open_marker_change_nothing(tmp_path):
    path = tmp_path / "results.md"
    path.write_text(DOCUMENT.replace("<!-- end -->", ""))
    before = path.read_text()
    assert publish.update(path, "cpu-cifar10", {"k": "new"}) == []
    path.write_text(DOCUMENT)
    assert publish.update(path, "cpu-flowers", {"k": "new"}) == []
    assert path.read_text() == DOCUMENT and "old" in before


def test_an_image_is_copied_beside_the_document(tmp_path):
    (tmp_path / "plot.png").write_bytes(b"png")
    link = publish.add_image(tmp_path / "docs.md", tmp_path / "plot.png", "reproduce-k.png")
    assert (tmp_path / link).read_bytes() == b"png" and link == "images/reproduce-k.png"
