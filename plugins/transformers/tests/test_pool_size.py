"""The size of ``host_pool`` under ``kvcore run``."""

from kvcore.config import load_config
from kvcore_transformers.commands.running import with_pool_size


def test_host_pool_is_as_large_as_the_cache_unless_its_size_is_configured(tmp_path):
    file = tmp_path / "kvcore.toml"
    file.write_text('[retraction]\nbackend = "host_pool"\n[retraction.options]\nblock_size = "4KiB"\n')
    config = with_pool_size(load_config(file, {"cache.memory": "18MiB"}))
    assert config.retraction.options == {"size": 18 << 20, "block_size": "4KiB"}
    file.write_text('[retraction]\nbackend = "host_pool"\n[retraction.options]\nsize = "5MiB"\n')
    assert with_pool_size(load_config(file)).retraction.options == {"size": "5MiB"}
    for other in ({}, {"retraction.policy": "recompute", "retraction.backend": "host_pool"}):
        assert with_pool_size(load_config(None, other)).retraction.options == {}
