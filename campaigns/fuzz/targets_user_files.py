"""Decoders of what the user brings: recipes, prompts, models, completions."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

from campaigns.fuzz.execution import Target
from campaigns.fuzz.held_file import HeldPath
from campaigns.fuzz.seeds import JSON, PLAIN, TOML, Seed, lines_of, message, seed
from campaigns.fuzz.targets_files import in_memory, on_file, write
from streamrl.base.errors import RecipeError, StreamRLError, WeightError
from streamrl.base.model_folder import _asks_for_code
from streamrl.evaluate.trial_completions import PlainText, _read_completions
from streamrl.plan import model_facts
from streamrl.plan.model_facts import ModelDirectoryError, ModelFacts, read_model_facts
from streamrl.prompts.prompt_rows import BadRow, decode_row, read_prompt, to_form
from streamrl.prompts.prompt_spec import RowForm, read_spec
from streamrl.prompts.prompt_tables import TableRows, find_table_files
from streamrl.prompts.tokenizer import ChatError, load_tokenizer
from streamrl.recipe.load import load_recipe
from streamrl.simulate.cluster import DEMO, dump_cluster, load_cluster
from streamrl.weights.publish import loaded_checkpoint
from streamrl.weights.publish.loaded_checkpoint import map_checkpoint

_RECIPES = Path(__file__).resolve().parent.parent.parent / "examples"
_MORE_OF_A_RECIPE = b"""
[rollout]
rounds = "tail_batching"
max_staleness = 2
[tail_batching]
prompt_oversampling = 1.5
[[rewards]]
function = "math"
weight = 0.5
options = { tolerance = 0.1, names = ["a", "b"] }
[evaluation]
prompts = "held.jsonl?prompt=question"
every = 5
[checkpoint]
every = 10
[checkpoint.advanced]
min_free_gib = 0.5
[transport]
kind = "tcp"
port = 5700
"""


def _recipes(scratch: Path) -> list[Target]:
    here = scratch / "recipe"
    found = [path.read_bytes() for path in sorted(_RECIPES.glob("*/recipe*.toml"))[:6]]
    base = b'[model]\npath = "model"\n[prompts]\ntrain = "a.jsonl"\n'
    (here / "base.toml").parent.mkdir(parents=True, exist_ok=True)
    (here / "base.toml").write_bytes(base + b'[[rewards]]\nfunction = "a.py:f"\n')

    def overridden(frames: Sequence[bytes]) -> str:
        load_recipe(here / "base.toml", [frame.decode("utf-8", "surrogateescape") for frame in frames])
        return "accepted"

    settings = (
        b"rollout.group_size=4",
        b"rewards.0.weight=2",
        b'rewards.1.function="a:b"',
        b"run.name=x",
        b"model.path=~/a",
    )
    return [
        on_file(
            "user.recipe",
            here / "recipe.toml",
            [*found, base + _MORE_OF_A_RECIPE],
            TOML,
            lambda: load_recipe(here / "recipe.toml"),
            refusals=(RecipeError,),
            amplification=64,
            quick=150,
        ),
        Target(
            name="user.overrides",
            messages=[message(*(seed(one, TOML) for one in settings)), *(message(seed(one, TOML)) for one in settings)],
            run=overridden,
            refusals=(RecipeError,),
            amplification=64,
            quick=150,
        ),
        on_file(
            "user.cluster",
            here / "cluster.toml",
            _clusters(),
            TOML,
            lambda: load_cluster(str(here / "cluster.toml")),
            refusals=(StreamRLError,),
            amplification=64,
        ),
    ]


def _clusters() -> list[bytes]:
    """The whole of one, and each table of it beside what none can do without."""
    tables = dict(table.split("\n", 1) for table in dump_cluster(DEMO).rstrip("\n").split("\n\n"))
    needed = {
        "[engine]": "base_s = 0.0017\nper_running_s = 2.7e-05\nmax_num_seqs = 8",
        "[trainer]": "token_s = 1e-05",
        "[lengths]": "cap = 448\nweights = [1.0]\nmus = [3.8]\nsigmas = [1.183]",
    }
    chosen = [tables, *({**needed, name: table} for name, table in tables.items())]
    return ["\n".join(f"{name}\n{table}" for name, table in one.items()).encode() for one in chosen]


# ---- prompts -------------------------------------------------------------------------------------------

_ROWS: list[dict[str, Any]] = [
    {"prompt": "2 + 2", "answer": "4", "tests": [{"in": "a", "out": [1.5, None]}]},
    {"messages": [{"role": "user", "content": "hello"}], "tools": [{"a": {}}], "chat_template_kwargs": {"x": True}},
    {"prompt_token_ids": [1, 2, 3, 255], "prompt_id": 7, "prompt": "x"},
    {"question": "how many", "prompt_id": "p-1", "score": 10**18},
]


def _spec() -> Target:
    def run(frames: Sequence[bytes]) -> str:
        spec = read_spec(b"".join(frames).decode("utf-8", "surrogateescape"))
        return f"accepted {spec.kind}"

    texts = (
        b"rows.jsonl",
        b"a/b.parquet?split=train&prompt=question",
        b"task.py:rows",
        b"reasoning_gym:basic?size=5&seed=1",
        b"rows.jsonl?system=you%20are&chat=true",
    )
    return Target(
        name="user.prompt_spec", messages=[message(seed(t, TOML)) for t in texts], run=run, refusals=(RecipeError,)
    )


def _rows() -> Target:
    tokenizer, forms = (
        PlainText(),
        (RowForm(), RowForm(prompt="question"), RowForm(system="be brief"), RowForm(chat=True)),
    )

    def run(frames: Sequence[bytes]) -> str:
        row = decode_row(frames[0] if frames else b"")
        form = forms[frames[1][0] % len(forms) if len(frames) > 1 and frames[1] else 0]
        prompt = read_prompt(to_form(row, form), 3, tokenizer, 4096)
        assert 0 < len(prompt.token_ids) <= 4096
        return "accepted"

    made = [
        message(seed(json.dumps(row).encode(), JSON), seed(bytes((number,)), PLAIN))
        for row in _ROWS
        for number in range(len(forms))
    ]
    return Target(name="user.rows", messages=made, run=run, refusals=(BadRow,), amplification=72)


def _tables(scratch: Path) -> list[Target]:
    rows = [{"prompt": f"2 + {n}", "answer": n, "tests": [{"in": "a" * n}]} for n in range(6)]
    table = pa.Table.from_pylist(rows)
    files: dict[str, bytes] = {}
    for compression in ("none", "snappy", "zstd"):
        sink = BytesIO()
        pq.write_table(table, sink, compression=compression, row_group_size=4)
        files[compression] = sink.getvalue()
    arrow = []
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        sink = BytesIO()
        with new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
        arrow.append(sink.getvalue())
    saved = json.dumps({"_data_files": [{"filename": "data.arrow"}]}).encode()

    def read(path: Path) -> int:
        rows = TableRows(path)
        try:
            for index in (0, rows.size // 2, rows.size - 1):
                rows.row(index)
        except BadRow:
            return 0
        finally:
            rows.close()
        return rows.size

    def saved_files(directory: HeldPath) -> int:
        saved = directory / "saved"
        files = find_table_files(saved)
        assert all(file.parent == saved and file.name not in ("", ".", "..") for file in files), f"it leads to {files}"
        return len(files)

    return [
        on_file(
            "user.parquet",
            scratch / "rows.parquet",
            list(files.values()),
            PLAIN,
            lambda: read(scratch / "rows.parquet"),
            refusals=(RecipeError,),
            spare_bytes=64 << 20,
            quick=150,
        ),
        on_file(
            "user.arrow",
            scratch / "rows.arrow",
            arrow,
            PLAIN,
            lambda: read(scratch / "rows.arrow"),
            refusals=(RecipeError,),
        ),
        in_memory("user.saved_dataset", "state.json", [saved], JSON, saved_files, refusals=(RecipeError,)),
    ]


def _completions() -> Target:
    name = "completions.jsonl"
    lines = (
        {"prompt_id": "p-1", "completion": "4"},
        {"prompt": "2 + 2", "completions": ["4", "5"], "finish_reason": "length"},
        {"prompt_id": 7, "text": "x", "token_ids": [1, 2]},
    )
    content = lines_of(*(json.dumps(line).encode() for line in lines))
    return in_memory(
        "user.completions", name, [content], JSON, lambda run: _read_completions(run / name), refusals=(RecipeError,)
    )


# ---- models --------------------------------------------------------------------------------------------


def _safetensors() -> list[bytes]:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]},
        "b.weight": {"dtype": "F32", "shape": [3], "data_offsets": [16, 28]},
    }
    return [_with_header(json.dumps(header).encode(), 28)]


def _with_header(text: bytes, size: int) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(size)


def _models(scratch: Path) -> list[Target]:
    config = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 99,
        "max_position_embeddings": 512,
        "eos_token_id": [2, 3],
        "head_dim": 16,
        "text_config": {"hidden_size": 64},
    }
    (content,) = _safetensors()
    length = int.from_bytes(content[:8], "little")
    spans = tuple((a + 8, b + 8) for a, b in JSON.spans_of(content[8 : 8 + length]))
    weights = Target(
        name="user.safetensors",
        messages=[message(Seed(content, JSON, spans))],
        run=lambda frames: _map(scratch / "one.safetensors", b"".join(frames)),
        refusals=(WeightError,),
        repair=lambda random, frames: (
            [_with_header(frames[0][8 : max(8, len(frames[0]) - 28)], 28)] if frames else frames
        ),
    )
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "<e>": 3}, [("a", "b")]))
    backend.add_special_tokens(["<e>"])
    configured = {
        "eos_token": {"content": "<e>"},
        "bos_token": "a",
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    }
    talks = scratch / "talks"
    talks.mkdir()
    files = {
        "config.json": json.dumps({"eos_token_id": 3}).encode(),
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(configured).encode(),
    }
    for name, text in files.items():
        (talks / name).write_bytes(text)

    def tokenizer(frames: Sequence[bytes]) -> str:
        name = os.fsdecode(frames[0]) if frames and os.fsdecode(frames[0]) in files else "config.json"
        try:
            write(talks / name, b"".join(frames[1:]))
            loaded = load_tokenizer(talks)
            loaded.decode(loaded.encode("abab"))
            loaded.encode_chat([{"role": "user", "content": "ab"}])
        finally:
            write(talks / name, files[name])
        return "accepted"

    return [
        weights,
        in_memory(
            "user.model_config",
            "config.json",
            [json.dumps(config).encode()],
            JSON,
            _facts,
            refusals=(ModelDirectoryError,),
            amplification=32,
        ),
        Target(
            name="user.tokenizer",
            run=tokenizer,
            refusals=(RecipeError, ChatError),
            amplification=256,
            quick=250,
            messages=[message(seed(os.fsencode(name), PLAIN), seed(text, JSON)) for name, text in files.items()],
        ),
    ]


def _facts(directory: HeldPath) -> ModelFacts:
    """Of a folder that holds the configuration alone, and weights that were counted."""
    module = vars(model_facts)
    before = {name: module[name] for name in ("unsafe_content", "_count_weights")}
    module["unsafe_content"] = lambda folder: _asks_for_code(folder / "config.json")
    module["_count_weights"] = lambda folder: (12, 48)
    try:
        return read_model_facts(directory)
    finally:
        module.update(before)


def _map(path: Path, content: bytes) -> str:
    """Every tensor lies within the file. Only where all do is there a file to map them from."""

    def within(file: Path, offset: int, count: int, wanted: Any) -> Any:
        assert 8 <= offset <= offset + count * wanted.itemsize <= len(content), f"{count} elements at byte {offset}"
        return np.empty(count, wanted)

    HeldPath.hold(path.name, content)
    before, loaded_checkpoint._map_bits = loaded_checkpoint._map_bits, within
    try:
        map_checkpoint(HeldPath(path))
    finally:
        loaded_checkpoint._map_bits = before
    write(path, content)
    for tensor in map_checkpoint(path).values():
        tensor.bits.sum()
    return "accepted"


def targets(scratch: Path) -> list[Target]:
    """All of this module. ``scratch``: where the files are written."""
    return [*_recipes(scratch), _spec(), _rows(), *_tables(scratch), _completions(), *_models(scratch)]
