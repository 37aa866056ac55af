//! Which process is this host: so that a run after a crash has its name at once, and two hosts of
//! one name are found out.
//!
//! A process is known by the machine, its boot, the namespace of its process numbers, its number
//! and when it began. Where all of these but the process are the same and there is no such process
//! any more, it has ended. Elsewhere only etcd knows, once the lease of its key is over.

use std::{fs, process};

use super::values::Identity;

/// The kernel's number of a boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// The machine's name for itself. To be read before the sandbox hides it.
pub(super) fn machine_id() -> String {
    read("/etc/machine-id")
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim_end().to_owned()
}

/// Of this process. Reads what the sandbox leaves readable.
pub(super) fn own(machine_id: &str, instance: u64) -> Identity {
    let space = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let machine = format!("{machine_id} {} {}", read(BOOT), space.display());
    let pid = process::id();
    let began = began(pid).unwrap_or(0);
    Identity { instance, machine, pid, began, weir: env!("CARGO_PKG_VERSION").to_owned() }
}

/// Whether it is another process than this one, and has ended for sure.
pub(super) fn has_ended(other: &Identity, own: &Identity) -> bool {
    if other.machine != own.machine {
        // The same machine, booted anew since.
        let mut words = (other.machine.split(' '), own.machine.split(' '));
        let (id, own_id) = (words.0.next(), words.1.next());
        let (boot, own_boot) = (words.0.next(), words.1.next());
        return id == own_id && id.is_some_and(|id| !id.is_empty()) && boot != own_boot;
    }
    began(other.pid) != Some(other.began)
}

/// When a process began, if it runs: the 22nd field of proc_pid_stat(5). One that nobody has waited
/// for yet (Z) has ended.
fn began(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is a name in brackets, which may hold anything.
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let has_ended = matches!(fields.next()?, "Z" | "X");
    fields.nth(18)?.parse().ok().filter(|_| !has_ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_lives_has_not_ended_and_who_is_elsewhere_may_live() {
        let own = own("id", 1);
        assert!(own.began > 0);
        assert!(!has_ended(&own, &own));
        assert!(
            has_ended(&Identity { began: own.began + 1, ..own.clone() }, &own),
            "another with its number"
        );
        assert!(has_ended(&Identity { pid: u32::MAX, ..own.clone() }, &own));
        let mut child = process::Command::new("true").spawn().unwrap();
        let ended = Identity { pid: child.id(), began: began(child.id()).unwrap_or(0), ..own.clone() };
        let is_zombie = || fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap().contains(") Z ");
        while !is_zombie() {
            std::thread::yield_now();
        }
        assert!(has_ended(&ended, &own), "nobody has waited for it");
        child.wait().unwrap();
        let other = Identity { machine: "other boot pid:[1]".to_owned(), pid: u32::MAX, ..own.clone() };
        assert!(!has_ended(&other, &own));
        let this = Identity { machine: "m now pid:[1]".to_owned(), ..own.clone() };
        let before = Identity { machine: "m before pid:[1]".to_owned(), ..own };
        assert!(has_ended(&before, &this));
    }
}
