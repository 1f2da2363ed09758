"""The network: the host's services, other interfaces, other ways out."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from functools import partial

from .core import Finding, attempts, canary, each, judge, probe, read

KIND = "network"
TUNNELS = ("sit", "tunl", "gre", "gretap", "erspan", "ip_vti", "ip6_vti", "ip6tnl", "ip6gre", "teql")
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCGIFMTU, SIOCSIFMTU = 0x8913, 0x8914, 0x8921, 0x8922


def connects(family: int, address: str, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(2)
        connection.connect((address, port))
        return bool(connection.recv(64) == canary("greeting").encode())


@probe(KIND)
def services_on_loopback() -> Finding:
    """Connect to a service of the host on loopback: TCP"""
    port = canary("tcp_port")
    return attempts(
        (
            ("127.0.0.1", lambda: connects(socket.AF_INET, "127.0.0.1", port)),
            ("127.1.2.3", lambda: connects(socket.AF_INET, "127.1.2.3", port)),
            ("0.0.0.0", lambda: connects(socket.AF_INET, "0.0.0.0", port)),
            ("mapped", lambda: connects(socket.AF_INET6, "::ffff:127.0.0.1", port)),
        )
    )


@probe(KIND)
def services_by_datagrams() -> Finding:
    """Talk to a service of the host on loopback: UDP"""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.settimeout(1)
        out.connect(("127.0.0.1", canary("udp_port")))
        out.send(b"probe")
        return judge(out.recv(64) == canary("greeting").encode())


@probe(KIND, maybe=True)
def addresses_of_the_host() -> Finding:
    """Connect to a service of the host by its other addresses"""
    port = canary("tcp_port_everywhere")
    return each(canary("addresses"), lambda address: connects(socket.AF_INET, address, port))


@probe(KIND, maybe=True)
def route_to_the_outside() -> Finding:
    """Have a route to the outside: UDP to 192.0.2.1 and 2001:db8::1, which sends nothing"""

    def route(family: int, address: str) -> bool:
        with socket.socket(family, socket.SOCK_DGRAM) as out:
            out.connect((address, 9))
        return True

    return attempts(
        (
            ("IPv4", lambda: route(socket.AF_INET, "192.0.2.1")),
            ("IPv6", lambda: route(socket.AF_INET6, "2001:db8::1")),
            ("broadcast", lambda: route(socket.AF_INET, "169.254.169.254")),
        )
    )


@probe(KIND, without="it would wait for the host's network")
def waiting_for_the_network() -> Finding:
    """Hang where there is no network: connections must fail at once"""
    started = time.monotonic()
    with socket.socket() as out:
        out.settimeout(5)
        error = out.connect_ex(("192.0.2.1", 80))
    return judge(error == 0 or time.monotonic() - started > 1, os.strerror(error))


@probe(KIND, maybe=True)
def other_interfaces() -> Finding:
    """See interfaces other than loopback"""
    names = [name for _, name in socket.if_nameindex() if name != "lo" and not name.rstrip("0").startswith(TUNNELS)]
    return judge(names, str(names))


@probe(KIND)
def sockets_of_the_host() -> Finding:
    """See the host's sockets in /proc/net"""
    port = ":{:04X} ".format(canary("tcp_port"))

    def listed(table: str, word: str) -> bool:
        return word in read("/proc/self/net/" + table, 1 << 22).decode("utf-8", "replace")

    return attempts(
        (
            ("tcp", lambda: listed("tcp", port)),
            ("unix", lambda: listed("unix", canary("abstract")["stream"])),
            ("path", lambda: listed("unix", canary("unix_path"))),
        )
    )


@probe(KIND, root=True)
def settings_of_interfaces() -> Finding:
    """Change an interface: flags and MTU of loopback (to what they are)"""

    def same(get: int, put: int, form: str) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
            value = fcntl.ioctl(handle, get, struct.pack("16s24x", b"lo"))
            fcntl.ioctl(
                handle, put, struct.pack("=16s" + form + "16x", b"lo", struct.unpack_from("=" + form, value, 16)[0])
            )
        return True

    return attempts(
        (
            ("flags", lambda: same(SIOCGIFFLAGS, SIOCSIFFLAGS, "H6x")),
            ("mtu", lambda: same(SIOCGIFMTU, SIOCSIFMTU, "i4x")),
        )
    )


@probe(KIND, root=True)
def routes_by_netlink() -> Finding:
    """Change loopback by netlink: RTM_SETLINK with nothing to set"""

    def attempt() -> bool:
        with socket.socket(16, socket.SOCK_RAW, 0) as link:
            link.settimeout(2)
            body = struct.pack("=BxHiII", 0, 0, socket.if_nametoindex("lo"), 0, 0)
            link.send(struct.pack("=IHHII", 16 + len(body), 19, 5, 1, 0) + body)
            answer = link.recv(4096)
        (error,) = struct.unpack_from("=i", answer, 16)
        if error:
            raise OSError(-error, os.strerror(-error))
        return True

    return attempts([("lo", attempt)])


@probe(KIND, root=True)
def options_that_need_privilege() -> Finding:
    """Set socket options that need CAP_NET_ADMIN: priority, mark, forced buffers, transparent proxy"""

    def option(level: int, name: int) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as handle:
            handle.setsockopt(level, name, 7)
        return True

    named = (("mark", 1, 36), ("priority", 1, 12), ("forced send buffer", 1, 32), ("forced receive buffer", 1, 33),
             ("transparent", 0, 19))  # fmt: skip
    return attempts((name, partial(option, level, number)) for name, level, number in named)


@probe(KIND, maybe=True)
def the_hypervisor() -> Finding:
    """Connect to the hypervisor or another machine of it (AF_VSOCK)"""

    def attempt(context: int) -> bool:
        with socket.socket(40, socket.SOCK_STREAM) as out:
            out.settimeout(0.5)
            return out.connect_ex((context, 1)) not in (1, 13, 97)

    return each((0, 1, 2), attempt, apart=True)
