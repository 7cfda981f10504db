"""What DDTREE cannot honour inside SGLang is refused by name, value and remedy."""

from types import SimpleNamespace

import pytest

from ddtree.sglang.refusals import request_fault, server_fault


def arguments(**changes):
    fine = {
        "speculative_draft_model_path": "drafter", "speculative_num_draft_tokens": None, "pp_size": 1, "page_size": None,
        "enable_dp_attention": False, "enable_hierarchical_cache": False, "disaggregation_mode": "null",
    }  # fmt: skip
    return SimpleNamespace(**{**fine, **changes})


def request(sampling=None, **changes):
    params = SimpleNamespace(**{"custom_params": None, "beam_width": None, "watermark": None, **(sampling or {})})
    fine = {"custom_logit_processor": None, "multimodal_inputs": None, "return_hidden_states": False, "sampling_params": params}
    return SimpleNamespace(**{**fine, **changes})


def test_what_is_fine_has_no_fault():
    assert server_fault(arguments()) is None and server_fault(arguments(speculative_num_draft_tokens=2, page_size=1)) is None
    assert request_fault(request()) is None and request_fault(request({"custom_params": {"tree_budget": 0}})) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
        ({"speculative_num_draft_tokens": 1}, "must be >= 2 (the root and one node), got 1"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"page_size": 64}, "--page-size 64"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"disaggregation_mode": "decode"}, "leave it at null"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
    ],
)
def test_a_servers_argument(changes, said):
    assert said in server_fault(arguments(**changes))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request({"custom_params": {"tree_budget": -1}}), "tree_budget must be an integer >= 0, got -1"),
        (request({"custom_params": {"tree_budget": "4"}}), "got '4'"),
        (request({"beam_width": 4}), "beam_width 4"),
        (request(return_hidden_states=True), "return_hidden_states"),
        (request(multimodal_inputs=object()), "text alone"),
        (request(custom_logit_processor="x"), "custom_logit_processor"),
    ],
)
def test_a_requests_wish(asked, said):
    assert said in request_fault(asked)
