//! Mode and owner of a Unix socket's file, which decide which users may connect. Checks only the
//! text.

use std::{fmt, str::FromStr};

/// Default mode of sockets: only the owner may connect, because clients can read and write disks.
const DEFAULT_MODE: u32 = 0o600;

/// Permissions of a socket's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketAccess {
    /// Permission bits, independent of the umask.
    pub mode: u32,
    /// Owner; `None` is the daemon's user.
    pub owner: Option<FileOwner>,
}

impl Default for SocketAccess {
    fn default() -> Self {
        Self { mode: DEFAULT_MODE, owner: None }
    }
}

/// A user, a group, or both, by name or number; at least one is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileOwner {
    /// Unchanged if `None`.
    pub user: Option<String>,
    /// Unchanged if `None`.
    pub group: Option<String>,
}

/// Writes the text that parses as the same value.
impl fmt::Display for FileOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.user.as_deref().unwrap_or_default())?;
        self.group.as_ref().map_or(Ok(()), |group| write!(f, ":{group}"))
    }
}

impl FromStr for FileOwner {
    type Err = String;

    /// Parses `USER`, `USER:GROUP` or `:GROUP`, as chown does.
    fn from_str(text: &str) -> Result<Self, String> {
        let (user, group) = text.split_once(':').unwrap_or((text, ""));
        let part = |part: &str| (!part.is_empty()).then(|| part.to_owned());
        let owner = Self { user: part(user), group: part(group) };
        if owner.user.is_none() && owner.group.is_none() || group.contains(':') || text.contains('\0') {
            return Err("is not an owner; write USER, USER:GROUP or :GROUP".to_owned());
        }
        Ok(owner)
    }
}

/// Parses permission bits as chmod does: octal, at most 777.
///
/// # Errors
/// Returns the rule as text for the user.
pub fn socket_mode(text: &str) -> Result<u32, String> {
    // `from_str_radix` alone would accept a plus sign.
    let octal = !text.is_empty() && text.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| octal && *mode <= 0o777);
    mode.ok_or_else(|| "is not a mode; write up to four octal digits, at most 0777, such as 0660".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        assert_eq!(
            (socket_mode("660"), socket_mode("0777"), socket_mode("0")),
            (Ok(0o660), Ok(0o777), Ok(0))
        );
        for wrong in ["", "1777", "0o660", "+660", "888", "rw"] {
            assert_eq!(
                socket_mode(wrong).unwrap_err(),
                "is not a mode; write up to four octal digits, at most 0777, such as 0660"
            );
        }
    }

    #[test]
    fn owners_are_written_as_for_chown() {
        let owner = |user: &str, group: &str| {
            let part = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            Ok(FileOwner { user: part(user), group: part(group) })
        };
        for (text, expect) in [
            ("qemu", owner("qemu", "")),
            ("qemu:", owner("qemu", "")),
            ("qemu:kvm", owner("qemu", "kvm")),
            (":36", owner("", "36")),
        ] {
            assert_eq!(text.parse(), expect);
        }
        for wrong in ["", ":", "a:b:c"] {
            assert!(wrong.parse::<FileOwner>().unwrap_err().starts_with("is not an owner"));
        }
    }
}
