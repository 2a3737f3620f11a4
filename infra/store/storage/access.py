"""Tells a user's mistake in the access to remote storage from a fault of the storage: credentials, profiles,
settings and addresses. Clients find these before a request succeeds, so every try would end the same way.

Invariant: errors are told apart here once, by the names of their classes, since no client is imported.
"""

import json
import os

from fsspec.utils import get_protocol

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or key and secret in FSSPEC_S3",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or token in FSSPEC_GS",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the same in FSSPEC_ABFS",
    "hf": "HF_TOKEN",
}
"""What gives credentials, by protocol."""
SAME = {"s3a": "s3", "gcs": "gs", "az": "abfs", "abfss": "abfs"}
# of botocore, google.auth, azure.core and huggingface_hub
NO_CREDENTIALS = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "NoAuthTokenError",
    "TokenRetrievalError", "SSOError", "GoogleAuthError", "ClientAuthenticationError", "PermissionError",
    "LocalTokenNotFoundError", "RepositoryNotFoundError",
}  # fmt: skip
PROFILE = {"ProfileNotFound", "ConfigNotFound", "ConfigParseError", "InvalidConfigError"}
ADDRESS = {"ParamValidationError", "NoRegionError", "InvalidRegionError", "BucketNotFound", "InvalidLocation"}


def fix_of(error: BaseException, url: str) -> str | None:
    """What a user can do about the first request's error; None for a fault of storage, and for files."""
    protocol = SAME.get(name := get_protocol(url), name)
    if protocol in ("file", "local"):
        return None
    variable = f"FSSPEC_{name.upper()}"
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & NO_CREDENTIALS:
        return f"set {CREDENTIALS.get(protocol, f'the credentials in {variable}')}, with access to it."
    if kinds & PROFILE:
        return "name a profile of ~/.aws/config in AWS_PROFILE, or unset it."
    if kinds & ADDRESS:
        return "name a bucket that exists, as its storage spells it."
    if kinds & {"ValueError", "TypeError"}:
        address = ", or AWS_ENDPOINT_URL, which begins with http:// or https://" if protocol == "s3" else ""
        return f"correct {variable} and {variable}_...{address}."
    return None


def check_settings(url: str) -> None:
    """Raises ValueError for settings in the environment that cannot be read: fsspec would ignore them."""
    variable = f"FSSPEC_{get_protocol(url).upper()}"
    try:
        if not isinstance(json.loads(os.environ.get(variable) or "{}"), dict):
            raise ValueError("it is no object")
    except ValueError as error:
        example = '{"profile": "name"}'
        raise ValueError(f"{variable} is not JSON: {error}. Fix: write an object such as {example}") from None
