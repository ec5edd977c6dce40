"""A thread that watches the peers while kernels wait for their words."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tpkernels import _C
from tpkernels._C.host import Phase
from tpkernels.errors import TpkernelsError
from tpkernels.symm.device import DeviceWorkspace

LOOK_S = 0.02  # seconds between two looks at the peers


class Watch:
    """Ends the waits of kernels on ``spaces``, and raises the ``alarm``, when a peer is lost.

    Nothing else may use ``channel`` meanwhile, and no rank publishes RESULT in its call.
    """

    def __init__(
        self,
        channel: _C.host.Channel,
        spaces: Sequence[DeviceWorkspace],
        alarm: _C.calls.Alarm | None = None,
    ) -> None:
        self.error: TpkernelsError | None = None
        self._channel, self._spaces, self._alarm = channel, spaces, alarm
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="tpkernels-watch", daemon=True)

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                self._channel.watch(Phase.RESULT, 0.0)
            except TpkernelsError as error:
                self.error = error
                if self._alarm is not None:
                    self._alarm.raised = True
                for space in tuple(self._spaces):
                    space.abort(0 if error.peer is None else error.peer)
                return

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
