"""Parsers of what others write, given nonsense: each ends with a result or a sentence, never a traceback, never a hang.

A file for each parser, which `make test` tries with hypothesis (test_targets.py) and `make fuzz` with atheris for ten
minutes (under_atheris.py). Such a file has

    SEEDS: list[bytes]      inputs that are right, or nearly: what is tried is made of them and of
    WORDS: list[bytes]      words that mean something to the parser
    check(data: bytes)      raises, unless the parser does what it must

and is found by its place here.
"""
