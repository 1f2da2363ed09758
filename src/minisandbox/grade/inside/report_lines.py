"""Send the lines of a test report from a grading sandbox to a reader outside.

A setting names two file descriptors, or two FIFOs if test processes do not inherit descriptors (tox). The first pipe
contains the key of this run, which the names of the tests to run may follow; it is read and closed before any code of
the project is loaded. The second pipe receives the lines.

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
        chunk = os.read(source, 4096)
        if not chunk:
            break
        key += chunk
    os.close(source)
    try:
        channel = fcntl.fcntl(target, fcntl.F_DUPFD, HIGH)
    except (OSError, IOError):  # the limit of open files is below HIGH
        channel = fcntl.fcntl(target, fcntl.F_DUPFD, 3)
    fcntl.fcntl(channel, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    os.close(target)
    return key, channel


def hide_from_children():
    """Remove this directory from PYTHONPATH, so that programs started by the tests do not load the reporter.

    The directory stays in sys.path, which pytest-xdist passes to its workers, so that they load the plugin, too.
    """
    directory = os.path.dirname(os.path.abspath(__file__))
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [entry for entry in entries if entry and os.path.abspath(entry) != directory]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)


def make_writer(setting):
    """Return a function that writes a line, a list with the number of written lines, and the tests to run.

    Bind everything that the function uses in advance, because tests may replace os.write, json.dumps and whole modules
    (pyfakefs, mock) while the lines are written.
    """
    message, channel = _take_descriptors(setting)
    key, chosen_tests = message[:KEY], message[KEY:]
    process_id = os.getpid()
    getpid, os_write = os.getpid, os.write
    encode = json.JSONEncoder(ensure_ascii=True).encode
    sha256 = hashlib.sha256
    state, line_count = [key], [0]

    def send(data):
        while data:
            try:
                data = data[os_write(channel, data):]
            except (OSError, IOError) as error:
                if error.errno != errno.EINTR:  # Python 2 does not retry interrupted writes
                    raise

    def write(node, when, value):
        if getpid() != process_id:  # this process is a fork that a test made, so it must not write to the pipe
            return
        if isinstance(node, bytes) and bytes is not str:
            node = node.decode("utf-8", "replace")
        try:
            line = encode([node, when, value])
        except UnicodeDecodeError:  # Python 2 with a node id that is not UTF-8
            line = encode([node.decode("utf-8", "replace"), when, value])
        encoded = line.encode("ascii")
        digest = sha256(b"line" + state[0] + encoded).hexdigest().encode("ascii")
        state[0] = sha256(b"next" + state[0] + encoded).digest()
        send(digest + b" " + encoded + b"\n")
        line_count[0] += 1

    names = frozenset(json.loads(chosen_tests.decode("utf-8"))) if chosen_tests else frozenset()
    return write, line_count, names
