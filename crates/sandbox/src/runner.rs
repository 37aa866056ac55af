//! Sandbox of the process that starts the command of `--on-event`: no capability, no set-uid
//! program. Files and sockets are not confined, as the command is the operator's own.

use rustix::thread::CapabilitySet;
use settings::FileOwner;

use super::{ThreadRestrictions, calls, user};

/// Confines this process, which has one thread. Mechanisms that this kernel lacks are skipped.
///
/// # Errors
/// Fails if the process cannot change to `owner`, or the kernel refuses a mechanism that it has.
pub fn confine(owner: Option<&FileOwner>, sandboxed: bool) -> anyhow::Result<()> {
    if let Some(owner) = owner {
        user::find(owner)?.switch()?;
    }
    if !sandboxed {
        return Ok(());
    }
    ThreadRestrictions { ruleset: None, allowed: CapabilitySet::empty() }.take()?;
    // If the kernel lacks seccomp, the daemon logs that.
    let _ = calls::restrict_command();
    Ok(())
}
