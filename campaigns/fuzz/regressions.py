"""Inputs that a decoder once could not take, as short as they could be made. All were found by the fuzzer."""

from __future__ import annotations

import json
import struct
import zipfile
from io import BytesIO

_DEEP_PACK, _DEEP_JSON = b"\x91" * 1200, b"[" * 2000
_BAD_TEXT = b"\xa2\xff\xfe"
_IN_TEXT = b'[run]\nname = """\n%s\n"""\n'


def _framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def _safetensors(header: object, size: int = 28) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def _unpackable() -> bytes:
    sink = BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("bundle.json", b"{}" * 40)
    content = bytearray(sink.getvalue())
    content[41:44] = b"\xff\xff\xff"  # the first bytes of what is packed
    return bytes(content)


REGRESSIONS: list[tuple[str, str, list[bytes]]] = [
    ("files.crash_bundle", "a member that cannot be unpacked", [_unpackable()]),
    ("streams.telemetry", "nested without end", [b"step", b"1", b'{"run_id":' + _DEEP_JSON]),
    ("weights.requests", "nested without end", [b"\x82\xa4type\xabGetManifest\xa1x" + _DEEP_PACK]),
    ("weights.requests", "a reply nested without end", [b"\x82\xa4type\xa9NotServed\xa1x" + _DEEP_PACK, b"reply"]),
    ("weights.announcement", "text that is none", [b"\x81" + _BAD_TEXT + b"\x01"]),
    ("weights.manifest", "nested without end", [b"\x81\xaeformat_version" + _DEEP_PACK]),
    ("weights.node_state", "text that is none", [b"\x81" + _BAD_TEXT + b"\x01"]),
    ("weights.node_state", "nested without end", [b"\x81\xa1x" + _DEEP_PACK]),
    (
        "rewards.call_answers",
        "text that is none",
        [b"\0", _framed(b"\x93\x01\xcb" + bytes(8) + b"\x91\x92\xc0\x81" + _BAD_TEXT + b"\x01")],
    ),
    ("rewards.call_answers", "nested without end", [b"\0", _framed(b"\x95\x01\x01\x90\xc2" + _DEEP_PACK)]),
    (
        "rewards.call_answers",
        "a value that is not finite",
        [b"\0", _framed(b"\x93\x01\x01\x93\x91\xca\x7f\xc0\0\0\x90\x90")],
    ),
    ("rewards.call_answers", "too few values", [b"\0", _framed(b"\x93\x01\x01\x91\x91\x01")]),
    ("rewards.call_orders", "text that is none", [_framed(b"\x91\x95\x01\0\x01" + _BAD_TEXT + b"\x80")]),
    ("rewards.fork_server", "text that is none", [b"\x81" + _BAD_TEXT + b"\x01"]),
    ("rewards.fork_server", "another text that is none", [b"\x81" + _BAD_TEXT + b"\x01", b"order"]),
    ("rewards.inspections", "not an inspection", [b"3\n"]),
    ("rewards.inspections", "text that is none", [b'{"spec":"\xff"}\n']),
    ("rewards.code", "text that is none", [b"\xff"]),
    ("rewards.code", "nested without end", [_DEEP_JSON]),
    ("rewards.code", "no values", [b'{"values":{"set":3}}']),
    ("rewards.zygote", "not JSON", [b'{"layers"']),
    ("rewards.zygote", "a report without its end", [b'{"run":3,"report":{"status":0}}']),
    ("rewards.cases", "a text of JSON nested without end", [json.dumps("[" * 2000).encode()]),
    ("rewards.cases", "lists in lists", [b'[{"input":' + b"[" * 450 + b"]" * 450 + b',"output":""}]']),
    ("files.topology", "not a topology", [b"3"]),
    ("files.topology", "nested without end", [b'{"x":' + _DEEP_JSON]),
    ("files.exit_reason", "text that is none", [b'{"\xff":1}']),
    ("files.trace", "nested without end", [b'{"type":"header","x":' + _DEEP_JSON + b"\n"]),
    ("files.scores", "not a list of scores", [b"3"]),
    ("files.scores", "text that is none", [b'{"\xff":1}']),
    ("user.recipe", "a number of 5,000 digits", [b"[run]\nsteps = " + b"1" * 5000]),
    ("user.recipe", "a key without end", [b"[run]\n" + b"a." * 12_000 + b"b = 1"]),
    ("user.recipe", "nested without end", [b"x = " + _DEEP_JSON]),
    ("user.recipe", "digits without end", [b"a = " + b"1" * 131_072]),
    ("user.recipe", "hexadecimal digits without end", [b"a = 0x" + b"f" * 131_072]),
    ("user.recipe", "a word without end", [_IN_TEXT % (b"a" * 150_000 + b"." * 70)]),
    ("user.recipe", "a table without end", [_IN_TEXT % (b"[" + b" " * 5000)]),
    (
        "user.recipe",
        "a home of nobody",
        [b'[model]\npath = "~nobody-at-all/x"\n[prompts]\ntrain = "a"\n[[rewards]]\nfunction = "a.py:f"'],
    ),
    (
        "user.recipe",
        "a path with a NUL",
        [b'[model]\npath = "a\\u0000"\n[prompts]\ntrain = "a"\n[[rewards]]\nfunction = "a.py:f"'],
    ),
    ("user.overrides", "bytes that are no text", [b"run.name=\xe0"]),
    ("user.overrides", "a number of 5,000 digits", [b"run.steps=" + b"1" * 5000]),
    ("user.cluster", "nested without end", [b"x = " + _DEEP_JSON]),
    ("user.prompt_spec", "a name that is too long", [b"a" * 5000]),
    ("user.prompt_spec", "a name with a NUL", [b"a\0b"]),
    ("user.prompt_spec", "an option that is no text", [b"a.jsonl?prompt=\xea"]),
    ("user.arrow", "an empty file", [b""]),
    ("user.saved_dataset", "a file without a name", [b'{"_data_files":[{}]}']),
    ("user.saved_dataset", "no file at all", [b'{"_data_files":[{"filename":""}]}']),
    ("user.saved_dataset", "the directory above", [b'{"_data_files":[{"filename":".."}]}']),
    ("user.saved_dataset", "a file elsewhere", [b'{"_data_files":[{"filename":"../../etc/passwd"}]}']),
    ("user.saved_dataset", "text that is none", [b'{"\xff":1}']),
    ("user.completions", "nested without end", [b'{"x":' + _DEEP_JSON + b"\n"]),
    ("user.safetensors", "without a shape", [_safetensors({"a": {"dtype": "F32", "data_offsets": [0, 4]}})]),
    ("user.safetensors", "not a table", [_safetensors([1])]),
    (
        "user.safetensors",
        "a side that is no number",
        [_safetensors({"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}})],
    ),
    (
        "user.safetensors",
        "offsets in reverse",
        [_safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}})],
    ),
    ("user.safetensors", "nested without end", [_safetensors(_DEEP_JSON)]),
    ("user.model_config", "a size in words", [b'{"hidden_size":"many"}']),
    ("user.model_config", "a size without an end", [b'{"vocab_size":1e999}']),
    ("user.model_config", "nested without end", [_DEEP_JSON]),
    ("user.tokenizer", "text that is none", [b"config.json", b'{"eos_token_id":3,"\xff":1}']),
    ("user.tokenizer", "a template without a name", [b"tokenizer_config.json", b'{"chat_template":[{}]}']),
    (
        "user.tokenizer",
        "a panic of the library",
        [
            b"tokenizer.json",
            (
                b'{"version":"1.0","added_tokens":[],"model":{"type":"BPE","continuing_subword_prefix":"xx",'
                b'"vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]}}'
            ),
        ],
    ),
    ("user.overrides", "lists in lists", [b"rewards.1.function=" + b"[" * 450 + b"1" + b"]" * 450]),
    (
        "user.tokenizer",
        "an unknown token that is unknown",
        [
            b"tokenizer.json",
            b'{"version":"1.0","added_tokens":[],"model":{"type":"BPE","unk_token":"none","vocab":{"b":1},"merges":[]}}',
        ],
    ),
]
