"""A folder with a small text, for commands that train on it."""

import pytest
from tiny import write_text


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("room")
        patch.setenv("PACELINE_CACHE", str(folder / "cache"))
        write_text(folder / "text.txt", paragraphs=120)
        yield folder
