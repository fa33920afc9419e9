"""How stored formats are indexed; one table from format name to scanner, shared by builder and worker."""

from .arrow import scan_arrow
from .folder import scan_folder
from .port import RESERVED, Bytes, Note, Scan, Scanner, ShardIndex
from .tar import scan_tar, tar_scanner

#: format name in a manifest -> scanner. ``tar-last`` splits member names at the last dot instead of the first.
SCANNERS: dict[str, Scanner] = {
    "tar": scan_tar,
    "tar-last": tar_scanner("last"),
    "folder": scan_folder,
    "arrow": scan_arrow,
}

__all__ = ["RESERVED", "SCANNERS", "Bytes", "Note", "Scan", "Scanner", "ShardIndex"]
