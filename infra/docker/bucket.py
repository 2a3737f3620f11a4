"""Makes the bucket of a store's URL if needed: `python -m infra.docker.bucket s3://bucket/store`."""

import sys

import fsspec


def main(url: str) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    bucket = root.split("/")[0]
    if not fs.exists(bucket):
        fs.mkdir(bucket)


if __name__ == "__main__":
    main(sys.argv[1])
