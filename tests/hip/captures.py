"""A HIP session whose launches AMD's runtime captures into graphs, as torch does on a GPU."""

from __future__ import annotations

import ctypes as c
import threading
from contextlib import contextmanager

from virtual_hip.hip_runtime import HipRuntime
from virtual_hip.hip_session import HipSession, Mirror

from mla_suite.emulator.driver import options

CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL = 0, 1


class CapturingRuntime(HipRuntime):
    """HIP's calls for graphs as well."""

    def begin_capture(self, stream, mode=CAPTURE_GLOBAL):
        self.call("hipStreamBeginCapture", c.c_void_p(stream), mode)

    def end_capture(self, stream):
        """The graph of what was captured, ready to be launched."""
        graph = c.c_void_p()
        self.call("hipStreamEndCapture", c.c_void_p(stream), c.byref(graph))
        try:
            return self._made("hipGraphInstantiate", graph, None, None, c.c_size_t(0))
        finally:
            self.call("hipGraphDestroy", graph)

    def launch_graph(self, graph, stream):
        self.call("hipGraphLaunch", c.c_void_p(graph), c.c_void_p(stream))

    def destroy_graph(self, graph):
        self.call("hipGraphExecDestroy", c.c_void_p(graph))


class RepeatedMirror(Mirror):
    """Storages whose contents can go to the GPU again, for launches that are repeated."""

    def copy_in(self, stream):
        for host, (gpu, size) in self._storages.items():
            self._runtime.copy_in(gpu, host, size, stream)


class Graph:
    """A captured sequence of launches. `replay` runs it on what its host tensors hold now; -> the launches' reports."""

    def __init__(self, session):
        self.session, self.mirror = session, RepeatedMirror(session.gpu, session.runtime)
        self.declared = {}  # by the packed parameters of a launch
        self.handle = 0

    def replay(self):
        session, stream = self.session, self.session.stream()
        for said in self.declared.values():
            said.reports.clear()
        self.mirror.copy_in(stream)
        session.runtime.launch_graph(self.handle, stream)
        self.mirror.copy_out(stream)
        session.runtime.synchronize(stream)
        session.gpu.check()
        return [report for said in self.declared.values() for report in said.reports]

    def close(self):
        """Gives back the graph and its memory."""
        self.session.runtime.destroy_graph(self.handle)
        for params in self.declared:
            self.session.gpu.unexpect(params)
        self.mirror.free()


class _Capturing(threading.local):
    graph: Graph | None = None
    aside = 0


class CapturingSession(HipSession):
    """A launch waits for its end, or is captured within `capture`."""

    def __init__(self, arch, library):
        super().__init__(arch, library)
        self.runtime = CapturingRuntime(self.runtime._library)
        self._capturing = _Capturing()

    def _launch(self, kernel, grid, block, dynamic_lds, params, items):
        here, graph = self._capturing, self._capturing.graph
        if graph is None:
            super()._launch(kernel, grid, block, dynamic_lds, params, items)
            return
        with self.driver.relaxed_capture():
            here.aside = here.aside or self.runtime.stream()
            graph.mirror.place(items, here.aside)  # the captured stream takes no copies for now
            self.runtime.synchronize(here.aside)
        moved, declared = self._declare(kernel, params, items, graph.mirror, options.get().schedule)
        graph.declared[moved] = declared
        self.driver.launch(kernel, grid, block, dynamic_lds, moved)

    @contextmanager
    def capture(self, mode=CAPTURE_GLOBAL):
        """Within the block this thread's launches are captured, and executed only when the graph is replayed."""
        graph = Graph(self)
        self.runtime.begin_capture(self.stream(), mode)
        self._capturing.graph = graph
        try:
            yield graph
        finally:
            self._capturing.graph = None
            graph.handle = self.runtime.end_capture(self.stream())
