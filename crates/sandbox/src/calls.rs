//! The system call filter: seccomp, for all threads at once.
//!
//! A call outside the list fails with ENOSYS, as on a kernel that lacks it. The C library then uses
//! its fallback for older kernels. For the reason not to kill the process instead, see
//! `docs/decisions/0031`.

use std::collections::BTreeMap;

use nix::libc::{self, c_long};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Is, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use super::SandboxNeeds;

type SeccompRules = BTreeMap<c_long, Vec<SeccompRule>>;

/// Applies the filter; returns the reason if that fails.
pub(super) fn restrict(needs: SandboxNeeds) -> Result<(), String> {
    apply(if needs.host { of_host() } else { of_disks(needs) })
}

/// Applies the filter of a process that starts commands: the same as for a daemon with devices.
pub(super) fn restrict_command() -> Result<(), String> {
    apply(of_host())
}

fn apply(program: Result<BpfProgram, seccompiler::BackendError>) -> Result<(), String> {
    let why = |error: &dyn std::fmt::Display| format!("system calls are not filtered: {error}");
    let program = program.map_err(|error| why(&error))?;
    seccompiler::apply_filter_all_threads(&program).map_err(|error| why(&error))
}

fn program(
    rules: SeccompRules,
    otherwise: SeccompAction,
    listed: SeccompAction,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, otherwise, listed, arch)?.try_into()
}

const REFUSED: SeccompAction = SeccompAction::Errno(libc::ENOSYS as u32);

/// Filter for a daemon that controls devices, mounts or cgroups: rejects only calls that none of
/// these needs.
fn of_host() -> Result<BpfProgram, seccompiler::BackendError> {
    let rules = REJECTED_FOR_HOST.iter().map(|call| (*call, Vec::new())).collect();
    program(rules, SeccompAction::Allow, REFUSED)
}

const REJECTED_FOR_HOST: [c_long; 32] = [
    libc::SYS_ptrace,
    libc::SYS_pidfd_getfd,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_kcmp,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_sethostname,
    libc::SYS_open_by_handle_at,
    libc::SYS_personality,
];

/// Filter for a daemon that only serves disks: accepts only what that needs.
fn of_disks(needs: SandboxNeeds) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: SeccompRules = ALWAYS.iter().map(|call| (*call, Vec::new())).collect();
    #[cfg(target_arch = "x86_64")]
    rules.extend(OF_X86_64.iter().map(|call| (*call, Vec::new())));
    if needs.connects || needs.cluster {
        rules.insert(libc::SYS_connect, Vec::new());
    }
    rules.extend(with_arguments(needs)?);
    program(rules, REFUSED, SeccompAction::Allow)
}

fn rule(conditions: &[(u8, Is, u64)]) -> Result<SeccompRule, seccompiler::BackendError> {
    let conditions = conditions.iter().map(|(index, is, value)| {
        // 32 bits: the kernel ignores the upper half of these arguments.
        SeccompCondition::new(*index, Length::Dword, is.clone(), *value)
    });
    SeccompRule::new(conditions.collect::<Result<_, _>>()?)
}

/// Calls that are accepted with certain arguments only.
fn with_arguments(needs: SandboxNeeds) -> Result<SeccompRules, seccompiler::BackendError> {
    let flag = |flag: libc::c_int| u64::from(flag.cast_unsigned());
    let none_of = |mask: u64| (Is::MaskedEq(mask), 0);
    // PROT_EXEC: no memory may become executable.
    let (is, zero) = none_of(flag(libc::PROT_EXEC));
    let data = [rule(&[(2, is, zero)])?];
    // Streams only: a datagram socket could send to any address, even one of a pair.
    let stream =
        |family: libc::c_int| [(0, Is::Eq, flag(family)), (1, Is::MaskedEq(0xf), flag(libc::SOCK_STREAM))];
    let pairs = [rule(&stream(libc::AF_UNIX))?];
    let mut sockets = pairs.to_vec();
    if needs.tcp || needs.cluster {
        for family in [libc::AF_INET, libc::AF_INET6] {
            // Not SCTP, whose sends connect, nor protocols that landlock's TCP rules do not cover.
            for protocol in [0, libc::IPPROTO_TCP] {
                let [family, kind] = stream(family);
                sockets.push(rule(&[family, kind, (2, Is::Eq, flag(protocol))])?);
            }
        }
    }
    // MSG_FASTOPEN connects, so sends with it are rejected.
    let (is, zero) = none_of(flag(libc::MSG_FASTOPEN));
    let to_peer = |flags: u8| Ok::<_, seccompiler::BackendError>(vec![rule(&[(flags, is.clone(), zero)])?]);
    // Threads of this process in its current namespaces only.
    let spaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET;
    let thread = Is::MaskedEq(flag(libc::CLONE_THREAD | spaces));
    let process_id = u64::from(std::process::id());
    let one_of = |index: u8, values: &[u64]| {
        values.iter().map(|value| rule(&[(index, Is::Eq, *value)])).collect::<Result<Vec<_>, _>>()
    };
    // No set-uid or set-gid files: another user of this host could execute them.
    let plain = |mode: u8| {
        let (is, zero) = none_of(SET_ID);
        rule(&[(mode, is, zero)])
    };
    let opened = |flags: u8| {
        // Without O_CREAT and O_TMPFILE the kernel ignores the mode, so it may have any value.
        let (is, zero) = none_of(flag(libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY));
        Ok::<_, seccompiler::BackendError>(vec![plain(flags + 1)?, rule(&[(flags, is, zero)])?])
    };
    let mut rules = SeccompRules::from([
        (libc::SYS_mmap, data.to_vec()),
        (libc::SYS_mprotect, data.to_vec()),
        (libc::SYS_socket, sockets),
        (libc::SYS_socketpair, pairs.to_vec()),
        (libc::SYS_openat, opened(2)?),
        (libc::SYS_fchmod, vec![plain(1)?]),
        (libc::SYS_fcntl, one_of(1, &COMMANDS.map(flag))?),
        (libc::SYS_sendto, to_peer(3)?),
        (libc::SYS_sendmsg, to_peer(2)?),
        (libc::SYS_clone, vec![rule(&[(0, thread, flag(libc::CLONE_THREAD))])?]),
        (libc::SYS_tgkill, vec![rule(&[(0, Is::Eq, process_id)])?]),
        (libc::SYS_prlimit64, vec![rule(&[(0, Is::Eq, 0)])?, rule(&[(0, Is::Eq, process_id)])?]),
        (libc::SYS_ioctl, one_of(1, &REQUESTS)?),
        // A thread may lower its own priority to 19; no other thread, and no other value.
        (libc::SYS_setpriority, vec![rule(&[(0, Is::Eq, 0), (1, Is::Eq, 0), (2, Is::Eq, 19)])?]),
        (
            libc::SYS_prctl,
            one_of(
                0,
                &[
                    libc::PR_SET_NAME,
                    libc::PR_GET_NAME,
                    PR_SET_VMA,
                    libc::PR_SET_NO_NEW_PRIVS,
                    libc::PR_GET_NO_NEW_PRIVS,
                ]
                .map(flag),
            )?,
        ),
    ]);
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_open, opened(1)?);
    if needs.changes_ownership {
        // These work by name, which landlock does not restrict.
        rules.insert(libc::SYS_fchmodat, vec![plain(2)?]);
        rules.insert(libc::SYS_fchownat, Vec::new());
        #[cfg(target_arch = "x86_64")]
        rules.extend([(libc::SYS_chmod, vec![plain(1)?]), (libc::SYS_chown, Vec::new())]);
    }
    Ok(rules)
}

/// Mode bits of files that run as their owner or group.
const SET_ID: u64 = (libc::S_ISUID | libc::S_ISGID) as u64;

/// Commands of fcntl(2) for descriptors and locks. None that sends signals, such as `F_SETOWN`.
const COMMANDS: [libc::c_int; 17] = [
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_SETLKW,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_OFD_SETLKW,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
    libc::F_GETPIPE_SZ,
    libc::F_SETPIPE_SZ,
    F_DUPFD_QUERY,
];

/// Compares two descriptors' open files (linux/fcntl.h).
const F_DUPFD_QUERY: libc::c_int = 1024 + 3;

/// Names memory, as the C library does (linux/prctl.h).
const PR_SET_VMA: libc::c_int = 0x5356_4d41;

/// Requests of ioctl(2) for files, block devices and sockets. None that inserts input into a
/// terminal.
const REQUESTS: [u64; 18] = [
    libc::FIONREAD,
    libc::FIONBIO,
    libc::FIOCLEX,
    libc::FIONCLEX,
    libc::TIOCOUTQ,
    libc::TCGETS,
    libc::TIOCGWINSZ,
    libc::FS_IOC_GETFLAGS,
    0x1268,      // BLKSSZGET (linux/fs.h, as all below)
    0x127b,      // BLKPBSZGET
    0x1278,      // BLKIOMIN
    0x1279,      // BLKIOOPT
    0x8008_1272, // BLKGETSIZE64
    0x1260,      // BLKGETSIZE
    0x125e,      // BLKROGET
    0x1277,      // BLKDISCARD
    0x127f,      // BLKZEROOUT
    0x127c,      // BLKDISCARDZEROES
];

const ALWAYS: [c_long; 127] = [
    // io_uring.
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Open files.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_sync,
    libc::SYS_fadvise64,
    libc::SYS_flock,
    // The access rights of a new overlay, within those of the user.
    libc::SYS_fchown,
    libc::SYS_fsetxattr,
    libc::SYS_fremovexattr,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_getdents64,
    libc::SYS_fstatfs,
    libc::SYS_copy_file_range,
    libc::SYS_sendfile,
    libc::SYS_readahead,
    // Files by name, restricted by landlock and the user's rights; opening is in `with_arguments`.
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_readlinkat,
    libc::SYS_getxattr,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_mkdirat,
    libc::SYS_umask,
    libc::SYS_getcwd,
    // Memory.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_msync,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    // Sockets, except for creating and connecting.
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    libc::SYS_shutdown,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    // Waiting.
    libc::SYS_futex,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_signalfd4,
    libc::SYS_pipe2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_sched_yield,
    libc::SYS_restart_syscall,
    // Threads and signals.
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_rseq,
    libc::SYS_set_tid_address,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_getparam,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigpending,
    libc::SYS_sigaltstack,
    libc::SYS_ioprio_get,
    // Identity, time and limits.
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_times,
    libc::SYS_getrusage,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getgroups,
    libc::SYS_getpgid,
    libc::SYS_getsid,
    libc::SYS_getpriority,
    libc::SYS_capget,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getcpu,
    libc::SYS_getrandom,
    libc::SYS_getrlimit,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
];

/// Older calls that only this architecture has.
#[cfg(target_arch = "x86_64")]
const OF_X86_64: [c_long; 18] = [
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_access,
    libc::SYS_pipe,
    libc::SYS_dup2,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_link,
    libc::SYS_mkdir,
    libc::SYS_readlink,
    libc::SYS_time,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_getdents,
    libc::SYS_arch_prctl,
];

#[cfg(test)]
mod tests {
    use seccompiler::sock_filter;

    use super::*;

    /// True if a program accepts a call: interprets the filter as the kernel does (linux/filter.h,
    /// linux/seccomp.h), limited to the instructions that occur.
    fn accepts(program: &[sock_filter], call: c_long, arguments: &[u64]) -> bool {
        let arch: u64 = if cfg!(target_arch = "x86_64") { 0xc000_003e } else { 0xc000_00b7 };
        let mut seccomp_data = vec![call.cast_unsigned() as u32, arch as u32, 0, 0];
        for index in 0..6 {
            let argument = arguments.get(index).copied().unwrap_or(0);
            seccomp_data.extend([argument as u32, (argument >> 32) as u32]);
        }
        let (mut at, mut value) = (0, 0_u32);
        loop {
            let step = &program[at];
            at += 1;
            let mut jump = |holds: bool| at += usize::from(if holds { step.jt } else { step.jf });
            match step.code {
                0x20 => value = seccomp_data[step.k as usize / 4],
                0x54 => value &= step.k,
                0x05 => at += step.k as usize,
                0x15 => jump(value == step.k),
                0x25 => jump(value > step.k),
                0x35 => jump(value >= step.k),
                0x06 => return step.k == 0x7fff_0000,
                other => panic!("{other:#x} is in no such program"),
            }
        }
    }

    fn number(value: libc::c_int) -> u64 {
        u64::from(value.cast_unsigned())
    }

    #[test]
    fn fcntl_cannot_send_signals() {
        let program = of_disks(SandboxNeeds::default()).expect("a program");
        let commands = |command| accepts(&program, libc::SYS_fcntl, &[3, number(command), 1]);
        assert!(commands(libc::F_DUPFD_CLOEXEC) && commands(libc::F_OFD_SETLK) && commands(libc::F_SETFL));
        // Of linux/fcntl.h: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY.
        for command in [8, 10, 15, 1024, 1026] {
            assert!(!commands(command), "{command}");
        }
    }

    #[test]
    fn only_stream_sockets_are_allowed() {
        let both = SandboxNeeds { tcp: true, ..SandboxNeeds::default() };
        for (needs, tcp) in [(SandboxNeeds::default(), false), (both, true)] {
            let program = of_disks(needs).expect("a program");
            for call in [libc::SYS_socket, libc::SYS_socketpair] {
                let makes = |family, kind: libc::c_int, protocol| {
                    let kind = number(kind | libc::SOCK_CLOEXEC);
                    accepts(&program, call, &[number(family), kind, number(protocol)])
                };
                assert!(makes(libc::AF_UNIX, libc::SOCK_STREAM, 0));
                for kind in [libc::SOCK_DGRAM, libc::SOCK_SEQPACKET, libc::SOCK_RAW] {
                    assert!(!makes(libc::AF_UNIX, kind, 0), "{kind}");
                    assert!(!makes(libc::AF_INET, kind, 0), "{kind}");
                }
                let tcp = tcp && call == libc::SYS_socket;
                for protocol in [0, libc::IPPROTO_TCP] {
                    assert_eq!(makes(libc::AF_INET, libc::SOCK_STREAM, protocol), tcp);
                    assert_eq!(makes(libc::AF_INET6, libc::SOCK_STREAM, protocol), tcp);
                }
                for protocol in [libc::IPPROTO_SCTP, libc::IPPROTO_MPTCP, 256] {
                    assert!(!makes(libc::AF_INET, libc::SOCK_STREAM, protocol), "{protocol}");
                }
            }
        }
    }

    #[test]
    fn set_id_files_cannot_be_created() {
        let gives = SandboxNeeds { changes_ownership: true, ..SandboxNeeds::default() };
        for needs in [SandboxNeeds::default(), gives] {
            let program = of_disks(needs).expect("a program");
            let opens = |flags: libc::c_int, mode| {
                accepts(&program, libc::SYS_openat, &[number(libc::AT_FDCWD), 1, number(flags), mode])
            };
            for bits in [0o4000, 0o2000, 0o6000] {
                assert!(!opens(libc::O_CREAT | libc::O_RDWR, bits | 0o755), "{bits:o}");
                assert!(!opens(libc::O_TMPFILE | libc::O_RDWR, bits | 0o755), "{bits:o}");
                assert!(!accepts(&program, libc::SYS_fchmod, &[3, bits | 0o755]), "{bits:o}");
                let by_name = [number(libc::AT_FDCWD), 1, bits | 0o755];
                assert!(!accepts(&program, libc::SYS_fchmodat, &by_name), "{bits:o}");
            }
            assert!(opens(libc::O_CREAT | libc::O_RDWR, 0o666));
            // The kernel ignores the mode if no file is created.
            assert!(opens(libc::O_DIRECTORY, u64::MAX));
            assert!(accepts(&program, libc::SYS_fchmod, &[3, 0o600]));
            let by_name = [number(libc::AT_FDCWD), 1, 0o660];
            assert_eq!(accepts(&program, libc::SYS_fchmodat, &by_name), needs.changes_ownership);
            // openat2 passes its mode in memory, which a filter cannot read.
            assert!(!accepts(&program, libc::SYS_openat2, &[]));
        }
    }
}
