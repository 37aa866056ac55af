//! Addresses of images of a Ceph cluster: `rbd:POOL/IMAGE@SNAPSHOT`, followed by QEMU's options.
//!
//! ```text
//!   rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][:conf=FILE][:id=USER][:keyring=FILE][:mon_host=ADDRESSES]
//! ```
//!
//! A backslash removes the special meaning of the next character, as in QEMU (`man
//! qemu-block-drivers`). Ceph's other options, which QEMU passes through, are rejected by name: the
//! config file applies to all programs that open the image, and a key on a command line is visible
//! to all users.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use crate::InvalidValue;

const RULE: &str = "is not an RBD image (rbd:POOL/IMAGE, rbd:POOL/NAMESPACE/IMAGE@SNAPSHOT; behind \
                    it perhaps :conf=FILE, :id=USER, :keyring=FILE, :mon_host=ADDRESSES; a \
                    backslash before a `:`, `@` or `/` that belongs to a name)";
const OPTION_RULE: &str = "has an option that weir does not take (conf, id, keyring and mon_host \
                           are taken; write others into the section [client] of Ceph's config file)";
const TWICE_RULE: &str = "gives an option twice (leave one out)";
/// Maximum length of a name, in bytes: more than Ceph accepts.
const LONGEST: usize = 4096;

/// An image of a cluster or a snapshot of it, and the parameters of the connection to the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RbdAddress {
    /// Pool name.
    pub pool: String,
    /// Namespace in the pool.
    pub namespace: Option<String>,
    /// Image name.
    pub image: String,
    /// Snapshot name; `None` for the image itself.
    pub snapshot: Option<String>,
    /// Ceph's config file; `None` for Ceph's default search (`CEPH_CONF`, `/etc/ceph/ceph.conf`).
    pub config: Option<PathBuf>,
    /// User name without `client.`; `None` for Ceph's default, `admin`.
    pub user: Option<String>,
    /// Keyring of the user; `None` for the config file's.
    pub keyring: Option<PathBuf>,
    /// Monitors, in the form of `mon_host`; `None` for the config file's.
    pub monitors: Option<String>,
}

impl RbdAddress {
    /// Parses the text after `rbd:`.
    ///
    /// # Errors
    /// It has another form, or an unsupported option.
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        let invalid = |rule| InvalidValue::new(text, rule);
        let mut parts = split(text, ':').into_iter();
        let path = parts.next().unwrap_or_default();
        let (path, snapshot) = match split(&path, '@').as_slice() {
            [path] => (path.clone(), None),
            [path, snapshot] => (path.clone(), Some(unescape(snapshot))),
            _ => return Err(invalid(RULE)),
        };
        let names: Vec<_> = split(&path, '/').iter().map(|name| unescape(name)).collect();
        let mut address = match names.as_slice() {
            [pool, image] => Self { pool: pool.clone(), image: image.clone(), ..Self::default() },
            [pool, namespace, image] => Self {
                pool: pool.clone(),
                namespace: Some(namespace.clone()),
                image: image.clone(),
                ..Self::default()
            },
            _ => return Err(invalid(RULE)),
        };
        address.snapshot = snapshot;
        for option in parts {
            let (key, value) = option.split_once('=').ok_or_else(|| invalid(RULE))?;
            let value = unescape(value);
            let is_new = match key {
                "conf" => address.config.replace(value.into()).is_none(),
                "keyring" => address.keyring.replace(value.into()).is_none(),
                "id" => address.user.replace(value).is_none(),
                "mon_host" => address.monitors.replace(value).is_none(),
                _ => return Err(invalid(OPTION_RULE)),
            };
            if !is_new {
                return Err(invalid(TWICE_RULE));
            }
        }
        address.check().map_err(|()| invalid(RULE))?;
        Ok(address)
    }

    fn check(&self) -> Result<(), ()> {
        let paths = [&self.config, &self.keyring].into_iter().flatten().filter_map(|path| path.to_str());
        let names = [Some(&self.pool), Some(&self.image), self.namespace.as_ref(), self.snapshot.as_ref()];
        let settings = [self.user.as_ref(), self.monitors.as_ref()];
        let all = names.into_iter().chain(settings).flatten().map(String::as_str).chain(paths);
        let is_valid = |text: &str| !text.is_empty() && text.len() <= LONGEST && !text.contains('\0');
        if all.into_iter().all(is_valid) { Ok(()) } else { Err(()) }
    }

    /// Resolves relative file names against `directory`.
    #[must_use]
    pub fn relative_to(self, directory: &Path) -> Self {
        let resolve = |path: Option<PathBuf>| path.map(|path| directory.join(path));
        Self { config: resolve(self.config), keyring: resolve(self.keyring), ..self }
    }

    /// Address without the connection's parameters, for display.
    pub fn name(&self) -> String {
        Self { config: None, user: None, keyring: None, monitors: None, ..self.clone() }.to_string()
    }
}

/// Splits at each `end` that is not escaped; keeps the backslashes.
fn split(text: &str, end: char) -> Vec<String> {
    let (mut pieces, mut piece, mut is_escaped) = (Vec::new(), String::new(), false);
    for character in text.chars() {
        if character == end && !is_escaped {
            pieces.push(std::mem::take(&mut piece));
            continue;
        }
        // A backslash also escapes a backslash.
        is_escaped = character == '\\' && !is_escaped;
        piece.push(character);
    }
    pieces.push(piece);
    pieces
}

/// Removes the backslashes.
fn unescape(text: &str) -> String {
    let (mut unescaped, mut is_escaped) = (String::new(), false);
    for character in text.chars() {
        is_escaped = character == '\\' && !is_escaped;
        if !is_escaped {
            unescaped.push(character);
        }
    }
    unescaped
}

/// Escapes the characters that end a name.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        if matches!(character, ':' | '@' | '/' | '\\') {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

/// Escapes an option's value, in which slashes and `@` have no special meaning.
fn value(text: &str) -> String {
    escaped(text).replace("\\/", "/").replace("\\@", "@")
}

impl fmt::Display for RbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rbd:{}", escaped(&self.pool))?;
        if let Some(namespace) = &self.namespace {
            write!(f, "/{}", escaped(namespace))?;
        }
        write!(f, "/{}", escaped(&self.image))?;
        if let Some(snapshot) = &self.snapshot {
            write!(f, "@{}", escaped(snapshot))?;
        }
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.to_string_lossy().into_owned());
        let options = [
            ("conf", path(&self.config)),
            ("id", self.user.clone()),
            ("keyring", path(&self.keyring)),
            ("mon_host", self.monitors.clone()),
        ];
        for (key, text) in options {
            if let Some(text) = text {
                write!(f, ":{key}={}", value(&text))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> RbdAddress {
        RbdAddress::read(text).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn names_are_read_as_qemu_reads_them() {
        let plain = read("vms/vm1");
        assert_eq!((plain.pool.as_str(), plain.image.as_str()), ("vms", "vm1"));
        let all = read("vms/tenant/vm1@monday:conf=/etc/ceph/b.conf:id=weir:mon_host=10.0.0.1\\:6789,h2");
        assert_eq!(all.namespace.as_deref(), Some("tenant"));
        assert_eq!(all.snapshot.as_deref(), Some("monday"));
        assert_eq!(all.config.as_deref(), Some(Path::new("/etc/ceph/b.conf")));
        assert_eq!(all.user.as_deref(), Some("weir"));
        assert_eq!(all.monitors.as_deref(), Some("10.0.0.1:6789,h2"));
        let odd = read("a\\/b/c\\@d\\:e@f\\\\g");
        assert_eq!((odd.pool.as_str(), odd.image.as_str()), ("a/b", "c@d:e"));
        assert_eq!(odd.snapshot.as_deref(), Some("f\\g"));
    }

    #[test]
    fn formatted_addresses_parse_again() {
        for text in [
            "vms/vm1",
            "vms/tenant/vm1@monday:conf=/etc/ceph/b.conf:id=weir:keyring=/k:mon_host=10.0.0.1\\:6789,h2",
            "a\\/b/c\\@d\\:e@f\\\\g:conf=/a@b\\:c",
        ] {
            let address = read(text);
            let formatted = address.to_string();
            assert_eq!(read(formatted.strip_prefix("rbd:").expect("it begins so")), address, "{formatted}");
        }
        assert_eq!(read("vms/vm1@s:id=x").name(), "rbd:vms/vm1@s");
    }

    #[test]
    fn invalid_addresses_are_rejected() {
        for text in [
            "",
            "vms",
            "/vm1",
            "vms/",
            "a/b/c/d",
            "vms//vm1",
            "vms/vm1@",
            "vms/vm1@a@b",
            "vms/vm1:",
            "vms/vm1:conf",
            "vms/vm1:conf=",
            "vms/v\0m",
        ] {
            assert_eq!(RbdAddress::read(text).map_err(|error| error.rule), Err(RULE.into()), "{text:?}");
        }
        let rule = |text| RbdAddress::read(text).map_err(|error| error.rule);
        assert_eq!(rule("vms/vm1:rbd_cache=false"), Err(OPTION_RULE.into()));
        assert_eq!(rule("vms/vm1:key=AQB"), Err(OPTION_RULE.into()));
        assert_eq!(rule("vms/vm1:id=a:id=b"), Err(TWICE_RULE.into()));
    }

    #[test]
    fn relative_files_resolve_against_a_directory() {
        let resolved = read("vms/vm1:conf=ceph.conf:keyring=/k").relative_to(Path::new("/etc/weir"));
        assert_eq!(resolved.config.as_deref(), Some(Path::new("/etc/weir/ceph.conf")));
        assert_eq!(resolved.keyring.as_deref(), Some(Path::new("/k")));
    }
}
