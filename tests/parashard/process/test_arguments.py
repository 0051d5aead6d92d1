"""Arguments that all services share: where a service may listen and what it tells others."""

import json

import pytest

from parashard.errors import ConfigurationError
from parashard.process.arguments import advertised_address, write_address
from parashard.process.starts import Start


def test_a_service_tells_where_it_listens_unless_another_address_leads_there(tmp_path):
    file = tmp_path / "shard-0.json"
    assert advertised_address(Start.read([]), "127.0.0.1:4000") == "127.0.0.1:4000"
    assert list(tmp_path.iterdir()) == []
    found = Start.read(["--advertise", "proxy:7", "--address-file", str(file)])
    assert advertised_address(found, "127.0.0.1:4000") == "proxy:7"
    assert json.loads(file.read_text()) == {"address": "127.0.0.1:4000", "data_address": ""}
    advertised_address(found, "127.0.0.1:4000", "127.0.0.1:4001")
    assert json.loads(file.read_text()) == {"address": "127.0.0.1:4000", "data_address": "127.0.0.1:4001"}


def test_an_address_file_is_replaced_whole(tmp_path):
    file = tmp_path / "coordinator.json"
    write_address(file, {"address": "127.0.0.1:1", "pid": 7})
    with file.open() as reader:
        write_address(file, {"address": "127.0.0.1:2"})
        assert json.load(reader) == {"address": "127.0.0.1:1", "pid": 7}
    assert json.loads(file.read_text()) == {"address": "127.0.0.1:2"}
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ConfigurationError, match=r"none/x\.json cannot be written: No such file"):
        write_address(tmp_path / "none" / "x.json", {"address": "127.0.0.1:2"})
