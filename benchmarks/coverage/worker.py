"""A process that measures one model after another, and the parent that bounds its time and its memory."""

import gc
import json
import os
import select
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from .measure import Line, measure, shown
from .subjects import subjects

PER_WORKER = 150
"""Models after which a process is replaced, so that what libraries keep of them is let go."""


def work() -> None:
    """Read a request a line, answer a line each; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    known = {subject.key: subject for subject in subjects()}
    done: set[str] = set()
    for text in sys.stdin:
        request = json.loads(text)
        done |= set(request["done"])
        try:
            line = measure(known[request["key"]], request["numeric"], done, request["evaluate"], request["size"])
        except Exception as error:  # the harness itself failed, which is nobody's pass
            line = {"key": request["key"], "not run": f"harness: {type(error).__name__}: {error}"}
        done |= shown(line)
        gc.collect()  # a model and what watched it hold each other
        print(json.dumps(line), file=answers, flush=True)


class Worker:
    """One process at a time; it is ended when a model takes too long or too much memory."""

    def __init__(self, seconds: float, gigabytes: float) -> None:
        self.seconds, self.gigabytes = seconds, gigabytes
        self.process: subprocess.Popen[str] | None = None
        self.answered = 0
        self.sent: set[str] = set()

    def _started(self) -> "subprocess.Popen[str]":
        if self.process is not None and (self.answered >= PER_WORKER or self.process.poll() is not None):
            self.close()
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.coverage", "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            self.answered, self.sent = 0, set()
        return self.process

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()  # closes its pipes
            self.process = None

    def measured(self, key: str, numeric: float, done: set[str], evaluate: bool, size: int) -> Line:
        """The line of one model; one that could not be finished says why under ``not run``."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        request: dict[str, Any] = {"key": key, "numeric": numeric, "evaluate": evaluate, "size": size}
        request["done"] = sorted(done - self.sent)
        self.sent |= done
        line: Line = {"key": key}
        end, most = time.monotonic() + self.seconds, 0.0
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            self.close()
            return line | {"not run": "crash: the process had ended"}
        while True:
            if select.select([process.stdout], [], [], 0.2)[0]:
                answer = process.stdout.readline()
                if answer:
                    self.answered += 1
                    return json.loads(answer)
                code = process.wait()
                self.close()
                return line | {"not run": f"crash: the process ended with {code}"}
            most = resident(process.pid)
            if most > self.gigabytes:
                self.close()
                return line | {"not run": f"memory: over {self.gigabytes:g} GB"}
            if time.monotonic() > end:
                self.close()
                return line | {"not run": f"time: over {self.seconds:g} s"}


def resident(pid: int) -> float:
    """The memory of a process in GB."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (OSError, ValueError):
        return 0.0
