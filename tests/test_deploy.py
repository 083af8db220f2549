"""What `deploy/` holds is what the tools that read it take."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze: apt-get install systemd")
    unit = tmp_path / "llmcache.service"
    text = (DEPLOY / unit.name).read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/llmcache/bin/llmcache", sys.executable))  # one that is there
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_image_is_reached_from_outside_by_default() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    entry, command = (json.loads(re.findall(rf"^{name} (.*)$", text, re.M)[0]) for name in ("ENTRYPOINT", "CMD"))
    assert [*entry, *command] == ["llmcache", "serve", "--model", "minilm", "--host", "0.0.0.0"]
