"""Several replicas' metrics as one text that Prometheus reads."""

from prometheus_client.parser import text_string_to_metric_families

from ddtree.engine.request import Emission, Request
from ddtree.replicas.merge import merge
from ddtree.server.metrics import Metrics


def metrics_of(num_tokens: int) -> str:
    metrics = Metrics('a "model", {odd}', clock=lambda: 1.0)
    metrics.began(1, Request((1, 2), 9))
    metrics.emitted(Emission(1, tuple(range(num_tokens)), "stop"))
    return metrics.render(1, 2, 0.5).decode()


def test_every_sample_is_kept_with_its_replica():
    alone = {index: list(text_string_to_metric_families(metrics_of(index + 3))) for index in (0, 1)}
    merged = list(text_string_to_metric_families(merge({index: metrics_of(index + 3) for index in (0, 1)})))
    assert [each.name for each in merged] == [each.name for each in alone[0]]
    assert [(each.type, each.documentation) for each in merged] == [(each.type, each.documentation) for each in alone[0]]

    def samples(families, index):
        return {
            (s.name, *sorted((k, v) for k, v in s.labels.items() if k != "replica")): s.value
            for family in families
            for s in family.samples
            if s.labels.get("replica", str(index)) == str(index) and not s.name.endswith("_created")
        }

    for index in (0, 1):
        assert samples(merged, index) == samples(alone[index], index)
    tokens = next(each for each in merged if each.name == "ddtree:generation_tokens")
    assert {s.labels["replica"]: s.value for s in tokens.samples if s.name.endswith("_total")} == {"0": 3, "1": 4}


def test_nobody_to_ask_is_an_empty_text():
    assert merge({}) == ""
