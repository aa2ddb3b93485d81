"""Loading plugins that are installed: every failure mode names the plugin and the cause."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import pytest

from kvcore.config import Config
from kvcore.contract import CONTRACT
from kvcore.errors import ConfigError, PluginError
from kvcore.plugins import discover, load_plugins, provided_names, provider_of, resolve_plugins

Install = Callable[..., object]


def test_a_healthy_plugin_registers_next_to_the_builtins(install: Install) -> None:
    install("healthy")
    registry = load_plugins(["healthy"])
    assert registry.plugins == ("builtin", "healthy")
    assert registry.format("fake8", block=4).block == 4
    assert registry.format("fp32").name == "fp32"
    assert registry.plugin_of("formats", "fake8") == "healthy"
    assert registry.plugin_of("formats", "fp32") == "builtin"


def test_a_plugin_is_imported_only_if_enabled(install: Install) -> None:
    install("healthy", "left", "broken_import")
    load_plugins(["left"])
    assert "kvcore_fake_left" in sys.modules
    assert "kvcore_fake_healthy" not in sys.modules
    assert provider_of("formats", "fake8") == "healthy"
    assert "broken8" in provided_names("formats")
    assert "kvcore_fake_healthy" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message", "facts"),
    [
        ("broken_import", "plugin failed to import", {"cause": "ModuleNotFoundError: No module named 'foo'"}),
        ("exits_at_import", "plugin failed to import", {"cause": "SystemExit: 3"}),
        ("misspelt", "misspelt hook", {"hook": "kvcore_register_format"}),
        ("unmarked", "not marked with @hookimpl", {"hook": "kvcore_register_formats"}),
        ("unmarked_misspelt", "misspelt hook", {"hook": "kvcore_registr_backups"}),
        ("hook_takes_arguments", "does not fit its specification", {}),
        ("wraps_hooks", "cannot wrap", {"hook": "kvcore_register_formats"}),
        ("other_major", "another version of the contract", {"got": f"{CONTRACT[0] + 1}.0"}),
        ("newer_minor", "another version of the contract", {"got": f"{CONTRACT[0]}.{CONTRACT[1] + 1}"}),
        ("malformed_info", "PLUGIN is malformed", {}),
        ("without_plugin", "does not expose PLUGIN", {}),
        ("plugin_is_a_string", "PLUGIN is not a PluginInfo", {"got": "str"}),
        ("named_otherwise", "another name than its entry point", {"expected": "named_otherwise", "got": "another"}),
        ("returns_none", "must return a list or tuple", {"got": "NoneType"}),
        ("returns_strings", "not a format", {"got": "'fp8'"}),
        ("returns_wrong_kind", "not a backup", {"hook": "kvcore_register_backups"}),
        ("forgets_methods", "not a format", {"reason": "it does not implement decode, encode"}),
        ("registers_twice", "registers a format twice", {"name": "same8"}),
        ("raises_in_hook", "hook of a plugin failed", {"cause": "ZeroDivisionError: division by zero"}),
        ("exits_in_hook", "hook of a plugin failed", {"cause": "SystemExit: 3"}),
        ("class_for_a_hook", "named like a hook but no function", {"hook": "kvcore_register_formats"}),
        ("returns_an_instance", "not a format", {"hook": "kvcore_register_formats"}),
        ("promises_too_much", "does not register", {"names": ["unkept8"]}),
    ],
)
def test_a_bad_plugin_is_an_error_that_names_plugin_and_cause(
    install: Install, name: str, message: str, facts: dict[str, object]
) -> None:
    install(name)
    with pytest.raises(PluginError, match=message) as caught:
        load_plugins([name])
    assert caught.value.fields["plugin"] == name
    assert caught.value.fields["distribution"] == f"kvcore-fake-{name.replace('_', '-')}"
    assert facts.items() <= caught.value.fields.items()
    # The same is reported, and nothing else is harmed.
    report = {item.name: item for item in discover()}
    assert report[name].error is not None
    assert message in report[name].error["message"]
    assert report["builtin"].healthy


@pytest.mark.parametrize("name", ["returns_an_instance", "exits_in_hook", "class_for_a_hook", "returns_wrong_kind"])
def test_leniently_loaded_every_fault_is_recorded_and_the_rest_works(install: Install, name: str) -> None:
    install(name, "healthy")
    registry = load_plugins([name, "healthy"], strict=False)
    assert set(registry.failures) == {name}
    assert "fake8" in registry.names("formats")


@pytest.mark.parametrize(
    ("settings", "kind", "name"),
    [
        ({"cache": {"format": "fake8"}}, "formats", "fake8"),
        ({"cache": {"formats": {"swa": "fake8"}}}, "formats", "fake8"),
        ({"retraction": {"backend": "fake-disk"}}, "backups", "fake-disk"),
        ({"transfer": {"transport": "fake-wire"}}, "transports", "fake-wire"),
    ],
)
def test_a_configuration_loads_the_providers_of_what_it_names(
    install: Install, settings: dict[str, object], kind: str, name: str
) -> None:
    """As the samples do: naming what a third party provides is enough."""
    install("healthy", "keeps", "left")
    config = Config.from_mapping(settings)
    registry = load_plugins(config)
    assert registry.plugins == resolve_plugins(config) != ("builtin",)
    assert registry.item(kind, name).name == name
    assert "kvcore_fake_left" not in sys.modules


@pytest.mark.parametrize(
    ("name", "hook"),
    [("misspelt", "kvcore_register_formats"), ("unmarked_misspelt", "kvcore_register_backups")],
)
def test_a_misspelt_hook_is_told_the_nearest_real_one(install: Install, name: str, hook: str) -> None:
    install(name)
    with pytest.raises(PluginError) as caught:
        load_plugins([name])
    assert hook in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "cause"), [("broken_import", ModuleNotFoundError), ("raises_in_hook", ZeroDivisionError)]
)
def test_the_cause_is_chained(install: Install, name: str, cause: type[Exception]) -> None:
    install(name)
    with pytest.raises(PluginError) as caught:
        load_plugins([name])
    assert isinstance(caught.value.__cause__, cause)


def test_n1_a_broken_plugin_is_recorded_and_asking_for_its_format_raises_the_cause(install: Install) -> None:
    """N1: registration exceptions are caught and passed over, so a broken plugin leads to a quiet fallback."""
    install("broken_import", "healthy")
    registry = load_plugins(["broken_import", "healthy"], strict=False)
    assert registry.failures["broken_import"].fields["cause"] == "ModuleNotFoundError: No module named 'foo'"
    assert "broken8" not in registry.names("formats")
    with pytest.raises(PluginError, match="failed to import") as caught:
        registry.format("broken8")
    assert caught.value.fields["plugin"] == "broken_import"
    assert caught.value.fields["format"] == "broken8"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert caught.value.__cause__.name == "foo"
    assert registry.format("fake8").name == "fake8"
    assert registry.format("fp32").name == "fp32"


def test_n1_by_default_nothing_loads_beside_a_broken_plugin(install: Install) -> None:
    """N1, strict: the engine does not start."""
    install("broken_import", "healthy")
    with pytest.raises(PluginError, match="failed to import"):
        load_plugins(["healthy", "broken_import"])


def test_n1_kernels_that_fail_late_fail_their_plugin(install: Install) -> None:
    """N1: kernels are collected on first use; their plugin's formats are not handed out afterwards."""
    install("broken_kernels")
    strict = load_plugins(["broken_kernels"])
    assert strict.format("bk8").name == "bk8"
    with pytest.raises(PluginError, match="hook of a plugin failed") as caught:
        strict.kernels()
    assert caught.value.fields["plugin"] == "broken_kernels"
    assert caught.value.fields["cause"] == "ModuleNotFoundError: No module named 'no_such_kernels'"

    lenient = load_plugins(["broken_kernels"], strict=False)
    assert {"store", "load"} <= {kernel.op for kernel in lenient.kernels()}  # the built-in ones
    with pytest.raises(PluginError) as caught:
        lenient.format("bk8")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert lenient.format("fp32").name == "fp32"


def test_a_kernel_of_an_unknown_op_is_refused(install: Install) -> None:
    install("kernel_without_op")
    with pytest.raises(PluginError, match="not a kernel") as caught:
        load_plugins(["kernel_without_op"]).kernels()
    assert "did you mean 'store'?" in caught.value.fields["reason"]


def test_two_distributions_with_one_plugin_name(install: Install) -> None:
    install("twin_a", "twin_b")
    with pytest.raises(PluginError, match="two installed distributions") as caught:
        load_plugins(["twin"])
    assert caught.value.fields["distributions"] == ["kvcore-fake-twin-a", "kvcore-fake-twin-b"]
    assert [item.healthy for item in discover() if item.name == "twin"] == [False, False]
    assert load_plugins().plugins == ("builtin",)  # they are nobody's problem until enabled
    with pytest.raises(PluginError, match="two installed distributions"):
        load_plugins(["twin"], strict=False).format("twin16")


def test_two_plugins_registering_one_name_names_both(install: Install) -> None:
    install("left", "right")
    for order in (["left", "right"], ["right", "left"]):
        with pytest.raises(PluginError, match="register a format of one name") as caught:
            load_plugins(order)
        assert caught.value.fields["name"] == "shared8"
        assert caught.value.fields["plugins"] == ["left", "right"]
    lenient = load_plugins(["right", "left"], strict=False)
    assert lenient.format("left8").name == "left8"
    assert lenient.format("right8").name == "right8"
    with pytest.raises(PluginError, match="register a format of one name"):
        lenient.format("shared8")
    assert load_plugins(["left"]).format("shared8").name == "shared8"


def test_a_builtin_name_cannot_be_taken_over(install: Install) -> None:
    install("takes_fp32")
    with pytest.raises(PluginError) as caught:
        load_plugins(["takes_fp32"])
    assert caught.value.fields["plugins"] == ["builtin", "takes_fp32"]


def test_requirements_are_loaded_and_a_missing_one_is_named(install: Install) -> None:
    install("needs_healthy", "needs_absent", "healthy", "ring_a", "ring_b")
    assert load_plugins(["needs_healthy"]).plugins == ("builtin", "healthy", "needs_healthy")
    assert load_plugins(["ring_b"]).plugins == ("builtin", "ring_a", "ring_b")
    with pytest.raises(PluginError, match="not installed") as caught:
        load_plugins(["needs_absent"])
    assert caught.value.fields == {"plugin": "helthy", "required_by": "needs_absent"}
    assert "'healthy'" in caught.value.remedy
    report = {item.name: item for item in discover()}
    assert report["needs_healthy"].healthy
    assert report["needs_absent"].error is not None
    assert "'healthy'" in report["needs_absent"].error["remedy"]


def test_a_plugin_whose_requirement_failed_has_failed(install: Install) -> None:
    install("needs_broken", "broken_import")
    registry = load_plugins(["needs_broken"], strict=False)
    assert set(registry.failures) == {"needs_broken", "broken_import"}
    with pytest.raises(PluginError, match="requires another that failed") as caught:
        registry.format("nb8")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_unknown_plugin_names_the_nearest(install: Install) -> None:
    install("healthy")
    with pytest.raises(PluginError, match="not installed") as caught:
        load_plugins(["helthy"])
    assert caught.value.fields["plugin"] == "helthy"
    assert caught.value.remedy == "did you mean 'healthy'?"
    with pytest.raises(ConfigError, match="list of names"):
        load_plugins("healthy")


def test_load_order_decides_nothing(install: Install) -> None:
    names = ("healthy", "left", "needs_healthy", "model_a")
    install(*names)

    def picture(order: tuple[str, ...]) -> object:
        registry = load_plugins(order)
        kinds = ("formats", "backups", "transports", "index_spaces", "models", "commands", "kernels", "pools")
        listed = [(kind, name, registry.plugin_of(kind, name)) for kind in kinds for name in registry.names(kind)]
        return registry.plugins, listed, [(k.op, k.name) for k in registry.kernels()]

    pictures = [picture(order) for order in itertools.permutations(names)]
    assert all(one == pictures[0] for one in pictures)
    assert ("formats", "nh8", "needs_healthy") in pictures[0][1]  # type: ignore[index]


def test_load_order_does_not_decide_which_fault_is_reported(install: Install) -> None:
    names = ("broken_import", "misspelt", "raises_in_hook")
    install(*names)
    seen = set()
    for order in itertools.permutations(names):
        with pytest.raises(PluginError) as caught:
            load_plugins(order)
        seen.add(str(caught.value))
    assert len(seen) == 1


def test_two_providers_of_one_format_are_an_error_until_one_is_named(install: Install) -> None:
    install("popular_a", "popular_b")
    with pytest.raises(PluginError, match="two installed plugins provide") as caught:
        provider_of("formats", "popular8")
    assert caught.value.fields["plugins"] == ["popular_a", "popular_b"]
    asked = {"cache": {"format": "popular8"}}
    with pytest.raises(PluginError, match="two installed plugins provide"):
        resolve_plugins(Config.from_mapping(asked))
    named = Config.from_mapping({**asked, "plugins": ["popular_b"]})
    assert resolve_plugins(named) == ("builtin", "popular_b")
    assert load_plugins(named).plugin_of("formats", "popular8") == "popular_b"


def test_an_entry_that_points_at_no_plugin_is_refused(install: Install) -> None:
    install("points_nowhere")
    with pytest.raises(PluginError, match="points at no plugin") as caught:
        provider_of("formats", "stray8")
    assert caught.value.fields["distribution"] == "kvcore-fake-points-nowhere"


def test_a_named_format_enables_its_plugin_and_nothing_else(install: Install) -> None:
    install("healthy", "left", "broken_import")
    config = Config.from_mapping({"cache": {"format": "fake8"}})
    assert resolve_plugins(config) == ("builtin", "healthy")
    assert resolve_plugins(Config()) == ("builtin",)
    assert resolve_plugins(Config.from_mapping({"plugins": ["left", "left"]})) == ("builtin", "left")
    assert provider_of("formats", "nothing_has_this") is None


def test_discover_reports_every_plugin_with_what_it_provides(install: Install) -> None:
    install("healthy", "broken_import", "needs_healthy")
    reports = {item.name: item for item in discover()}
    assert list(reports) == sorted(reports)
    healthy = reports["healthy"]
    assert (healthy.distribution, healthy.version) == ("kvcore-fake-healthy", "1.5")
    assert (healthy.contract, healthy.summary) == (CONTRACT, "a fake")
    assert healthy.provides == {"formats": ("fake8",), "commands": ("fake-hello",)}
    broken = reports["broken_import"]
    assert broken.provides == {"formats": ("broken8",), "commands": ("fake-broken",)}
    assert broken.error is not None
    assert broken.error["fields"]["cause"] == "ModuleNotFoundError: No module named 'foo'"
    assert "formats" in reports["builtin"].provides
    assert "kernels" not in reports["builtin"].provides


def test_deep_discovery_finds_kernels_that_do_not_load(install: Install) -> None:
    install("broken_kernels")
    shallow = {item.name: item for item in discover()}["broken_kernels"]
    assert shallow.error is None
    assert [word.split(",")[0] for word in shallow.missing] == ["no_such_kernels"]  # seen in its source
    reports = {item.name: item for item in discover(deep=True)}
    assert reports["broken_kernels"].error is not None
    assert "store/" in "".join(reports["builtin"].provides["kernels"])
