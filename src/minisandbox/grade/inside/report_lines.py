"""Send a reporter's lines from a grading sandbox to a reader outside.

A setting names two file descriptors, or two FIFOs if descriptors are not inherited (tox). The first pipe contains the
key of this run and perhaps the tests to run; it is read and closed before any code of the project is loaded. The second
pipe receives the lines.

A line is a hash, a space and an ASCII JSON array: [name, when, value]. Each hash covers a secret state, which starts as
the key and advances with every line. Without the state, no line can be forged, changed, omitted or moved. Even with the
state, earlier lines are safe. Python 2.7 to 3.14, standard library only.
"""

import errno
import fcntl
import hashlib
import json
import os

KEY = 64
"""The length of the key in bytes; a JSON array of tests to run may follow."""
HIGH = 300
"""The lowest number for our file descriptor: programs under test close and count the low ones."""


def _take_descriptors(setting):
    """Return the key, and a file descriptor for the lines that child processes do not inherit."""
    pipes = setting.split(":")
    if pipes[0].startswith("/"):  # two FIFOs, unlinked once they are open
        source, target = os.open(pipes[0], os.O_RDONLY), os.open(pipes[1], os.O_WRONLY)
        for path in pipes:
            os.unlink(path)
    else:
        source, target = [int(number) for number in pipes]
    key = b""
    while True:
        data = os.read(source, 4096)
        if not data:
            break
        key += data
    os.close(source)
    try:
        channel = fcntl.fcntl(target, fcntl.F_DUPFD, HIGH)
    except (OSError, IOError):  # HIGH is above the limit of file descriptors
        channel = fcntl.fcntl(target, fcntl.F_DUPFD, 3)
    fcntl.fcntl(channel, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    os.close(target)
    return key, channel


def hide_from_children():
    """Remove this directory from PYTHONPATH, so that programs started by the tests do not load the reporter.

    It stays in sys.path, which pytest-xdist passes to its workers: they load the plugin, too.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [entry for entry in entries if entry and os.path.abspath(entry) != here]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)


def make_writer(setting):
    """Return a function that writes a line, a list with the number of written lines, and the tests to run.

    Everything that the function uses is bound here: tests replace os.write, json.dumps and whole modules (pyfakefs,
    mock) while the lines are written.
    """
    sent, channel = _take_descriptors(setting)
    key, chosen = sent[:KEY], sent[KEY:]
    process = os.getpid()
    getpid, os_write = os.getpid, os.write
    encode = json.JSONEncoder(ensure_ascii=True).encode
    sha256 = hashlib.sha256
    state, written = [key], [0]

    def send(data):
        while data:
            try:
                data = data[os_write(channel, data):]
            except (OSError, IOError) as error:
                if error.errno != errno.EINTR:  # Python 2 does not retry
                    raise

    def write(node, when, value):
        if getpid() != process:  # a test forked this process, which continues as pytest
            return
        if isinstance(node, bytes) and bytes is not str:
            node = node.decode("utf-8", "replace")
        try:
            line = encode([node, when, value])
        except UnicodeDecodeError:  # Python 2 with a node id that is not UTF-8
            line = encode([node.decode("utf-8", "replace"), when, value])
        data = line.encode("ascii")
        mark = sha256(b"line" + state[0] + data).hexdigest().encode("ascii")
        state[0] = sha256(b"next" + state[0] + data).digest()
        send(mark + b" " + data + b"\n")
        written[0] += 1

    return write, written, frozenset(json.loads(chosen.decode("utf-8"))) if chosen else frozenset()
