"""Many processes: how they wait for each other, share a value, make sure that they have the same one, and agree on a
step at which to stop.

Everything here rests on JAX's coordination service (a small key-value store with barriers on process 0), so
none of it runs a device computation and all of it has a time limit. `_state` is the one place that touches
a private JAX name.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from bessemer import errors
from bessemer.errors import BessemerError, StorageError

LINGER = 3.0
"""Seconds for which process 0 stays after a failure that the others read from it: the service goes with it."""

OK = "ok:"  # before a value that is shared; a failure has the name of its error there

_uses: Counter[str] = Counter()


def process_index() -> int:
    """This process's number. Asks the coordination service, so it never starts a backend."""
    return int(_state().process_id)


def process_count() -> int:
    return int(_state().num_processes)


def barrier(name: str, timeout: float = 300.0) -> None:
    """Wait until every process has come here; after `timeout` seconds name those that have not."""
    service = client()
    if service is not None and process_count() > 1:
        _meet(service, name, _numbered(f"bessemer/barrier/{name}"), "here", timeout)


def agree(name: str, value: str, timeout: float = 1800.0) -> None:
    """Every process has the same `value`, or each of them ends with an error that names those which do not.

    All must call it in the same order, from one thread: `name` may come again, and the values of its last time go.
    """
    service = client()
    if service is None or process_count() == 1:
        return
    before = _latest(f"bessemer/agree/{name}")
    key = _numbered(f"bessemer/agree/{name}")
    _meet(service, name, key, value, timeout)
    try:
        found = {int(entry.rpartition("/")[2]): given for entry, given in service.key_value_dir_get(key)}
        if before is not None and process_index() == 0:
            service.key_value_delete(before)  # all are here, so all have read it
    except (RuntimeError, ValueError) as error:
        raise _lost(error) from error
    others = sorted(index for index, given in found.items() if given != found[0])
    if others:
        _linger()
        raise StorageError(
            f"the processes do not agree on {name}: process {', '.join(map(str, others))} has {found[others[0]]}, "
            f"process 0 {found[0]}. All need the same settings, files, versions and kind of device; then start them "
            "again, with `bessemer resume` if the run has begun."
        )


def share(name: str, make: Callable[[], str], timeout: float = 1800.0) -> str:
    """Process 0 computes `make()`; all processes return its value, and all must call this in the same order.

    When `make` raises, process 0 raises it as it is and the others an error of the same kind with its message
    (StorageError, if it is none of ours).
    """
    service = client()
    if service is None or process_count() == 1:
        return make()
    key = _numbered(f"bessemer/share/{name}")
    if process_index() == 0:
        outcome = "StorageError:process 0 ended before it had a result"
        try:
            value = make()
            outcome = OK + value
            return value
        except (RuntimeError, ValueError, TypeError, KeyError, OSError, BessemerError) as error:
            kind = type(error).__name__ if isinstance(error, BessemerError) else "StorageError"
            outcome = f"{kind}:{error}"
            raise
        finally:
            service.key_value_set(key, outcome)
            if not outcome.startswith(OK):
                _linger()
    try:
        verdict, _, value = service.blocking_key_value_get(key, int(timeout * 1000)).partition(":")
    except (RuntimeError, ValueError) as error:
        raise StorageError(
            f"waited up to {timeout:.0f} s for process 0 to finish '{name}' ({first_line(error)}). "
            "Process 0 was lost or is stuck: see its log, then `bessemer resume`."
        ) from error
    if verdict + ":" != OK:
        raise getattr(errors, verdict, StorageError)(f"process 0 failed in '{name}': {value}")
    return value


def forget(name: str) -> None:
    """Process 0 drops what was last shared as `name`, which is large or comes often. To be called when every process
    has read it: after `agree` or `barrier`."""
    service, key = client(), _latest(f"bessemer/share/{name}")
    if service is None or process_count() == 1 or process_index() != 0 or key is None:
        return
    try:
        service.key_value_delete(key)
    except (RuntimeError, ValueError) as error:
        raise _lost(error) from error


class StepAgreement:
    """All processes do something after the same step: stop, or save.

    The first to propose at step s writes s + 3. That is far enough: the loop keeps at most two steps in flight, so
    nobody can have passed s + 3 before the proposer, which the collectives wait for, has written it. Each process
    creates it at the same point of the program; alone, a proposal is due at once. It serves once.
    """

    MARGIN = 3

    def __init__(self, purpose: str = "stop") -> None:
        self.purpose = purpose
        self._key = _numbered(f"bessemer/{purpose}")
        self._at: int | None = None

    def propose(self, step: int) -> None:
        """Ask for it. Only the first proposal, of whichever process, counts."""
        service = client()
        if self._at is not None:
            return
        if service is None or process_count() == 1:
            self._at = step
            return
        try:
            service.key_value_set(self._key, str(step + self.MARGIN))
        except (RuntimeError, ValueError) as error:
            if "ALREADY_EXISTS" not in str(error):
                raise _lost(error) from error

    def due(self, step: int) -> bool:
        """Return whether it is time after `step`; every process asks once per step, after dispatching it."""
        service = client()
        if self._at is None and service is not None and process_count() > 1:
            self._at = self._poll(service)
            if self._at is not None and step > self._at:
                raise StorageError(
                    f"process {process_index()} was told at step {step} to {self.purpose} at step {self._at}: the "
                    "processes are out of step. `bessemer resume` continues from the last checkpoint."
                )
        return self._at is not None and step >= self._at

    def _poll(self, service: Any) -> int | None:
        try:
            return int(service.key_value_try_get(self._key))
        except (RuntimeError, ValueError) as error:
            if "NOT_FOUND" in str(error):
                return None
            raise _lost(error) from error


def _state() -> Any:
    from jax._src import distributed

    return distributed.global_state


def coordinator() -> str:
    """host:port of process 0."""
    return str(_state().coordinator_address)


def client() -> Any | None:
    """The coordination service's client; None in a run of one process."""
    return _state().client


def _numbered(name: str) -> str:
    """Keys are used once: the same call on every process gets the same number. Names become short."""
    _uses[name] += 1
    return _key(name)


def _latest(name: str) -> str | None:
    """The key of the last call."""
    return _key(name) if _uses[name] else None


def _key(name: str) -> str:
    return f"{name[:60]}-{zlib.crc32(name.encode()):08x}/{_uses[name]}"


def _meet(service: Any, name: str, key: str, word: str, timeout: float) -> None:
    """Sign in below `key` with a word, and wait for the others."""
    service.key_value_set(f"{key}/{process_index()}", word)
    try:
        service.wait_at_barrier(key, int(timeout * 1000))
    except (RuntimeError, ValueError) as error:
        raise StorageError(
            f"waited {timeout:.0f} s at '{name}' for the other processes ({_missing(service, key)}; "
            f"{first_line(error)}). A process was lost: start the job again with `bessemer resume`."
        ) from error


def _missing(service: Any, key: str) -> str:
    """Which processes have not signed in at a barrier, for its error message."""
    try:
        here = {int(entry.rpartition("/")[2]) for entry, _ in service.key_value_dir_get(key)}
    except (RuntimeError, ValueError):
        return "it is unknown which are missing"
    absent = sorted(set(range(process_count())) - here)
    return f"missing: process {', '.join(map(str, absent))}" if absent else "all had arrived"


def _linger() -> None:
    if process_index() == 0:
        time.sleep(LINGER)


def _lost(error: BaseException) -> StorageError:
    return StorageError(
        f"process {process_index()} lost the coordination service on process 0 ({first_line(error)}). "
        "`bessemer resume` continues from the last checkpoint."
    )


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


# Programs that are compiled at their first call, run by several processes.
#
# Between processes on CPUs a collective waits for half a minute at most when it is the first of its group
# (gloo's handshake; later ones have no such limit). A process that found its program in the cache would stand
# there while another compiles for minutes. So all compile first, wait for each other without a collective,
# and then run.


SECONDS = 3600.0
"""The most that processes wait for each other's compilers."""


class CompiledTogether:
    """`program` (of `jax.jit`) as it is, except that all processes have compiled it for new shapes before one runs it.

    With arrays over several processes, all of them must call it in the same order, from one thread. `static`: its
    static arguments, given by name.
    """

    def __init__(self, program: Any, name: str, static: tuple[str, ...] = ()):
        self.program, self.name, self.static = program, name, static
        self._made: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        if process_count() == 1:
            return self.program(*args, **named)
        leaves, form = jax.tree.flatten((args, named))
        if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
            return self.program(*args, **named)  # a model of this process alone, such as a judge in a reward
        key = (form, *map(_kind, leaves))
        if key not in self._made:
            self._made[key] = self.program.lower(*args, **named).compile()
            barrier(f"every process has compiled {self.name}", SECONDS)
        return self._made[key](
            *args, **{name: value for name, value in named.items() if name not in self.static}
        )

    @property
    def compilations(self) -> int:
        """For how many shapes it has been compiled."""
        return len(self._made) + int(self.program._cache_size())


def _kind(leaf: Any) -> Any:
    """What the compiler knows of an argument; of a static one, its value."""
    if not hasattr(leaf, "dtype"):
        return leaf
    return leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False), getattr(leaf, "sharding", None)
