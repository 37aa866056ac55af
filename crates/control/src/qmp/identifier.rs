//! Names given by clients: ids by QEMU's rule, and names by the rule of the config file.

use super::{error::QmpError, json::excerpt};

/// Maximum length of a name in bytes, as in the config file: the limit of the NBD protocol.
const MAX_NAME_BYTES: usize = 4096;

/// Text of the rule that [`is_well_formed`] checks.
pub(super) const RULE: &str = "(a letter, then letters, digits, '-', '.' and '_')";

/// QEMU's rule for ids (`id_wellformed`): a letter, then letters, digits, `-`, `.` and `_`.
pub(super) fn is_well_formed(id: &str) -> bool {
    let mut bytes = id.bytes();
    bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic())
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

pub(super) fn check(key: &str, id: &str) -> Result<(), QmpError> {
    if is_well_formed(id) {
        return check_name(key, id);
    }
    Err(QmpError::rule(key, format!("expects an identifier {RULE}, not '{}'", excerpt(id))))
}

/// Rule for names: printable on one line, and usable on a command line.
pub(super) fn check_name(key: &str, name: &str) -> Result<(), QmpError> {
    if name.is_empty() {
        return Err(QmpError::rule(key, "is empty"));
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(QmpError::rule(key, format!("is too long; a name has {MAX_NAME_BYTES} bytes at most")));
    }
    if name.chars().any(char::is_control) {
        return Err(QmpError::rule(key, "holds a control character"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_follow_qemus_rule() {
        for id in ["a", "vm-1.disk_0", "Z9"] {
            check("id", id).unwrap();
        }
        for id in ["", "0a", "#b", "a b", "a/b", "é", "a\n"] {
            let error = check("id", id).unwrap_err().to_string();
            assert!(error.starts_with("Parameter 'id' expects an identifier"), "{error}");
        }
        check_name("group", "Tenant 1/ü").unwrap();
        assert!(check_name("group", "a\tb").is_err());
        assert!(check_name("group", &"x".repeat(4097)).is_err());
    }
}
