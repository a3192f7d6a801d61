"""stub"""

from typing import Any


def encode_image(value: Any, wish: Any) -> Any:
    raise NotImplementedError


def open_image(value: Any, encoding: str, transform: Any) -> Any:
    raise NotImplementedError
