//! Identity of the process that owns a host's name: a restart after a crash gets the name at once,
//! and two hosts with one name are detected.
//!
//! A process is identified by machine, boot, pid namespace, pid and start time. If everything but
//! the process matches and the process does not exist, it has ended. Otherwise only the expiry of
//! its key's lease shows that.

use std::{fs, process};

use super::etcd_values::HostIdentity;

/// Boot id of the kernel.
const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// Machine id. Has to be read before the sandbox hides the file.
pub(super) fn machine_id() -> String {
    read("/etc/machine-id")
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim_end().to_owned()
}

/// Identity of this process. Reads only files that the sandbox leaves readable.
pub(super) fn own_identity(machine_id: &str, instance: u64) -> HostIdentity {
    let space = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let machine = format!("{machine_id} {} {}", read(BOOT_ID_FILE), space.display());
    let pid = process::id();
    let began = start_ticks(pid).unwrap_or(0);
    HostIdentity { instance, machine, pid, start_ticks: began, weir: env!("CARGO_PKG_VERSION").to_owned() }
}

/// True if `other` is a different process that has certainly ended.
pub(super) fn has_ended(other: &HostIdentity, own: &HostIdentity) -> bool {
    if other.machine != own.machine {
        // The same machine after a reboot.
        let mut fields = (other.machine.split(' '), own.machine.split(' '));
        let (id, own_id) = (fields.0.next(), fields.1.next());
        let (boot, own_boot) = (fields.0.next(), fields.1.next());
        return id == own_id && id.is_some_and(|id| !id.is_empty()) && boot != own_boot;
    }
    start_ticks(other.pid) != Some(other.start_ticks)
}

/// Start time of a running process: field 22 of proc_pid_stat(5). `None` for a zombie.
fn start_ticks(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in parentheses, which may itself contain any character.
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let has_ended = matches!(fields.next()?, "Z" | "X");
    fields.nth(18)?.parse().ok().filter(|_| !has_ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_or_remote_process_has_not_ended() {
        let own = own_identity("id", 1);
        assert!(own.start_ticks > 0);
        assert!(!has_ended(&own, &own));
        assert!(
            has_ended(&HostIdentity { start_ticks: own.start_ticks + 1, ..own.clone() }, &own),
            "another process with the same pid"
        );
        assert!(has_ended(&HostIdentity { pid: u32::MAX, ..own.clone() }, &own));
        let mut child = process::Command::new("true").spawn().unwrap();
        let ended = HostIdentity {
            pid: child.id(),
            start_ticks: start_ticks(child.id()).unwrap_or(0),
            ..own.clone()
        };
        let is_zombie = || fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap().contains(") Z ");
        while !is_zombie() {
            std::thread::yield_now();
        }
        assert!(has_ended(&ended, &own), "its parent has not waited for it");
        child.wait().unwrap();
        let other = HostIdentity { machine: "other boot pid:[1]".to_owned(), pid: u32::MAX, ..own.clone() };
        assert!(!has_ended(&other, &own));
        let current = HostIdentity { machine: "m now pid:[1]".to_owned(), ..own.clone() };
        let earlier = HostIdentity { machine: "m before pid:[1]".to_owned(), ..own };
        assert!(has_ended(&earlier, &current));
    }
}
