"""Check that a device is available to benchmark: `python -m experiments.measures.bench.at_hand DEVICE FOLDER`.

If it is not, one line says so, as does a file in the results folder, and the exit status is 3.
"""

import json
import sys
from pathlib import Path

from experiments.models.architectures import check_target
from experiments.support.environment import describe
from llmcache import ConfigError

NOT_RUN = "not_run.json"


def why_not(device: str, folder: Path) -> str:
    """Return why the device cannot be measured and write that to the folder; "" (and no file) if it can."""
    path = folder / NOT_RUN
    try:
        check_target(device, "bfloat16")
    except ConfigError as error:
        folder.mkdir(parents=True, exist_ok=True)
        told = {"was_run": False, "device": device, "reason": str(error), "environment": describe(seed=0)}
        path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        return f"Not run: {error}. {path} says so."
    path.unlink(missing_ok=True)
    return ""


if __name__ == "__main__":
    reason = why_not(sys.argv[1], Path(sys.argv[2]))
    print(reason, end="\n" if reason else "")
    sys.exit(3 if reason else 0)
