//! Limit of open files and sockets of the process.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Current soft limit (RLIMIT_NOFILE); `u64::MAX` if it cannot be read.
pub fn limit() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft)
}

/// Raises the soft limit to the hard one. The usual soft limit of 1024 exists for programs that
/// use select(2), and every open disk holds several descriptors.
pub fn raise_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open files cannot be raised");
    }
}
