"""A run with views of one's own is exact: killed, continued, with and without workers."""

import os
import re
import signal
from pathlib import Path

import pytest

from meanshift.training.step import TrainStep
from tests.support.exact import assert_same
from tests.support.processes import make_photos, outcome, pretrain_command, run_processes

PAGE = (Path(__file__).parents[2] / "docs" / "views.md").read_text()
WORKERS = "state[0].config.data.workers"


def kill_in_step_7():
    step = TrainStep.__call__

    def changed(self, images, now):
        if now.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, images, now)

    TrainStep.__call__ = changed


@pytest.mark.slow
def test_a_killed_run_with_own_views_ends_in_the_same_bits(tmp_path):
    (code,) = re.findall(r"^```python\n# mine.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    photos = make_photos(tmp_path / "photos")
    outcomes = {}
    for name, workers, killed in (("whole", 0, False), ("again", 0, True), ("workers", 2, True)):
        out = tmp_path / name
        module = f"{tmp_path / 'mine.py'}:MyViews"
        command = pretrain_command(photos, out, views__module=module, data__workers=workers)
        if killed:
            before = {0: kill_in_step_7}
            codes, group = run_processes(1, command, tmp_path / f"{name}-killed", before=before)
            assert codes == [-signal.SIGKILL], group.output
        codes, group = run_processes(1, command, tmp_path / f"{name}-last")
        assert codes == [0], group.output
        outcomes[name] = outcome(out)
    assert_same(outcomes["again"], outcomes["whole"])
    assert_same(outcomes["workers"], outcomes["whole"], unless=WORKERS)
