"""Files of rows as people have them: their prompts and columns come out as they were put in, or a sentence that names
file, row and remedy says why not. Yardsticks are json, pyarrow and, for chats, the template by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.parquet as pq

from campaigns.front_door.folders import demo_model
from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer
from streamrl.run.prompts.open_prompts import check_prompts, open_prompts

CHAT = [{"role": "system", "content": "12"}, {"role": "user", "content": "34:"}]
CHAT_TEXT = "[system|12][user|34:]"
ROWS = [{"prompt": f"{n}{n + 1}:", "answer": str(n), "level": None if n % 2 else n / 2} for n in range(4)]
TEXTS = [str(row["prompt"]) for row in ROWS]


@cache
def _tokenizer(directory: Path) -> Tokenizer:
    model = demo_model(directory)
    template = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    return load_tokenizer(model)


def taken(path: Path, spec: str, prompts: Sequence[str], columns: Sequence[Mapping[str, Any]] = ()) -> str:
    """'' where the rows of ``spec`` in ``path`` give these prompts (texts without BOS) and at least ``columns``."""
    tokenizer = _tokenizer(path)
    if problems := check_prompts(f"{path}/{spec}", tokenizer, {}):
        return f"refused: {problems[0]}"

    source = open_prompts(f"{path}/{spec}", tokenizer, seed=0, shuffle=False)
    drawn = anyio.run(source.draw, len(prompts))
    anyio.run(source.aclose)
    if source.size not in (None, len(prompts)):
        return f"{source.size} rows in place of {len(prompts)}"
    for found, text in zip(drawn, prompts, strict=True):
        expected = tokenizer._encoding(text, add_special_tokens=text[:2] not in ("[s", "[u")).ids
        if found.token_ids.tolist() != expected:
            return f"{tokenizer.decode(found.token_ids, skip_special=False)!r} in place of {text!r}"
    for found, row in zip(drawn, columns, strict=False):
        if wrong := {name: found.columns.get(name) for name in row if found.columns.get(name) != row[name]}:
            return f"columns {wrong} in place of {row}"
    return ""


def refused(path: Path, spec: str, *words: str) -> str:
    """'' where a check refuses ``spec`` in one line with all ``words``."""
    problems = check_prompts(f"{path}/{spec}", _tokenizer(path), {})
    said = problems[0] if problems else "nothing"
    return "" if all(word in said and "\n" not in said for word in words) else f"said: {said}"


def lines(rows: Sequence[Any], **how: Any) -> bytes:
    """JSONL."""
    return b"".join(json.dumps(row, **how).encode() + b"\n" for row in rows)


def _file(name: str, content: bytes, check: Callable[[Path], str]) -> Callable[[Path], str]:
    def try_it(path: Path) -> str:
        (path / name.partition("?")[0]).write_bytes(content)
        return check(path)

    return try_it


def jsonl(content: bytes, prompts: Sequence[str] = TEXTS, columns: Sequence[Any] = (), form: str = "") -> Any:
    """A JSONL file that is taken."""
    return _file("r.jsonl", content, lambda path: taken(path, f"r.jsonl{form}", prompts, columns))


def bad(content: bytes, *words: str, name: str = "r.jsonl") -> Any:
    """A file that is refused."""
    return _file(name, content, lambda path: refused(path, name, *words))


def parquet(
    rows: Any = ROWS, prompts: Sequence[str] = TEXTS, columns: Sequence[Any] = (), form: str = "", **how: Any
) -> Callable[[Path], str]:
    """A parquet file that is taken."""

    def try_it(path: Path) -> str:
        pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path / "r.parquet", **how)
        return taken(path, f"r.parquet{form}", prompts, columns)

    return try_it


def _shards(path: Path) -> str:
    for number in range(2):
        rows = pa.Table.from_pylist(ROWS[2 * number : 2 * number + 2])
        (path / "data").mkdir(exist_ok=True)
        pq.write_table(rows, path / f"data/train-0000{number}-of-00002.parquet")
    (path / "data/.cache").mkdir()
    (path / "data/.cache/old.parquet").write_bytes(b"no parquet")
    return taken(path, "data", TEXTS, ROWS)


def _iterator(source: str, prompts: Sequence[str]) -> Callable[[Path], str]:
    return _file("mine.py", source.encode(), lambda path: taken(path, "mine.py:rows", prompts))


def _renamed(table: pa.Table, type_: pa.DataType) -> pa.Table:
    return table.set_column(0, "prompt", table.column("prompt").cast(type_))


_table = pa.Table.from_pylist(ROWS)
_columns = {"data_source": "g", "reward_model": {"ground_truth": "4"}, "extra_info": {"i": 1}}
_mixed = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}, {"role": "user", "content": "1"}]
VARIANTS: dict[str, Callable[[Path], str]] = {
    "a byte order mark": jsonl(b"\xef\xbb\xbf" + lines(ROWS), columns=ROWS),
    "CRLF": jsonl(lines(ROWS).replace(b"\n", b"\r\n"), columns=ROWS),
    "empty lines, and none at the end": jsonl(b"\n \n" + lines(ROWS).rstrip(b"\n"), columns=ROWS),
    "escapes and characters": jsonl(lines([{"prompt": "é\u2028🙂:"}], ensure_ascii=False), ["é\u2028🙂:"]),
    "half of a surrogate": bad(lines([{"prompt": "\ud83d"}]), "line 1 is not a JSON object"),
    "NaN": bad(b'{"prompt": "1", "level": NaN}\n', "line 1 is not a JSON object"),
    "UTF-16": bad(json.dumps(ROWS[0]).encode("utf-16"), "line 1 is not a JSON object"),
    "Latin-1": bad(b'{"prompt": "1"}\n{"prompt": "\xe9"}\n', "line 2 is not a JSON object"),
    "NUL": bad(b'{"prompt": "1"}\n\x00\x00\x00\n', "line 2 is not a JSON object"),
    "an array of all rows": jsonl(json.dumps(ROWS).encode(), columns=ROWS),
    "an array over lines": jsonl(json.dumps(ROWS, indent=1).encode(), columns=ROWS),
    "an array that is cut": bad(json.dumps(ROWS).encode()[:-9], "begins a JSON array and is none", "one a line"),
    "rows over lines": bad(json.dumps(ROWS[0], indent=1).encode(), "line 1 is not a JSON object"),
    "gzip": bad(gzip.compress(lines(ROWS)), "line 1", "compressed): unpack it"),
    "a .json": _file("r.json", lines(ROWS), lambda path: taken(path, "r.json", TEXTS, ROWS)),
    "a .csv": _file("r.csv", b"prompt,n\n1:,2\n", lambda path: taken(path, "r.csv", ["1:"], [{"n": 2}])),
    "an .xml": bad(b"<rows/>", ".xml", name="r.xml"),
    "no rows": bad(b"\n\n", "is empty: add rows"),
    "an empty prompt": jsonl(lines([{"prompt": ""}]), [""]),
    "equal ids": bad(lines([{"prompt": "1", "prompt_id": 1}, {"prompt": "2", "prompt_id": "1"}]), "line 2", "unique"),
    "a very long row": jsonl(lines([{"prompt": "1" * (1 << 20)}]), ["1" * (1 << 20)]),
    "keys twice": jsonl(b'{"prompt": "1", "prompt": "2"}\n', ["2"]),
    "a list of messages": jsonl(lines([{"prompt": CHAT}]), [CHAT_TEXT]),
    "JSON text of messages": jsonl(lines([{"prompt": json.dumps(CHAT)}]), [CHAT_TEXT]),
    "messages in another column": jsonl(lines([{"chat": CHAT}]), [CHAT_TEXT], form="?prompt=chat"),
    "text that looks like a list": jsonl(lines([{"prompt": "[1, 2]:"}, {"prompt": "[]"}]), ["[1, 2]:", "[]"]),
    "messages of Python's repr": bad(lines([{"prompt": repr(CHAT)}]), "line 1", "Python's text of messages"),
    "messages of ShareGPT": bad(lines([{"prompt": [{"from": "human", "value": "1"}]}]), "line 1", '"role"'),
    "prompt and messages": bad(lines([{"prompt": "1", "messages": CHAT}]), "line 1", "?prompt="),
    "of verl": parquet([{**_columns, "prompt": CHAT}], [CHAT_TEXT], [{**_columns, "messages": CHAT}]),
    "JSON text in parquet": parquet([{"prompt": json.dumps(CHAT)}], [CHAT_TEXT]),
    "fields of other messages": parquet([{"messages": [CHAT[1], *_mixed]}], ["[user|34:][assistant|None][user|1]"]),
    "parquet": parquet(columns=ROWS, row_group_size=1),
    "large strings": parquet(_renamed(_table, pa.large_string()), columns=ROWS),
    "views of strings": parquet(_renamed(_table, pa.string_view()), columns=ROWS),
    "a dictionary": parquet(_table.set_column(0, "prompt", _table.column("prompt").dictionary_encode()), columns=ROWS),
    "a column of nulls": parquet(_table.append_column("none", pa.nulls(4)), columns=ROWS),
    "an index of pandas": parquet(_table.append_column("__index_level_0__", pa.array(range(4))), columns=ROWS),
    "NaN in parquet": parquet(_table.append_column("x", pa.array([float("nan")] * 4)), columns=ROWS),
    "times": parquet(_table.append_column("t", pa.array([0] * 4, pa.timestamp("us"))), columns=ROWS),
    "decimals": parquet(_table.append_column("d", pa.array([1] * 4, pa.decimal128(9, 2))), columns=ROWS),
    "maps": parquet(_table.append_column("m", pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int64())))),
    "nested": parquet([{**row, "tests": [{"in": [[1], []], "out": {"x": None}}]} for row in ROWS], columns=ROWS),
    "compressed parquet": parquet(columns=ROWS, compression="zstd"),
    "shards, and a hidden folder": _shards,
    "parquet under another name": bad(lines(ROWS), "r.parquet cannot be read", name="r.parquet"),
    "arrays of NumPy": _iterator(f"import numpy\nrows = [{{'prompt': numpy.array({CHAT})}}]", [CHAT_TEXT]),
    "numbers of NumPy": _iterator("import numpy\nrows = [{'prompt': '1', 'n': numpy.float32(1)}]", ["1"]),
    "tuples and sets": _iterator("rows = [{'prompt': '1', 'n': (1, {2})}]", ["1"]),
}
