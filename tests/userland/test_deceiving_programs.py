"""Programs that would pass a test without doing what it tests: what they learn of it, and what they can pretend."""

import pytest

from megappo.lab.graders.code import code

LOOKS = {
    "frames": """
import sys
def found():
    frame = sys._getframe()
    while frame:
        yield from map(repr, [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts])
        frame = frame.f_back
""",
    "the garbage collector": """
import gc
def found():
    for one in gc.get_objects():
        if not isinstance(one, type) and type(one) in (dict, list, tuple, set):
            yield repr(one)[:10**6]
""",
    "modules": """
import sys
def found():
    for module in list(sys.modules.values()):
        yield from (value for value in list(vars(module).values()) if isinstance(value, str))
""",
    "its memory": """
import ctypes, os
def found():
    libc, file = ctypes.CDLL(None), os.open("memory", os.O_RDWR | os.O_CREAT)
    libc.sbrk.restype = ctypes.c_void_p
    for place in (id(object()), id(bytearray(1000)), libc.sbrk(0)):
        begin = place // 4096 * 4096
        for page in range(begin - 2**24, begin + 2**22, 4096):
            if libc.pwrite(file, ctypes.c_void_p(page), 4096, 0) == 4096:
                yield os.pread(file, 4096, 0).decode("latin-1")
""",
    "its files": """
import os
def found():
    for folder in (".", "..", "/proc/self", "/dev/fd"):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            try:
                yield open(os.path.join(folder, name), errors="replace").read(10**6)
            except OSError:
                pass
    for descriptor in range(3):
        try:
            yield os.pread(descriptor, 10**6, 0).decode("latin-1")
        except OSError:
            pass
""",
}
SEARCH = """
def f(n):
    import re
    for text in found():
        try:
            if match := re.search("EXPEC" + "TED[0-9]{4}", text):
                return match[0]
        except TypeError:
            pass
    return "nothing"
"""
LABELS = {
    "an assertion": "assert f(3) == 'EXPECTED7314'",
    "a function check": {"test": "def check(g):\n    assert g(3) == 'EXPECTED7314'", "entry_point": "f"},
    "a test that prints it": "print('EXPECTED7314', flush=True)\nassert f(3) == 'EXPECTED7314'",
    "results": {"inputs": [[3], [4]], "outputs": ["EXPECTED7314", "EXPECTED7315"], "fn_name": "f"},
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
def test_a_program_does_not_find_what_is_expected_of_it(look: str, label: object):
    nothing = {"inputs": [[3]], "outputs": ["nothing"], "fn_name": "f"}
    assert code(look + SEARCH, nothing)["score"] == 1.0, "the search comes to its end"
    assert code(look + SEARCH, label)["score"] == 0.0
    secret = "\nsecret = ['EXPECTED' + str(7000 + 314)]\n" + look.replace("def found", "SECRET = secret[0]\ndef found")
    if "files" not in look and "listdir" not in look:
        assert code(secret + SEARCH, "assert f(3) == 'EXPECTED7314'")["score"] == 1.0, "it finds what is there"


OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "contains", "hash", "bool", "call", "len", "add", "radd", "round")
ALL_TRUE = "class T:\n" + "".join(f"    def __{name}__(self, *a): return True\n" for name in OPERATORS)
NEAR = "    def __float__(self): return self\n    def __abs__(self): return 0\n    def __sub__(self, other): return 0\n"
OF_A_KIND = "class T({}):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
FORGES = """
import json, os, socket
def send(*message):
    text = json.dumps(["tuple", message]).encode()
    socket.socket(fileno=3).sendall(text + b"\\n")
    os._exit(0)
def f(n): send({})
"""
EXEC, END = '["builtin", "exec"]', '"import os; os._exit(0)"'
RAISED = FORGES.format(f'"raised", {EXEC}, ["tuple", [{END}]], ""')
ASKED = FORGES.format(f'"ask", "call", ["tuple", [{EXEC}, {END}]], ["dict", []]')
PRETENDS = {
    "an object equal to all": (ALL_TRUE + "def f(n): return T()", "assert f(3) == 9"),
    "on the right": (ALL_TRUE + "def f(n): return T()", "assert 9 == f(3)"),
    "an object in all": (ALL_TRUE + "def f(n): return T()", "assert f(3) in (8, 9)"),
    "an object with all": (ALL_TRUE + "def f(n): return T()", "assert 9 in f(3)"),
    "an object between all": (ALL_TRUE + "def f(n): return T()", "assert 8 < f(3) < 10"),
    "an object near all": (ALL_TRUE + NEAR + "def f(n): return T()", "assert abs(f(3) - 9.5) < 1e-6"),
    "a list of them": (ALL_TRUE + "def f(n): return [T()]", "assert f(3) == [9]"),
    "a dictionary of them": (ALL_TRUE + "def f(n): return {1: T()}", "assert f(3) == {1: 9}"),
    "a number equal to all": (OF_A_KIND.format("int") + "def f(n): return T()", "assert f(3) == 9"),
    "a text equal to all": (OF_A_KIND.format("str") + "def f(n): return T()", "assert f(3) == 'nine'"),
    "a list equal to all": (OF_A_KIND.format("list") + "def f(n): return T()", "assert f(3) == [9]"),
    "its class": (
        "class M(type):\n    def __eq__(self, other): return True\nclass T(metaclass=M): pass\ndef f(n): return T",
        "assert f(3) == 9",
    ),
    "its own abs": ("def f(n): return 1.0\ndef abs(n): return 0", "assert abs(f(3) - 9.5) < 1e-6"),
    "its own len": ("def f(n): return [1]\ndef len(n): return 9", "assert len(f(3)) == 9"),
    "its own module": (
        "class math:\n    isclose = lambda *a: True\ndef f(n): return 1",
        "assert math.isclose(f(3), 9)",
    ),
    "its own package": (
        "class np:\n    allclose = lambda *a: True\ndef f(n): return 1",
        "assert np.allclose(f(3), 9)",
    ),
    "its own package of another name": (
        "class numpy:\n    allclose = lambda *a: True\ndef f(n): return 1",
        {"test": "def check(g): assert numpy.allclose(g(3), 9)", "entry_point": "f"},
    ),
    "a changed module": (
        "import math\nmath.isclose = lambda *a: True\ndef f(n): return 1",
        "assert math.isclose(f(3), 9)",
    ),
    "a changed Python": ("import builtins\nbuiltins.abs = lambda n: 0\ndef f(n): return 1", "assert abs(f(3) - 9) < 1"),
    "its own errors": ("def f(n): return 1\nclass AssertionError(Exception): pass", "assert f(3) == 9"),
    "its own Python": ("def f(n): return 1\n__builtins__ = {'abs': lambda n: 0}", "assert abs(f(3) - 9) < 1"),
    "the end of all": ("import os\ndef f(n): os._exit(0)", "assert f(3) == 9"),
    "an end": ("import sys\ndef f(n): sys.exit(0)", "assert f(3) == 9"),
    "an end of the test": ("class E(SystemExit): code = 0\ndef f(n): raise E(0)", "assert f(3) == 9"),
    "an end before": ("import os\nos._exit(0)", "assert f(3) == 9"),
    "a forged answer": (
        "import os\nfor n in range(3, 9):\n    try: os.write(n, b'\\0' * 8)\n    except OSError: pass",
        "f(3)",
    ),
    "a forged exception": (RAISED, "assert f(3) == 9"),
    "a forged request": (ASKED, "assert f(3) == 9"),
    "a forged class": (RAISED.replace("builtin", "error"), "assert f(3) == 9"),
    "a request of a forged class": (ASKED.replace("builtin", "error"), "assert f(3) == 9"),
    "an end of a loop": ("def f(n): raise StopIteration", "assert all(map(lambda n: f(n) == n * n, [3, 4]))"),
    "the stack's token": (
        "import os, sys\ndef f(n):\n    frame = sys._getframe()\n    while frame:\n        "
        "for one in frame.f_locals.values():\n            if isinstance(one, str) and len(one) == 32:\n                "
        "os.write(3, one.encode()); os._exit(0)\n        frame = frame.f_back",
        "assert f(3) == 9",
    ),
}


@pytest.mark.parametrize(("program", "test"), PRETENDS.values(), ids=PRETENDS)
def test_a_program_cannot_pretend(program: str, test: object):
    assert code(program, test)["score"] == 0.0


CLASS = """
class Stack:
    size = 3
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __getitem__(self, index): return self.items[index]
    def __iter__(self): return iter(self.items)
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __str__(self): return f"Stack{self.items}"
    def __add__(self, other): return Stack(*self.items, *other.items)
class Full(ValueError): pass
def full(): raise Full("no room")
"""
WORKS = {
    "objects": (CLASS, "s = Stack(1)\nassert s.push(2) is s and len(s) == 2 and s[1] == 2 and list(s) == [1, 2]"),
    "attributes": (
        CLASS,
        "s = Stack()\ns.items = [5]\nassert s.items == [5] and Stack.size == 3 and s.push(6)[-1] == 6",
    ),
    "two objects": (
        CLASS,
        "assert Stack(1) == Stack(1) and Stack(1) != Stack(2) and Stack(1) + Stack(2) == Stack(1, 2)",
    ),
    "its text": (CLASS, "assert str(Stack(1)) == 'Stack[1]' and f'{Stack()}' == 'Stack[]'"),
    "its class": (
        CLASS,
        "assert isinstance(Stack(), Stack) and not isinstance(3, Stack) and not isinstance(full, Stack)",
    ),
    "own errors": (
        CLASS,
        "try:\n    full()\n    assert False\nexcept Full as error:\n    assert str(error) == 'no room'",
    ),
    "errors": (
        "def f(n): return [][n]",
        "try:\n    f(1)\nexcept IndexError as e:\n    assert 'out of range' in str(e)\nelse:\n    1 / 0",
    ),
    "kinds": (
        "def f(x): return (x, {x}, {x: 1j}, frozenset([x]), b'a', None)",
        "assert f(2) == (2, {2}, {2: 1j}, {2}, b'a', None)",
    ),
    "no list": ("def f(x): return [x]", "assert f(2) != (2,) and not f(2) == (2,)"),
    "counters": ("from collections import *\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
    "fractions": (
        "from fractions import Fraction\ndef f(x): return Fraction(1, x)",
        "assert f(2) == 0.5 and f(4) * 4 == 1",
    ),
    "numpy": ("import numpy as np\ndef f(x): return np.ones(2)[0] * x", "assert f(2) == 2 and np.allclose(f(3), 3)"),
    "numpy that neither imports": ("def f(x): return [x, 2 * x]", "assert np.allclose(f(3), [3, 6])"),
    "a variable with the name of a package": ("def f(x): return x", "pd = f(3)\nassert pd == 3"),
    "a name of a package": ("def numpy(a, b): return a + b", "assert numpy(1, 2) == 3"),
    "infinity": ("def f(x): return [float('inf'), -x]", "assert f(2.5) == [float('inf'), -2.5]"),
    "generators": ("def f(x): yield from range(x)", "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0 and 1 in f(2)"),
    "closures": ("def f(x): return lambda y: x + y", "assert f(1)(2) == 3"),
    "functions of the test": ("def f(g, x): return [g(y) for y in x]", "assert f(lambda y: y + 1, [1, 2]) == [2, 3]"),
    "a list in place": ("def f(x): x.sort()", "x = [[3, 1], [2]]\nf(x)\nassert x == [[2], [3, 1]]"),
    "keywords": ("def f(name, x=1): return name * x", "assert f(name='a', x=2) == 'aa'"),
    "what it prints": (
        "def f(): print('hello')",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out: f()\n"
        "assert out.getvalue() == 'hello\\n'",
    ),
    "a name of Python's": ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
    "a module of that name": ("def bisect(a, b): return a + b", "assert bisect(1, 2) == 3"),
    "an import": ("def f(x): return x", "from solution import f as g\nassert g(2) == 2"),
    "helpers": (
        "def f(x): return x + 1\ndef g(x): return x - 1",
        {"test": "def check(c):\n    assert c(g(2)) == 2", "entry_point": "f"},
    ),
    "large numbers": ("def f(x): return 2 ** x", "assert f(20000) == 2 ** 20000"),
    "half a character": ("def f(x): return x", "assert f('\\ud800') == '\\ud800'"),
}


@pytest.mark.parametrize(("program", "test"), WORKS.values(), ids=WORKS)
def test_an_honest_program_passes(program: str, test: object):
    assert code(program, test)["score"] == 1.0
