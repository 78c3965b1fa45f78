"""Coordination between processes: barriers, broadcast, agreement on values and on a step, joint compilation.

Everything uses JAX's coordination service (a key-value store with barriers on process 0), so nothing runs a device
computation and every wait has a time limit. `_state` is the only access to a private JAX name.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax

from bessemer.errors import BessemerError, StorageError, error_of_exit_code

LINGER = 3.0  # seconds that process 0, which hosts the service, stays up so that the others can read its failure
COMPILE_SECONDS = 3600.0  # the most that processes wait for each other's compilers
TIMEOUT = 1800.0  # seconds that processes wait for each other otherwise
OK = "ok:"  # prefix of a broadcast value; a failure has its exit code there

_uses: Counter[str] = Counter()


def process_index() -> int:
    """Return the number of this process, from the coordination service: no backend is started."""
    return int(_state().process_id)


def process_count() -> int:
    return int(_state().num_processes)


def barrier(name: str, timeout: float = 300.0) -> None:
    """Wait until every process is here; after `timeout` seconds raise StorageError that names the missing ones."""
    service = _service()
    if service is not None:
        _meet(service, name, _numbered(f"bessemer/barrier/{name}"), "here", timeout)


def agree(name: str, value: str) -> None:
    """Raise StorageError on every process, naming those that differ, unless all have the same `value`.

    All processes must call it in the same order, from one thread. A repeated `name` deletes its previous values.
    """
    service = _service()
    if service is None:
        return
    before = _latest(f"bessemer/agree/{name}")
    key = _numbered(f"bessemer/agree/{name}")
    _meet(service, name, key, value, TIMEOUT)
    with _coordination():
        found = {int(entry.rpartition("/")[2]): given for entry, given in service.key_value_dir_get(key)}
        if before is not None and process_index() == 0:
            service.key_value_delete(before)  # all are here, so all have read it
    others = sorted(index for index, given in found.items() if given != found[0])
    if others:
        _linger()
        raise StorageError(
            f"the processes do not agree on {name}: process {', '.join(map(str, others))} has {found[others[0]]}, "
            f"process 0 {found[0]}. All need the same settings, files, versions and kind of device; then start them "
            "again, with `bessemer resume` if the run has begun."
        )


def broadcast(name: str, make: Callable[[], str], timeout: float = TIMEOUT) -> str:
    """Return `make()` as computed by process 0, on every process; all must call this in the same order.

    When `make` raises, process 0 raises that error and the others one with its message and exit code (StorageError, if
    it is not one of ours).
    """
    service = _service()
    if service is None:
        return make()
    key = _numbered(f"bessemer/broadcast/{name}")
    if process_index() == 0:
        outcome = f"{StorageError.exit_code}:process 0 ended before it had a result"
        try:
            value = make()
            outcome = OK + value
            return value
        except (RuntimeError, ValueError, TypeError, KeyError, OSError, BessemerError) as error:
            code = error.exit_code if isinstance(error, BessemerError) else StorageError.exit_code
            outcome = f"{code}:{error}"
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
        raise error_of_exit_code(int(verdict))(f"process 0 failed in '{name}': {value}")
    return value


def forget(name: str) -> None:
    """Delete the value last broadcast as `name`, once every process has read it (after `agree` or `barrier`)."""
    service, key = _service(), _latest(f"bessemer/broadcast/{name}")
    if service is not None and process_index() == 0 and key is not None:
        with _coordination():
            service.key_value_delete(key)


class StepAgreement:
    """Makes all processes do something once after the same step: stop, or save.

    The first to propose at step s writes s + 3. The loop keeps at most two steps in flight, and collectives wait for
    the proposer, so nobody has passed s + 3 by then. Every process must create it at the same point of the program;
    with one process, a proposal is due at once.
    """

    MARGIN = 3

    def __init__(self, purpose: str = "stop") -> None:
        self.purpose = purpose
        self._key = _numbered(f"bessemer/{purpose}")
        self._at: int | None = None

    def propose(self, step: int) -> None:
        """Ask for it at `step`. Only the first proposal of any process counts."""
        service = _service()
        if self._at is not None:
            return
        if service is None:
            self._at = step
            return
        with _coordination():
            try:
                service.key_value_set(self._key, str(step + self.MARGIN))
            except (RuntimeError, ValueError) as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise

    def due(self, step: int) -> bool:
        """Return whether it is time after `step`; every process asks once per step, after dispatching it."""
        service = _service()
        if self._at is None and service is not None:
            with _coordination():
                found = read_key(service, self._key)
            self._at = None if found is None else int(found)
            if self._at is not None and step > self._at:
                raise StorageError(
                    f"process {process_index()} was asked at step {step} to {self.purpose} at step {self._at}: the "
                    "processes are out of step. `bessemer resume` continues from the last checkpoint."
                )
        return self._at is not None and step >= self._at


class CompiledTogether:
    """A `jax.jit` program that all processes compile for new shapes before any of them runs it.

    Between CPU processes, the first collective of a group waits at most 30 s (gloo's handshake), while another process
    may compile for minutes. So all compile, meet at a barrier without a collective, and then run. With arrays that
    span processes, all must call it in the same order, from one thread. `static`: names of static arguments.
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
        key = (form, *map(_signature, leaves))
        if key not in self._made:
            self._made[key] = self.program.lower(*args, **named).compile()
            barrier(f"every process has compiled {self.name}", COMPILE_SECONDS)
        return self._made[key](*args, **{name: value for name, value in named.items() if name not in self.static})

    @property
    def compilations(self) -> int:
        """The number of shapes it was compiled for."""
        return len(self._made) + int(self.program._cache_size())


def _signature(leaf: Any) -> Any:
    """Return what the compiler knows of an argument; of a static one, its value."""
    if not hasattr(leaf, "dtype"):
        return leaf
    return leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False), getattr(leaf, "sharding", None)


# --- the coordination service ---


def _state() -> Any:
    from jax._src import distributed

    return distributed.global_state


def coordinator() -> str:
    """Return host:port of process 0."""
    return str(_state().coordinator_address)


def client() -> Any | None:
    """Return the coordination service's client; None if the run was not started as one of several processes."""
    return _state().client


def _service() -> Any | None:
    """Return the client if there are other processes to coordinate with."""
    return client() if process_count() > 1 else None


@contextlib.contextmanager
def _coordination() -> Iterator[None]:
    """Turn an error of the coordination service into a StorageError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise StorageError(
            f"process {process_index()} lost the coordination service on process 0 ({first_line(error)}). "
            "`bessemer resume` continues from the last checkpoint."
        ) from error


def read_key(service: Any, key: str) -> str | None:
    """Return the value of a key, or None if nobody has set it."""
    try:
        return str(service.key_value_try_get(key))
    except (RuntimeError, ValueError) as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def _numbered(name: str) -> str:
    """Return a new key: keys are used once, and the same call gets the same number on every process."""
    _uses[name] += 1
    return _key(name)


def _latest(name: str) -> str | None:
    """Return the key of the previous call."""
    return _key(name) if _uses[name] else None


def _key(name: str) -> str:
    return f"{name[:60]}-{zlib.crc32(name.encode()):08x}/{_uses[name]}"


def _meet(service: Any, name: str, key: str, value: str, timeout: float) -> None:
    """Write `value` below `key`, and wait for the other processes to do the same."""
    service.key_value_set(f"{key}/{process_index()}", value)
    try:
        service.wait_at_barrier(key, int(timeout * 1000))
    except (RuntimeError, ValueError) as error:
        raise StorageError(
            f"waited {timeout:.0f} s at '{name}' for the other processes ({_missing(service, key)}; "
            f"{first_line(error)}). A process was lost: start the job again with `bessemer resume`."
        ) from error


def _missing(service: Any, key: str) -> str:
    """Say which processes have not arrived at a barrier."""
    try:
        here = {int(entry.rpartition("/")[2]) for entry, _ in service.key_value_dir_get(key)}
    except (RuntimeError, ValueError):
        return "it is unknown which are missing"
    absent = sorted(set(range(process_count())) - here)
    return f"missing: process {', '.join(map(str, absent))}" if absent else "all had arrived"


def _linger() -> None:
    if process_index() == 0:
        time.sleep(LINGER)


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
