"""Entropy coding of streams of small unsigned integers (gaps and steps of ``codec.py``), by the shortest of three
codes.

The first byte of a stream is its code. 0 to 31: Rice with this parameter, as two bit planes (quotients in unary, then
the low bits of all symbols). 32 and above: fixed width, with the code minus 32 bits a symbol. 255: pcodec
(github.com/pcodec/pcodec), which bins the symbols and codes the bins by tANS. Pcodec comes within 1 to 3 % of the
entropy on long streams; the two other codes, which have no tables, are for short streams."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, PagingSpec  # type: ignore[import-untyped]
from pcodec.wrapped import FileCompressor, FileDecompressor  # type: ignore[import-untyped]

from streamrl.base.errors import WeightError
from streamrl.weights.codec.bits import BitArray, BitType

_PCODEC = 255
_FIXED = 32
_RICE_LIMIT = 4096  # symbols; in longer streams the tables of pcodec weigh little and its code is the shorter one
_FIXED_LIMIT = 1 << 16  # bits
_ONE_PAGE = 1 << 30  # symbols: more than any stream has
_PCODEC_CONFIG = ChunkConfig(
    compression_level=6,  # 64 bins; level 8 takes a tenth more time for 0.3 % less bytes
    mode_spec=ModeSpec.classic(),
    delta_spec=DeltaSpec.no_op(),
    paging_spec=PagingSpec.equal_pages_up_to(_ONE_PAGE),
)
_PCODEC_HEADER = FileCompressor().write_header()


def encode_symbols(symbols: BitArray) -> bytes:
    """Encode a stream (uint16 or uint32 [n]). An empty stream takes no bytes."""
    if not symbols.size:
        return b""
    width = int(symbols.max()).bit_length()
    if not width and symbols.size <= _FIXED_LIMIT:
        return bytes((_FIXED,))
    compressor = FileCompressor().chunk_compressor(symbols, _PCODEC_CONFIG)
    shortest = b"".join((bytes((_PCODEC,)), compressor.write_meta(), compressor.write_page(0)))
    if symbols.size <= _RICE_LIMIT:
        shortest = _encode_rice(symbols, len(shortest)) or shortest
    if symbols.size * max(1, width) <= min(_FIXED_LIMIT, 8 * len(shortest) - 16):
        return bytes((_FIXED + width,)) + _pack(symbols, width)
    return shortest


def decode_symbols(encoded: memoryview, dtype: BitType, count: int, tensor: str) -> BitArray:
    """Decode ``count`` symbols of ``dtype``. ``tensor``: name in errors. Raises ``WeightError`` for bytes that
    ``encode_symbols`` does not write."""
    if not count and not len(encoded):
        return np.zeros(0, dtype=dtype)
    if not count or not len(encoded):
        raise _broken(tensor, f"{len(encoded)} bytes for {count} symbols")
    code = encoded[0]
    body = encoded[1:]
    if code == _PCODEC:
        return _decode_pcodec(body, dtype, count, tensor)
    if code < _FIXED and count <= _RICE_LIMIT:
        return _decode_rice(body, code, dtype, count, tensor)
    width = code - _FIXED
    if 0 <= width <= 8 * dtype.itemsize and count * max(1, width) <= _FIXED_LIMIT:
        return cast("BitArray", _unpack(body, width, count, tensor).astype(dtype))
    raise _broken(tensor, f"code {code} for {count} symbols")


def _pack(symbols: BitArray, width: int) -> bytes:
    """Concatenate the low ``width`` bits of all symbols."""
    as_bytes = symbols.view(np.uint8).reshape(symbols.size, -1)
    return np.packbits(np.unpackbits(as_bytes, axis=1, count=width, bitorder="little"), bitorder="little").tobytes()


def _unpack(body: memoryview, width: int, count: int, tensor: str) -> NDArray[np.uint32]:
    if len(body) != (count * width + 7) // 8:
        raise _broken(tensor, f"{len(body)} bytes for {count} symbols of {width} bits")
    bits = np.unpackbits(np.frombuffer(body, dtype=np.uint8), bitorder="little")
    if bits[count * width :].any():
        raise _broken(tensor, "bits beyond its end")
    wide = np.zeros((count, 32), dtype=np.uint8)
    wide[:, :width] = bits[: count * width].reshape(count, width)
    return np.packbits(wide, axis=1, bitorder="little").view("<u4").reshape(-1)


def _encode_rice(symbols: BitArray, limit: int) -> bytes:
    """Encode by Rice, code byte included. Returns no bytes where the stream would not be shorter than ``limit``
    bytes."""
    # The best parameter is about log2(0.7 * mean): try the integers around that.
    estimate = max(0, (7 * int(symbols.sum(dtype=np.int64)) // (10 * symbols.size)).bit_length() - 1)
    bits = {k: int((symbols >> k).sum(dtype=np.int64)) + (k + 1) * symbols.size for k in (estimate, estimate + 1)}
    parameter = min(bits, key=bits.__getitem__)
    if bits[parameter] // 8 + 2 >= limit:
        return b""
    ends = np.cumsum((symbols >> parameter).astype(np.int64) + 1)
    unary = np.zeros(int(ends[-1]), dtype=np.uint8)
    unary[ends - 1] = 1
    return b"".join((bytes((parameter,)), np.packbits(unary, bitorder="little").tobytes(), _pack(symbols, parameter)))


def _decode_rice(body: memoryview, parameter: int, dtype: BitType, count: int, tensor: str) -> BitArray:
    low_bytes = (count * parameter + 7) // 8
    split = len(body) - low_bytes
    if split < 1:
        raise _broken(tensor, f"{len(body)} bytes for {count} symbols")
    unary = np.unpackbits(np.frombuffer(body[:split], dtype=np.uint8), bitorder="little")
    ends = np.flatnonzero(unary)
    if ends.size != count or ends[-1] < 8 * (split - 1):
        raise _broken(tensor, f"{ends.size} symbols instead of {count}")
    symbols = (np.diff(ends, prepend=-1) - 1).astype(np.int64) << parameter
    symbols |= _unpack(body[split:], parameter, count, tensor)
    if symbols.max() > np.iinfo(dtype).max:
        raise _broken(tensor, f"symbol {symbols.max()} for {dtype.name}")
    return cast("BitArray", symbols.astype(dtype))


def _decode_pcodec(body: memoryview, dtype: BitType, count: int, tensor: str) -> BitArray:
    symbols = np.empty(count, dtype=dtype)
    try:
        file, _ = FileDecompressor.new(_PCODEC_HEADER)
        chunk, header_bytes = file.chunk_decompressor(bytes(body), f"u{8 * dtype.itemsize}")
        page = bytes(body[header_bytes:])
        progress, page_bytes = chunk.read_page_into(page, count, symbols)
    except (RuntimeError, TypeError) as error:
        raise _broken(tensor, str(error)) from error
    if progress.n_processed != count or not progress.finished or page_bytes != len(page):
        raise _broken(tensor, f"{progress.n_processed} of {count} symbols from {page_bytes} of {len(page)} bytes")
    return symbols


def _broken(tensor: str, reason: str) -> WeightError:
    return WeightError(f"patch of {tensor!r} has a stream that cannot be decoded: {reason}")
