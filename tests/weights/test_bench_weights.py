"""``benchmarks/bench_weights.py`` measures right, and refuses input that cannot be measured, with a remedy."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import weight_measurement as measurement
from bench_weights import main
from synthetic_updates import (
    SIGMA,
    adam_step,
    draw_weights,
    from_bfloat16,
    learning_rate_for,
    noise_of_step,
    synthetic_model,
    to_bfloat16,
)
from update_entropy import UpdateCounts
from weight_measurement import DeltaMeter, UpdatedTensor

from streamrl.base.errors import WeightError
from streamrl.weights.codec.codec import WeightPatch, decode_patch, encode_patch
from streamrl.weights.pull.loaded_checkpoint import map_checkpoint

CODES = {"<u2": "BF16", "<u4": "F32", "<i8": "I64", "|u1": "F8_E4M3"}


def write_safetensors(file: Path, tensors: dict[str, np.ndarray], *, cut: int = 0) -> Path:
    """The bits of ``tensors`` as safetensors: uint16 as BF16, uint32 as F32; the last ``cut`` bytes missing."""
    header, body = {}, b""
    for name, bits in tensors.items():
        offsets = [len(body), len(body) + bits.nbytes]
        header[name] = {"dtype": CODES[bits.dtype.str], "shape": list(bits.shape), "data_offsets": offsets}
        body += bits.tobytes()
    text = json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes((struct.pack("<Q", len(text)) + text + body)[: -cut or None])
    return file


def drawn(elements: int, seed: int = 1) -> np.ndarray:
    return draw_weights(elements, seed, 0)


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the command prints with ``--json``, parsed."""
    assert main(["--json", *arguments]) == 0
    return dict(json.loads(capsys.readouterr().out))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The complaint about ``arguments``, which must be exit code 2 and no traceback."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_synthetic_update_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = measured(capsys, "--params", "300k", "--density", "0.02")
    sizes = report["sizes"]
    assert report["elements"] == 300_000
    assert sizes["dense_bytes"] == 600_000
    assert report["density"] == pytest.approx(0.02, rel=0.1)
    assert report["changed"] == round(report["density"] * 300_000)
    assert sizes["index_value_bytes"] == 6 * report["changed"]
    # What counts more of what is known is smaller, and a real code is larger.
    assert sizes["conditional_by_tensor_bytes"] <= sizes["conditional_bytes"] < 0.8 * sizes["context_free_bytes"]
    assert sizes["conditional_by_tensor_bytes"] < sizes["encoded_bytes"] < sizes["index_value_bytes"]
    assert sizes["encoded_bytes_a_change"] == pytest.approx(sizes["encoded_bytes"] / report["changed"])
    assert list(report["stages"]) == ["diff", "diff + encode", "decode", "apply", "state hash"]
    for cost in report["stages"].values():
        assert cost["dense_gb_per_s"] == pytest.approx(6e-4 / cost["wall_s"])


def test_recorded_update_is_counted_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {"layer.weight": drawn(30_000).reshape(100, 300), "norm.weight": drawn(64).astype(np.uint32) << 16}
    new = {name: bits.copy() for name, bits in old.items()}
    new["layer.weight"][::10, 7] ^= 1
    new["norm.weight"][5] = 0x7FC00001  # a NaN with a payload
    first = write_safetensors(tmp_path / "old" / "model.safetensors", old).parent
    second = write_safetensors(tmp_path / "new" / "model.safetensors", new)  # a file does as well as a directory
    report = measured(capsys, "--model", str(first), str(second))
    assert (report["tensors"], report["elements"], report["changed"]) == (2, 30_064, 11)
    assert report["sizes"]["dense_bytes"] == 2 * 30_000 + 4 * 64
    assert report["sizes"]["index_value_bytes"] == 10 * 6 + 1 * 8
    expected = [
        encode_patch(new[name].reshape(-1), bits.reshape(-1), dtype)
        for (name, bits), dtype in zip(old.items(), ("bfloat16", "float32"), strict=True)
    ]
    assert report["sizes"]["encoded_bytes"] == sum(len(patch.encoded) for patch in expected if patch)


def test_input_that_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write_safetensors(tmp_path / "old.safetensors", {"w": drawn(100)})
    other = write_safetensors(tmp_path / "other.safetensors", {"v": drawn(100)})
    longer = write_safetensors(tmp_path / "longer.safetensors", {"w": drawn(101)})
    cut = write_safetensors(tmp_path / "cut" / "model.safetensors", {"w": drawn(100)}, cut=9)
    packed = write_safetensors(tmp_path / "packed.safetensors", {"w": np.zeros(8, np.uint8)})
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    cases = [
        (["--params", "many"], "--params 'many' is no number of parameters: give one such as 500M"),
        (["--density", "0"], "--density 0 is no share of elements: give one above 0"),
        (["--density", "0.99"], "give at most 0.95"),
        (["--threads", "0"], "--threads 0 --seed 0: at least 1 and 0"),
        (["--model", str(tmp_path / "none")], "none does not exist: give a directory with *.safetensors"),
        (["--model", str(tmp_path / "empty")], "empty has no *.safetensors weights"),
        (["--model", str(tmp_path / "pickled")], "save the model with safe_serialization=True"),
        (["--model", str(cut)], "broken model.safetensors: it is cut"),
        (["--model", str(packed)], "'w' as F8_E4M3; published weights are BF16, F16 or F32"),
        (["--model", str(old), str(other)], "differ in 2 tensor names (v, w): give two versions of one model"),
        (["--model", str(old), str(longer)], "'w' is bfloat16 [100] in"),
        (["--model", str(old), str(old)], "none of 100 elements differs: give two versions"),
        (["--model", str(old), str(old), "--density", "0.1"], "leave them out"),
        (["--model", str(old), str(old), str(old)], "--model was given 3 paths"),
        (["--model", str(old), "--params", "1M"], "the model has its size"),
    ]
    for arguments, message in cases:
        assert message in refused(capsys, *arguments), arguments


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        write_safetensors(tmp_path / name, {"w": drawn(10)})
    with pytest.raises(WeightError, match=r"'w' in two files \(model-00001-of-00002.safetensors and model-00002-"):
        map_checkpoint(tmp_path)


def test_bits_that_decode_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_bit_off(*arguments: Any) -> WeightPatch:
        patch = decode_patch(*arguments)
        patch.values[-1] ^= 1
        return patch

    monkeypatch.setattr(measurement, "decode_patch", one_bit_off)
    old, new = adam_step(drawn(10_000), 3e-6, 1, 0)
    with pytest.raises(WeightError, match="'w' decodes to other bits"):
        DeltaMeter(1).add([UpdatedTensor("w", "bfloat16", old, new)])


def test_entropy_of_an_update_computed_by_hand() -> None:
    # Sixteen elements of exponent 127 (1.0), two of which go one step up; eight of 128 (2.0), four of which change.
    old = np.array([0x3F80] * 16 + [0x4000] * 8, dtype=np.uint16)
    new = old.copy()
    new[[3, 9]] += 1
    new[[16, 17]] += 1
    new[[18, 19]] += 2
    counts = UpdateCounts.of(old, new, "bfloat16")
    # -log2 of the binomial frequencies: H(1/8) = 0.5436 bits, H(1/2) = 1, H(1/4) = 0.8113.
    h_8, h_4 = (-p * math.log2(p) - (1 - p) * math.log2(1 - p) for p in (1 / 8, 1 / 4))
    steps_alone = 6 * -(4 / 6 * math.log2(4 / 6) + 2 / 6 * math.log2(2 / 6))
    assert counts.context_free_bits() == pytest.approx(24 * h_4 + steps_alone)
    assert counts.conditional_bits() == pytest.approx(16 * h_8 + 8 * 1 + 0 + 4 * 1)
    halves = UpdateCounts.of(old[:10], new[:10], "bfloat16")
    halves.add(UpdateCounts.of(old[10:], new[10:], "bfloat16"))
    assert halves.conditional_bits() == pytest.approx(counts.conditional_bits())
    assert halves.context_free_bits() == pytest.approx(counts.context_free_bits())


def test_a_step_spreads_as_one_of_adam() -> None:
    """Against Adam's recursion over many elements, with the second moment at the variance of the noise."""
    steps, elements = 7, 200_000
    generator = np.random.default_rng(0)
    moment, place = np.zeros(elements), np.zeros(elements)
    for step in range(1, steps + 1):
        before = place.copy()
        moment = 0.9 * moment + 0.1 * generator.standard_normal(elements)
        place = place + moment / (1 - 0.9**step)
    a, b, c = noise_of_step(steps)
    assert before.std() == pytest.approx(a, rel=0.01)
    assert (place - before).std() == pytest.approx(math.hypot(b, c), rel=0.01)
    assert np.mean(before * (place - before)) == pytest.approx(a * b, rel=0.02)


def test_rounding_to_bfloat16_is_to_the_nearest_ties_to_even() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x80000001], dtype=np.uint32).view(np.float32)
    assert to_bfloat16(ties).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x8000]
    exact = drawn(1000)
    assert np.array_equal(to_bfloat16(from_bfloat16(exact)), exact)


def test_weights_and_steps_are_drawn_independently() -> None:
    """To numpy, seeds that differ only in trailing zeros are equal: tensor 0 once had its weights as its noise."""
    weights = from_bfloat16(draw_weights(50_000, 0, 0))
    assert weights.std() == pytest.approx(SIGMA, rel=0.02)
    old, _ = adam_step(draw_weights(50_000, 0, 0), 1e-3, 0, 0)
    moved = from_bfloat16(old) - weights
    assert abs(np.corrcoef(weights, moved)[0, 1]) < 0.02
    other = from_bfloat16(draw_weights(50_000, 0, 1))
    assert abs(np.corrcoef(weights, other)[0, 1]) < 0.02


def test_learning_rate_gives_the_density() -> None:
    sample = drawn(1 << 18)
    for density in (0.005, 0.5):
        old, new = adam_step(sample, learning_rate_for(density, sample), 5, 0)
        assert np.count_nonzero(old != new) / sample.size == pytest.approx(density, rel=0.05)
    with pytest.raises(WeightError, match=r"no noise step changes 90.0% of these weights"):
        learning_rate_for(0.9, np.full(1000, 0x7F00, dtype=np.uint16))  # 1.7e38 each


def test_synthetic_model_has_the_size_asked_for() -> None:
    for parameters in (1, 31, 5_000, 1_234_567, 494_000_000):
        shapes = synthetic_model(parameters)
        assert sum(shape.elements for shape in shapes) == parameters
        assert len({shape.name for shape in shapes}) == len(shapes)
    assert max(shape.elements for shape in synthetic_model(494_000_000)) == 4 * 1024 * 1024
