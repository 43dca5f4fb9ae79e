"""Runs `script` with `arguments`, its output in `log`: names that `forks.ForkedScript` sets before it runs this."""

import os
import runpy
import sys

if __name__ == "__main__":
    given = globals()
    output = os.open(given["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(given["environment"])
    sys.argv = [given["script"], *given["arguments"]]
    runpy.run_path(given["script"], run_name="__main__")
