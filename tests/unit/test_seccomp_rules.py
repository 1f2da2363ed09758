"""The system-call filter, on both architectures, as the interpreter sees it; the kernel's view is in tests/kernel."""

from __future__ import annotations

import errno
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minisandbox.launch.kernel import seccomp, seccomp_bpf
from minisandbox.launch.kernel.seccomp_rules import ALLOW, RULES, Clause, Rule, Test, rules_by_name
from minisandbox.launch.kernel.seccomp_tables import NEWEST, known_calls

ARCHITECTURES = ("x86_64", "aarch64")
GARBAGE = 0xDEADBEEF << 32
X32_BIT = 0x40000000
I386, ARM, RISCV64 = 0x40000003, 0x40000028, 0xC00000F3
both = pytest.mark.parametrize("architecture", ARCHITECTURES)
other = pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES} - {platform.machine()}))
"""For rules that tests/kernel/test_seccomp.py tries on this machine's kernel."""

# What Docker's default profile denies to a container without further capabilities (moby/profiles, seccomp/default.json;
# https://docs.docker.com/engine/security/seccomp/).
DOCKER_DENIES = """
    _sysctl acct add_key afs_syscall bpf chroot clock_settime clone3 create_module delete_module fanotify_init
    file_getattr file_setattr finit_module fsconfig fsmount fsopen fspick get_kernel_syms get_mempolicy getpmsg
    init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl
    listns lookup_dcookie lsm_get_self_attr lsm_list_modules lsm_set_self_attr mbind migrate_pages mount mount_setattr
    move_mount move_pages nfsservctl open_by_handle_at open_tree open_tree_attr perf_event_open pidfd_getfd pivot_root
    process_madvise putpmsg query_module quotactl quotactl_fd reboot request_key security set_mempolicy
    set_mempolicy_home_node setdomainname sethostname setns settimeofday swapoff swapon sysfs syslog tuxcall umount2
    unshare uselib userfaultfd ustat vhangup vserver
"""
STRICTER = """
    io_setup adjtimex clock_adjtime epoll_ctl_old epoll_wait_old fanotify_mark listmount memfd_secret modify_ldt
    name_to_handle_at process_mrelease process_vm_readv process_vm_writev statmount sync syncfs
"""
NEEDED = """
    openat2 pidfd_open pidfd_send_signal prctl kill waitid wait4 memfd_create setresuid setresgid setgroups getxattr
    listxattr sched_yield sched_setaffinity close_range recvmsg sendmsg execve restart_syscall rt_sigreturn ppoll
    seccomp fchmodat2 mseal cachestat futex_waitv rseq getrandom statx ioctl uname sendfile splice tee vmsplice fcntl
    setxattr madvise landlock_create_ruleset
"""


def number(architecture: str, name: str) -> int:
    return next(number for number, known in known_calls(architecture).items() if known == name)


def ask(architecture: str, name: str, *arguments: int) -> str:
    verdict = seccomp.simulate(architecture, number(architecture, name), arguments)
    return seccomp.verdict_name(verdict)


# --- the tables ------------------------------------------------------------------------------------------------------


@both
def test_a_table_has_every_number_that_the_kernel_gives_out(architecture: str) -> None:
    holes = {"x86_64": range(337, 424), "aarch64": [*range(244, 260), *range(295, 424)]}[architecture]
    assert set(known_calls(architecture)) == set(range(NEWEST + 1)) - set(holes)


@both
def test_a_table_names_no_call_twice(architecture: str) -> None:
    names = list(known_calls(architecture).values())
    assert len(names) == len(set(names))


def test_architectures_share_the_newer_numbers() -> None:
    x86_64, aarch64 = map(known_calls, ARCHITECTURES)
    assert {n: x86_64[n] for n in range(424, NEWEST + 1)} == {n: aarch64[n] for n in range(424, NEWEST + 1)}


@pytest.mark.parametrize(
    ("architecture", "header", "pattern"),
    [
        ("x86_64", "x86_64-linux-gnu/asm/unistd_64.h", r"#define __NR_(\w+)\s+(\d+)"),
        ("aarch64", "asm-generic/unistd.h", r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
    ],
)
def test_numbers_are_those_of_the_kernel_headers(architecture: str, header: str, pattern: str) -> None:
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip(f"there are no kernel headers here: {path}")
    theirs = {name: int(value) for name, value in re.findall(pattern, path.read_text())}
    if architecture == "aarch64":
        theirs["newfstatat"] = theirs["fstatat"]
    ours = {name: value for value, name in known_calls(architecture).items()}
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 280
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    of_32_bits = {*range(403, 424), 244}  # and the base of numbers of architectures' own
    assert {value for value in theirs.values() if value <= NEWEST} - of_32_bits <= set(ours.values())


@both
def test_the_numbers_of_our_own_calls(architecture: str) -> None:
    own = (number(architecture, "seccomp"), number(architecture, "unshare"), number(architecture, "clone3"))
    assert seccomp._NUMBERS[architecture] == own


def test_an_unknown_architecture_is_an_error() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        known_calls("riscv64")


# --- the rules -------------------------------------------------------------------------------------------------------


@both
def test_every_known_call_has_a_rule(architecture: str) -> None:
    assert len(seccomp.calls(architecture)) == len(known_calls(architecture))


def test_every_rule_is_about_calls_that_exist() -> None:
    known = {name for architecture in ARCHITECTURES for name in known_calls(architecture).values()}
    assert set(rules_by_name()) == known


def test_rules_have_reasons_of_one_line() -> None:
    for rule in RULES:
        assert rule.reason
        assert "\n" not in rule.reason
        assert len(rule.reason) <= 110
        assert all(clause.when and len(clause.when) <= 90 for clause in rule.clauses)


def test_what_docker_denies_is_denied() -> None:
    rules = rules_by_name()
    allowed = [name for name in DOCKER_DENIES.split() if rules[name].verdict == ALLOW or rules[name].clauses]
    assert allowed == []


@both
def test_nothing_else_is_refused_than_docker_denies_and_what_is_said_to_be_stricter(architecture: str) -> None:
    refused = {call.name for call in seccomp.calls(architecture) if call.rule.verdict and not call.rule.clauses}
    assert refused <= {*DOCKER_DENIES.split(), *STRICTER.split()}


# --- the program -----------------------------------------------------------------------------------------------------


@both
def test_unconditional_verdicts_hold_for_any_arguments(architecture: str) -> None:
    for call in seccomp.calls(architecture):
        if not call.rule.clauses:
            for arguments in ((), [2**64 - 1] * 6, [1] * 6, [GARBAGE] * 6):
                assert seccomp.simulate(architecture, call.number, arguments) == call.rule.verdict, call.name


def verdict_by_rule(rule: Rule, arguments: list[int]) -> int:
    """What a rule says, worked out without any program."""
    for clause in rule.clauses:
        if all(holds(test, arguments[test.argument]) for test in clause.tests):
            return clause.verdict
    return rule.verdict


def holds(test: Test, value: int) -> bool:
    if test.wide and value >> 32:
        return False
    return ((value & 0xFFFFFFFF & test.mask) in test.values) == test.one_of


interesting = sorted(
    {value for rule in RULES for clause in rule.clauses for test in clause.tests for value in test.values}
)
words = st.one_of(st.sampled_from(interesting), st.integers(0, 64), st.integers(0, 2**32 - 1))
arguments_of_calls = st.lists(
    st.builds(lambda low, high: low | high << 32, words, st.one_of(st.just(0), st.integers(0, 2**32 - 1))),
    min_size=6,
    max_size=6,
)


@both
@given(data=st.data())
def test_the_program_does_what_the_rules_say(architecture: str, data: st.DataObject) -> None:
    calls = seccomp.calls(architecture)
    conditional = [call for call in calls if call.rule.clauses]
    call = data.draw(st.one_of(st.sampled_from(conditional), st.sampled_from(calls)))
    arguments = data.draw(arguments_of_calls)
    assert seccomp.simulate(architecture, call.number, arguments) == verdict_by_rule(call.rule, arguments)


@both
def test_numbers_that_no_kernel_has_are_unknown(architecture: str) -> None:
    known = known_calls(architecture)
    beyond = [*range(NEWEST + 1, NEWEST + 200), 4096, 0x3FFFFFFF, 0x80000000, 0xFFFFFFFF]
    for unknown in [*(n for n in range(NEWEST) if n not in known), *beyond]:
        assert seccomp.simulate(architecture, unknown) == errno.ENOSYS, unknown


def test_x32_is_refused() -> None:
    for known in [*known_calls("x86_64"), *range(512, 548)]:
        assert seccomp.simulate("x86_64", known | X32_BIT) == errno.ENOSYS, known


@both
def test_other_architectures_are_refused_whatever_the_number(architecture: str) -> None:
    own = seccomp.AUDIT_ARCHITECTURES[architecture]
    for foreign in {I386, ARM, RISCV64, 0, *seccomp.AUDIT_ARCHITECTURES.values()} - {own}:
        for any_number in range(600):
            assert seccomp.simulate(architecture, any_number, audit_architecture=foreign) == errno.ENOSYS


@both
def test_the_kernel_would_take_the_program(architecture: str) -> None:
    """bpf_check_classic(), seccomp_check_filter(): known instructions, aligned loads, jumps within, a return last."""
    code = list(seccomp_bpf.instructions(seccomp.assemble(architecture)))
    assert len(code) <= 4096
    assert code[-1][0] == 0x06
    for position, (operation, if_true, if_false, constant) in enumerate(code):
        assert operation in (0x20, 0x54, 0x05, 0x15, 0x35, 0x06)
        if operation == 0x20:
            assert constant % 4 == 0
            assert constant < 64
        farthest = {0x05: constant, 0x15: max(if_true, if_false), 0x35: max(if_true, if_false)}.get(operation, 0)
        assert position + 1 + farthest < len(code) or operation == 0x06


@both
def test_the_kernel_can_answer_unconditional_calls_without_the_program(architecture: str) -> None:
    """Since Linux 5.11 it keeps a bitmap of calls that are allowed whatever their arguments: seccomp_is_const_allow()
    finds them by running the program, and gives up at the first look at an argument."""
    for call in seccomp.calls(architecture):
        looked = list(loads(seccomp.assemble(architecture), seccomp.AUDIT_ARCHITECTURES[architecture], call.number))
        assert (max(looked) >= 16) == bool(call.rule.clauses), call.name
        assert call.rule.clauses or len(looked) == 2


def loads(program: bytes, audit_architecture: int, called: int) -> Iterator[int]:
    """The offsets that a run reads, up to the first argument."""
    code = list(seccomp_bpf.instructions(program))
    accumulator = position = 0
    while code[position][0] != 0x06:
        operation, if_true, if_false, constant = code[position]
        position += 1
        if operation == 0x20:
            yield constant
            if constant >= 16:
                return
            accumulator = called if constant == 0 else audit_architecture
        elif operation == 0x05:
            position += constant
        else:
            taken = accumulator == constant if operation == 0x15 else accumulator >= constant
            position += if_true if taken else if_false


@both
def test_finding_a_call_takes_few_steps(architecture: str) -> None:
    pieces = list(seccomp._pieces(architecture))
    assert len(pieces) < 128  # halved seven times
    assert len(seccomp.assemble(architecture)) // 8 < 500


# --- calls by their arguments ----------------------------------------------------------------------------------------

CLONE_THREAD = 0x3D0F00  # what pthread_create(3) asks for
CLONE_VFORK = 0x4111  # what posix_spawn(3) asks for
NEW_NAMESPACES = {
    "NEWNS": 0x20000, "NEWCGROUP": 0x2000000, "NEWUTS": 0x4000000, "NEWIPC": 0x8000000, "NEWUSER": 0x10000000,
    "NEWPID": 0x20000000, "NEWNET": 0x40000000,
}  # fmt: skip


@both
@pytest.mark.parametrize("flags", [17, CLONE_THREAD, CLONE_VFORK, 0x1200011, 0x80 | 17])
def test_clone_makes_processes_and_threads(architecture: str, flags: int) -> None:
    assert ask(architecture, "clone", flags) == "allowed"


@other
@pytest.mark.parametrize("flag", NEW_NAMESPACES.values(), ids=NEW_NAMESPACES)
def test_clone_makes_no_namespaces(architecture: str, flag: int) -> None:
    for flags in (flag, flag | 17, flag | CLONE_THREAD, flag | GARBAGE):
        assert ask(architecture, "clone", flags) == "EPERM"


UNIX, INET, INET6, NETLINK = 1, 2, 10, 16
STREAM, DGRAM, RAW, RDM, SEQPACKET, DCCP, PACKET = 1, 2, 3, 4, 5, 6, 10
NONBLOCK_CLOEXEC = 0x80800


@both
@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ((UNIX, STREAM, 0), "allowed"),
        ((UNIX, SEQPACKET, 0), "allowed"),
        ((UNIX, DGRAM | NONBLOCK_CLOEXEC, 0), "allowed"),
        ((INET, STREAM, 0), "allowed"),
        ((INET, STREAM | NONBLOCK_CLOEXEC, 6), "allowed"),
        ((INET6, DGRAM, 17), "allowed"),
        ((INET6, STREAM, 0), "allowed"),
        ((INET | GARBAGE, STREAM | GARBAGE, 6 | GARBAGE), "allowed"),
        ((NETLINK, RAW | NONBLOCK_CLOEXEC, 0), "allowed"),
        ((NETLINK, DGRAM, 0), "allowed"),
        ((INET, RAW, 1), "EPERM"),
        ((INET6, RAW | NONBLOCK_CLOEXEC, 58), "EPERM"),
        ((INET | GARBAGE, RAW | GARBAGE, 255), "EPERM"),
        ((INET, PACKET, 0x0300), "EPERM"),  # the kernel takes it for AF_PACKET
        ((INET, DGRAM, 1), "EPROTONOSUPPORT"),  # ICMP
        ((INET, STREAM, 132), "EPROTONOSUPPORT"),  # SCTP
        ((INET, STREAM, 262), "EPROTONOSUPPORT"),  # MPTCP
        ((INET, DGRAM, 115), "EPROTONOSUPPORT"),  # L2TP
        ((INET, DGRAM, 136), "EPROTONOSUPPORT"),  # UDP-Lite
        ((INET, SEQPACKET, 0), "EPROTONOSUPPORT"),
        ((INET6, DCCP, 33), "EPROTONOSUPPORT"),
        ((NETLINK, RAW, 9), "EPROTONOSUPPORT"),  # audit
        ((NETLINK, RAW, 12), "EPROTONOSUPPORT"),  # netfilter
        ((NETLINK, RAW, 15), "EPROTONOSUPPORT"),  # udev
    ],
)
def test_sockets(architecture: str, arguments: tuple[int, ...], answer: str) -> None:
    assert ask(architecture, "socket", *arguments) == answer


@both
def test_other_families_of_sockets_are_not_there(architecture: str) -> None:
    for family in {*range(64), 2**32 - 1} - {UNIX, INET, INET6, NETLINK}:
        for kind in (STREAM, DGRAM, RAW, SEQPACKET):
            assert ask(architecture, "socket", family, kind, 0) == "EAFNOSUPPORT", family
            assert ask(architecture, "socket", family | GARBAGE, kind, 0) == "EAFNOSUPPORT", family
            assert ask(architecture, "socketpair", family, kind, 0) == "ENOTSUP", family
    assert ask(architecture, "socketpair", UNIX, STREAM, 0) == "allowed"


SELF_READ, SELF_SET = (0, 7, 0, 0x7FFF0000), (0, 7, 0x7FFF0000, 0)


@both
@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (SELF_READ, "allowed"),
        (SELF_SET, "allowed"),
        ((GARBAGE, 7, 0x7FFF0000, 0), "allowed"),  # the kernel sees pid 0
        ((1, 7, 0, 0x7FFF0000), "allowed"),
        ((1234, 7, 0, 0x7FFF0000), "allowed"),
        ((1, 7, 0x7FFF0000, 0), "EPERM"),
        ((1234, 7, 0x7FFF0000, 0), "EPERM"),
        ((1 | GARBAGE, 7, 0x7FFF0000, 0), "EPERM"),
        ((1, 7, 0x7FFF00000000, 0), "EPERM"),  # a pointer whose low word is zero is not null
        ((2**32 - 1, 7, 0x1000, 0), "EPERM"),
    ],
)
def test_limits_of_others_are_read_only(architecture: str, arguments: tuple[int, ...], answer: str) -> None:
    assert ask(architecture, "prlimit64", *arguments) == answer


@other
@pytest.mark.parametrize("request_", [0x5412, 0x541C, 0x5423])
def test_terminals_cannot_be_typed_into(architecture: str, request_: int) -> None:
    assert ask(architecture, "ioctl", 0, request_, 0) == "EPERM"
    assert ask(architecture, "ioctl", 0, request_ | GARBAGE, 0) == "EPERM"
    assert ask(architecture, "ioctl", 0, request_ | 1 << 32, 0) == "EPERM"


@both
@pytest.mark.parametrize("request_", [0x5401, 0x5413, 0x5414, 0x540E, 0x541B, 0x80045430, 0x40049409, 0x5411, 0x541D])
def test_other_ioctls_are_allowed(architecture: str, request_: int) -> None:
    assert ask(architecture, "ioctl", 0, request_, 0x5412) == "allowed"


@both
def test_personalities(architecture: str) -> None:
    for allowed in (0, 8, 0x20000, 0x20008, 0xFFFFFFFF):
        assert ask(architecture, "personality", allowed) == "allowed"
        assert ask(architecture, "personality", allowed | GARBAGE) == "allowed"
    for refused in (0x40000, 0x40008, 0x0400000, 0x100000, 1, 0x7FFFFFFF):
        assert ask(architecture, "personality", refused) == "EPERM"


@other
def test_scheduling_of_pid_1_is_out_of_reach(architecture: str) -> None:
    for name in ("sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler"):
        assert [ask(architecture, name, pid) for pid in (0, 1, 2, 1 | GARBAGE)] == [
            "allowed",
            "EPERM",
            "allowed",
            "EPERM",
        ]
    for name, process, group, user in (("setpriority", 0, 1, 2), ("ioprio_set", 1, 2, 3)):
        assert ask(architecture, name, process, 0) == "allowed"
        assert ask(architecture, name, process, 4321) == "allowed"
        assert ask(architecture, name, group, 0) == "allowed"
        assert ask(architecture, name, process, 1) == "EPERM"
        assert ask(architecture, name, process | GARBAGE, 1 | GARBAGE) == "EPERM"
        assert ask(architecture, name, user, 0) == "EPERM"


@both
def test_tracing_is_allowed_but_not_to_stop_at_the_end(architecture: str) -> None:
    traceme, attach, seize = 0, 16, 0x4206
    assert ask(architecture, "ptrace", traceme) == "allowed"
    for request in (attach, seize):
        assert ask(architecture, "ptrace", request, 77) == "allowed"
    for request in (21, 0x4200, seize):  # PTRACE_OLDSETOPTIONS, PTRACE_SETOPTIONS
        assert ask(architecture, "ptrace", request, 77, 0, 0x3F) == "allowed"
        assert ask(architecture, "ptrace", request | GARBAGE, 77, 0, 0x47 | GARBAGE) == "EPERM"


@both
def test_prctl(architecture: str) -> None:
    for option in (1, 4, 15, 22, 24, 36, 38, 47, 0x59616D61):
        assert ask(architecture, "prctl", option) == "allowed"
    assert ask(architecture, "prctl", 22 | GARBAGE, 2 | GARBAGE) == "EINVAL"  # PR_SET_SECCOMP, a filter


@both
def test_what_programs_and_our_own_processes_need_is_allowed(architecture: str) -> None:
    assert {name: ask(architecture, name) for name in NEEDED.split()} == dict.fromkeys(NEEDED.split(), "allowed")


# --- the assembler and the interpreter -------------------------------------------------------------------------------


@given(st.integers(2, 40), st.integers(1, 200), st.integers(0, 2**16))
@example(40, 200, 39)
def test_searching_far_apart_pieces(count: int, size: int, wanted: int) -> None:
    """Conditional jumps reach 255 instructions; farther ones need a jump of their own."""
    filler = [(0x54, 0, 0, 0xFFFFFFFF)] * (size - 1)
    pieces = [(first, [*filler, *seccomp_bpf.decide(first + 1)]) for first in range(count)]
    program = seccomp_bpf.complete_filter(7, pieces, errno.ENOSYS)
    assert seccomp_bpf.run(program, 7, wanted, ()) == min(wanted, count - 1) + 1
    assert seccomp_bpf.run(program, 8, wanted, ()) == errno.ENOSYS


def check(clauses: list[Clause], *arguments: int) -> int:
    program = seccomp_bpf.complete_filter(7, [(0, seccomp_bpf.check_arguments(clauses, 99))], errno.ENOSYS)
    return seccomp_bpf.run(program, 7, 0, arguments)


def test_the_first_clause_that_holds_decides() -> None:
    clauses = [Clause("a", (Test(0, (1, 2)), Test(1, (3,))), 11), Clause("b", (Test(0, (1,)),), 12)]
    assert [check(clauses, *pair) for pair in ((1, 3), (2, 3), (1, 4), (2, 4), (5, 3))] == [11, 11, 12, 99, 99]


def test_none_of_several_values() -> None:
    clauses = [Clause("a", (Test(5, (1, 2, 3), one_of=False),), 11)]
    assert [check(clauses, 0, 0, 0, 0, 0, value) for value in (0, 1, 2, 3, 4, 1 | GARBAGE)] == [11, 99, 99, 99, 11, 99]


def test_the_interpreter_refuses_what_the_kernel_would() -> None:
    for instruction in ((0x61, 0, 0, 0), (0x20, 0, 0, 64), (0x20, 0, 0, 2), (0x06, 0, 0, 0x80000000), (0x05, 0, 0, 9)):
        program = b"".join(seccomp_bpf._INSTRUCTION.pack(*part) for part in (instruction, (0x54, 0, 0, 1)))
        with pytest.raises(ValueError, match=r"instruction|verdict|end"):
            seccomp_bpf.run(program, 7, 0, ())


@both
def test_huge_pages_are_refused_and_other_memory_is_not(architecture: str) -> None:
    anonymous, huge, of_1_gib = 0x22, 0x40000, 30 << 26
    assert ask(architecture, "mmap", 0, 4096, 3, anonymous, -1, 0) == "allowed"
    assert ask(architecture, "mmap", 0, 4096, 3, anonymous | huge, -1, 0) == "ENOMEM"
    assert ask(architecture, "mmap", 0, 4096, 3, anonymous | huge | of_1_gib | GARBAGE, -1, 0) == "ENOMEM"
    assert [ask(architecture, "memfd_create", 0, flags) for flags in (3, 4, 7)] == ["allowed", "EINVAL", "EINVAL"]
    assert [ask(architecture, "shmget", 0, 4096, flags) for flags in (0o1600, 0o5600)] == ["allowed", "EPERM"]


@both
def test_shared_memory_is_not_locked(architecture: str) -> None:
    locked, unlocked, removed = 11, 12, 0
    assert [ask(architecture, "shmctl", 5, what, 0) for what in (unlocked, removed)] == ["allowed"] * 2
    assert [ask(architecture, "shmctl", 5, locked | more, 0) for more in (0, GARBAGE)] == ["EPERM"] * 2


@both
def test_no_protocol_of_the_kernels_is_put_on_a_connection(architecture: str) -> None:
    tcp, protocol, no_delay = 6, 31, 1
    assert [ask(architecture, "setsockopt", 3, tcp, option) for option in (protocol, no_delay)] == ["ENOENT", "allowed"]


# --- for people ------------------------------------------------------------------------------------------------------


@both
def test_the_description_names_every_call_once(architecture: str) -> None:
    lines = list(seccomp.describe(architecture))
    numbers = [
        int(match[1]) for line in lines if (match := re.match(r" *(\d+) \w+ +(?:allowed|by arguments|E\w+) +\S", line))
    ]
    assert numbers == sorted(known_calls(architecture))
    assert all(len(line) <= 160 for line in lines)
    assert sum(line.endswith("- otherwise") for line in lines) == 20
