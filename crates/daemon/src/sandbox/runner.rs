//! What the process gives up that hands events on (`on_event`): all but what its one task takes.
//!
//! ```text
//!   webhook   no capability, no program, no process; reads what the C library and TLS need, writes
//!             nothing; calls the ports of its server and of names, or a Unix socket
//!   command   no capability, no set-uid program; else what its user may, as the command is the
//!             operator's own
//! ```

use landlock::{AccessNet, NetPort, RulesetCreatedAttr};
use rustix::thread::CapabilitySet;
use settings::{OnEvent, Owner, WebServer};

use super::{Part, calls, files, user};

/// Where names are looked up.
const NAMES: u16 = 53;

/// Confines this process, which has one thread. What this kernel lacks is done without.
///
/// # Errors
/// Where it cannot be another user, or what the kernel has cannot be had.
pub(crate) fn confine(target: &OnEvent, owner: Option<&Owner>, sandboxed: bool) -> anyhow::Result<()> {
    if let Some(owner) = owner {
        user::find(owner)?.become_it()?;
    }
    if !sandboxed {
        return Ok(());
    }
    let ruleset = match target {
        OnEvent::Command(_) => None,
        OnEvent::Webhook(webhook) => {
            let ports = match &webhook.server {
                WebServer::Unix(_) => Vec::new(),
                WebServer::Tcp { port, .. } => vec![*port, NAMES],
            };
            match files::public() {
                // No landlock: system calls are filtered all the same.
                Err(_) => None,
                Ok(rules) => {
                    let ports = ports.into_iter().map(|port| NetPort::new(port, AccessNet::ConnectTcp));
                    Some(ports.into_iter().try_fold(rules, RulesetCreatedAttr::add_rule)?)
                }
            }
        }
    };
    Part { ruleset, kept: CapabilitySet::empty() }.take()?;
    let filtered = match target {
        OnEvent::Webhook(_) => calls::restrict_caller(),
        OnEvent::Command(_) => calls::restrict_command(),
    };
    // A kernel without seccomp has said so to the daemon.
    let _ = filtered;
    Ok(())
}
