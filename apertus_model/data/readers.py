"""A datatrove reader of the documents of a source.

Invariant: task `rank` reads the files `tasks[rank]`, in order, independently of the number of workers and of
datatrove's sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.readers.base import BaseDiskReader

from apertus_model.data.documents import Rejection, open_source, read_documents
from specs.sources import SourceSpec


class SourceReader(BaseDiskReader):
    """A reader of any text format of `SourceSpec` from any fsspec URL. Stats: `bytes`, `rejected_<reason>`,
    and datatrove's own.

    The metadata of a document are the columns that `source.metadata` names (for a web archive, `url` and
    `date`). Its identifier is the one in its source, or `<file>/<position in the file>`.

    `source.limit` bounds the documents of each task, so a source with a limit has to be a single task.
    `on_reject` is called with the identifier of each rejected document and the reason.
    """

    name = "documents"

    def __init__(
        self,
        source: SourceSpec,
        tasks: list[list[str]],
        on_reject: Callable[[str, str], None] = lambda document, reason: None,
    ) -> None:
        fs, root = open_source(source)
        super().__init__((root, fs), limit=-1 if source.limit is None else source.limit, add_file_path=False)
        self._source = source
        self._root = root
        self._fs = fs
        self._tasks = tasks
        self._on_reject = on_reject

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        for document in self.read_files_shard(self._tasks[rank]):
            self.update_doc_stats(document)
            self.stat_update("bytes", value=len(document.text.encode()))
            yield document

    def read_file(self, filepath: str) -> DocumentsPipeline:
        name = filepath or PurePosixPath(self._root).name
        for index, found in enumerate(read_documents(self._source, self._fs, self._root, filepath)):
            if isinstance(found, Rejection):
                self.stat_update(f"rejected_{found.reason}")
                self._on_reject(f"{name}/{index}", found.reason)
                continue
            identifier = {} if found.id is None else {"id": found.id}
            yield self.get_document_from_dict(
                {"text": found.text, "metadata": found.metadata, **identifier}, name, index
            )
