"""Remove the code of all GPU architectures but one from a CUDA library, which then compresses to a tenth.

A fat binary (section `.nv_fatbin`) is a list of images, one per architecture; the driver picks one. Images of other
architectures are overwritten with zeros in place: offsets stay the same, so the library loads as before. Kernels that
exist only for another architecture are lost. The format is CUDA 13's, inferred from its libraries.
"""

import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

MAGIC = 0xBA55ED50
SECTIONS = (".nv_fatbin", "__nv_relfatbin")
ALIGNMENT = 8


def prune(source: Path, target: Path, architecture: int) -> int:
    """Write a copy with the code of one architecture (90: Hopper) and without debug symbols.

    Returns:
        Number of bytes overwritten with zeros; 0 for a library without GPU code.
    """
    data = bytearray(source.read_bytes())
    zeroed = sum(_clear_images(data, *section, architecture) for section in _fat_sections(source))
    target.write_bytes(data)
    subprocess.run(["strip", "--strip-unneeded", target], check=True)
    return zeroed


def _fat_sections(path: Path) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of each section that holds fat binaries."""
    listing = subprocess.run(
        ["readelf", "--section-headers", "--wide", path], capture_output=True, text=True, check=True
    )
    for line in listing.stdout.splitlines():
        columns = line.replace("[ ", "[").split()
        if len(columns) > 5 and columns[1] in SECTIONS:
            yield int(columns[4], 16), int(columns[5], 16)


def _clear_images(data: bytearray, start: int, size: int, architecture: int) -> int:
    zeroed, position, end = 0, start, start + size
    while position < end - 16:
        magic, _, header_bytes, content_bytes = struct.unpack_from("<IHHQ", data, position)
        if magic != MAGIC:
            position += ALIGNMENT
            continue
        image, images_end = position + header_bytes, position + header_bytes + content_bytes
        while image < images_end:
            _, _, image_header_bytes, image_bytes = struct.unpack_from("<HHIQ", data, image)
            (image_architecture,) = struct.unpack_from("<I", data, image + 28)
            body = image + image_header_bytes
            if image_architecture != architecture:
                data[body : body + image_bytes] = bytes(image_bytes)
                zeroed += image_bytes
            image = body + image_bytes
        position = -(-images_end // ALIGNMENT) * ALIGNMENT
    return zeroed
