//! How many files and sockets the process may have open at a time.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// How many it may have now.
pub fn limit() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft)
}

/// Raises the soft limit to the hard one: the usual 1024 is for programs that use select(2).
pub fn raise_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit on open files stays as it is");
    }
}
