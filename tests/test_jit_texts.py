"""What kfconvert.jit reads in sources and in the output of compilers."""

import pytest

from kfconvert import CompileError
from kfconvert.jit.errors import error_lines
from kfconvert.jit.registrations import check_registrations, without_comments


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
    ("text", "message"),
    [
        ("TORCH_LIBRARY(aten, m) {}", r"has a TORCH_LIBRARY\(aten\) already"),
        ("STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {}", r"has a TORCH_LIBRARY\(aten\) already"),
        ('TORCH_LIBRARY_FRAGMENT(aten, m) { m.def("relu(int x) -> int"); }', "operator aten::relu already"),
        ('TORCH_LIBRARY_FRAGMENT(x, m) { m.def("aten::add.out(int x) " "-> int") }', "aten::add.out already"),
        ('TORCH_LIBRARY(free, m) { m.def("f(Tensor x -> Tensor"); }', 'read the schema "f.*: expected '),
    ],
)
def test_registrations_that_torch_would_refuse(text, message):
    with pytest.raises(CompileError, match=message):
        check_registrations(without_comments(text), "aten")


@pytest.mark.parametrize(
    "text",
    [
        'TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("relu", f); }',
        'TORCH_LIBRARY(free, m) { m.def("relu(Tensor x) -> Tensor"); m.def("name", &f); }',
        'TORCH_LIBRARY_FRAGMENT(aten, m) {} TORCH_LIBRARY(free, m) { m.def("relu(Tensor x) -> Tensor"); }',
        "// TORCH_LIBRARY(aten, m)\n/* TORCH_LIBRARY(aten,\n m) */",
        'PYBIND11_MODULE(x, m) { m.def("relu(", &f, "// f"); }',
    ],
)
def test_registrations_that_are_fine(text):
    check_registrations(without_comments(text), "x")
