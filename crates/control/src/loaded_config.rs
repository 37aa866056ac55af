//! Config in force, with all inputs of its next reading.
//!
//! Data only; `reload` reads the file again.

use std::{path::PathBuf, rc::Rc};

use export::nbd;
use settings::{ConfigWithOrigins, DaemonConfig, DesiredState};
use storage::rate::RateBudgets;

/// Config in force.
#[derive(Clone)]
pub struct LoadedConfig {
    /// Path as given: messages and relative paths begin with it.
    pub file: PathBuf,
    /// Options of the command line, which override keys of the file.
    pub options: ConfigWithOrigins<DaemonConfig>,
    /// Number of sockets that the service manager passed.
    pub inherited: usize,
    /// The plan of the last successful start or reload.
    pub plan: Rc<DesiredState>,
    /// TLS credentials of NBD servers.
    pub tls: Option<nbd::NbdServerTls>,
    /// Rate budgets that several disks share.
    pub budgets: RateBudgets,
}
