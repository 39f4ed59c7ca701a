"""The server of warm.py: imports the framework, then forks a process for each program that it is asked for. It ends
when nobody can ask any more."""
import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref

import warm

FRAMEWORKS = ("torch", "sklearn.datasets", "tensorflow")  # those that there are
_before = []    # objects of the parent; if they were freed, they would close descriptors that are now the program's
_at_exit = []   # functions that the program has registered by atexit
_frameworks_finalizers = set()
_register = atexit.register
_stat = open("/proc/self/stat").read().rpartition(")")[2].split()
_shown = {"cmdline": [int(field) for field in _stat[45:47]], "environ": [int(field) for field in _stat[47:49]]}
_site = [folder for folder in sys.path[1:] if folder not in map(os.path.abspath, warm.folders(os.environ))]


def main(requests):
    for framework in FRAMEWORKS:
        try:
            importlib.import_module(framework)
        except ModuleNotFoundError:
            continue
    if "tensorflow" in sys.modules:
        dir(sys.modules["tensorflow"].keras)  # imports Keras, of the version that the environment asks for
    _frameworks_finalizers.update(weakref.finalize._registry)
    gc.freeze()  # else a collection in each process would copy the pages of all objects
    children = {}  # by pidfd: its number, and whom its end is told to
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != requests.fileno():
                pid, teller = children.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                with teller:
                    _tell(teller, os.waitpid(pid, 0)[1])
                continue
            said, received, _, _ = socket.recv_fds(requests, warm.MOST_BYTES, 4)
            if not said:
                return
            *streams, teller = received
            pid = os.fork()
            if pid == 0:
                _become(streams=streams, keep=(), **json.loads(said))
            for stream in streams:
                os.close(stream)
            teller = socket.socket(fileno=teller)
            _tell(teller, pid)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, teller
            poll.register(pidfd, select.POLLIN)


def _tell(teller, number):
    try:
        teller.send(b"%d" % number)
    except OSError:  # the test has ended, or has never asked
        pass


def _start(popen, *arguments):
    """Popen._execute_child of a forked process."""
    call = warm.Call(popen, arguments)
    options = call.options
    if not call.can_be_forked() or warm.read_early(call.environment) != warm.read_early(os.environ) \
            or "lightcc.core.lib" in sys.modules:  # the core has threads, which do not survive a fork
        warm.start_by_exec(popen, *arguments)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(call.program, call.environment, options["cwd"] or ".", options["start_new_session"], call.streams(),
                options["pass_fds"], options.get("process_group", -1), options["preexec_fn"])
    call.is_started(pid)


def _become(program, environment, folder, session, streams, keep, process_group=-1, preexec_fn=None):
    """Makes this process what Python would be that has been started so, and ends it with the program."""
    try:
        _take_descriptors(streams, keep)
        os.chdir(folder)
        if session:
            os.setsid()
        if process_group not in (None, -1):
            os.setpgid(0, process_group)
        _forget(environment)
        _show("cmdline", program)
        _show("environ", [f"{name}={value}" for name, value in environment.items()])
        if preexec_fn:
            preexec_fn()
        subprocess.Popen._execute_child = _start
        code = _run(program)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    ctypes.pythonapi.Py_Exit(code)


def _take_descriptors(streams, keep):
    copies = [os.dup(stream) for stream in streams]
    for standard, copy in enumerate(copies):
        os.dup2(copy, standard)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in keep:
            try:
                os.close(descriptor)
            except OSError:  # that of the list itself
                pass
    for descriptor in keep:
        os.set_inheritable(descriptor, True)


def _forget(environment):
    """What this process knows of the one that it is forked from, but for the frameworks."""
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for function in _at_exit:
        atexit.unregister(function)
    _at_exit.clear()
    atexit.register = _register_at_exit
    for finalizer in list(weakref.finalize._registry):
        if finalizer not in _frameworks_finalizers:
            finalizer.detach()
    _before.extend(sys.modules.pop(name) for name, module in list(sys.modules.items()) if _is_of_program(name, module))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    os.environ.clear()
    os.environ.update(environment)
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    _before.append([sys.stdin, sys.stdout, sys.stderr])
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, errors=errors, closefd=False)
    sys.stdout = sys.__stdout__ = _output(1, unbuffered, encoding, errors)
    sys.stderr = sys.__stderr__ = _output(2, unbuffered, encoding, "backslashreplace")


def _register_at_exit(function, *arguments, **options):
    _at_exit.append(function)
    return _register(function, *arguments, **options)


def _is_of_program(name, module):
    """Whether a module is neither Python's nor a framework's."""
    file = getattr(module, "__file__", None) or _site[0]
    return name.partition(".")[0] in ("lightcc", "__main__") or not file.startswith((*_site, __file__, warm.__file__))


def _output(descriptor, unbuffered, encoding, errors):
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw if unbuffered else io.BufferedWriter(raw), encoding, errors, newline="\n",
                            line_buffering=descriptor == 2 or raw.isatty(), write_through=unbuffered)


def _show(what, words):
    """Has /proc/self/cmdline or environ show these words, by which tests find processes."""
    start, end = _shown[what]
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[:end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _run(program):
    """Runs it as python does; its exit code."""
    _, first, *others = program
    kind = first if first in ("-c", "-m") else ""
    sys.orig_argv[:] = program
    sys.argv[:] = [kind, *others[1:]] if kind else [first, *others]
    there = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.realpath(first)))
    sys.path[:] = [there, *map(os.path.abspath, warm.folders(os.environ)), *_site]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    try:
        if kind == "-m":
            runpy._run_module_as_main(others[0])
        elif kind:
            exec(compile(others[0], "<string>", "exec"), main.__dict__)
        else:
            main.__file__ = first
            with io.open_code(first) as file:
                code = compile(file.read(), first, "exec")
            exec(code, main.__dict__)
    except SystemExit as end:
        return _code(end.code)
    except BaseException as error:
        error = error.with_traceback(error.__traceback__.tb_next)  # which begins in the program
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            _end_by_interrupt()
        return 1
    return 0


def _code(given):
    if given is None or isinstance(given, int):
        return (given or 0) & 0xff
    print(given, file=sys.stderr)
    return 1


def _end_by_interrupt():
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
