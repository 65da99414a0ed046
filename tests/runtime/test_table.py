"""Tables of metrics as text."""

from meanshift.runtime.table import table


def test_one_column_is_a_list_without_a_title():
    assert table({"run": {"1-NN": 50.0, "20-NN": 61.257}}) == "  1-NN      50.00\n  20-NN     61.26"


def test_several_columns_have_titles_and_gaps():
    text = table({"one": {f"m{i}": float(i) for i in range(5)}, "another one": {"m0": 7.0}})
    lines = text.splitlines()
    assert lines[0].split("  ")[-1] == "another one"
    assert lines[1].split() == ["m0", "0.00", "7.00"]
    assert lines[-1].split() == ["m4", "4.00"]
    assert len({len(line) for line in lines[:2]}) == 1


def test_few_metrics_of_several_are_rows():
    lines = table({"one": {"a": 1.0, "b": 2.0}, "two": {"a": 3.0}}).splitlines()
    assert [line.split() for line in lines] == [
        ["a", "b"],
        ["one", "1.00", "2.00"],
        ["two", "3.00"],
    ]
    assert table({"one": {"a": 1.0}}, as_rows=True).splitlines()[0].split() == ["a"]


def test_a_std_is_behind_its_metric():
    text = table({"run": {"top-1": 50.0, "top-1 std": 0.5, "std": 3.0}})
    assert [line.split() for line in text.splitlines()] == [
        ["top-1", "50.00", "±", "0.50"],
        ["std", "3.00"],
    ]


def test_nothing_is_an_empty_table():
    assert table({}).strip() == ""
