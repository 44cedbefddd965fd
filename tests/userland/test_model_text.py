"""Values of user code as a model reads them, compared with pydantic's JSON where it writes the same."""

import datetime
import json
import uuid
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import BaseModel, TypeAdapter

from megappo.userland.model_text import ModelTextFormatter, model_text

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)


class Colour(Enum):
    RED = "rot"


@dataclass(slots=True)
class Place:
    name: str
    day: datetime.date
    colour: Colour


class Order(BaseModel):
    place: Place
    at: datetime.datetime


PLACE = Place("Zürich", NOW.date(), Colour.RED)


@pytest.mark.parametrize("value", [PLACE, Order(place=PLACE, at=NOW), [NOW.time(), uuid.UUID(int=7), Path("a/b")]])
def test_records_and_dates_are_as_pydantic_writes_them(value):
    assert json.loads(model_text(value)) == json.loads(TypeAdapter(type(value)).dump_json(value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("ein Wort, 好", "ein Wort, 好"),
        ({"Wort": "好", "none": None}, '{"Wort": "好", "none": null}'),
        ([Decimal("0.10"), Fraction(1, 4), np.float32(0.5), np.int64(3), np.bool_(True)], "[0.1, 0.25, 0.5, 3, true]"),
        ({"a": np.arange(4).reshape(2, 2), "b": torch.tensor([1.5])}, '{"a": [[0, 1], [2, 3]], "b": [1.5]}'),
        (np.array(["2026-01-02"], "datetime64[ns]"), '["2026-01-02T00:00:00.000000000"]'),
        (np.datetime64("2026-01-02"), '"2026-01-02"'),
    ],
)
def test_json_is_as_people_write_it(value, text):
    assert model_text(value) == text


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", Place, object()])
def test_a_value_that_json_lacks_is_an_error_that_names_its_type(value):
    with pytest.raises(TypeError, match=f" is {type(value).__name__}$"):
        model_text({"deep": [value]})


def test_templates_hold_json():
    label = {"answer": "ja, 好", "steps": [0.5, True]}
    text = ModelTextFormatter().format("{label} {label[answer]} {label[steps]} {{}} {score:.1f}", label=label, score=2)
    assert text == '{"answer": "ja, 好", "steps": [0.5, true]} ja, 好 [0.5, true] {} 2.0'
