"""The loader as a ``torch.utils.data.IterableDataset``, for code that wants to wrap it in a DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from manifests.errors import ConfigError

from .loader import RemoteDataLoader


class RemoteDataset(IterableDataset[Any]):
    """Yields the batches of ``RemoteDataLoader(*args, **kwargs)``; wrap it with ``batch_size=None``.

    More than one DataLoader worker is refused: each would be another consumer of the same rank. The reading and decoding
    happens on feedline's workers, so one process has nothing left to share out.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.loader = RemoteDataLoader(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise ConfigError(
                f"RemoteDataset in a DataLoader with num_workers={info.num_workers}",
                cause="each of them would consume the same rank",
                remedy="use num_workers=0 or 1: feedline's workers do the work",
            )
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def steps_left(self) -> int:
        """See ``RemoteDataLoader.steps_left``."""
        return self.loader.steps_left

    def state_dict(self) -> dict[str, Any]:
        """See ``RemoteDataLoader.state_dict``."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | list[Any], allow: Iterable[str] = ()) -> None:
        """See ``RemoteDataLoader.load_state_dict``."""
        self.loader.load_state_dict(state, allow)

    def set_epoch(self, epoch: int) -> None:
        """See ``RemoteDataLoader.set_epoch``."""
        self.loader.set_epoch(epoch)

    def ack(self) -> None:
        """See ``RemoteDataLoader.ack``. It acknowledges what left the loader: all that a DataLoader around it took."""
        self.loader.ack()

    def stats(self) -> dict[str, float]:
        """See ``RemoteDataLoader.stats``."""
        return self.loader.stats()

    def close(self) -> None:
        """See ``RemoteDataLoader.close``."""
        self.loader.close()

    def __enter__(self) -> RemoteDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
