"""What attacks are made of: a pickle that makes a call when it is loaded, and edited JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Calls:
    """Pickled, it is a call of `function` with `arguments`, made when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def edit(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))
