"""Data URLs: all base64 forms of clients, and errors."""

import base64
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.images.data_url import data_of
from shared.models.image_processor import InvalidImageError

HEADS = [
    "data:image/png;base64,",
    "DATA:IMAGE/PNG;BASE64,",
    "data:image/png;charset=utf-8;base64,",
    "data:;base64,",
    "data:image/png; base64 ,",
    " data:image/png;name=a%2Cb;base64,\n ",
]
FORMS = {
    "plain": lambda text: text,
    "lines of 76": lambda text: base64.encodebytes(base64.b64decode(text)).decode(),
    "lines of Windows": lambda text: "\r\n".join(re.findall(".{1,4}", text)),
    "blanks and tabs": lambda text: " \t\f".join(text),
    "no padding": lambda text: text.rstrip("="),
    "for URLs": lambda text: text.replace("+", "-").replace("/", "_"),
    "for URLs, no padding": lambda text: text.replace("+", "-").replace("/", "_").rstrip("="),
    "escaped": lambda text: text.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
    "escaped line break": lambda text: f"{text}%0D%0A",
    "fragment": lambda text: f"{text}#image",
}


@pytest.mark.parametrize("form", FORMS)
@given(data=st.binary(max_size=64), head=st.sampled_from(HEADS))
@example(data=b"\xfb\xff\xfe\xfb", head=HEADS[0])  # has both differing letters and padding
def test_data_url_accepts_every_base64_form(form: str, data: bytes, head: str):
    assert data_of(head + FORMS[form](base64.b64encode(data).decode())) == data


@pytest.mark.parametrize(
    "text", ["Q", "QUJDR", "=", "QQ==QQ==", "QQ=Q", "Q*==", "é", "%ZZ", "Q%=="]
)
def test_data_url_rejects_invalid_base64(text: str):
    with pytest.raises(InvalidImageError, match="contains invalid base64"):
        data_of(HEADS[0] + text)
