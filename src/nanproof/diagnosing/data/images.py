"""Image files, each a row: does it decode, and is there anything on it?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...errors import UsageError
from ...files import open_file
from .piece import Piece, Progress, Unreadable

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
PIXELS = 200_000_000  # a larger one is taken for a decompression bomb


def read_image(path: Path, progress: Progress) -> Iterator[Piece]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise UsageError("reading images needs Pillow", hint="pip install 'nanproof[data]'") from None
    try:
        with open_file(path) as file, Image.open(file) as image:
            if image.width * image.height > PIXELS:
                raise Unreadable(f"{image.width:,} × {image.height:,} pixels are more than an image has")
            pixels = np.asarray(image)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Unreadable(f"it does not decode ({str(error).replace(str(path), path.name)})") from None
    progress(path.stat().st_size)
    yield Piece(0, {"pixels": pixels[None]})
