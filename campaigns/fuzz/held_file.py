"""A file in memory for decoders that are given a path: opening one in a file system takes longer than to decode it.

Only for readers that take the bytes of one file and do no more with the system. Whatever maps a file, or looks at a
directory, is given real ones.
"""

from __future__ import annotations

import os
from io import BytesIO, TextIOWrapper
from pathlib import PosixPath
from typing import IO, Any, ClassVar

_CLAIM_FROM = 1 << 20
_MOST_KEPT = 64


class HeldPath(PosixPath):
    """The last file that was held, if it has its name; a directory otherwise. Paths that are made from it are such as
    well."""

    held: ClassVar[tuple[str, bytes]] = ("", b"")
    _made: ClassVar[dict[tuple[str, str], HeldPath]] = {}

    @classmethod
    def hold(cls, name: str, content: bytes) -> None:
        """This is what files of that name have in them now. There are no others."""
        HeldPath.held = name, content

    def __truediv__(self, key: Any) -> HeldPath:
        """The same paths are made again and again, which takes as long as to decode what is there."""
        place = str(self), key
        made = HeldPath._made.get(place)
        if made is None:
            made = super().__truediv__(key)
            if len(HeldPath._made) < _MOST_KEPT:
                HeldPath._made[place] = made
        return made

    def _content(self) -> bytes:
        name, content = HeldPath.held
        if self.name != name:
            raise FileNotFoundError(f"{self} is not there")
        return content

    def read_bytes(self) -> bytes:
        return self._content()

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        return TextIOWrapper(BytesIO(self._content()), encoding, errors).read()

    def open(self, mode: str = "r", *_: Any, **options: Any) -> IO[Any]:  # type: ignore[override]
        stream = _Stream(self._content())
        return stream if "b" in mode else TextIOWrapper(stream, **options)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat_result((0o100600, 0, 0, 1, 0, 0, len(self._content()), 0, 0, 0))

    def exists(self) -> bool:
        return True

    def is_file(self) -> bool:
        return self.name == HeldPath.held[0]

    def is_dir(self) -> bool:
        return self.name != HeldPath.held[0]


class _Stream(BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _CLAIM_FROM:
            bytearray(size)  # a file makes room for what it is asked for, whatever there is
        return super().read(size)
