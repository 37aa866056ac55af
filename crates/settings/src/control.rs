//! Default address of the control socket: one rule for the daemon that opens it and for the
//! commands that connect to it.
//!
//! ```text
//!   WEIR_QMP=unix:PATH                 both
//!   RUNTIME_DIRECTORY/qmp.sock         the daemon: the service manager created the directory
//!   /run/weir/qmp.sock                 root
//!   XDG_RUNTIME_DIR/weir/qmp.sock      another user; commands then try root's socket as well
//! ```
//!
//! Never checks if a daemon listens.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
};

/// Environment variable with another address, as `unix:PATH`.
pub const VARIABLE: &str = "WEIR_QMP";
/// Root's directory, by the Filesystem Hierarchy Standard.
const DIRECTORY_OF_ROOT: &str = "/run/weir";
const DIRECTORY: &str = "weir";
const SOCKET: &str = "qmp.sock";

/// Control socket at its default address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlSocketLocation {
    /// Path of the socket.
    pub path: PathBuf,
    /// Mode of its directory, if weir has to create it.
    pub directory_mode: Option<u32>,
}

impl ControlSocketLocation {
    /// Socket that a daemon opens.
    ///
    /// # Errors
    /// Fails if a variable is invalid or missing.
    pub fn for_daemon() -> Result<Self, String> {
        Self::from_sources(is_root(), |name| env::var_os(name))
    }

    /// Socket that commands connect to: the first that exists, else the first.
    ///
    /// # Errors
    /// Fails if a variable is invalid.
    pub fn for_commands() -> Result<Self, String> {
        Self::first_existing(is_root(), |name| env::var_os(name), Path::exists)
    }

    /// True if commands use this path only because no variable gives the address of this user's
    /// daemon.
    pub fn is_fallback(path: &Path) -> bool {
        path == root_socket().path && Self::has_no_directory(is_root(), |name| env::var_os(name))
    }

    /// A given socket. Its directory has to exist, unless it is weir's own.
    pub fn at(path: PathBuf) -> Self {
        // Only /run/weir may be missing after a boot without a unit.
        let is_own = path.parent() == Some(Path::new(DIRECTORY_OF_ROOT));
        Self { path, directory_mode: is_own.then_some(0o755) }
    }

    fn from_sources(is_root: bool, variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, String> {
        if let Some(named) = from_variable(&variable)? {
            return Ok(named);
        }
        // A unit may have several directories, separated by colons.
        // systemd's RuntimeDirectory=; the directory exists already.
        let of_unit = non_empty(variable("RUNTIME_DIRECTORY"));
        if let Some(directory) = of_unit.and_then(|all| env::split_paths(&all).next()) {
            return Ok(Self { path: directory.join(SOCKET), directory_mode: None });
        }
        let location = if is_root { Some(root_socket()) } else { user_socket(&variable) };
        location.ok_or_else(|| {
            "XDG_RUNTIME_DIR is not set, so there is no directory for the control socket".to_owned()
        })
    }

    fn has_no_directory(is_root: bool, variable: impl Fn(&str) -> Option<OsString>) -> bool {
        !is_root && non_empty(variable(VARIABLE)).is_none() && user_socket(&variable).is_none()
    }

    fn first_existing(
        is_root: bool,
        variable: impl Fn(&str) -> Option<OsString>,
        exists: impl Fn(&Path) -> bool,
    ) -> Result<Self, String> {
        if let Some(named) = from_variable(&variable)? {
            return Ok(named);
        }
        Ok(match user_socket(&variable).filter(|_| !is_root) {
            // Without a daemon of this user, commands use the system's.
            Some(socket) if exists(&socket.path) || !exists(&root_socket().path) => socket,
            _ => root_socket(),
        })
    }
}

fn from_variable(
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<Option<ControlSocketLocation>, String> {
    let Some(value) = non_empty(variable(VARIABLE)) else { return Ok(None) };
    let value = value.to_string_lossy();
    let path = crate::parse_unix_socket(&value).map_err(|rule| format!("{VARIABLE}={value}: {rule}"))?;
    Ok(Some(ControlSocketLocation::at(path)))
}

fn root_socket() -> ControlSocketLocation {
    ControlSocketLocation::at(Path::new(DIRECTORY_OF_ROOT).join(SOCKET))
}

fn user_socket(variable: impl Fn(&str) -> Option<OsString>) -> Option<ControlSocketLocation> {
    // XDG Base Directory Specification: relative paths are invalid and must be ignored.
    let directory =
        non_empty(variable("XDG_RUNTIME_DIR")).map(PathBuf::from).filter(|path| path.is_absolute())?;
    Some(ControlSocketLocation { path: directory.join(DIRECTORY).join(SOCKET), directory_mode: Some(0o700) })
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Treats an empty variable as unset.
fn non_empty(variable: Option<OsString>) -> Option<OsString> {
    variable.filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at<'a>(variables: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
    }

    #[track_caller]
    fn check(
        is_root: bool,
        variables: &[(&str, &str)],
        existing: &[&str],
        daemon: Result<&str, &str>,
        command: &str,
    ) {
        let found = ControlSocketLocation::from_sources(is_root, at(variables));
        let found = found.as_ref().map(|place| place.path.to_str().unwrap()).map_err(String::as_str);
        assert_eq!(found, daemon, "{variables:?}");
        let exists = |path: &Path| existing.iter().any(|known| Path::new(known) == path);
        let found = ControlSocketLocation::first_existing(is_root, at(variables), exists).unwrap();
        assert_eq!(found.path.to_str(), Some(command), "{variables:?}");
    }

    #[test]
    fn commands_and_daemon_agree_on_the_path() {
        let (user, root) = ("/run/user/7/weir/qmp.sock", "/run/weir/qmp.sock");
        let runtime = ("XDG_RUNTIME_DIR", "/run/user/7");
        check(true, &[], &[], Ok(root), root);
        // `sudo` may preserve the user's variable.
        check(true, &[runtime], &[user], Ok(root), root);
        check(false, &[runtime, (VARIABLE, "")], &[user, root], Ok(user), user);
        check(false, &[runtime], &[], Ok(user), user);
        // The system's service, used by this user.
        check(false, &[runtime], &[root], Ok(user), root);
        check(false, &[runtime, (VARIABLE, "unix:/q")], &[user], Ok("/q"), "/q");
        let none = Err("XDG_RUNTIME_DIR is not set, so there is no directory for the control socket");
        check(false, &[], &[], none, root);
        check(false, &[("XDG_RUNTIME_DIR", "here")], &[], none, root);
    }

    #[test]
    fn a_user_without_a_runtime_directory_has_no_socket() {
        let runtime = ("XDG_RUNTIME_DIR", "/run/user/7");
        assert!(ControlSocketLocation::has_no_directory(false, at(&[])));
        assert!(ControlSocketLocation::has_no_directory(false, at(&[("XDG_RUNTIME_DIR", "here")])));
        assert!(!ControlSocketLocation::has_no_directory(false, at(&[runtime])));
        assert!(!ControlSocketLocation::has_no_directory(false, at(&[(VARIABLE, "unix:/q")])));
        assert!(!ControlSocketLocation::has_no_directory(true, at(&[])));
    }

    #[test]
    fn a_service_uses_its_runtime_directory() {
        let unit = ("RUNTIME_DIRECTORY", "/run/weir:/run/other");
        check(false, &[unit], &[], Ok("/run/weir/qmp.sock"), "/run/weir/qmp.sock");
        check(true, &[unit, (VARIABLE, "unix:/q")], &[], Ok("/q"), "/q");
    }

    #[test]
    fn only_weirs_own_directories_are_created() {
        let mode = |is_root, variables: &[(&str, &str)]| {
            ControlSocketLocation::from_sources(is_root, at(variables)).unwrap().directory_mode
        };
        assert_eq!(mode(true, &[]), Some(0o755));
        assert_eq!(mode(false, &[("XDG_RUNTIME_DIR", "/run/user/7")]), Some(0o700));
        assert_eq!(mode(true, &[(VARIABLE, "unix:/q/s")]), None);
        assert_eq!(mode(true, &[("RUNTIME_DIRECTORY", "/run/weir")]), None);
    }

    #[test]
    fn an_invalid_variable_is_named() {
        let error = ControlSocketLocation::from_sources(true, at(&[(VARIABLE, "/b")])).unwrap_err();
        assert_eq!(error, "WEIR_QMP=/b: is a path without unix: before it (write unix:/b)");
    }
}
