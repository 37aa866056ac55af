//! Reads the tasks of a cgroup and their counters.
//!
//! ```text
//!   /proc/PID/task/TID/io     bytes and calls of this task        requires ptrace access, else unknown
//!   /proc/PID/task/TID/stat   name, state, time waited for I/O    field 42, if kernel.task_delayacct is 1
//! ```
//!
//! A buffered write counts when the page becomes dirty, so a task's bytes may run ahead of its
//! cgroup's. Source: proc_pid_io(5), proc_pid_stat(5), accounting/delay-accounting.rst.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use anyhow::Context as _;

use crate::{
    control_group::ControlGroup,
    kernel::{proc_io, proc_io::TaskIo, proc_stat, proc_stat::TICK},
};

/// Identity of a task, unique until reboot: pids are reused, but not with the same start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TaskId {
    pub(crate) pid: i32,
    /// Equals `pid` for the first task of a process.
    pub(crate) tid: i32,
    /// Ticks from boot to its start.
    pub(crate) start_ticks: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CgroupTask {
    /// At most 15 bytes, chosen by the task itself.
    pub(crate) name: String,
    /// `R` running, `S` sleeping, `D` waiting for a device, and others.
    pub(crate) state: char,
    /// `None` without permission to read it.
    pub(crate) io: Option<TaskIo>,
    /// Time waited for I/O, with a resolution of 10 ms; 0 without delay accounting.
    pub(crate) waited: Duration,
}

/// Tasks of a cgroup, without those of its children; empty if it was removed or is threaded.
pub(crate) fn read(group: &ControlGroup, proc: &Path) -> anyhow::Result<BTreeMap<TaskId, CgroupTask>> {
    let mut tasks = BTreeMap::new();
    for pid in group.processes().unwrap_or_default() {
        // The process has exited since it was listed.
        let Ok(entries) = fs::read_dir(proc.join(pid.to_string()).join("task")) else { continue };
        for entry in entries.flatten() {
            let Some(tid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            if let Some((id, task)) = read_one(pid, tid, &entry.path())? {
                tasks.insert(id, task);
            }
        }
    }
    Ok(tasks)
}

fn read_one(pid: i32, tid: i32, directory: &Path) -> anyhow::Result<Option<(TaskId, CgroupTask)>> {
    // Bytes, not a string: a name need not be UTF-8.
    let Ok(stat) = fs::read(directory.join("stat")) else { return Ok(None) };
    let stat = proc_stat::parse(&String::from_utf8_lossy(&stat)).with_context(|| format!("task {tid}"))?;
    // Requires ptrace access to the task; without it the remaining columns are shown.
    let io = match fs::read_to_string(directory.join("io")) {
        Ok(text) => Some(proc_io::parse(&text).with_context(|| format!("task {tid}"))?),
        Err(_) => None,
    };
    let waited = TICK.saturating_mul(u32::try_from(stat.blkio_delay_ticks).unwrap_or(u32::MAX));
    let id = TaskId { pid, tid, start_ticks: stat.start_ticks };
    Ok(Some((id, CgroupTask { name: stat.name, state: stat.state, io, waited })))
}

/// Time that the first task of a zombie process (ended, not yet reaped) waited for I/O; `None`
/// without delay accounting.
pub(crate) fn zombie_io_wait(pid: u32, proc: &Path) -> Option<Duration> {
    if !has_delay_accounting(proc) {
        return None;
    }
    let text = fs::read(proc.join(pid.to_string()).join("stat")).ok()?;
    let ticks = proc_stat::parse(&String::from_utf8_lossy(&text)).ok()?.blkio_delay_ticks;
    Some(TICK.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX)))
}

/// True if delay accounting is on. Kernels before 5.14 lack the sysctl and count by default.
pub(crate) fn has_delay_accounting(proc: &Path) -> bool {
    fs::read_to_string(proc.join("sys/kernel/task_delayacct")).map_or(true, |text| text.trim() != "0")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::fake_machine::FakeMachine;

    /// Id of a process's first task that started at `start_ticks`.
    pub(in crate::show) fn id(tid: i32, start_ticks: u64) -> TaskId {
        TaskId { pid: tid, tid, start_ticks }
    }

    /// Builds fields 1 to 44 of proc_pid_stat(5): the start is field 22, the I/O delay field 42.
    fn stat(tid: i32, name: &str, start: u64, ticks: u64) -> String {
        let middle = "0 ".repeat(17);
        let after = "0 ".repeat(19);
        format!("{tid} ({name}) D 1 {middle}{start} {after}{ticks} 0 0\n")
    }

    #[test]
    fn tasks_of_ended_processes_are_omitted() {
        let machine = FakeMachine::v2("io");
        let (proc, group) = (machine.roots().proc, machine.group("/a"));
        machine.write("/a", "cgroup.procs", "7\n9\n");
        for (tid, ticks) in [(7, 150), (8, 0)] {
            let task = proc.join(format!("7/task/{tid}"));
            fs::create_dir_all(&task).unwrap();
            fs::write(task.join("stat"), stat(tid, "a) (b", 33, ticks)).unwrap();
        }
        let io = "rchar: 1\n\
                  wchar: 2\n\
                  syscr: 3\n\
                  syscw: 4\n\
                  read_bytes: 4096\n\
                  write_bytes: 8192\n\
                  cancelled_write_bytes: 0\n";
        fs::write(proc.join("7/task/7/io"), io).unwrap();
        let tasks = read(&group, &proc).unwrap();
        assert_eq!(tasks.keys().map(|id| (id.pid, id.tid)).collect::<Vec<_>>(), [(7, 7), (7, 8)]);
        let (first, second) = (tasks.values().next().unwrap(), tasks.values().last().unwrap());
        assert_eq!((first.name.as_str(), first.state), ("a) (b", 'D'));
        assert_eq!(first.waited, Duration::from_millis(1500));
        assert_eq!(first.io.map(|io| io.write_bytes), Some(8192));
        assert_eq!(second.io, None, "/proc/PID/task/TID/io cannot be read");
    }

    #[test]
    fn waits_are_counted_unless_disabled_in_the_kernel() {
        let root = tempfile::tempdir().unwrap();
        assert!(has_delay_accounting(root.path()), "before Linux 5.14 there is no switch");
        fs::create_dir_all(root.path().join("sys/kernel")).unwrap();
        fs::write(root.path().join("sys/kernel/task_delayacct"), "0\n").unwrap();
        assert!(!has_delay_accounting(root.path()));
        assert_eq!(zombie_io_wait(std::process::id(), root.path()), None);
        fs::write(root.path().join("sys/kernel/task_delayacct"), "1\n").unwrap();
        assert!(has_delay_accounting(root.path()));
    }
}
