from __future__ import annotations

import numpy as np
import pytest

from dflash_lit.data.documents import Document
from dflash_lit.errors import UserError


def test_types_are_final():
    document = Document(np.array([5, 6, 7], dtype=np.int64), np.array([False, True, True]), "a")
    assert document.input_ids.dtype == np.int32
    assert document.supervised.dtype == np.bool_
    assert len(document) == 3


@pytest.mark.parametrize(
    ("ids", "supervised", "says"),
    [
        ([5, 6, 7], [True, True], "as many"),
        ([5], [True], "at least 2"),
        ([], [], "whole numbers"),
        ([5, -1], [True, True], "token ids"),
        ([5, 2**31], [True, True], "token ids"),
        ([5.0, 6.0], [True, True], "whole numbers"),
        ([[5, 6]], [[True, True]], "one list"),
        ([5, 6], [0, 1], "true or false"),
    ],
)
def test_wrong_documents_are_named(ids, supervised, says):
    with pytest.raises(UserError, match=says) as error:
        Document(np.array(ids), np.array(supervised), "chat 17")
    assert "'chat 17'" in str(error.value)
    assert "\n" not in str(error.value)
