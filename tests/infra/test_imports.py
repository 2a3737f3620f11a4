import gc

import pytest

from infra.imports import quick_imports


def test_the_collector_is_off_during_imports_and_skips_what_they_made() -> None:
    with quick_imports():
        assert not gc.isenabled()
        made = [[number] for number in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() > len(made)
    assert not any(each is made for each in gc.get_objects())


def test_the_collector_is_left_as_it_was_after_an_error_and_inside_another_block() -> None:
    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()
    with quick_imports():
        with quick_imports():
            pass
        assert not gc.isenabled()
