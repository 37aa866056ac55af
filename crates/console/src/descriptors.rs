//! How many files and sockets the process may have open at a time.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// As many descriptors as the administrator allows: a socket or two and a file for each disk add
/// up. The usual soft limit of 1024 is for programs that use select(2).
pub fn raise_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit on open files stays as it is");
    }
}
