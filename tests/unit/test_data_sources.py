"""Reading sets: every fault is named by file and line, and all faults of a file come together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import datasets
import pytest

from allranks.data.sources import Source, open_source
from allranks.errors import ProblemsError


def written(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def opened(name: str, split: str = "train") -> Source:
    return open_source(name, split=split, key="data.train")


def rows_of(name: str) -> list[tuple[int, object]]:
    source = opened(name)
    return list(source.rows(source.columns))


def faults_of(name: str) -> str:
    with pytest.raises(ProblemsError) as caught:
        rows_of(name)
    return str(caught.value)


ROWS = [{"text": "a", "n": 1}, {"text": "ü\u2028b", "n": 2}]


def test_jsonl_rows_carry_their_line_numbers(tmp_path):
    text = "\ufeff" + json.dumps(ROWS[0]) + "\r\n\n" + json.dumps(ROWS[1], ensure_ascii=False) + "\n\n\n"
    name = written(tmp_path, "a.jsonl", text)
    assert rows_of(name) == [(1, ROWS[0]), (2, None), (3, ROWS[1])], "blank lines at the end are none"
    source = opened(name)
    assert (source.unit, source.columns, source.size) == ("line", ("text", "n"), 5)


def test_all_corrupt_lines_of_a_jsonl_file_come_together(tmp_path):
    lines = [json.dumps(ROWS[0])] * 250
    lines[3] = '{"text": "cut'
    lines[200] = '{"text": "a" "n": 1}'
    text = faults_of(written(tmp_path, "a.jsonl", "\n".join(lines)))
    assert f"{tmp_path}/a.jsonl: 2 problems" in text
    assert 'a.jsonl:4: not valid JSON: Unterminated string starting at (column 10): {"text": "cut' in text
    assert "a.jsonl:201: not valid JSON: Expecting ',' delimiter (column 14)" in text


def test_no_sample_is_taken_after_a_corrupt_line(tmp_path):
    source = opened(written(tmp_path, "a.jsonl", (json.dumps(ROWS[0]) + "\n") * 150 + "no\n" + json.dumps(ROWS[0])))
    read = []
    rows = source.rows(())
    with pytest.raises(ProblemsError):
        while True:
            read.append(next(rows))
    assert len(read) == 150


def test_a_file_of_faults_is_not_listed_to_its_end(tmp_path):
    assert "20 problems" in faults_of(written(tmp_path, "a.jsonl", "no\n" * 5000))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "caf\xe9"}', "not UTF-8: byte 0xe9 at position 14"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b"\x00\x00", "not valid JSON: Expecting value (column 1)"),
    ],
    ids=["latin-1", "deep", "long number", "nul"],
)
def test_lines_that_break_parsers(tmp_path, line, message):
    name = written(tmp_path, "a.jsonl", b'{"text": "a"}\n' + line + b"\n")
    text = faults_of(name)
    assert "a.jsonl:2: " in text
    assert message in text


def test_a_json_array_is_read_by_row(tmp_path):
    name = written(tmp_path, "a.json", "\n " + json.dumps(ROWS, indent=1))
    assert rows_of(name) == [(1, ROWS[0]), (2, ROWS[1])]
    assert (opened(name).unit, opened(name).size) == ("row", 2)
    broken = written(tmp_path, "b.json", '[\n{"text": "a"},\n{"text" "b"}\n]')
    assert "b.json:3: not valid JSON: Expecting ':' delimiter (column 9)" in faults_of(broken)
    lines = written(tmp_path, "c.json", "".join(json.dumps(row) + "\n" for row in ROWS))
    assert rows_of(lines) == [(1, ROWS[0]), (2, ROWS[1])]


def test_csv_records_are_counted_by_the_line_they_begin_in(tmp_path):
    name = written(tmp_path, "a.csv", 'text,label\n"two\nlines, ""quoted""",x\n\nlast,y\n\n')
    assert rows_of(name) == [
        (2, {"text": 'two\nlines, "quoted"', "label": "x"}),
        (4, None),
        (5, {"text": "last", "label": "y"}),
    ]


def test_csv_fields_may_be_long(tmp_path):
    name = written(tmp_path, "a.csv", "text\n" + "x" * 300_000 + "\n")
    assert len(rows_of(name)[0][1]["text"]) == 300_000


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        ('text,label\na,x\n"never closed,y\nb,z\n', 3, "a quote opened in this record is never closed"),
        ('text,label\n"a"b,x\n', 2, "not valid CSV: ',' expected after '\"'"),
        ("text,label\na,x\nb,y,z\nc\n", 3, "3 fields where the header has 2: b"),
        ("text,label\na,x\nb,y,z\nc\n", 4, "1 fields where the header has 2: c"),
        (b"text,label\na,x\ncaf\xe9,y\n", 3, "not UTF-8: byte 0xe9 at position 4"),
        ("text,text\na,b\n", 1, "empty or repeated name: 'text'"),
        ("text,\na,b\n", 1, "empty or repeated name: ''"),
    ],
)
def test_csv_faults(tmp_path, content, place, message):
    text = faults_of(written(tmp_path, "a.csv", content))
    assert f"a.csv:{place}: " in text
    assert message in text


def saved_parquet(folder: Path, rows: int = 3000) -> Path:
    path = folder / "a.parquet"
    datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(rows)], "n": list(range(rows))}).to_parquet(path)
    return path


def test_parquet_reads_the_columns_that_are_needed(tmp_path):
    source = opened(str(saved_parquet(tmp_path)))
    assert (source.unit, source.columns, source.size) == ("row", ("text", "n"), 3000)
    rows = list(source.rows(("text",)))
    assert rows[2999] == (3000, {"text": "text 2999"})


def test_damaged_parquet_names_the_file(tmp_path):
    path = saved_parquet(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "a.parquet: not a readable parquet file" in faults_of(str(path))
    path.write_bytes(whole[:100] + b"\xff" * 4000 + whole[4100:])
    assert "a.parquet: after row 0: not a readable parquet file" in faults_of(str(path))


def test_folders_saved_by_datasets(tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    train = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "validation": train}).save_to_disk(tmp_path / "many")
    source = opened(str(tmp_path / "one"), split="no matter")
    assert (source.unit, source.size, source.columns) == ("row", 2, ("text", "label"))
    assert source.class_names == {"label": ("no", "yes")}
    assert list(source.rows(("text",))) == [(1, {"text": "a"}), (2, {"text": "b"})]
    assert opened(str(tmp_path / "many"), split="validation").size == 2
    with pytest.raises(ProblemsError) as caught:
        opened(str(tmp_path / "many"), split="valid")
    assert "data.train_split: " in str(caught.value)
    assert "has no split 'valid'" in str(caught.value)
    assert "valid: train, validation" in str(caught.value)


def test_damaged_folder_names_the_row(tmp_path):
    folder = tmp_path / "one"
    datasets.Dataset.from_dict({"text": ["a" * 1000] * 100}).save_to_disk(folder)
    arrow = next(folder.glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:3000])
    with pytest.raises(ProblemsError, match="one"):
        rows_of(str(folder))
    (folder / "state.json").write_text("{")
    with pytest.raises(ProblemsError, match="cannot be read: JSONDecodeError"):
        opened(str(folder))


def test_equal_content_has_an_equal_fingerprint(tmp_path):
    first = opened(written(tmp_path, "a.jsonl", '{"text": "a"}\n')).content
    assert opened(written(tmp_path, "b.jsonl", '{"text": "a"}\n')).content == first
    assert opened(written(tmp_path, "c.jsonl", '{"text": "b"}\n')).content != first


def refusal(name: str) -> str:
    with pytest.raises(ProblemsError) as caught:
        opened(name)
    return str(caught.value)


def test_names_that_mean_nothing(tmp_path):
    written(tmp_path, "train.jsonl", "")
    text = refusal(f"{tmp_path}/trian.jsonl")
    assert "data.train: there is no file or folder" in text
    assert f"nearest: {tmp_path}/train.jsonl" in text
    assert "holds no sample" in refusal(f"{tmp_path}/train.jsonl")
    assert "holds no sample" in refusal(written(tmp_path, "empty.csv", "text,label\n\n"))
    text = refusal(written(tmp_path, "train.txt", "a"))
    assert "has no known ending" in text
    assert "valid: .jsonl, .ndjson, .json, .csv, .parquet" in text
    (tmp_path / "folder").mkdir()
    assert "was not saved by `datasets`" in refusal(f"{tmp_path}/folder")


def test_streams_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("-", "https://example.org/a.jsonl", f"{tmp_path}/pipe.jsonl"):
        text = refusal(name)
        assert "is a stream" in text
        assert "fix: save it to a file first" in text


def test_an_unknown_hub_id_is_no_traceback(monkeypatch):
    def not_found(repository: str, configuration: str | None, split: str) -> None:
        raise datasets.exceptions.DatasetNotFoundError(f"{repository} {configuration} {split}\nmore")

    monkeypatch.setattr(datasets, "load_dataset", not_found)
    text = refusal("someone/some-set:main")
    assert "'someone/some-set:main' is no file or folder here, and the hub gave no set of that id" in text
    assert "DatasetNotFoundError: someone/some-set main train" in text
    assert "data.train_split: train" in text


def test_a_hub_set_is_read_by_row(monkeypatch):
    found = datasets.Dataset.from_dict({"text": ["a", "b"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda repository, configuration, split: found)
    assert rows_of("someone/some-set") == [(1, {"text": "a"}), (2, {"text": "b"})]


def test_a_key_that_stands_twice_is_refused_by_its_line(tmp_path):
    doubled = '{"text": "a", "meta": {"x": 1, "x": 2}}'
    lines = written(tmp_path, "a.jsonl", f'{{"text": "x"}}\n{doubled}\n{{"text": 1, "text": 2}}\n')
    text = faults_of(lines)
    assert f"a.jsonl:2: the key 'x' stands twice in a record: {doubled}" in text
    assert "a.jsonl:3: the key 'text' stands twice in a record" in text
    array = written(tmp_path, "b.json", f'[\n {{"text": "["}},\n\n {doubled}\n]')
    assert "b.json:4: the key 'x' stands twice in a record" in faults_of(array)


def test_only_a_file_with_a_similar_stem_is_offered(tmp_path):
    written(tmp_path, "train.jsonl", "{}")
    assert "nearest" not in faults_of(str(tmp_path / "nope.jsonl"))
    assert f"nearest: {tmp_path / 'train.jsonl'}" in faults_of(str(tmp_path / "trian.jsonl"))
