"""The trainer's side: a data loader whose work is done by feedline's data workers."""

from .config import ClientOptions, Mix, Shuffle
from .dataset import RemoteDataset
from .loader import RemoteDataLoader
from .ranks import gather_states

__all__ = ["ClientOptions", "Mix", "RemoteDataLoader", "RemoteDataset", "Shuffle", "gather_states"]
