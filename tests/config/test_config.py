"""`config.toml`: defaults, every key, and errors that name the key."""

from __future__ import annotations

import pytest

from kvd.config.config import Config, ModelEntry, load, parse
from kvd.host.memory.nvidia import Device
from protocol.errors import ConfigError
from protocol.kv import KVSpec
from protocol.policy import ModelPolicy


def test_no_file_means_the_defaults(tmp_path):
    assert load(tmp_path / "config.toml") == Config()


def test_a_file_with_everything(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(
        """
        budget = "8GiB"
        models = ["demo", {source = "/models/qwen", alias = "qwen", kv = "k8v4"}]
        max_rows = 16
        prefill_chunk = 512
        drain_timeout_s = 5
        blas = "off"
        native = "off"
        attention = "reference"
        log_level = "debug"
        """
    )
    config = load(file)
    assert config.budget_bytes == 8 * 2**30
    assert config.entries == [
        ModelEntry("demo"),
        ModelEntry("/models/qwen", alias="qwen", kv="k8v4"),
    ]
    assert [entry.kv_spec for entry in config.entries] == [KVSpec(8, 8), KVSpec(8, 4)]
    assert config.attention == "reference"
    assert (config.max_rows, config.prefill_chunk, config.drain_timeout_s) == (16, 512, 5.0)


@pytest.mark.parametrize(
    ("platform", "device", "chunk", "lone"),
    [
        ("linux", None, 64, 256),
        ("darwin", None, 256, None),
        ("linux", Device(80 * 2**30), 1024, None),
        ("linux", Device(None), 1024, None),
    ],
)
def test_the_default_prefill_chunk_depends_on_the_device(
    monkeypatch, platform, device, chunk, lone
):
    monkeypatch.setattr("kvd.host.memory.nvidia.first_device", lambda: device)
    monkeypatch.setattr("sys.platform", platform)
    assert (Config().chunk, Config().lone_chunk) == (chunk, lone)
    for size in (64, 320):
        chosen = parse(f"prefill_chunk = {size}")
        assert (chosen.chunk, chosen.lone_chunk) == (size, None)


def test_the_scratch_on_cuda_is_a_part_of_the_budget(monkeypatch):
    gib = 1 << 30
    monkeypatch.setattr("kvd.host.memory.nvidia.first_device", lambda: None)
    assert Config().attention_scratch(100 * gib) == gib // 4
    monkeypatch.setattr("kvd.host.memory.nvidia.first_device", lambda: Device(None))
    found = [Config().attention_scratch(budget * gib) for budget in (2, 8, 32, 63, 104)]
    assert found == [gib // 4, gib // 4, gib, gib, 2 * gib]


def test_kv_settings_of_a_model_in_a_table():
    config = parse(
        """
        [[models]]
        source = "demo"

        [[models]]
        source = "/models/qwen"
        alias = "qwen"

        [models.kv]
        scheme = "k8v4"
        group_size = 32
        value_group_size = 128
        schemes = ["k4v4", "k4v2g64"]
        floors = { 0 = "k8v8", -1 = "k16v16" }
        quantized_kv_start = 512
        max_kv_size = 8192
        keep = 8
        """
    )

    assert [entry.kv_spec for entry in config.entries] == [
        KVSpec(),
        KVSpec(
            8,
            4,
            group_size=32,
            value_group_size=128,
            schemes=("k4v4", "k4v2g64"),
            floors={0: "k8v8", -1: "k16v16"},
            quantized_kv_start=512,
            max_kv_size=8192,
            keep=8,
        ),
    ]


def kv(settings: str) -> str:
    return f"models = [{{source = 'b', kv = {{{settings}}}}}]"


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("bugdet = 1", "bugdet", "did you mean budget?"),
        ("zzz = 1", "zzz", "known keys: budget, models"),
        ("budget = -1", "budget", "budget must be at least 1"),
        ("budget = '0'", "budget", "out of range"),
        (f"budget = '{'9' * 400}'", "budget", "out of range"),
        (f"budget = {'9' * 400}", "budget", ""),
        ("budget = 'many'", "budget", "write it like 8GiB"),
        ("budget = 3", "budget", "3 B is less than the minimum of 64.0 MiB; write the unit"),
        ("budget = '63MiB'", "budget", "63.0 MiB is less than the minimum"),
        ("models = [{sorce = 'x'}]", "models[0].sorce", "did you mean source?"),
        ("models = ['a', {source = ''}]", "models[1].source", "must not be empty"),
        ("models = ['a', {source = 'b', kv = 'k7v8'}]", "models[1].kv", "no KV scheme"),
        ("models = [{source = 'b', kv = 8}]", "models[0].kv", "must be a text or an object, not"),
        (kv("scheme = 'k7v8'"), "models[0].kv.scheme", "key bits must be one of 2, 3, 4, 5, 6, 8"),
        (kv("schem = 'k8v8'"), "models[0].kv.schem", "did you mean scheme?"),
        (kv("group_size = 16"), "models[0].kv.group_size", "must be one of 32, 64, not 16"),
        (kv("scheme = 'k4v4g32', group_size = 64"), "models[0].kv.group_size", "set it once"),
        (kv("schemes = ['k4v4', 'k8v4']"), "models[0].kv.schemes", "must go down"),
        (kv("floors = {x = 'k8v8'}"), "models[0].kv.floors", "must be a whole number, not a text"),
        (kv("max_kv_size = 100"), "models[0].kv.max_kv_size", "must be at least 256"),
        (kv("max_kv_size = 512, keep = 500"), "models[0].kv.keep", "must be at most 384, because"),
        ("models = [1]", "models[0]", "must be a text or an object, not a number"),
        ("prefill_chunk = 65", "prefill_chunk", "multiple of 64"),
        ("max_rows = 0", "max_rows", "must be at least 1"),
        ("models = [{source = 'a', alias = 'a b'}]", "models[0].alias", "letters, digits"),
        ("log_level = 'loud'", "log_level", "one of debug, error, info, warning, not 'loud'"),
        ("watchdog = {decode = 9}", "watchdog.decode", "did you mean decode_s?"),
        ("watchdog = {decode_s = 0}", "watchdog.decode_s", "must be more than 0"),
        ("drain_timeout_s = 'long'", "drain_timeout_s", "must be a number, not a text"),
        ("drain_timeout_s = inf", "drain_timeout_s", "must be at most 31536000"),
        ("drain_timeout_s = nan", "drain_timeout_s", "must be at least 0"),
        ("journal_keep_s = 1e308", "journal_keep_s", "must be at most 31536000"),
        ("models = ['']", "models[0]", "must not be empty"),
        (r'models = ["/a\u0000/demo"]', "models[0]", "must not contain NUL"),
        (r'models = [{source = "a\u0000"}]', "models[0].source", "must not contain NUL"),
        ("models = ['/a/my model']", "models[0]", "the name 'my model', but a name may hold"),
        ("models = ['/a/x', 'b/x']", "models[1]", "models[0] have the same name 'x'"),
        (
            "models = ['a', {source = 'b', alias = 'a'}]",
            "models[1]",
            "give one of them another alias",
        ),
    ],
)
def test_an_error_names_the_key(text, key, says):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.detail["key"] == key
    assert says in caught.value.message
    assert key in caught.value.message


def test_the_error_for_invalid_toml_names_the_file_and_the_line():
    with pytest.raises(ConfigError, match=r"my\.toml is not TOML: .*line 2"):
        parse("budget = [1\nx", "my.toml")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("budget = 8GiB", 'budget = "8GiB"'),
        ("max_rows = 4\nbudget = 8 GiB  # half", 'budget = "8 GiB"'),
        ("[http]\nhost = 0.0.0.0", 'host = "0.0.0.0"'),
        ("log_level = debug", 'log_level = "debug"'),
        ("budget = ", None),
        ("models = [demo]", None),
        ('budget = "8GiB', None),
        ("budget = [1\nx", None),
        ("x", None),
    ],
)
def test_missing_quotes_are_pointed_out(text, advice):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    if advice is None:
        assert "quotes" not in caught.value.message
    else:
        assert caught.value.message.endswith(f"; write texts in quotes: {advice}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"budget = {'[' * 1000}{']' * 1000}", "nested too deeply"),
        (f"budget = {'{a=' * 1000}", "nested too deeply"),
        (f"budget = 1{'0' * 5000}", "is not TOML"),
    ],
)
def test_what_the_parser_cannot_read_is_a_config_error(text, reason):
    with pytest.raises(ConfigError, match=f"my.toml.*{reason}"):
        parse(text, "my.toml")


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path):
    (tmp_path / "config.toml").write_bytes(b'budget = "\xff"')
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "config.toml")


def test_the_policy_of_a_model():
    config = parse(
        """
        [[models]]
        source = "/models/qwen"
        load = "demand"
        priority = 2
        pinned = true
        idle_ttl_s = 600
        max_context = 8192
        ranks = 2
        """
    )
    (entry,) = config.entries

    assert entry.load == "demand"
    assert entry.policy == ModelPolicy(
        priority=2, pinned=True, idle_ttl_s=600.0, max_context=8192, ranks=2
    )
    assert parse('models = ["demo"]').entries[0].policy == ModelPolicy()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("priority = 101", "models[0].priority must be at most 100"),
        ("ranks = 9", "models[0].ranks must be at most 8"),
        ("ranks = 0", "models[0].ranks must be at least 1"),
        ("idle_ttl_s = 0", "models[0].idle_ttl_s must be more than 0"),
        ('load = "later"', "models[0].load must be one of demand, start"),
    ],
)
def test_the_error_for_an_invalid_field_of_a_model_names_it(line, says):
    with pytest.raises(ConfigError) as refused:
        parse(f'[[models]]\nsource = "demo"\n{line}')
    assert says in refused.value.message.replace("...", "0")
