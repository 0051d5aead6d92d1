"""What a label means: told from the labels where that is safe, refused with counts where it is not, in every format."""

import numpy as np
import pytest

from parashard.data.array_files import NpzOptions, open_npz
from parashard.data.table_files import CsvOptions, open_csv
from parashard.errors import BadData


def from_csv(tmp_path, labels, **options):
    path = tmp_path / "a.csv"
    path.write_text("x,price\n" + "".join(f"{i % 7}.5,{label}\n" for i, label in enumerate(labels)))
    return open_csv(CsvOptions(path=path, label="price", held_out=0.0, **options))


def from_parquet(tmp_path, labels, **options):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from parashard.data.table_files import ParquetOptions, open_parquet

    path = tmp_path / "a.parquet"
    inputs = [i % 7 + 0.5 for i in range(len(labels))]
    parquet.write_table(pa.table({"x": inputs, "price": pa.array(labels)}), path)
    return open_parquet(ParquetOptions(path=path, label="price", held_out=0.0, **options))


both = pytest.mark.parametrize("opened", [from_csv, from_parquet])


def targets_of(source):
    return source.examples(np.arange(source.spec.examples))[1]


@both
def test_numbers_with_a_fraction_are_values(tmp_path, opened):
    source = opened(tmp_path, [3.25, -1.0, 3.25, 8.0])
    assert source.spec.classes == 0
    assert targets_of(source).dtype == np.float32
    assert targets_of(source).tolist() == [3.25, -1.0, 3.25, 8.0]
    target = source.spec.preprocessing.target
    assert (target.kind, target.name) == ("value", "price")
    assert (target.mean, target.deviation) == (3.375, np.std([3.25, -1.0, 3.25, 8.0]))


@both
def test_many_distinct_whole_numbers_are_refused_with_counts(tmp_path, opened):
    labels = [i % 812 for i in range(1000)]
    with pytest.raises(BadData) as refused:
        opened(tmp_path, labels)
    assert "label column 'price': has 812 distinct whole numbers in 1,000 rows; say data.target = " in str(
        refused.value
    )
    assert '"value" to predict the number, or "class" to tell 812 classes apart' in str(refused.value)
    assert opened(tmp_path, labels, target="class").spec.classes == 812
    values = opened(tmp_path, labels, target="value")
    assert (values.spec.classes, targets_of(values).tolist()) == (0, labels)


@both
@pytest.mark.parametrize(
    ("labels", "classes"), [([0, 1, 1], 2), ([5, 3, 4] * 2, 3), ([i % 20 for i in range(40)], 20), ([0.0, 1.0] * 5, 2)]
)
def test_few_distinct_whole_numbers_are_classes(tmp_path, opened, labels, classes):
    assert opened(tmp_path, labels).spec.classes == classes


@both
@pytest.mark.parametrize("labels", [[10, 20, 30], [i % 21 for i in range(100)], list(range(20))])
def test_whole_numbers_that_may_be_amounts_are_not_guessed(tmp_path, opened, labels):
    with pytest.raises(BadData, match=r"distinct whole numbers in [\d,]+ rows; say data.target"):
        opened(tmp_path, labels)


@both
def test_texts_that_are_mostly_different_are_no_classes(tmp_path, opened):
    labels = [f"name {i}" for i in range(50)]
    with pytest.raises(
        BadData, match=r"'price': has 50 distinct texts in 50 rows; say data.target = .class. to tell 50"
    ):
        opened(tmp_path, labels)
    assert opened(tmp_path, labels, target="class").spec.classes == 50


@both
def test_a_value_must_be_a_number(tmp_path, opened):
    with pytest.raises(
        BadData, match=r"""column 'price', row 1.*: the label is "dear", and data.target = "value" needs"""
    ):
        opened(tmp_path, ["dear", "cheap", "dear"], target="value")


@both
def test_a_value_that_is_missing_or_constant_is_reported(tmp_path, opened):
    with pytest.raises(BadData, match=r"column 'price', row 2.*: the label is missing \(in 2 rows\)"):
        opened(tmp_path, [1.5, None, 2.5, None] if opened is from_parquet else [1.5, "NA", 2.5, ""])
    with pytest.raises(BadData, match=r"label column 'price': is 2.5 in every training row: there is nothing to learn"):
        opened(tmp_path, [2.5, 2.5, 2.5])
    with pytest.raises(BadData, match=r"column 'price', row 1.*: the label 1e\+60 is not finite in float32"):
        opened(tmp_path, [1e60, 2.5, 2.5])


@both
def test_values_that_float32_does_not_tell_apart_are_refused(tmp_path, opened):
    since_1970 = [1700000000.5 + row for row in range(100)]
    with pytest.raises(BadData, match=r"the labels: float32 rounds values by up to .*: subtract a constant"):
        opened(tmp_path, since_1970)
    opened(tmp_path, [value - since_1970[0] + 0.5 for value in since_1970])
    opened(tmp_path, [1e9, *(row + 0.5 for row in range(99))])


@both
def test_a_text_among_the_labels_gets_no_advice_that_is_refused_next(tmp_path, opened):
    with pytest.raises(BadData) as refused:
        opened(tmp_path, [*map(str, range(599)), "hello"])
    assert "found 'hello'; 599 of the 600 values in this column are finite" in str(refused.value)
    assert str(refused.value).endswith("Correct the file, or leave such a row out")
    with pytest.raises(BadData) as refused:
        opened(tmp_path, ["1", "2", "none", "1", "2", "1"])
    assert str(refused.value).endswith('or say data.target = "class" if all of the column\'s values are names')
    with pytest.raises(BadData) as refused:
        opened(tmp_path, ["1", "2", "none", "1", "2", "1"], target="value")
    assert str(refused.value).endswith("Correct the file, or leave such a row out")


@both
def test_a_label_of_any_length_leaves_room_for_its_place(tmp_path, opened):
    long = "x" * 5000
    with pytest.raises(BadData, match="column 'price', row 1") as refused:
        opened(tmp_path, [long, *"y" * 40], target="value")
    assert len(str(refused.value)) < 400 + len(str(tmp_path))
    (tmp_path / "b.csv").write_text(f"x,price\n1,{long}\n")
    with pytest.raises(BadData, match="column 'price', row 1") as refused:
        from_csv(tmp_path, ["a", "b"] * 5, held_out_path=tmp_path / "b.csv")
    assert len(str(refused.value)) < 400 + len(str(tmp_path))


@both
def test_classes_may_be_named_by_numbers_and_texts_if_asked_for(tmp_path, opened):
    labels = ["1", "2", "none", "1"]
    with pytest.raises(BadData, match=r"column 'price', row 3.*: found 'none'; 3 of the 4 values"):
        opened(tmp_path, labels)
    source = opened(tmp_path, labels, target="class")
    assert source.spec.preprocessing.target.classes == ("1", "2", "none")


@both
def test_numeric_classes_have_the_same_order_asked_for_or_not(tmp_path, opened):
    labels = [10, 9, 9, 10]
    assert opened(tmp_path, labels, target="class").spec == opened(tmp_path, labels).spec
    assert opened(tmp_path, labels).spec.preprocessing.target.classes == ("9", "10")


def test_booleans_are_classes_with_names(tmp_path):
    source = from_parquet(tmp_path, [True, False, True])
    assert source.spec.preprocessing.target.classes == ("false", "true")
    assert targets_of(source).tolist() == [1, 0, 1]
    assert targets_of(from_parquet(tmp_path, [True, False], target="value")).tolist() == [1.0, 0.0]


# --- arrays ---


def from_npz(tmp_path, targets, **options):
    np.savez(tmp_path / "a.npz", inputs=np.ones((len(targets), 2)), targets=targets)
    return open_npz(NpzOptions(path=tmp_path / "a.npz", held_out=0.0, **options))


@pytest.mark.parametrize(
    ("targets", "classes"),
    [
        (np.array([0, 2, 1] * 4), 3),
        (np.array([True, False]), 2),
        (np.arange(2000) % 1000, 1000),
        (np.array([0.25, 1.0, 3.0]), 0),
        (np.arange(100.0), 0),
    ],
)
def test_the_dtype_of_an_array_says_what_its_targets_are(tmp_path, targets, classes):
    source = from_npz(tmp_path, targets)
    assert source.spec.classes == classes
    assert source.spec.preprocessing.target.kind == ("class" if classes else "value")


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (np.arange(1000), "has 1,000 distinct integers up to 999 in 1,000 examples"),
        (np.arange(1000) % 50 * 1000, "has 50 distinct integers up to 49,000 in 1,000 examples"),
        (np.arange(1000) % 10 * 1.0, "has 10 distinct floats, all of them whole, in 1,000 examples"),
    ],
)
def test_values_that_speak_against_the_dtype_are_refused_with_counts(tmp_path, targets, said):
    with pytest.raises(BadData, match=rf"array 'targets': {said}; say data.target = "):
        from_npz(tmp_path, targets)
    assert from_npz(tmp_path, targets, target="value").spec.classes == 0
    assert from_npz(tmp_path, targets, target="class").spec.classes == targets.max() + 1


def test_floats_that_are_not_whole_number_no_classes(tmp_path):
    with pytest.raises(BadData, match=r"array 'targets': index 1 is 0.5, and with data.target = .class."):
        from_npz(tmp_path, np.array([0, 0.5]), target="class")
