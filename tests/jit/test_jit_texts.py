"""What kfconvert.jit reads in the output of compilers."""

from kfconvert.jit.errors import error_lines


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
