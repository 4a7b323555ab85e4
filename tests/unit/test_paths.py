"""Where everything lies, for a user, for root and for CARMA_HOME."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import pytest

from carma import paths as module
from carma.errors import BadSettings
from carma.paths import Paths, find_paths, find_socket, make_directories

HOME = {"HOME": "/home/alice"}


def everything(paths: Paths) -> list[Path]:
    return [
        paths.config_file,
        paths.state_dir,
        paths.log_dir,
        paths.socket,
        paths.database,
        paths.daemon_log,
        paths.pid_file,
        paths.vgpu_dir,
    ]


def test_carma_home_holds_all_in_one_directory() -> None:
    for uid in (0, 1001):
        paths = find_paths({**HOME, "CARMA_HOME": "/srv/carma", "XDG_STATE_HOME": "/elsewhere"}, uid)
        assert all(path.is_relative_to("/srv/carma") for path in everything(paths))
        assert paths.socket == Path("/srv/carma/carma.sock")
        assert paths.system_config_file is None


def test_a_relative_carma_home_is_made_absolute() -> None:
    assert find_paths({"CARMA_HOME": "here"}, 1001).state_dir == Path.cwd() / "here"


def test_an_empty_carma_home_is_none() -> None:
    assert find_paths({**HOME, "CARMA_HOME": ""}, 1001).layout == "user"


def test_a_user_gets_xdg_directories() -> None:
    paths = find_paths(HOME, 1001)
    assert paths.config_file == Path("/home/alice/.config/carma/config.toml")
    assert paths.system_config_file == Path("/etc/carma/config.toml")
    assert paths.database == Path("/home/alice/.local/state/carma/carma.db")
    assert paths.log_dir == Path("/home/alice/.local/share/carma/logs")
    assert paths.socket == Path("/home/alice/.local/state/carma/carma.sock")


def test_xdg_variables_count_unless_they_are_relative() -> None:
    paths = find_paths({**HOME, "XDG_STATE_HOME": "/var/s", "XDG_CONFIG_HOME": "c", "XDG_DATA_HOME": "/var/d"}, 1001)
    assert paths.state_dir == Path("/var/s/carma")
    assert paths.log_dir == Path("/var/d/carma/logs")
    assert paths.config_file == Path("/home/alice/.config/carma/config.toml")


def test_root_gets_the_systems_directories() -> None:
    paths = find_paths({"HOME": "/home/alice", "XDG_STATE_HOME": "/home/alice/s"}, 0)
    assert [str(path) for path in everything(paths)] == [
        "/etc/carma/config.toml",
        "/var/lib/carma",
        "/var/log/carma",
        "/run/carma/carma.sock",
        "/var/lib/carma/carma.db",
        "/var/log/carma/daemon.log",
        "/var/lib/carma/daemon.pid",
        "/var/lib/carma/vgpu",
    ]


def test_without_home_the_password_file_answers() -> None:
    found = find_paths({}, pwd.getpwall()[-1].pw_uid or 1)
    assert found.layout == "user"
    assert found.state_dir.is_absolute()
    with pytest.raises(BadSettings, match="no home directory"):
        find_paths({}, 3_999_999_999)


def test_a_socket_path_that_the_kernel_would_cut_is_refused() -> None:
    with pytest.raises(BadSettings, match="too long") as caught:
        find_paths({"CARMA_HOME": "/tmp/" + "x" * 100}, 1001)
    assert "shorter" in caught.value.hint
    assert find_paths({"CARMA_HOME": "/tmp/" + "x" * 80}, 1001).socket.name == "carma.sock"


def test_a_client_looks_at_home_then_its_own_then_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "system.sock"
    monkeypatch.setattr(module, "SYSTEM_SOCKET", system)
    environ = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "s")}
    own = tmp_path / "s" / "carma" / "carma.sock"
    assert find_socket(environ, 1001) == own  # neither is there: the error names the user's own
    system.touch()
    assert find_socket(environ, 1001) == system
    own.parent.mkdir(parents=True)
    own.touch()
    assert find_socket(environ, 1001) == own
    assert find_socket({**environ, "CARMA_HOME": "/nowhere"}, 1001) == Path("/nowhere/carma.sock")


def test_directories_are_made_with_their_modes_whatever_the_umask(tmp_path: Path) -> None:
    paths = _short(tmp_path / "a")
    before = os.umask(0o077)
    try:
        make_directories(paths)
        make_directories(paths)
    finally:
        os.umask(before)
    expected = 0o755 if os.geteuid() == 0 else 0o700
    for directory in (paths.state_dir, paths.log_dir):
        assert stat.S_IMODE(directory.stat().st_mode) == expected


def test_a_directory_that_others_can_change_is_refused(tmp_path: Path) -> None:
    paths = _short(tmp_path)
    make_directories(paths)
    paths.state_dir.chmod(0o777)
    with pytest.raises(BadSettings, match="all users"):
        make_directories(paths)


def test_links_of_ones_own_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("./here/../real")
    (tmp_path / "here").mkdir()
    make_directories(_short(tmp_path / "link"))
    assert (tmp_path / "real" / "home").is_dir()


def test_a_loop_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to("home")
    with pytest.raises(BadSettings, match="cannot be created"):
        make_directories(_short(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["first", "second", "home"])
def test_a_path_that_another_user_could_redirect_is_refused(tmp_path: Path, name: str) -> None:
    """A path is also refused if a link of root's leads to it."""
    (tmp_path / "real" / "home").mkdir(parents=True)
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to("real")
    target = tmp_path / "real" / "home" if name == "home" else tmp_path / name
    os.chown(target, 65534, 65534, follow_symlinks=False)
    with pytest.raises(BadSettings, match="belongs to user 65534"):
        make_directories(_short(tmp_path / "first"))


def test_a_file_in_the_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    with pytest.raises(BadSettings, match="cannot be created"):
        make_directories(_short(tmp_path))


def _short(tmp_path: Path) -> Paths:
    """Without the check of the socket's length: pytest's directories can be long."""
    home = tmp_path / "home"
    return Paths(
        layout="home",
        config_file=home / "config.toml",
        system_config_file=None,
        state_dir=home,
        log_dir=home / "logs",
        socket=home / "carma.sock",
    )
