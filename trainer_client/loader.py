"""``RemoteDataLoader``: batches from data workers, in a training loop, with a position that can be saved."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from manifests.cursor import default_lanes
from manifests.errors import ConfigError, FeedlineWarning
from manifests.pipeline import Pipeline
from manifests.plan import Plan
from manifests.ranges import Ranges
from manifests.wire import messages as m

from . import dynamic_state
from .config import ClientOptions, LoaderConfig, Mix, Shuffle, check_lanes, make_config
from .control import Closed, Control
from .figures import Waits
from .joining import Dataset, find_dataset, new_holder, open_generation, settings_of
from .passes import Pass
from .position import blank_state, epoch_start, state_at
from .ranks import resolve_rank
from .reads import ReadPool
from .run import Engine, Epoch, Run
from .session import Leg
from .session import steps_per_epoch as count_steps
from .state import LoadedState, check_fits, load

_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A normal end of the interpreter delivers acknowledgements and gives the leases back."""
    for engine in list(_open_engines):
        engine.close()


class RemoteDataLoader:
    """Iterate over batches that data workers read and decode.

    One ``for`` yields ``epochs`` epochs; the next ``for`` goes on with the epoch after. A batch is a dict of
    ``Tensor [batch, ...]`` (fixed-shape numbers) or ``list`` (strings, bytes, ragged numbers) per output field, with
    ``__id__`` (int64 [batch], the sample ids) and, if ``tail="pad"`` or ``on_error="skip"``, ``__pad__`` (bool [batch]).
    Elastic jobs have ``__epoch__`` too (int64 [batch]): the epoch a row belongs to, which is an earlier one where ranks
    died at its end.

    Args:
        address: dispatcher ``host:port``, several as a list or comma list; None: ``$FEEDLINE_DISPATCHER``.
        dataset: ``name[@version]``, or the path of a manifest file (has a ``/`` or ends in ``.parquet``).
        job: name of the consumer group; all ranks give the same.
        batch_size: rows per batch and rank.
        pipeline: recipe from stored fields to output fields; None: the stored fields.
        rank, world_size: of this data-parallel process; None: torch.distributed, else RANK and WORLD_SIZE, else 0 of 1.
        seed: of order and augmentation; None: the loaded state's or the job record's, else drawn once and kept in both.
        order: "deterministic": which rows a rank gets in which batch is fixed by seed, epoch and lanes. "dynamic": ranks
            take their rows from a pool as they go, so a faster one can get more (``tail="ragged"``), and what others
            have taken already is part of the position: resume from the list of all ranks' states (``gather_states``),
            or from one of them where the dispatcher kept the marks of the others.
        shuffle: ``Shuffle(..)``, or None for the manifest's order.
        lanes: row sequences an epoch is cut into; world_size must divide it, then and on every resume. None: the
            state's or the record's, else lcm(12, world_size).
        tail: "pad" (equal steps, repeats flagged), "drop" (full batches only), "ragged" (every row once, unequal steps; in
            dynamic order ranks take until there are no more rows, and ``len()`` is a TypeError).
        epochs: epochs per ``for``; None: without end.
        resume: "latest": start where the dispatcher's record of acknowledgements is.
        on_error: "raise", or "skip" bad samples up to ``max_bad`` per rank and epoch (int: count, float: share of the
            epoch's rows).
        ack: "next": a batch is acknowledged when the loop asks for the next; "manual": by ``ack()``.
        collate: called with the batch dict, its result is what the loop gets.
        pin_memory: page-locked batch tensors (where CUDA is there).
        prefetch: bytes on their way at the most, like "256MiB".
        elastic: with ``order="dynamic"``, for loops without collectives: a rank that dies gives its rows back to the
            others, and a new process may take its place. Steps are not equal whatever ``tail`` is, ``len()`` is a
            TypeError. Otherwise a rank that is silent for longer than its lease and ``timeout`` ends all loops with
            ``RankAbsent``.
        audit: the books of each epoch are looked at when all ranks are through with it (in the background, and for a
            few seconds at the end of a pass); rows lost or handed out twice are a ``ProtocolError`` that names the shards.
        timeout: seconds any wait may take before it becomes an error that names what was waited for.
        join_timeout: seconds to wait for the other ranks at the start.
        options: ``ClientOptions(..)``.

    The constructor checks arguments only; it opens nothing, and the object pickles.

    Raises:
        ConfigError: an argument that cannot work.
    """

    def __init__(
        self,
        address: str | list[str] | tuple[str, ...] | None = None,
        *,
        dataset: str | Mix,
        job: str,
        batch_size: int,
        pipeline: Pipeline | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        order: str = "deterministic",
        shuffle: Shuffle | None = Shuffle(),  # noqa: B008  (frozen)
        lanes: int | None = None,
        tail: str = "pad",
        epochs: int | None = 1,
        steps_per_epoch: int | None = None,
        resume: str | None = None,
        on_error: str = "raise",
        max_bad: int | float = 0.001,
        ack: str = "next",
        collate: Callable[[dict[str, Any]], Any] | None = None,
        pin_memory: bool = False,
        device: Any = None,
        prefetch: str | int = "256MiB",
        elastic: bool = False,
        audit: bool = False,
        timeout: float = 120.0,
        join_timeout: float = 300.0,
        options: ClientOptions = ClientOptions(),  # noqa: B008  (frozen)
    ) -> None:
        self._config: LoaderConfig = make_config(
            address,
            dataset=dataset,
            job=job,
            batch_size=batch_size,
            pipeline=pipeline,
            rank=rank,
            world_size=world_size,
            seed=seed,
            order=order,
            shuffle=shuffle,
            lanes=lanes,
            tail=tail,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            resume=resume,
            on_error=on_error,
            max_bad=max_bad,
            ack=ack,
            collate=collate,
            pin_memory=pin_memory,
            device=device,
            prefetch=prefetch,
            elastic=elastic,
            audit=audit,
            timeout=timeout,
            join_timeout=join_timeout,
            options=options,
        )
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._dataset: Dataset | None = None
        self._ranks = (0, 1)
        self._holder: m.Holder | None = None
        self._loaded: LoadedState | None = None
        self._loaded_raw: Any = None
        self._allow: frozenset[str] = frozenset()
        self._set_epoch: int | None = None
        self._pass: Pass | None = None
        #: the epoch that ``state_dict`` tells of; set as one, so that any thread may ask without the lock
        self._where: tuple[Run, Epoch] | None = None
        self._waits = Waits()
        self._closed = False

    def __repr__(self) -> str:
        run = self._run
        where = "not connected" if self._engine is None else "connected" if run is None else repr(run)
        return f"RemoteDataLoader({self._config.dataset}, job {self._config.job}, {where})"

    # -- iterating

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass: what a loaded state left of one, or the epoch after the last one entered."""
        with self._lock:
            self._check_open()
            engine = self._connect()
            before = self._run
            if before is None or self._loaded is not None or self._rewinds(before):
                try:
                    run = self._open(engine)
                except Closed:
                    raise _closed() from None
                first, epoch = run.start.first_epoch, run.start.epoch
            else:
                run = before
                epoch = self._leave_epoch(run)
                first = epoch
            self._set_epoch = None
            stop = None if self._config.epochs is None else max(first + self._config.epochs, epoch + 1)
            if self._pass is not None:
                self._pass.superseded = True
            current = self._begin(run, epoch, first)
            self._loaded_raw = None
            if self._config.has_quotas and self._steps_per_epoch() == 0:
                self._no_steps(current)
            self._pass = Pass(self, run, current, stop)
            self._waits.begin()
            return self._pass

    def _begin(self, run: Run, epoch: int, first: int) -> Epoch:
        try:
            entered = run.begin(epoch, first)
        except Closed:
            raise _closed() from None
        self._where = run, entered
        return entered

    def __len__(self) -> int:
        """Batches of one whole pass (``epochs`` epochs), whatever was resumed.

        Raises:
            TypeError: ``epochs=None`` has no end, and without quotas (elastic, or `ragged` in dynamic order) nobody
                knows it before.
        """
        self._check_steps_known("len()")
        return self._steps_per_epoch() * (self._config.epochs or 1)

    @property
    def steps_left(self) -> int:
        """Batches the current pass, or the one a loaded state is in, still has to hand out; a whole pass before it began
        and after it ended."""
        with self._lock:
            run, position = self._run, self._pass
            self._check_steps_known("steps_left")
            if self._loaded is not None and self._loaded.identity is not None and self._set_epoch is None:
                return self._steps_after(self._loaded.start)
            if self._loaded is not None or run is None or position is None or position.stop is None:
                return len(self)
            epoch = position.epoch
            left = epoch.leg.steps - epoch.session.position.steps
            rest = position.stop - epoch.number - 1
            if left == 0 and rest <= 0:
                return len(self)
            return left + max(0, rest) * self._steps_per_epoch()

    def _check_steps_known(self, what: str) -> None:
        if self._config.epochs is None:
            raise TypeError(f"{what} of a loader with epochs=None: it has no end")
        if not self._config.has_quotas:
            kind = "an elastic loader" if self._config.elastic else "a loader with order='dynamic' and tail='ragged'"
            raise TypeError(f"{what} of {kind}: it takes rows until there are none")

    def _steps_after(self, start: m.StartPoint) -> int:
        self._connect()
        rank, world = self._ranks
        shard_rows = self._need_dataset().manifest.shard_rows
        config = self._config
        if config.order == "dynamic":
            left = int(shard_rows.sum()) - len(Ranges.decode(start.ranges))
            here = count_steps(left, world, config.batch_size, config.tail, rank, world)
            if start.missing:  # what they have taken is not known, but they were at the same step
                here = max(0, self._steps_per_epoch() - start.step)
        else:
            # only the sizes of the plan matter here
            plan = Plan(shard_rows, seed=0, epoch=0, shuffle=None, lanes=len(start.taken))
            here = Leg(
                plan,
                rank=rank,
                world_size=world,
                batch_size=config.batch_size,
                tail=config.tail,
                taken=np.array(start.taken, np.int64),
            ).steps
        rest = max(start.first_epoch + (config.epochs or 1), start.epoch + 1) - start.epoch - 1
        return here + rest * self._steps_per_epoch()

    def _steps_per_epoch(self) -> int:
        self._connect()
        dataset = self._need_dataset()
        rank, world = self._ranks
        run = self._run
        lanes = self._config.lanes or (run.settings.lanes if run is not None else None) or self._loaded_lanes()
        return count_steps(
            dataset.manifest.rows,
            world,
            self._config.batch_size,
            self._config.tail,
            rank,
            lanes or default_lanes(world),
        )

    def _loaded_lanes(self) -> int | None:
        loaded = self._loaded
        return None if loaded is None or loaded.identity is None else int(loaded.identity["lanes"])

    # -- position

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch the loop received. A small dict of plain values; makes no call.

        Its size does not depend on the position. Any thread may call it at any time; it never waits. See
        ``trainer_client.state`` for the entries. Where it takes the states of all ranks to resume (dynamic order, or
        ``on_error="skip"``), the dispatcher is told of it in the background, so that one of them may be enough.
        """
        loaded, where = self._loaded_raw, self._where
        if loaded is not None:
            return dict(loaded)
        if where is None:
            return blank_state(self._config)
        state, mark = state_at(*where, epochs=self._config.epochs)
        if mark is not None:
            where[0].reporter.mark(mark)
        return state

    def load_state_dict(self, state: Mapping[str, Any] | list[Any], allow: Iterable[str] = ()) -> None:
        """Start the next ``iter()`` where ``state`` was saved. A list of all ranks' states is joined into one.

        A lone state of several ranks is enough in deterministic order, unless it was saved under ``on_error="skip"``.
        Otherwise the next ``iter()`` asks the dispatcher for what it was told of the other ranks' states of that step.

        Args:
            allow: {"pipeline"}: accept a state that was saved with another pipeline.

        Raises:
            ConfigError: not a state. StateMismatch: of another dataset or settings (also raised by the next ``iter()``
                where only the dispatcher can tell). By the next ``iter()`` StateIncomplete: positions of other ranks are
                missing, and the dispatcher does not know them.
        """
        wrong = set(allow) - {"pipeline"}
        if wrong:
            raise ConfigError(f"allow={sorted(wrong)} is unknown", remedy="only 'pipeline' can be allowed to differ")
        loaded = load(state)
        with self._lock:
            self._check_open()
            if self._dataset is not None:
                check_fits(loaded, settings_of(self._config, self._dataset, self._ranks[1]), allow)
            self._loaded = loaded
            self._loaded_raw = loaded.state
            self._allow = frozenset(allow)
            if self._pass is not None:
                self._pass.superseded = True

    def set_epoch(self, epoch: int) -> None:
        """Start the next ``iter()`` with this epoch instead of the one that would follow."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ConfigError(f"epoch {epoch!r} is not an integer of at least 0")
        self._set_epoch = epoch

    def ack(self) -> None:
        """Acknowledge every batch handed out so far, and wait until that is recorded (at most 5 s).

        Raises:
            ConfigError: the loader was not made with ``ack="manual"``.
            Fenced and the like: the dispatcher refuses it, as another process holds the rank by now.
        """
        if self._config.ack != "manual":
            raise ConfigError("ack() needs ack='manual'", cause=f"this loader has ack={self._config.ack!r}")
        run = self._run
        if run is not None:
            run.reporter.acknowledge()
            if not run.reporter.flush(5.0):
                run.check()

    # -- figures and end

    def stats(self) -> dict[str, float]:
        """Figures since the first batch was asked for.

        ``wait_share`` (of the time, 0..1), ``step_s`` (seconds per batch), ``rows_per_s``, ``bytes_per_s`` (of batch
        tensors), ``queue_bytes`` (rows on their way), ``hot_share`` (of rows read that needed nothing from
        storage), ``workers`` (that served in the last 10 s).
        """
        self._connect()
        return self._waits.summary(self._run)

    def close(self) -> None:
        """Deliver acknowledgements (at most 5 s), give the rank's lease back, stop all threads. Final.

        Any thread may call it; a loop that waits gets an error at once.
        """
        self._closed = True  # without the lock, which a loop that waits for ranks holds
        engine, current = self._engine, self._pass
        if current is not None:
            current.superseded = True
        if engine is not None:
            engine.close()

    def __enter__(self) -> RemoteDataLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "config": self._config,
            "loaded": self.state_dict() if self._run or self._loaded else None,
            "allow": self._allow,
            "set_epoch": self._set_epoch,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._config = state["config"]
        self._reset()
        if state["loaded"] is not None:
            self.load_state_dict(state["loaded"], state["allow"])
        self._set_epoch = state["set_epoch"]

    # -- inside

    @property
    def _run(self) -> Run | None:
        return None if self._engine is None else self._engine.run

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()
        if self._engine is not None and self._engine.pid != os.getpid():
            raise ConfigError(
                "this loader was connected before the process was forked",
                cause="its threads and connections stayed in the parent process",
                remedy="make a new loader here, or pickle it",
            )

    def _connect(self) -> Engine:
        with self._lock:
            self._check_open()
            if self._engine is not None:
                return self._engine
            config = self._config
            self._ranks = resolve_rank(config.rank, config.world_size)
            if config.lanes is not None:
                check_lanes(config.lanes, self._ranks[1])
            if config.pin_memory and not torch.cuda.is_available():
                warnings.warn("pin_memory=True has no effect without CUDA", FeedlineWarning, stacklevel=3)
            control = Control(config.addresses(), config.options.connection)
            try:
                dataset = find_dataset(control, config)
                if self._loaded is not None:
                    check_fits(self._loaded, settings_of(config, dataset, self._ranks[1]), self._allow)
            except Closed:
                raise _closed() from None
            except BaseException:
                control.close()
                raise
            pool = ReadPool(
                config.options.reads,
                config.options.connection,
                stall=float(config.options.stall),
                timeout=config.timeout,
            )
            engine = Engine(control, pool)
            self._dataset, self._holder, self._engine = dataset, new_holder(), engine
            if self._closed:  # meanwhile, on another thread
                engine.close()
                raise _closed()
            _open_engines.add(engine)
            if multiprocessing.parent_process() is not None:
                # processes of multiprocessing end without atexit
                multiprocessing.util.Finalize(engine, Engine.close, args=(engine,), exitpriority=10)
            weakref.finalize(self, engine.close).atexit = False
            return engine

    def _need_dataset(self) -> Dataset:
        if self._dataset is None:
            raise ConfigError("this loader is not connected")
        return self._dataset

    def _rewinds(self, run: Run) -> bool:
        """``set_epoch`` to an epoch this generation already entered means starting over from there."""
        return self._set_epoch is not None and run.current is not None and self._set_epoch <= run.current.number

    def _open(self, engine: Engine) -> Run:
        config, dataset = self._config, self._need_dataset()
        rank, world = self._ranks
        settings = settings_of(config, dataset, world)
        before = engine.run
        start = self._start_point(before)
        if self._loaded is not None and self._loaded.identity is not None:
            identity = self._loaded.identity
            settings = msgspec.structs.replace(settings, seed=identity["seed"], lanes=identity["lanes"])
            if "dynamic" in self._loaded.state and start.kind == "checkpoint":
                quotas = dynamic_state.has_quotas(self._loaded.state)
                start = dynamic_state.start_for(start, settings, dataset.manifest.rows, quotas=quotas)
        elif before is not None:
            settings = msgspec.structs.replace(settings, seed=before.settings.seed, lanes=before.settings.lanes)
        if before is not None:
            before.close(leave=False)
            engine.run = None
        if self._holder is None:
            raise ConfigError("this loader is not connected")
        opened = open_generation(
            engine.control,
            config,
            rank=rank,
            holder=self._holder,
            settings=settings,
            start=start,
            closing=engine.closing,
        )
        run = Run(
            config,
            dataset,
            opened,
            rank=rank,
            holder=self._holder,
            control=engine.control,
            pool=engine.pool,
            waits=self._waits,
        )
        engine.adopt(run)
        self._loaded = None
        return run

    def _start_point(self, before: Run | None) -> m.StartPoint:
        if self._loaded is not None and self._loaded.identity is not None:
            start = self._loaded.start
            if self._set_epoch is not None and self._set_epoch != start.epoch:
                return epoch_start(self._set_epoch)
            return start
        if before is not None and self._set_epoch is not None:
            return epoch_start(self._set_epoch)
        if self._config.resume == "latest" and before is None and self._set_epoch is None:
            return m.StartPoint(kind="latest")
        epoch = self._set_epoch or 0
        return m.StartPoint(kind="fresh", epoch=epoch, first_epoch=epoch)

    def _leave_epoch(self, run: Run) -> int:
        """Close the books of the epoch the last pass was in; the number of the next one."""
        epoch = run.current
        if epoch is None:
            return self._set_epoch if self._set_epoch is not None else run.start.epoch
        if self._config.ack == "next":
            epoch.books.acknowledge()
        if self._config.audit:
            run.auditor.add(epoch.number)
        if epoch.session.finished:  # left with its last batch, before the loop was told that it was the last
            epoch.books.finish()
        else:
            epoch.books.abandon()
        return self._set_epoch if self._set_epoch is not None else epoch.number + 1

    def _no_steps(self, epoch: Epoch) -> None:
        text = (
            f"epoch {epoch.number} has no step: {epoch.leg.plan.rows} rows are fewer than one batch of "
            f"{self._config.batch_size} on each of {self._ranks[1]} ranks (tail={self._config.tail!r})"
        )
        if self._config.epochs is None:
            raise ConfigError(text, remedy="use a smaller batch_size, or tail='pad'")
        warnings.warn(text, FeedlineWarning, stacklevel=3)


def _closed() -> ConfigError:
    return ConfigError("this loader is closed", remedy="make a new one")
