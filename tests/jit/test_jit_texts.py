"""What kfconvert.jit reads in the output of compilers and of processes, and in torch's registries."""

import re

import pytest
import torch

from kfconvert import CompileError
from kfconvert.jit.errors import error_lines
from kfconvert.jit.loading import reason_of
from kfconvert.jit.registrations import Registrations, names


def test_lines_that_name_an_error():
    output = """FAILED: [code=2] a.o
nvcc -Werror -c /x/a.cu -o error.o
/x/a.cu(12): error: identifier "foo" is undefined
    foo;
    ^
/x/a.cu(12): error: identifier "foo" is undefined
/x/a.cu(9): warning #177-D: variable "error" was declared but never referenced
/x/b.h:3:10: fatal error: c.h: No such file or directory
ptxas error   : Entry function '_Z1kPf' uses too much shared data
nvcc fatal   : Unsupported gpu architecture 'sm_10'
/usr/bin/ld: a.o: undefined reference to `f()'
2 errors detected in the compilation of "/x/a.cu".
ninja: build stopped: subcommand failed."""
    assert error_lines(output) == [
        '/x/a.cu:12: error: identifier "foo" is undefined',
        "/x/b.h:3:10: fatal error: c.h: No such file or directory",
        "ptxas error   : Entry function '_Z1kPf' uses too much shared data",
        "nvcc fatal   : Unsupported gpu architecture 'sm_10'",
        "/usr/bin/ld: a.o: undefined reference to `f()'",
    ]


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("", ""),
        ("a.so: undefined symbol: f\n", "a.so: undefined symbol: f"),
        ("hello\nterminate called after throwing an instance of 'int'\n", "terminate .* an instance of 'int'"),
        ("terminate called ...\n  what():  no such\nluck\n", "no such luck"),
        (
            "across the boundary: x\n  what():  \nunknown type specifier :\nf(Foo x) -> Tensor\n  ~~~ <--- HERE\n"
            " (originally from aoti_torch_library_def(...) API call failed at library.h, line 99)\n",
            r"unknown type specifier : f\(Foo x\) -> Tensor",
        ),
        (
            "  what():  Only a single TORCH_LIBRARY can be used\nException raised from registerLibrary at a.cpp:215 "
            "(most recent call first):\nframe #0: c10::Error\n<omitting python frames>\n",
            "Only a single TORCH_LIBRARY can be used",
        ),
    ],
)
def test_why_a_process_died(printed, reason):
    assert re.fullmatch(reason, reason_of(printed))


def test_what_was_registered():
    before = names()
    whole, part = torch.library.Library("jit_whole", "DEF"), torch.library.Library("jit_part", "FRAGMENT")
    own = torch.library.Library("aten", "FRAGMENT")
    for library in (whole, part, own):
        library.define("jit_texts.x(Tensor x) -> Tensor")
    kernels = torch._C._dispatch_library("IMPL", "jit_kernels", "CPU")
    kernels.impl("f", "CPU", lambda x: x)
    found = Registrations.since(before)
    assert found.namespaces == ["jit_whole"]
    assert found.operators == [f"{namespace}::jit_texts.x" for namespace in ("aten", "jit_part", "jit_whole")]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Registrations(["free", "aten"], []), r"already has a TORCH_LIBRARY\(aten\)"),
        (Registrations([], ["free::f", "aten::add.out"]), "already has an operator aten::add.out"),
    ],
)
def test_registrations_that_this_process_has(found, message):
    with pytest.raises(CompileError, match=message):
        found.check()


def test_registrations_that_are_free():
    Registrations(["free"], ["free::relu", "aten::relu.free"]).check()
