//! Metrics of the process from `/proc`, by the names of Prometheus's client libraries.
//!
//! Read on the thread that reports them, not on the main thread: with many threads and descriptors
//! it takes time. Unreadable values are omitted.

use std::{fs, path::Path, time::Duration};

/// Clock tick: USER_HZ is 100 on every architecture that Rust supports on Linux
/// (include/uapi/asm-generic/param.h).
const TICK: Duration = Duration::from_millis(10);

#[derive(Debug, Default)]
pub(super) struct ProcessMetrics {
    pub(super) cpu: Option<Duration>,
    pub(super) resident_bytes: Option<u64>,
    pub(super) virtual_bytes: Option<u64>,
    pub(super) open_descriptors: Option<u64>,
    /// Processor time of long-lived threads, by name.
    pub(super) threads: Vec<(String, Duration)>,
}

impl ProcessMetrics {
    pub(super) fn now() -> Self {
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let memory = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let bytes = |key: &str| {
            let line = memory.lines().find_map(|line| line.strip_prefix(key))?;
            Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
        };
        let descriptors = fs::read_dir("/proc/self/fd").ok().map(|list| list.count() as u64);
        let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let mut threads: Vec<_> = tasks.filter_map(|task| thread(&task.path())).collect();
        threads.sort();
        // Threads of equal name count as one.
        threads.dedup_by(|(name, more), (same, sum)| {
            let is_same = name == same;
            if is_same {
                *sum += *more;
            }
            is_same
        });
        Self {
            cpu: times(&stat).map(|(_, cpu)| cpu),
            resident_bytes: bytes("VmRSS:"),
            virtual_bytes: bytes("VmSize:"),
            open_descriptors: descriptors,
            threads,
        }
    }
}

/// Name and processor time of a thread, if it is long-lived.
fn thread(path: &Path) -> Option<(String, Duration)> {
    let (name, cpu) = times(&fs::read_to_string(path.join("stat")).ok()?)?;
    // The main thread's name is the program's, so it is recognized by its id.
    let is_main = path.file_name()?.to_str()?.parse() == Ok(std::process::id());
    let name = if is_main { "main".to_owned() } else { name };
    (is_main || name.starts_with("worker ") || name == "http" || name == "cgroups").then_some((name, cpu))
}

/// Name and processor time in a stat file: proc_pid_stat(5), fields 2, 14 and 15. The name ends at
/// the last parenthesis.
fn times(stat: &str) -> Option<(String, Duration)> {
    let (_, rest) = stat.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u32>().ok();
    Some((name.to_owned(), TICK * (ticks()?.checked_add(ticks()?)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_user_and_system() {
        let stat = "17 (worker) 3) R 1 1 1 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 1 0 5 0 0";
        assert_eq!(times(stat), Some(("worker) 3".to_owned(), Duration::from_secs(3))));
        assert_eq!(times("17 (worker 3) R 1"), None);
        assert_eq!(times(""), None);
    }

    #[test]
    fn this_process_has_memory_descriptors_and_a_main_thread() {
        let process = ProcessMetrics::now();
        assert!(process.resident_bytes > Some(0) && process.virtual_bytes >= process.resident_bytes);
        assert!(process.open_descriptors > Some(2));
        assert!(process.cpu.is_some());
        assert!(process.threads.iter().any(|(name, _)| name == "main"));
    }
}
