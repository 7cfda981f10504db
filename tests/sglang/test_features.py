"""The layers that a drafter asks of SGLang's targets: given, or refused with the reason."""

from types import SimpleNamespace

import pytest

from ddtree.sglang.features import capture


class Hands:
    """A model, or the body of one, that hands out layers."""

    def set_dflash_layers_to_capture(self, layer_ids):
        self.asked = layer_ids


def test_a_target_that_can_is_asked_in_dflash_own_count():
    model = Hands()
    capture(model, 30, (2, 11, 20, 27))
    assert model.asked == [2, 11, 20, 27]


def test_a_body_is_asked_by_what_goes_into_its_layers():
    model = SimpleNamespace(model=Hands())
    capture(model, 8, (1, 3, 6))
    assert model.model.asked == [2, 4, 7]


def test_the_last_layer_is_refused_by_name():
    with pytest.raises(ValueError, match=r"\[1, 3, 5, 7\] hold the last layer, 7, .* ddtree's own engine"):
        capture(Hands(), 8, (1, 3, 5, 7))


def test_a_target_that_hands_nothing_out_is_refused():
    with pytest.raises(ValueError, match="SimpleNamespace has no set_dflash_layers_to_capture"):
        capture(SimpleNamespace(model=None), 8, (1, 3))
