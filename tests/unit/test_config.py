"""workbench.yaml: layers, refusals that name the nearest right key, warnings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serving.core.state import Tier, TierSlo
from workbench.config import StartPolicy, load_config
from workbench.config_layers import ConfigError

MINIMAL = """
models:
  tiny: {source: "pypi:tiny==1.0"}
pools:
  - {model: tiny, hardware: cpu, replicas: 2}
"""


def write(folder: Path, text: str = MINIMAL) -> Path:
    file = folder / "workbench.yaml"
    file.write_text(text)
    return file


def load(folder: Path, text: str = MINIMAL, **env: str):
    return load_config(write(folder, text), env)


def test_defaults_stand_under_the_file(tmp_path: Path):
    config = load(tmp_path)
    assert config.hardware["h200-141g"].memory_gb == 141
    assert config.slo.of("h100-80g").ttft_p99_s == 1.0
    assert config.slo.of("cpu").ttft_p99_s > 1.0
    assert config.data_dir == tmp_path / ".workbench"
    assert config.pools[0].pool_id == "tiny-cpu"
    assert config.pools[0].start is StartPolicy.WITH_STACK


def test_a_price_of_ones_own_keeps_the_rest_of_the_class(tmp_path: Path):
    config = load(tmp_path, MINIMAL + "hardware: {cpu: {usd_per_hour: 0.09}}\n")
    assert config.hardware["cpu"].usd_per_hour == 0.09
    assert config.hardware["cpu"].watts == 15


def test_the_environment_stands_over_the_file(tmp_path: Path):
    config = load(tmp_path, WORKBENCH__GATEWAY__PORT="9000", WORKBENCH__POOLS__0__REPLICAS="3")
    assert config.gateway.port == 9000
    assert config.pools[0].replicas == 3


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("gatway: {port: 1}", "unknown key 'gatway'; did you mean 'gateway'?"),
        ("gateway: {prot: 1}", "gateway: unknown key 'prot'; did you mean 'port'?"),
        ("gateway: {port: 70000}", "gateway.port: Input should be less than or equal to 65535 (found 70000)"),
        (
            "slo: {hardware: {cpu: {ttft_p9_s: 1}}}",
            "slo.hardware.cpu: unknown key 'ttft_p9_s'; did you mean 'ttft_p99_s'?",
        ),
        ("slo: {hardware: {cqu: {ttft_p99_s: 1}}}", "slo.hardware: unknown hardware class 'cqu'; did you mean 'cpu'?"),
        ("slo: {tiers: {bach: {ttft_p99_s: 1}}}", "slo.tiers: unknown tier 'bach'; did you mean 'batch'?"),
        ("routing: {weights: {coost: 1}}", "routing.weights: unknown scorer 'coost'; did you mean 'cost'?"),
        ("routing: {weights: {cost: -1}}", "routing weights must be finite and not negative"),
        ("data_dir: x\ndata_dir: y", "the key 'data_dir' stands twice"),
        ("gateway: [", "workbench.yaml"),
        ("gateway: {port: 2024-13-45}", "month must be in 1..12"),
        (f"gateway: {{port: {'1' * 5000}}}", "4300 digits"),
        ("gateway: " + "[" * 1000 + "]" * 1000, "nested too deep"),
        ('data_dir: "a\\0b"', "data_dir: no path holds a NUL"),
        ("hardware: {cpu: {usd_per_hour: .inf}}", "hardware.cpu.usd_per_hour: Input should be a finite number"),
        ("hardware: {cpu: {tflops: {bf16: .inf}}}", "hardware.cpu.tflops.bf16: Input should be a finite number"),
        ("stores: {redis_url: junk}", "stores: redis_url (or REDIS_URL): 'junk' is no redis://host:port"),
        ('stores: {redis_url: "redis://:6379"}', "is no redis://host:port"),
    ],
)
def test_a_mistake_is_named_with_its_path(tmp_path: Path, extra: str, expected: str):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, MINIMAL + extra + "\n")
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ("{model: tini, hardware: cpu}", "pools.0.model: unknown model 'tini'; did you mean 'tiny'?"),
        ("{model: tiny, hardware: h100}", "pools.0.hardware: unknown hardware class 'h100'; did you mean 'h100-80g'?"),
        ("{model: tiny, hardware: cpu, launcher: attach}", "needs urls"),
        ("{model: tiny, hardware: cpu, launcher: attach, urls: ['host:8000']}", "urls: 'host:8000' is no http://host"),
        ("{model: tiny, hardware: cpu, launcher: attach, urls: ['http://']}", "urls: 'http://' is no http://host:port"),
        ("{model: tiny, hardware: cpu, launcher: attach, urls: ['http://h:99999']}", "is no http://host:port"),
        ("{model: tiny, hardware: cpu, adapters: [french]}", "adapters are for launcher 'attach'"),
        ("{model: tiny, hardware: cpu, launcher: fake, adapters: [a, a]}", "each needs a name of its own"),
        ("{model: tiny, hardware: cpu, launcher: fake, adapters: [tiny]}", "not the model's (tiny)"),
        ("{model: tiny, hardware: cpu, cores: [[0], [1]]}", "cores names 2 replicas and replicas is 1"),
        ("{model: tiny, hardware: cpu, engine: {max_num_seq: 4}}", "did you mean 'max_num_seqs'?"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(tmp_path: Path, pool: str, expected: str):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, f'models: {{tiny: {{source: "pypi:tiny==1.0"}}}}\npools: [{pool}]\n')
    assert expected in str(error.value)


def test_two_pools_of_one_name_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="two pools are called 'tiny-cpu'"):
        load(tmp_path, MINIMAL + "  - {model: tiny, hardware: cpu}\n")


def test_an_unknown_variable_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="did you mean 'gateway'"):
        load(tmp_path, WORKBENCH__GATWAY__PORT="1")
    with pytest.raises(ConfigError, match="expected an index from 0 to 0"):
        load(tmp_path, WORKBENCH__POOLS__4__REPLICAS="1")


@pytest.mark.parametrize("value", ["[", "2024-13-45", "1" * 5000, "[" * 1000])
def test_a_variable_that_is_no_yaml_is_refused(tmp_path: Path, value: str):
    with pytest.raises(ConfigError, match=r"WORKBENCH__GATEWAY__PORT: '.* is no YAML value"):
        load(tmp_path, WORKBENCH__GATEWAY__PORT=value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path):
    file = tmp_path / "workbench.yaml"
    file.write_bytes(b"models: \xff\xfe")
    with pytest.raises(ConfigError, match="is no UTF-8 text"):
        load_config(file, env={})


def test_one_replica_is_warned_about(tmp_path: Path):
    assert load(tmp_path).warnings() == []
    single = load(tmp_path, WORKBENCH__POOLS__0__REPLICAS="1")
    assert single.warnings() == ["models.tiny: one replica only, so a restart of it is an outage of the model"]


def test_a_missing_file_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--config FILE"):
        load_config(env={})


def test_the_file_is_found_from_a_folder_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert load_config(env={}).data_dir == tmp_path / ".workbench"


def test_the_projects_own_file_is_valid():
    config = load_config(Path(__file__).parents[2] / "workbench.yaml", {})
    assert {pool.model for pool in config.pools} == set(config.models)


def test_what_the_projects_own_file_shows_in_comments_is_valid(tmp_path: Path):
    text = (Path(__file__).parents[2] / "workbench.yaml").read_text("utf-8")
    shown = re.sub(r"^# (?=hardware:|  h200-141g:|stores:)", "", text, flags=re.MULTILINE)
    config = load(tmp_path, shown)
    assert config.hardware["h200-141g"].usd_per_hour == 3.10
    assert config.stores.mlflow_tracking_uri == "http://127.0.0.1:5000"
    assert config.slo == load(tmp_path, MINIMAL).slo


def test_a_store_behind_a_socket_is_one(tmp_path: Path):
    assert load(tmp_path, REDIS_URL="unix:///run/store.sock").stores.redis_url == "unix:///run/store.sock"
    with pytest.raises(ConfigError, match="REDIS_URL"):
        load(tmp_path, REDIS_URL="junk")


def test_the_usual_variables_name_servers_that_somebody_else_runs(tmp_path: Path):
    config = load(tmp_path, REDIS_URL="redis://store:6379", MLFLOW_TRACKING_URI="http://mlflow:5000")
    assert config.stores.redis_url == "redis://store:6379"
    assert config.stores.mlflow_tracking_uri == "http://mlflow:5000"


def test_weights_and_slos_of_a_tier_reach_the_published_policy(tmp_path: Path):
    routing = "routing: {tier_weights: {batch: {cost: 1.0}}, slos: {interactive: {ttft_s: 1.0, tpot_s: 0.05}}}\n"
    policy = load(tmp_path, MINIMAL + routing).routing.policy()
    assert policy.weights_of(Tier.BATCH) == {"cost": 1.0}
    assert policy.weights_of(Tier.DEFAULT) == policy.weights
    assert policy.slos[Tier.INTERACTIVE] == TierSlo(1.0, 0.05)
    for wrong, says in (("batch: {prize: 1.0}", "prize"), ("gold: {cost: 1.0}", "gold")):
        with pytest.raises(ConfigError, match=says):
            load(tmp_path, MINIMAL + f"routing: {{tier_weights: {{{wrong}}}}}\n")
