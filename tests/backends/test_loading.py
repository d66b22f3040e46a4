"""What a folder or an option may be: models that cannot be loaded or run are refused, and say why."""

import pytest

from verl_fn.backends.model import check_head


def test_a_head_is_lm_or_value():
    assert [check_head(head) for head in ("lm", "value")] == ["lm", "value"]
    with pytest.raises(ValueError, match="^head is 'critic'; it must be lm or value$"):
        check_head("critic")
