"""An object store in memory that takes any key, as a real one does: also `runs/x/../../evil`."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileSystemHandler, FileType, PyFileSystem


class MemoryStore(FileSystemHandler):
    """`objects`: bucket/key → bytes."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    @property
    def system(self) -> PyFileSystem:
        return PyFileSystem(self)

    def _about(self, path: str) -> FileInfo:
        if path in self.objects:
            return FileInfo(path, FileType.File, size=len(self.objects[path]))
        below = any(key.startswith(f"{path}/") for key in self.objects)
        return FileInfo(path, FileType.Directory if below else FileType.NotFound)

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        return [self._about(path) for path in paths]

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        return [self._about(key) for key in sorted(self.objects) if key.startswith(f"{selector.base_dir}/")]

    def open_input_stream(self, path: str) -> Any:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return pa.BufferReader(self.objects[path])

    open_input_file = open_input_stream

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        store = self.objects

        class Stream(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    store[path] = self.getvalue()
                super().close()

        return pa.PythonFile(Stream(), mode="w")

    def delete_file(self, path: str) -> None:
        if path not in self.objects:
            raise FileNotFoundError(path)
        del self.objects[path]

    def get_type_name(self) -> str:
        return "memory"

    def normalize_path(self, path: str) -> str:
        return path

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def _never(self, *arguments: Any) -> None:
        raise NotImplementedError

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _never
    move = copy_file = open_append_stream = _never
