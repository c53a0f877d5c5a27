"""Offers: what is a valid answer, and which rows it covers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_core import LinearSite, Offer, OpSite
from backend_core.offers import as_offers

SITE = LinearSite("model.layers.3.mlp.up_proj")


def build(module):
    return lambda x: x


def test_defaults_claim_nothing():
    offer = Offer("a", build)
    assert (offer.rows, offer.exactness, offer.row_invariant) == ((1, None), "rounding", False)
    assert offer.label == "a"
    with pytest.raises(dataclasses.FrozenInstanceError):
        offer.exactness = "bitwise"  # type: ignore[misc]


def test_label_names_the_plugin():
    assert Offer("a", build, plugin="p").label == "p/a"


@pytest.mark.parametrize("name", ["", None, 3, b"x"])
def test_a_name_is_needed(name):
    with pytest.raises(TypeError, match="name"):
        Offer(name, build)


@pytest.mark.parametrize("thing", [None, "build", 3])
def test_build_must_be_callable(thing):
    with pytest.raises(TypeError, match="'a': build must be callable"):
        Offer("a", thing)


@pytest.mark.parametrize("exactness", ["exact", "", None, "Bitwise"])
def test_exactness_is_one_of_three(exactness):
    with pytest.raises(ValueError, match="exactness"):
        Offer("a", build, exactness=exactness)


@pytest.mark.parametrize("rows", [(0, 4), (-1, None), (5, 4), (1, 0)])
def test_rows_must_be_a_range(rows):
    with pytest.raises(ValueError, match="rows"):
        Offer("a", build, rows=rows)


@pytest.mark.parametrize("rows", [(1,), 4, None, (1, 2, 3), ("1", 2)])
def test_rows_of_another_form_are_refused(rows):
    with pytest.raises((TypeError, ValueError)):
        Offer("a", build, rows=rows)


@pytest.mark.parametrize(
    "rows,asked,want",
    [
        ((1, None), (1, 16), True), ((1, None), (17, None), True), ((1, 16), (1, 16), True),
        ((1, 16), (17, None), False), ((1, 15), (1, 16), False), ((2, None), (1, 16), False),
        ((1, 1), (1, 1), True), ((17, 4096), (17, None), False), ((3, 9), (4, 5), True),
    ],
)  # fmt: skip
def test_covers(rows, asked, want):
    assert Offer("a", build, rows=rows).covers(*asked) is want


bounds = st.integers(1, 20).flatmap(lambda lo: st.tuples(st.just(lo), st.one_of(st.none(), st.integers(lo, 24))))


@given(bounds, bounds)
def test_covers_means_that_every_number_of_rows_is_inside(rows, asked):
    beyond = 60  # stands for "any"

    def members(r):
        return set(range(r[0], (r[1] or beyond) + 1))

    assert Offer("a", build, rows=rows).covers(*asked) is (members(asked) <= members(rows))


def test_as_offers_accepts_none_one_and_many():
    a, b = Offer("a", build), Offer("b", build)
    assert as_offers(None, SITE) == []
    assert as_offers([], SITE) == []
    assert as_offers(a, SITE) == [a]
    assert as_offers([a, b], SITE) == [a, b]
    assert as_offers((b, a), SITE) == [b, a]


@pytest.mark.parametrize(
    "answer,said",
    [("offer", "str"), (b"x", "bytes"), (3, "int"), ({"name": "a"}, "dict"), ([Offer("a", build), 4], "int"),
     ([None], "NoneType"), (True, "bool"), (Offer, "type"), (iter([]), "list_iterator")],
)  # fmt: skip
def test_as_offers_refuses_the_rest_and_says_where(answer, said):
    with pytest.raises(TypeError) as info:
        as_offers(answer, SITE)
    assert str(info.value) == (
        f"select_linear must return None, an Offer or a list of offers, not {said} (site {SITE.path!r})"
    )


def test_as_offers_names_the_hook():
    with pytest.raises(TypeError, match=r"^select_op must return"):
        as_offers(1, OpSite("model.norm"))
