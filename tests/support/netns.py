# SPDX-License-Identifier: Apache-2.0
"""Hosts for tests: network namespaces that reach each other.

    with Network(3) as net:
        daemon = net.popen(0, [...])       # net.address(0) is host 0's address
        net.cut(2); net.mend(2)            # host 2's link, both ways
        net.cut(0, to=[2]); net.mend(0)    # what 0 sends to 2 is dropped, not what 2 sends to 0
    with Network(2, switch=True) as net:   # slower: frames pass through frame_switch.py
        net.impair(1, delay_ms=50, loss=0.01)   # what host 1 sends

Needs root and `ip`; `require()` ends the program with 77 (skipped) without them. Hosts are joined
by veth and a bridge, which is in a namespace too: nothing touches the network of the machine. With
`switch` they are joined by TAP devices and a program, because not every kernel has `tc netem`. The
test's own process is on none of the hosts: run clients with net.popen or net.run, or call
net.enter, which moves the calling thread, and the threads that it starts, onto a host.
"""

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid

SKIPPED = 77
CLONE_NEWNET = 0x40000000
SWITCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "frame_switch.py")


def _ip(*arguments):
    done = subprocess.run(["ip", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=30)
    if done.returncode != 0:
        raise RuntimeError("ip %s: %s" % (" ".join(arguments), done.stdout.strip()))
    return done.stdout


def missing():
    """Why namespaces cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the program ip is missing"
    probe = "moed-probe-%s" % uuid.uuid4().hex[:6]
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except RuntimeError as error:
        return str(error)
    return None


def require():
    """Ends the program with 77, which ctest shows as skipped, if namespaces cannot be made."""
    reason = missing()
    if reason is not None:
        print("skipped:", reason)
        sys.exit(SKIPPED)


def _set_namespace(file):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _await_host(address, seconds=20):
    """Returns once a host refuses a connection: no port is open there yet."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, 9), timeout=1).close()
            return
        except ConnectionRefusedError:
            return
        except OSError:
            if time.monotonic() > end:
                raise


def leave(home):
    """Undoes Network.enter; `home` is the open /proc/self/ns/net from before."""
    _set_namespace(home)


class Network:
    """`hosts` namespaces; host h has the address 10.77.0.(h + 1) on eth0."""

    def __init__(self, hosts, switch=False):
        self.hosts = hosts
        self.name = "moed-%s" % uuid.uuid4().hex[:6]
        self.with_switch = switch
        self.switch = None
        self.made = []
        self.processes = []

    def namespace(self, host):
        return "%s-%d" % (self.name, host)

    def address(self, host):
        return "10.77.0.%d" % (host + 1)

    # ---------------------------------------------------------------- set-up, end

    def __enter__(self):
        try:
            for host in range(self.hosts):
                self._make(self.namespace(host))
            if self.with_switch:
                self._join_by_switch()
            else:
                self._join_by_bridge()
            for host in range(self.hosts):
                there = self.namespace(host)
                _ip("-n", there, "address", "add", self.address(host) + "/24", "dev", "eth0")
                _ip("-n", there, "link", "set", "eth0", "up")
                _ip("-n", there, "link", "set", "lo", "up")
            for host in range(self.hosts):
                self._await_others(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self, namespace):
        _ip("netns", "add", namespace)
        self.made.append(namespace)

    def _join_by_bridge(self):
        bridge = self.name + "-br"
        self._make(bridge)
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for host in range(self.hosts):
            _ip("-n", self.namespace(host), "link", "add", "eth0", "type", "veth",
                "peer", "name", "port%d" % host, "netns", bridge)
            _ip("-n", bridge, "link", "set", "port%d" % host, "master", "br0", "up")

    def _join_by_switch(self):
        names = [self.namespace(host) for host in range(self.hosts)]
        self.switch = subprocess.Popen([sys.executable, SWITCH, *names], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True)
        if self.switch.stdout.readline() != "ready\n":
            raise RuntimeError("the switch did not start")

    def _await_others(self, host):
        """A new link takes some time until it carries frames; until then others are unreachable."""
        errors = []

        def look():
            try:
                self.enter(host)
                for other in range(self.hosts):
                    _await_host(self.address(other))
            except OSError as error:
                errors.append(error)

        thread = threading.Thread(target=look)  # it stays on that host
        thread.start()
        thread.join()
        if errors:
            raise RuntimeError("host %d does not reach all others: %s" % (host, errors[0]))

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        if self.switch is not None:
            self.switch.communicate()  # the end of its input ends it
        for namespace in reversed(self.made):
            _ip("netns", "del", namespace)
        self.made.clear()

    # ------------------------------------------------------------------ processes

    def command(self, host, arguments):
        """The command line that runs `arguments` on a host."""
        return ["ip", "netns", "exec", self.namespace(host), *arguments]

    def popen(self, host, arguments, **options):
        """Starts a program on a host. The pid is the program's: `ip` replaces itself by it."""
        process = subprocess.Popen(self.command(host, arguments), **options)
        self.processes.append(process)
        return process

    def enter(self, host):
        with open("/var/run/netns/" + self.namespace(host)) as place:
            _set_namespace(place)

    def run(self, host, arguments, **options):
        return subprocess.run(self.command(host, arguments), **options)

    # --------------------------------------------------------------------- faults

    def _tell_switch(self, text):
        self.switch.stdin.write(text + "\n")
        self.switch.stdin.flush()
        if self.switch.stdout.readline() != "done\n":
            raise RuntimeError("the switch did not obey")

    def impair(self, host, delay_ms=0, loss=0.0):
        """Delays what a host sends, and drops this share of its frames. Needs switch=True."""
        self._tell_switch("impair %d %g %g" % (host, delay_ms, loss))

    def cut(self, host, to=None):
        """Cuts a host's link without notice to either end; with `to`, drops only what it sends to
        these hosts."""
        if to is not None:
            for other in to:
                _ip("-n", self.namespace(host), "route", "replace", "blackhole",
                    self.address(other) + "/32")
        elif self.with_switch:
            self._tell_switch("cut %d" % host)
        else:
            _ip("-n", self.name + "-br", "link", "set", "port%d" % host, "nomaster")

    def mend(self, host):
        """Undoes cut and impair."""
        there = self.namespace(host)
        for other in range(self.hosts):
            route = self.address(other) + "/32"
            if _ip("-n", there, "route", "show", "type", "blackhole", route).strip():
                _ip("-n", there, "route", "del", "blackhole", route)
        if self.with_switch:
            self._tell_switch("mend %d" % host)
        else:
            _ip("-n", self.name + "-br", "link", "set", "port%d" % host, "master", "br0")
