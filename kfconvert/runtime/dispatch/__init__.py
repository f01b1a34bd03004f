"""Where a call of a converted model goes: the program of a variant, or the original forward."""
