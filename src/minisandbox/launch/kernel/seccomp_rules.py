"""The rules of the system-call filter: a verdict and a reason for every known system call.

Every call that Docker's default profile denies without further capabilities (moby/profiles, seccomp/default.json) is
denied, except two that are newer than the profile: uprobe, which only the kernel's own trampolines call, and
rseq_slice_yield, which affects only the caller's time slice. A further call is refused only if code could use it to
reach the host or pid 1, to exhaust a resource of the whole machine, or to reach kernel code with published exploits.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

ALLOW = 0
"""The verdict that allows a call; any other verdict is the errno that the call returns."""

PRETEND = -1
"""The verdict of calls that do nothing but return success."""

_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Test:
    """A condition on one argument of a system call.

    Attributes:
        argument: index of the argument, from 0.
        values: values to compare with.
        mask: bits to compare. The kernel reads most arguments as 32-bit numbers and ignores the high word, so only the
            low word is compared unless ``wide``.
        one_of: whether the argument must be one of the values (True) or none of them (False).
        wide: whether the high word must be zero too, as for a null pointer.
    """

    __test__ = False  # keep pytest from collecting this class

    argument: int
    values: tuple[int, ...]
    mask: int = _LOW
    one_of: bool = True
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Clause:
    """A verdict for certain arguments.

    Attributes:
        when: description of the case.
        tests: conditions that must all hold.
        verdict: :data:`ALLOW` or an errno.
    """

    when: str
    tests: tuple[Test, ...]
    verdict: int


@dataclass(frozen=True, slots=True)
class Rule:
    """A verdict for one or more system calls.

    Attributes:
        names: names of the calls.
        verdict: :data:`ALLOW` or an errno, if no clause holds.
        reason: reason for the verdict, in one line.
        clauses: cases with a different verdict; the first that holds decides.
    """

    names: tuple[str, ...]
    verdict: int
    reason: str
    clauses: tuple[Clause, ...] = ()


def _allow(names: str, reason: str, *clauses: Clause) -> Rule:
    return Rule(tuple(names.split()), ALLOW, reason, clauses)


def _refuse(names: str, verdict: int, reason: str, *clauses: Clause) -> Rule:
    return Rule(tuple(names.split()), verdict, reason, clauses)


def _has(argument: int, flag: int) -> Test:
    return Test(argument, (flag,), flag)


# CLONE_NEW: NS, CGROUP, UTS, IPC, USER, PID, NET; CLONE_NEWTIME is no flag of clone(2)
_CLONE_NEW = 0x7E020000
# TIOCSTI TIOCLINUX TIOCSETD
_TERMINALS = (0x5412, 0x541C, 0x5423)
_BRIDGES = (0x8940, 0x8941, 0x8980, 0x8981, 0x8982, 0x8983, 0x89A0, 0x89A1, 0x89A2, 0x89A3)
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _SECCOMP_SET_FILTER = 22, 2, 1
_SOL_SOCKET, _SO_ATTACH = 1, (26, 50, 51, 52)  # FILTER BPF REUSEPORT_CBPF REUSEPORT_EBPF
_SOL_TCP, _TCP_ULP = 6, 31
# PTRACE_OLDSETOPTIONS PTRACE_SETOPTIONS PTRACE_SEIZE
_PTRACE_OPTIONS, _PTRACE_O_TRACEEXIT = (21, 0x4200, 0x4206), 0x40
# LINUX, LINUX32, both also with UNAME26; 0xFFFFFFFF queries the current one
_PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_STREAM, _DGRAM, _RAW, _PACKET, _TYPE_MASK = 1, 2, 3, 10, 0xF
_TCP, _UDP, _ROUTE = 6, 17, 0
_DEVICES, _FILE_TYPE = (0o020000, 0o060000), 0o170000  # S_IFCHR S_IFBLK, S_IFMT
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x40000, 0x4, 0o4000
_SHM_LOCK = 11
_PROCESS, _USER, _IO_PROCESS, _IO_USER = 0, 2, 1, 3

_INTERNET = Test(0, (_INET, _INET6))
_SOCKETS = (
    Clause("AF_UNIX", (Test(0, (_UNIX,)),), ALLOW),
    Clause("AF_INET, AF_INET6: TCP", (_INTERNET, Test(1, (_STREAM,), _TYPE_MASK), Test(2, (0, _TCP))), ALLOW),
    Clause("AF_INET, AF_INET6: UDP", (_INTERNET, Test(1, (_DGRAM,), _TYPE_MASK), Test(2, (0, _UDP))), ALLOW),
    Clause("SOCK_RAW, SOCK_PACKET", (_INTERNET, Test(1, (_RAW, _PACKET), _TYPE_MASK)), errno.EPERM),
    Clause("any other protocol over AF_INET, AF_INET6", (_INTERNET,), errno.EPROTONOSUPPORT),
    Clause(
        "AF_NETLINK: routes and addresses, as getaddrinfo(3) asks", (Test(0, (_NETLINK,)), Test(2, (_ROUTE,))), ALLOW
    ),
    Clause("any other AF_NETLINK", (Test(0, (_NETLINK,)),), errno.EPROTONOSUPPORT),
)
_PID_1 = "pid 1, which keeps the sandbox's lifetime"
_HUGE = "the host's pool of huge pages, in no account of memory"
_FILTERS = "a filter: the machine has one amount of memory for their code (bpf_jit_limit)"

RULES = (
    # --- files -------------------------------------------------------------------------------------------------------
    _allow(
        "open openat openat2 creat close close_range read write readv writev pread64 pwrite64 preadv pwritev preadv2 "
        "pwritev2 lseek dup dup2 dup3 fcntl flock fsync fdatasync sync_file_range fallocate fadvise64 readahead "
        "truncate ftruncate copy_file_range pipe pipe2 splice tee vmsplice sendfile",
        "contents of files and pipes, within what the sandbox's mounts show",
    ),
    _refuse("sync syncfs", errno.EPERM, "write out what the whole machine has to; fsync is allowed"),
    _allow(
        "stat lstat fstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getdents "
        "getdents64 getcwd chdir fchdir umask mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link "
        "linkat symlink symlinkat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat "
        "futimesat cachestat",
        "names and attributes of files, within what the sandbox's mounts show",
    ),
    _allow("mknod mknodat", "makes FIFOs and sockets; the kernel refuses devices without CAP_MKNOD"),
    _allow(
        "getxattr lgetxattr fgetxattr getxattrat listxattr llistxattr flistxattr listxattrat removexattr lremovexattr "
        "fremovexattr removexattrat setxattr lsetxattr fsetxattr setxattrat",
        "extended attributes; the kernel keeps trusted.* and security.* to itself",
    ),
    _allow("inotify_init inotify_init1 inotify_add_watch inotify_rm_watch", "watching files; instances are limited"),
    # --- waiting, time -----------------------------------------------------------------------------------------------
    _allow(
        "poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd "
        "eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime pause",
        "waiting for events",
    ),
    _refuse("io_setup", errno.ENOSYS, "the machine has one number of them (fs.aio-max-nr), which databases need"),
    _allow("io_destroy io_submit io_cancel io_getevents io_pgetevents", "nothing without io_setup"),
    _allow(
        "nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times alarm getitimer setitimer "
        "timer_create timer_settime timer_gettime timer_getoverrun timer_delete",
        "reading clocks and the process's own timers",
    ),
    # --- memory ------------------------------------------------------------------------------------------------------
    _allow(
        "munmap mremap mprotect pkey_mprotect pkey_alloc pkey_free brk msync mlock mlock2 munlock mlockall munlockall "
        "remap_file_pages membarrier map_shadow_stack mseal madvise mincore",
        "the process's own memory",
    ),
    _allow("mmap", "the process's own memory", Clause(f"MAP_HUGETLB: {_HUGE}", (_has(3, _MAP_HUGETLB),), errno.ENOMEM)),
    _allow("memfd_create", "files in memory", Clause(f"MFD_HUGETLB: {_HUGE}", (_has(1, _MFD_HUGETLB),), errno.EINVAL)),
    # --- processes ---------------------------------------------------------------------------------------------------
    _allow(
        "fork vfork execve execveat exit exit_group wait4 waitid getpid getppid gettid getpgid getpgrp setpgid getsid "
        "setsid set_tid_address set_robust_list get_robust_list rseq rseq_slice_yield restart_syscall arch_prctl "
        "getcpu set_thread_area get_thread_area",
        "processes and threads of the sandbox's own",
    ),
    _allow(
        "clone",
        "processes and threads of the sandbox's own",
        Clause("a CLONE_NEW* flag: no new namespaces", (Test(0, (0,), _CLONE_NEW, one_of=False),), errno.EPERM),
    ),
    _allow(
        "prctl",
        "a process's own settings; the kernel checks each",
        Clause(_FILTERS, (Test(0, (_PR_SET_SECCOMP,)), Test(1, (_SECCOMP_MODE_FILTER,))), errno.EINVAL),
    ),
    _allow("seccomp", "can only tighten", Clause(_FILTERS, (Test(0, (_SECCOMP_SET_FILTER,)),), errno.EINVAL)),
    _allow(
        "landlock_create_ruleset landlock_add_rule landlock_restrict_self", "programs that restrict themselves further"
    ),
    _allow(
        "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal rt_sigaction rt_sigprocmask "
        "rt_sigpending rt_sigsuspend rt_sigtimedwait rt_sigreturn sigaltstack",
        "signals to the sandbox's own processes; its pid 1 cannot be killed from inside",
    ),
    _allow(
        "ptrace",
        "debuggers and sanitizers of its own programs; what supervises them is not dumpable, so not traceable",
        Clause(
            "PTRACE_O_TRACEEXIT: two that trace each other so end by no signal, not even the host's",
            (Test(0, _PTRACE_OPTIONS), _has(3, _PTRACE_O_TRACEEXIT)),
            errno.EPERM,
        ),
    ),
    _allow("uretprobe uprobe", "only the kernel's probe trampolines use these; refused, a probed program would crash"),
    _allow("futex futex_waitv futex_wake futex_wait futex_requeue", "locks"),
    # --- limits, scheduling ------------------------------------------------------------------------------------------
    _allow("getrlimit setrlimit getrusage sysinfo uname getpriority ioprio_get", "the process's own limits and use"),
    _refuse(
        "prlimit64",
        errno.EPERM,
        "setting limits of others: with one uid, those of pid 1 and of the supervisors are among them",
        Clause("pid 0: the caller", (Test(0, (0,)),), ALLOW),
        Clause("no new limit: reading", (Test(2, (0,), wide=True),), ALLOW),
    ),
    _allow(
        "sched_yield sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_get_priority_max "
        "sched_get_priority_min sched_rr_get_interval",
        "reading the scheduler's settings",
    ),
    _allow(
        "sched_setaffinity sched_setattr sched_setparam sched_setscheduler",
        "scheduling of the sandbox's own processes; raising takes CAP_SYS_NICE",
        Clause(_PID_1, (Test(0, (1,)),), errno.EPERM),
    ),
    _allow(
        "setpriority",
        "scheduling of the sandbox's own processes; raising takes CAP_SYS_NICE",
        Clause(_PID_1, (Test(0, (_PROCESS,)), Test(1, (1,))), errno.EPERM),
        Clause("every process of a user: pid 1 is one", (Test(0, (_USER,)),), errno.EPERM),
    ),
    _allow(
        "ioprio_set",
        "scheduling of the sandbox's own processes; raising takes CAP_SYS_NICE",
        Clause(_PID_1, (Test(0, (_IO_PROCESS,)), Test(1, (1,))), errno.EPERM),
        Clause("every process of a user: pid 1 is one", (Test(0, (_IO_USER,)),), errno.EPERM),
    ),
    _allow(
        "getuid geteuid getgid getegid getresuid getresgid getgroups setgroups setuid setgid setreuid setregid "
        "setresuid setresgid setfsuid setfsgid capget capset",
        "ids and capabilities, within the sandbox's user namespace and its bounding set",
    ),
    # --- talking -----------------------------------------------------------------------------------------------------
    _allow(
        "shmat shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl mq_open mq_unlink "
        "mq_timedsend mq_timedreceive mq_notify mq_getsetattr",
        "System V and POSIX queues, in the sandbox's own namespace",
    ),
    _allow(
        "shmget",
        "System V shared memory, in the sandbox's own namespace",
        Clause(f"SHM_HUGETLB: {_HUGE}", (_has(2, _SHM_HUGETLB),), errno.EPERM),
    ),
    _allow(
        "shmctl",
        "System V shared memory, in the sandbox's own namespace",
        # the kernel mistakes a namespace's limit in bytes for a number of pages (user_shm_lock in mm/mlock.c)
        Clause("SHM_LOCK: locked memory of all ids, and of the host's user", (Test(1, (_SHM_LOCK,)),), errno.EPERM),
    ),
    _refuse("socket", errno.EAFNOSUPPORT, "what programs seldom need loads kernel modules on request", *_SOCKETS),
    _refuse(
        "socketpair",
        errno.EOPNOTSUPP,
        "no other family has pairs, but for TIPC",
        Clause("AF_UNIX", (Test(0, (_UNIX,)),), ALLOW),
    ),
    _allow(
        "bind connect listen accept accept4 getsockname getpeername getsockopt shutdown sendto recvfrom sendmsg "
        "recvmsg sendmmsg recvmmsg",
        "sockets, of the families that can be made",
    ),
    _allow(
        "setsockopt",
        "sockets, of the families that can be made",
        Clause(f"SO_ATTACH_*, {_FILTERS}", (Test(1, (_SOL_SOCKET,)), Test(2, _SO_ATTACH)), errno.EPERM),
        Clause(
            "TCP_ULP: loads protocols into the kernel (TLS, SMC), with published exploits",
            (Test(1, (_SOL_TCP,)), Test(2, (_TCP_ULP,))),
            errno.ENOENT,
        ),
    ),
    _allow(
        "ioctl",
        "devices are those of the sandbox's own /dev",
        Clause(
            "TIOCSTI, TIOCLINUX: type into terminals; TIOCSETD: loads line disciplines",
            (Test(1, _TERMINALS),),
            errno.EPERM,
        ),
        Clause("SIOC*BR, SIOC*VLAN: load modules for bridges and VLANs", (Test(1, _BRIDGES),), errno.EPERM),
    ),
    _refuse(
        "personality",
        errno.EPERM,
        "old behaviours of the kernel, seldom tested there, and no address randomisation",
        Clause("Linux, 32-bit, 2.6 names, or asking", (Test(0, _PERSONALITIES),), ALLOW),
    ),
    _allow("getrandom", "random numbers"),
    # --- refused: namespaces and mounts ------------------------------------------------------------------------------
    _refuse("clone3", errno.ENOSYS, "a filter cannot see its flags, behind a pointer; libraries fall back to clone"),
    _refuse("unshare setns", errno.EPERM, "new namespaces give capabilities, and with them most of the kernel"),
    _refuse(
        "mount umount2 pivot_root chroot open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick "
        "mount_setattr",
        errno.EPERM,
        "the sandbox's view of files is made before it starts",
    ),
    _refuse("statmount listmount listns", errno.ENOSYS, "what /proc shows of mounts and namespaces is enough"),
    # --- refused: other processes' insides ---------------------------------------------------------------------------
    _refuse(
        "process_vm_readv process_vm_writev process_madvise process_mrelease pidfd_getfd kcmp",
        errno.EPERM,
        "other processes' memory and descriptors; debuggers have ptrace",
    ),
    _refuse("userfaultfd", errno.EPERM, "holds the kernel still in mid-copy: the usual helper of its exploits"),
    # --- refused: much kernel for little use -------------------------------------------------------------------------
    _refuse("bpf perf_event_open", errno.EPERM, "programs in the kernel, and counters of the whole machine"),
    _refuse(
        "io_uring_setup io_uring_enter io_uring_register",
        errno.ENOSYS,
        "goes round this filter; looks like a kernel without it, so programs fall back to epoll",
    ),
    _refuse("add_key request_key keyctl", errno.EPERM, "keyrings are not namespaced: those of the host's sessions"),
    _refuse("fanotify_init fanotify_mark", errno.EPERM, "watching whole file systems; inotify is there"),
    _refuse("name_to_handle_at open_by_handle_at", errno.EPERM, "handles reach files by number, past the mounts"),
    _refuse("memfd_secret", errno.ENOSYS, "memory that the sandbox's accounting cannot see"),
    _refuse("modify_ldt", errno.ENOSYS, "16- and 32-bit segments, as a kernel without them says"),
    _refuse("lsm_get_self_attr lsm_set_self_attr lsm_list_modules", errno.ENOSYS, "the host's security modules"),
    _refuse("file_getattr file_setattr", errno.ENOSYS, "too new for programs to need; ioctl does the same"),
    # --- refused: the machine ----------------------------------------------------------------------------------------
    _refuse(
        "init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff acct quotactl "
        "quotactl_fd syslog vhangup sethostname setdomainname iopl ioperm",
        errno.EPERM,
        "the machine is the host's",
    ),
    _refuse(
        "settimeofday clock_settime adjtimex clock_adjtime", errno.EPERM, "the clock, and its state, is the host's"
    ),
    _refuse(
        "get_mempolicy set_mempolicy set_mempolicy_home_node mbind move_pages migrate_pages",
        errno.EPERM,
        "where memory lies is the host's business; libnuma takes it for a machine without NUMA",
    ),
    _refuse("ustat sysfs", errno.EPERM, "obsolete, and about the host's file systems"),
    _refuse(
        "_sysctl uselib create_module get_kernel_syms query_module nfsservctl getpmsg putpmsg afs_syscall tuxcall "
        "security epoll_ctl_old epoll_wait_old vserver lookup_dcookie",
        errno.ENOSYS,
        "the kernel has dropped it, or never had it",
    ),
)


OWNERS = (
    *(
        Rule((name,), PRETEND, "there is one id to give files to, and one to become")
        for name in (
            "chown", "fchown", "lchown", "fchownat", "setgroups", "setuid", "setgid", "setreuid", "setregid",
            "setresuid", "setresgid", "setfsuid", "setfsgid", "capset",
        )
    ),
    _allow("mknod", "", Clause("a device, which nobody could open", (Test(1, _DEVICES, _FILE_TYPE),), PRETEND)),
    _allow("mknodat", "", Clause("a device, which nobody could open", (Test(2, _DEVICES, _FILE_TYPE),), PRETEND)),
)  # fmt: skip
"""Calls that only pretend to succeed in a build with one id, so that packages install (Charliecloud's list)."""


def rules_by_name() -> dict[str, Rule]:
    """Return the rules by system call name, for all architectures.

    Raises:
        ValueError: two rules name the same call.
    """
    by_name: dict[str, Rule] = {}
    for rule in RULES:
        for name in rule.names:
            if name in by_name:
                raise ValueError(f"two rules for {name}")
            by_name[name] = rule
    return by_name
