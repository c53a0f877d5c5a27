"""Lets the lab see what a shift of a signed number to the left loses: see kernels/lab/include/lab/shift.h."""

from __future__ import annotations

from .tokens import Tokens


def check_shifts(t: Tokens) -> None:
    """`a << b` becomes `a <<lab_shl<< b`, and `a <<= b` becomes `a <<=lab_shl= b`, in place."""
    for i, text in enumerate(t.text):
        before = t.previous(i - 1)
        if t.kind[i] != "punct" or (before >= 0 and t.text[before] == "operator"):
            continue
        if text == "<<=":
            t.text[i] = "<<=lab_shl="
        elif text == "<" and i + 1 < len(t.text) and t.text[i + 1] == "<":
            t.text[i + 1] = "<lab_shl<<"
