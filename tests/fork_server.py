"""Processes that need not import torch again: forked from one that has done so, but else like any other.

Half of the time of a tiny run is imports. :func:`forked_python` is a program to be used in place of ``sys.executable``: it has a
server fork, gives the forked process its arguments, environment, working folder and open files, passes signals on, and ends as it
ends. It is the ``sys.executable`` of the forked process, too, whose children are therefore forked alike.

Not for tests about processes themselves (who is whose parent, who is killed by whom), nor for variables that are read while
importing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import marshal
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent

IMPORTED = """
    callbacks.acceptance callbacks.compile_warmup callbacks.export callbacks.finite_guard callbacks.interrupt callbacks.memory
    callbacks.progress callbacks.prune callbacks.throughput callbacks.wandb_run dflash_lit.cli dflash_lit.ranks
    dflash_lit.report_page hydra._internal.utils hydra.core.global_hydra lightning.pytorch.loggers matplotlib.figure pyarrow
    torch._dynamo transformers.generation.utils transformers.models.qwen3.modeling_qwen3
"""

CLIENT = """\
#!{python} -SE
import marshal, os, signal, socket, sys

if "DFLASH_LIT_PARENT" in os.environ:  # a process that is to end with its parent
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
environment = dict(os.environ, FORKED_PYTHON={program!r})
request = marshal.dumps((sys.argv[1:], os.getcwd(), environment, os.getppid()))
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
pid = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
ended = server.recv(8, socket.MSG_WAITALL)
code = int.from_bytes(ended, "big", signed=True) if ended else 1
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def forked_python() -> str:
    """Path of the program; its server ends with this process. Where forking is not safe, ``sys.executable``."""
    if sys.platform != "linux" or torch.cuda.is_available():  # a GPU's driver that was looked at before is of no use afterwards
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="forked"))
    program = folder / "python"
    address = str(folder / "socket")
    program.write_text(CLIENT.format(python=sys.executable, program=str(program), address=address))
    program.chmod(0o755)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)
        shutil.rmtree(folder)

    atexit.register(end)
    return str(program)


def serve(listener: socket.socket) -> tuple[list[str], str, dict[str, str], int, list[int]]:
    """Fork for every request; returns it, with its open files, in the forked process. In the server it does not return."""
    poll = selectors.DefaultSelector()
    woken, wakes = socket.socketpair()
    for one in (woken, wakes):
        one.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}
    for source in (listener, woken, sys.stdin):
        poll.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in poll.select():
            if key.fileobj is sys.stdin:  # whoever wanted the processes is gone
                for pid in clients:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                atexit._run_exitfuncs()
                os._exit(0)
            elif key.fileobj is listener:
                client, _ = listener.accept()
                size, files, _, _ = socket.recv_fds(client, 8, 3)
                request = marshal.loads(client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    poll.close()
                    for one in (client, listener, woken, wakes, *clients.values()):
                        one.close()
                    return *request, files
                for file in files:
                    os.close(file)
                client.sendall(pid.to_bytes(8, "big"))
                clients[pid] = client
                poll.register(client, selectors.EVENT_READ, pid)
            elif key.fileobj is woken:
                woken.recv(4096)
                while clients:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if not pid:
                        break
                    with clients.pop(pid) as client, contextlib.suppress(BrokenPipeError):
                        if client in poll.get_map():
                            poll.unregister(client)
                        client.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
            else:  # the program was killed
                poll.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)


def run(arguments: list[str]) -> None:
    """As the interpreter would with these arguments."""
    while arguments[0] in ("-u", "-S", "-E"):
        arguments.pop(0)
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        sys.modules.pop(arguments[1], None)  # or runpy warns
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).absolute().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    for name in IMPORTED.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    arguments, folder, environment, parent, files = serve(socket.socket(fileno=int(sys.argv[1])))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())  # type: ignore[union-attr]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.executable = environment["FORKED_PYTHON"]
    real: Any = os
    real.getppid = lambda: parent
    random.seed()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # temporary folders are the server's
        if (alive := finalizer.peek()) is not None and isinstance(alive[0], tempfile.TemporaryDirectory):
            atexit.unregister(alive[0].cleanup)
    code = 0
    try:
        run(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    # All of an interpreter's end but to free every object, which takes longer than all else: the pages are another process's.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
