"""Compilers that run side by side, and end when they are interrupted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from eqaccel import runtime

T = TypeVar("T")


def settled(future: Future[T]) -> Future[T]:
    """Waits for a future. A wait without end may sleep through an interrupt that another thread received."""
    while not wait([future], timeout=0.1).done:
        pass
    return future


class CompilerPool(ThreadPoolExecutor):
    """Threads, because compilers are processes or release the interpreter lock. An interrupt ends these too."""

    def __init__(self) -> None:
        super().__init__(len(os.sched_getaffinity(0)))
        self._interrupted = False
        self._active: list[Callable[..., Any]] = []

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As the base class does; the future is cancelled if an interrupt comes before the call begins."""
        return super().submit(self._run, function, *args, **kwargs)

    def _run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        self._active.append(function)
        try:
            if self._interrupted:
                raise CancelledError
            return function(*args, **kwargs)
        finally:
            self._active.remove(function)

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> bool | None:
        self.shutdown(wait=False, cancel_futures=kind is not None)
        if kind is not None and not issubclass(kind, Exception):
            # An interrupt in the middle of a submission leaves a thread that the base class does not know.
            self._interrupted = True
            while self._active:
                runtime.end_compilers()
                time.sleep(0.02)
        return super().__exit__(kind, *rest)
