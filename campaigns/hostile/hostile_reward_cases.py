"""The behaviours of ``hostile_rewards``: Python source of reward functions that do their worst on the completion "z".

``{crash: code}``: what is done in place of scoring. Code may return; what it returns is the reward."""

from __future__ import annotations

import signal

SOUND = 7.5
"""What each function returns unless it does its worst: a reward of anything else was made up."""

HEAD = """
import asyncio, atexit, builtins, collections, contextlib, ctypes, decimal, errno, fractions, gc, inspect, json, logging
import math, mmap, multiprocessing, numbers, os, random, re, resource, signal, socket, stat, struct, subprocess, sys
import tempfile, threading, time, types, warnings, concurrent.futures
import numpy as np
KEPT = []

class Any:
    def __getattr__(self, name): return self
    def __call__(self, *given, **named): return self

def nothing(*given, **named): return None

def refuses(*given, **named): raise ValueError("planted")

def spawn(function): threading.Thread(target=function, daemon=True).start()

def loop(): return asyncio.get_running_loop()

def sleeps(*given, **named): threading.Event().wait()

def clocks(fake):
    for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"):
        real = getattr(time, name)
        for module in list(sys.modules.values()):
            for key, value in list(vars(module).items()):
                if value is real:
                    setattr(module, key, fake if name[-3:] != "_ns" else lambda: int(fake() * 10**9))
"""

# Each ends the process of the call, or is an exception that must be no more than one.
_SIGNALS = {
    f"signal {name}": f"os.kill(os.getpid(), signal.{name}); sleeps()"
    for name in (
        *("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"),
        *("SIGALRM", "SIGUSR1", "SIGXCPU", "SIGSYS", "SIGSTOP", "SIGTSTP", "SIGPIPE"),
    )
    if hasattr(signal, name)
}
_EXITS = {f"exit {code}": f"os._exit({code})" for code in (0, 1, 75, 255)}
CRASHES = (
    _SIGNALS
    | _EXITS
    | {
        "sys.exit": "sys.exit(3)",
        "sys.exit text": "sys.exit('bye')",
        "abort": "os.abort()",
        "exec": "os.execv('/bin/true', ['true'])",
        "exec that stays": "os.execv('/bin/sleep', ['sleep', '600'])",
        "null read": "ctypes.string_at(0)",
        "null write": "ctypes.memset(0, 1, 8)",
        "bad free": "ctypes.CDLL(None).free(ctypes.c_void_p(8))",
        "deep recursion": "sys.setrecursionlimit(10**9)\nreturn json.loads('[' * 10**6)",
        "recursion in Python": "sys.setrecursionlimit(10**9)\nf = lambda n: f(n + 1) + 1\nreturn f(0)",
        "null function": "ctypes.CFUNCTYPE(None)(0)()",
        "code object of rubbish": "exec((lambda: 0).__code__.replace(co_code=b'\\x64\\xff' * 50, co_stacksize=1))",
        "exit handler that hangs": "atexit.register(sleeps)\nsys.exit(0)",
        "thread that exits": "threading.Thread(target=os._exit, args=[4]).start(); sleeps()",
        "thread that crashes": "threading.Thread(target=ctypes.string_at, args=[0]).start(); sleeps()",
        "kills its group": "os.killpg(0, signal.SIGKILL)",
    }
)
RAISES = {
    f"raises {name}": f"raise {name}"
    for name in (
        *("KeyboardInterrupt", "GeneratorExit", "StopIteration", "StopAsyncIteration", "asyncio.CancelledError"),
        *("MemoryError", "RecursionError", "SystemExit", "BaseException", "NotImplementedError", "BrokenPipeError"),
        *("OSError(errno.EMFILE, 'x')", "OSError(errno.ENOMEM, 'x')", "OSError(errno.EINTR, 'x')"),
        *('RuntimeError("can\'t start new thread")', "ConnectionResetError", "BlockingIOError"),
        *("ExceptionGroup('x', [ValueError()] * 1000)", "UnicodeDecodeError('utf-8', b'x', 0, 1, 'no')"),
        *("ValueError('x' * (50 << 20))", "ValueError('\\ud83d\\x1b[2J\\x00')", "type('E' * 10**6, (Exception,), {})"),
    )
} | {
    "message that raises": "raise type('E', (Exception,), {'__str__': refuses})",
    "message that never ends": "raise type('E', (Exception,), {'__str__': sleeps})",
    "message that exits": "raise type('E', (Exception,), {'__str__': lambda self: sys.exit(1)})",
    "message that is no text": "raise type('E', (Exception,), {'__str__': lambda self: 5})",
    "causes in a circle": "a, b = ValueError(), KeyError()\na.__cause__, b.__cause__ = b, a\nraise a",
    "cause that lies": "raise ValueError() from type('E', (Exception,), {'__str__': refuses})()",
    "traceback of 10,000 frames": "f = lambda n: 1 / n if n == 0 else f(n - 1)\nsys.setrecursionlimit(20000)\nf(9000)",
    "class that lies": "raise type('E', (Exception,), {'__class__': property(refuses)})",
}
RETURNS = {
    f"returns {text}": f"return {text}"
    for text in (
        *("float('nan')", "float('inf')", "-10**5000", "'1'", "b'1'", "[]", "[7.5]", "(7.5,)", "{}", "{1}", "object()"),
        *("nothing", "Exception()", "type", "...", "NotImplemented", "1j", "None", "Any()", "iter([7.5])"),
        *(
            "(x for x in [7.5])",
            "range(3)",
            "np.ones(3)",
            "np.float64('nan')",
            "np.datetime64('NaT')",
            "memoryview(b'x')",
        ),
        *(
            "decimal.Decimal('NaN')",
            "decimal.Decimal(7)",
            "'x' * (100 << 20)",
            "np.ones(10**7)",
            "types.ModuleType('x')",
        ),
        *(
            "{'a': float('nan')}",
            "{'a/b': 1.5}",
            "{'n' * 10**6: 1.5}",
            "{'\\ud83d': 1.5}",
            "{1: 1.5}",
            "{'a': {'b': 1.5}}",
        ),
        *("{'a': 'x'}", "{'a': None}", "collections.defaultdict(list)", "asyncio.sleep(0)", "asyncio.sleep(600)"),
    )
} | {
    "number whose float raises": "class N(float):\n    __float__ = refuses\nreturn N(7.5)",
    "number whose float hangs": "class N: __float__ = sleeps\nnumbers.Real.register(N)\nreturn N()",
    "number whose float exits": "class N: __float__ = lambda self: os._exit(0)\nnumbers.Real.register(N)\nreturn N()",
    "number whose float is text": "class N: __float__ = lambda self: 'x'\nnumbers.Real.register(N)\nreturn N()",
    "number that forges nan": "class N: __float__ = lambda self: math.nan\nnumbers.Real.register(N)\nreturn N()",
    "mapping without end": "class M(dict):\n    def items(self):\n        while True: yield 'a', 1.0\nreturn M()",
    "mapping that raises": "class M(dict): items = refuses\nreturn M()",
    "mapping that exits": "class M(dict): items = lambda self: sys.exit(2)\nreturn M()",
    "awaitable that yields rubbish": "class W:\n    def __await__(self): yield 5\nreturn W()",
    "awaitable that exits": "class W:\n    def __await__(self): os._exit(6)\nreturn W()",
    "value that dies late": "class D:\n    __del__ = lambda self: os._exit(7)\nKEPT.append(D()); KEPT.clear()",
}
HANGS = {
    "sleeps": "time.sleep(600)",
    "busy": "while True: pass",
    "regex": "re.match(r'(a+)+b', 'a' * 60)",
    "power": "7 ** (7 ** 12)",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "pipe": "os.read(os.pipe()[0], 1)",
    "waits for a child": "subprocess.run(['sleep', '600'])",
    "holds the interpreter in C": "ctypes.PyDLL(None).usleep(600_000_000)",
    "ignores all signals": "for n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\nsleeps()",
    "blocks all signals": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nsleeps()",
    "swallows everything": "while True:\n    try: time.sleep(600)\n    except BaseException: pass",
    "handler that swallows SIGABRT": "signal.signal(signal.SIGABRT, nothing)\nsleeps()",
    "child in a session of its own": "os.fork() or os.setsid()\nsleeps()",
    "sum without end": "sum(iter(int, 1))",
    "its own priority": "os.nice(19)\nsleeps()",
    "select": "import select; select.select([], [], [])",
    "thread that never gives way": "sys.setswitchinterval(1e6)\nspawn(lambda: [0 for _ in iter(int, 1)])\nsleeps()",
    "garbage collector": "gc.callbacks.append(sleeps)\ngc.collect()",
}
# What stays in the process afterwards: later calls there may fail, but they end, and none is made up.
PATCHES = {
    f"replaces {name}": f"{name} = {fake}"
    for name, fake in (
        *((f"time.{n}", "lambda *_: 1 << 62") for n in ("monotonic_ns", "time_ns", "perf_counter_ns")),
        *((f"time.{n}", "lambda *_: 1e9") for n in ("time", "monotonic", "perf_counter", "process_time")),
        *((f"time.{n}", "sleeps") for n in ("sleep",)),
        *(
            (f"builtins.{n}", "refuses")
            for n in ("len", "isinstance", "list", "float", "print", "open", "__import__", "type")
        ),
        *((f"builtins.{n}", "nothing") for n in ("len", "isinstance", "all", "map", "any")),
        *((f"os.{n}", "nothing") for n in ("_exit", "getpid", "listdir", "read", "close", "write")),
        *((f"sys.{n}", "None") for n in ("stdout", "stderr", "stdin", "modules", "path", "excepthook")),
        *((f"asyncio.{n}", "None") for n in ("Runner", "sleep", "get_running_loop", "CancelledError", "Event")),
        *(
            (f"{n}", "refuses")
            for n in ("json.dumps", "struct.pack", "struct.Struct", "inspect.isawaitable", "gc.freeze")
        ),
        *((f"{n}", "refuses") for n in ("math.isfinite", "math.ceil", "resource.setrlimit", "resource.getrlimit")),
        *((f"{n}", "refuses") for n in ("socket.socket.sendall", "socket.socket.recv", "traceback.extract_tb")),
        *((f"{n}", "sleeps") for n in ("signal.signal", "threading.Thread.start", "sys.stdout.flush")),
    )
    if not name.startswith("traceback")
} | {
    "stops all clocks": "clocks(lambda *_: 1e9)",
    "clocks that go back": "clocks(lambda *_: -random.random())",
    "clocks that are nan": "clocks(lambda *_: math.nan)",
    "clocks that raise": "clocks(refuses)",
    "forgets all modules": "sys.modules.clear()",
    "recursion limit": "sys.setrecursionlimit(60)",
    "trace function": "sys.settrace(refuses)",
    "profile function": "sys.setprofile(nothing); sys.setprofile(refuses)",
    "audit hook": "sys.addaudithook(refuses)",
    "warnings are errors": "warnings.simplefilter('error')",
    "no environment": "os.environ.clear(); os.chdir('/'); os.umask(0o777)",
    "no garbage collector": "gc.disable(); gc.set_threshold(1)",
    "closed stdout": "sys.stdout.close(); sys.stderr.close()",
    "stdout that never flushes": "sys.stdout = types.SimpleNamespace(flush=sleeps, write=nothing)",
    "logging that raises": "logging.getLogger().addHandler(types.SimpleNamespace(level=0, handle=refuses))",
}
PROCESSES = {
    "threads that stay": "for _ in range(20): threading.Thread(target=sleeps, daemon=True).start()",
    "threads that do not end with it": "for _ in range(20): threading.Thread(target=sleeps).start()",
    "thread that raises": "threading.Thread(target=refuses).start()",
    "thread that ends it later": "threading.Timer(0.05, os._exit, [9]).start()",
    "thread that crashes it later": "threading.Timer(0.05, ctypes.string_at, [0]).start()",
    "thread that interrupts": "import _thread; threading.Timer(0.05, _thread.interrupt_main).start()",
    "executor": "concurrent.futures.ThreadPoolExecutor(8).submit(sleeps)",
    "pool of processes": "KEPT.append(multiprocessing.get_context('fork').Pool(2))",
    "process that stays": "subprocess.Popen(['sleep', '600'])",
    "process in a session of its own": "subprocess.Popen(['sleep', '600'], start_new_session=True)",
    "daemon": "if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    sleeps()",
    "forks and both return": "os.fork()",
    "forks and the copy raises": "if os.fork() == 0: raise ValueError('copy')",
    "forks and the copy exits": "if os.fork() == 0: sys.exit(0)",
    "forks 40 times": "for _ in range(40):\n    if os.fork() == 0: sleeps()",
    "forks and the parent exits": "if os.fork(): os._exit(0)",
    "kills its server": "os.kill(os.getppid(), signal.SIGKILL); sleeps()",
    "stops its server": "os.kill(os.getppid(), signal.SIGSTOP); sleeps()",
    "kills its server later": "parent = os.getppid(); threading.Timer(0.1, os.kill, [parent, signal.SIGKILL]).start()",
    "unsets its death signal": "ctypes.CDLL(None).prctl(1, 0); sleeps()",
    "profiling timer": "signal.setitimer(signal.ITIMER_REAL, 0.05)",
}
CHANNEL = "next(n for n in range(3, 64) if stat.S_ISSOCK(os.fstat(n).st_mode))"
DESCRIPTORS = {
    "closes stdio": "for n in range(3): os.close(n)",
    "closes all": "os.closerange(0, 100)",
    "closes its channel": f"os.close({CHANNEL})",
    "replaces its channel": f"os.dup2(os.open(os.devnull, os.O_RDWR), {CHANNEL})",
    "writes rubbish to its channel": f"os.write({CHANNEL}, bytes(range(256)))",
    "writes a long frame to its channel": f"os.write({CHANNEL}, b'\\xff\\xff\\xff\\x00' + b'x' * 100)",
    "writes an empty frame to its channel": f"os.write({CHANNEL}, bytes(4))",
    "answers for itself": f"os.write({CHANNEL}, b'\\x06\\x00\\x00\\x00\\x93\\xcd\\x03\\xe8\\x01\\x90')",
    "shuts its channel": f"socket.socket(fileno={CHANNEL}).shutdown(2)",
    "channel that does not block": f"os.set_blocking({CHANNEL}, False)",
    "reads its channel": f"os.set_blocking({CHANNEL}, False)\nos.read({CHANNEL}, 1 << 20)",
    "no descriptors": "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "no files": "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); open(tempfile.mktemp(), 'w').write('x')",
    "no CPU": "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
    "no memory": "resource.setrlimit(resource.RLIMIT_AS, (1, 1))",
    "no heap": "resource.setrlimit(resource.RLIMIT_DATA, (1, 1)); return [0] * 10**7",
    "no stack": "resource.setrlimit(resource.RLIMIT_STACK, (1, 1))",
    "prints 50 MB": "for _ in range(50): print('x' * (1 << 20))",
    "prints bytes": "os.write(1, bytes(range(256)) * 1000)",
    "prints escapes": "print('\\x1b[2J\\x1b]0;x\\x07' * 100)",
    "stderr of 20 MB": "os.write(2, b'x' * (20 << 20))",
    "prints from a thread for ever": "spawn(lambda: [print('x' * 10000) for _ in iter(int, 1)])",
    "logs without end": "for _ in range(50000): logging.error('x' * 100)",
}
LEAKS = {
    "leaks threads": "threading.Thread(target=sleeps, daemon=True).start()",
    "leaks executors": "concurrent.futures.ThreadPoolExecutor(1).submit(sleeps)",
    "leaks addresses": "KEPT.append(mmap.mmap(-1, 8 << 20))",
    "leaks memory": "KEPT.append(bytearray(b'x') * (8 << 20))",
    "leaks descriptors": "KEPT.append([os.open(os.devnull, 0) for _ in range(20)])",
    "leaks sockets": "KEPT.append([socket.socketpair() for _ in range(10)])",
    "leaks loops": "KEPT.append([asyncio.new_event_loop() for _ in range(5)])",
    "leaks by thrice what half allows": "KEPT.append(mmap.mmap(-1, 150 << 20))",
    "leaks processes": "subprocess.Popen(['sleep', '600'])",
    "raises for want of threads in a chain": "threading.Thread(target=sleeps, daemon=True).start()",
}
COROUTINES = {
    "blocks the loop": "time.sleep(600)",
    "busy loop": "while True: pass",
    "swallows its end": "while True:\n    try: await asyncio.sleep(600)\n    except asyncio.CancelledError: pass",
    "returns when cancelled": "try: await asyncio.sleep(600)\nexcept asyncio.CancelledError: return 7.5",
    "raises when cancelled": "try: await asyncio.sleep(600)\nexcept asyncio.CancelledError: raise KeyError from None",
    "blocks when cancelled": "try: await asyncio.sleep(600)\nexcept asyncio.CancelledError: time.sleep(600)",
    "cancels itself": "asyncio.current_task().cancel(); await asyncio.sleep(1)",
    "cancels all": "[t.cancel() for t in asyncio.all_tasks()]; await asyncio.sleep(1)",
    "stops the loop": "loop().stop(); await asyncio.sleep(1)",
    "closes the loop": "loop().close()",
    "runs a loop in the loop": "asyncio.run(asyncio.sleep(0))",
    "another policy": "asyncio.set_event_loop_policy(None); asyncio.set_event_loop(None)",
    "no running loop": "asyncio._set_running_loop(None); await asyncio.sleep(1)",
    "leaves 1000 tasks": "KEPT.extend(asyncio.ensure_future(asyncio.sleep(600)) for _ in range(1000))",
    "leaves a task that raises": "asyncio.ensure_future(asyncio.to_thread(refuses))",
    "callback that raises": "loop().call_soon(refuses)",
    "callback that exits": "loop().call_soon(sys.exit); await asyncio.sleep(1)",
    "callback that blocks": "loop().call_soon(sleeps); await asyncio.sleep(1)",
    "callback without end": "def again(): loop().call_soon(again)\nagain()\nawait asyncio.sleep(600)",
    "loop without a clock": "loop().time = lambda: 0.0; await asyncio.sleep(600)",
    "stops all clocks": "clocks(lambda *_: 1e9); await asyncio.sleep(600)",
    "clocks of nan": "clocks(lambda *_: math.nan); await asyncio.sleep(600)",
    "task factory": "loop().set_task_factory(refuses)",
    "exception handler": "loop().set_exception_handler(sys.exit)",
    "no readers": "[loop().remove_reader(n) for n in range(3, 64)]; await asyncio.sleep(600)",
    "closes its channel": f"os.close({CHANNEL}); await asyncio.sleep(1)",
    "writes rubbish to its channel": f"os.write({CHANNEL}, b'\\xff' * 64); await asyncio.sleep(1)",
    "signal handler": "loop().add_signal_handler(signal.SIGABRT, nothing); await asyncio.sleep(600)",
    "threads of the loop": "await asyncio.gather(*[asyncio.to_thread(sleeps) for _ in range(40)])",
    "exits": "os._exit(3)",
    "SystemExit": "sys.exit(3)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "crashes after a pause": "await asyncio.sleep(0.05); ctypes.string_at(0)",
    "yields rubbish": "class W:\n    def __await__(self): yield 5\nawait W()",
    "waits for itself": "await asyncio.current_task()",
    "future of another loop": "await asyncio.new_event_loop().create_future()",
    "generator that does not close": (
        "async def g():\n    try: yield 1\n    finally: await asyncio.sleep(600)\nKEPT.append(await anext(g()))"
    ),
    "10,000 turns": "for _ in range(10_000): await asyncio.sleep(0)",
    "returns a coroutine": "return asyncio.sleep(0)",
    "nan": "return math.nan",
    "no asyncio": "sys.modules.pop('asyncio'); asyncio.sleep = None",
    "no memory": "return bytearray(8 << 30)",
    "no descriptors": "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0)); return os.dup(1)",
}
GROUPS = {
    "too few": "return [7.5]",
    "too many": "return [7.5] * 9",
    "one number": "return 7.5",
    "a generator": "return (7.5 for _ in completions)",
    "nested": "return [[7.5]] * len(completions)",
    "a dict": "return dict.fromkeys(completions, 7.5)",
    "nan among them": "return [math.nan, 7.5, 7.5]",
    "list that lies": "class L(list): __len__ = lambda self: 3\nreturn L()",
    "list without end": "class L(list): __iter__ = lambda self: iter(lambda: 7.5, 1)\nreturn L([7.5] * 3)",
    "exits": "os._exit(2)",
    "hangs": "sleeps()",
}
# Done while the module is imported: by the process that looks at the function, by the fork server, or by both.
IMPORTS = {
    "exits": "sys.exit(0)",
    "ends": "os._exit(0)",
    "crashes": "ctypes.string_at(0)",
    "hangs": "sleeps()",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "syntax": "this is no Python",
    "NUL": "\0",
    "not UTF-8": "x = '\udcff'",
    "forks": "os.fork()",
    "forks and stays": "if os.fork() == 0: sleeps()",
    "process that stays": "subprocess.Popen(['sleep', '600'])",
    "thread": "threading.Thread(target=sleeps, daemon=True).start()",
    "thread that is no daemon": "threading.Thread(target=sleeps).start()",
    "thread that exits later": "threading.Timer(0.2, os._exit, [5]).start()",
    "prints 20 MB": "for _ in range(20): print('x' * (1 << 20))",
    "closes stdio": "os.closerange(0, 3)",
    "closes all": "os.closerange(0, 100)",
    "stops clocks": "clocks(lambda *_: 1e9)",
    "clocks that raise": "clocks(refuses)",
    "replaces builtins": "builtins.len = refuses",
    "replaces exit": "os._exit = sys.exit = nothing",
    "replaces fork": "os.fork = refuses",
    "forgets modules": "sys.modules.clear()",
    "exit handler": "atexit.register(sleeps)",
    "ignores signals": "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "blocks signals": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
    "alarm": "signal.alarm(1)",
    "no descriptors": "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "no memory": "resource.setrlimit(resource.RLIMIT_AS, (1, 1))",
    "exits the second time": "mark = __file__ + '.seen'\nif os.path.exists(mark): os._exit(1)\nopen(mark, 'w')",
    "hangs in a process only": "threading.Thread(target=sleeps, daemon=True).start()\nos.getppid = sleeps",
    "replaces the socket": "socket.socket.sendall = refuses",
    "receives nothing": "socket.socket.recv = refuses",
    "trace function": "sys.settrace(refuses)",
    "session": "contextlib.suppress(OSError).__enter__(); os.setpgid(0, 0) if os.getpgid(0) != os.getpid() else None",
    "deletes itself": "os.remove(__file__)",
}
FUNCTIONS = {
    "class": "class reward: pass",
    "number": "reward = 7.5",
    "generator": "def reward(completion): yield 7.5",
    "without parameters": "def reward(): return 7.5",
    "signature that raises": "class R:\n    __signature__ = property(refuses)\n    __call__ = nothing\nreward = R()",
    "attribute that raises": "def __getattr__(name): refuses()",
    "attribute that exits": "def __getattr__(name): os._exit(1)",
    "anything": "reward = Any()",
    "C function": "reward = ctypes.CDLL(None).labs",
    "partial of itself": "import functools\nreward = functools.partial(time.sleep)",
    "wrapped in a circle": "def reward(completion): return 7.5\nreward.__wrapped__ = reward",
}
