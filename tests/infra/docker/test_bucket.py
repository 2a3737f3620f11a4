"""The bucket of the services' object storage."""

from __future__ import annotations

import fsspec

from infra.docker.bucket import main
from tests.infra.moto import Moto


def test_the_bucket_of_a_store_is_made_once_and_kept(moto: Moto) -> None:
    with moto.in_environment():
        fs = fsspec.filesystem("s3")
        assert not fs.exists("fresh")
        main("s3://fresh/store")
        fs.pipe_file("fresh/store/format.json", b"{}")
        main("s3://fresh/store")
        assert fs.find("fresh") == ["fresh/store/format.json"]
