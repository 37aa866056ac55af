//! The config file as it was read last, and what it takes to read it again.
//!
//! Only data: who reads it again is `reload`.

use std::{path::PathBuf, rc::Rc};

use export::nbd;
use settings::{DaemonConfig, ConfigWithOrigins, DesiredState};
use storage::rate::RateBudgets;

/// The configuration that is in force.
pub struct Loaded {
    /// As it was named: places in messages and relative paths begin with it.
    pub file: PathBuf,
    /// Options of the command line, which replace keys of the file.
    pub options: ConfigWithOrigins<DaemonConfig>,
    /// How many sockets the service manager passed.
    pub inherited: usize,
    /// As it was read.
    pub plan: Rc<DesiredState>,
    /// TLS credentials of NBD servers.
    pub tls: Option<nbd::NbdServerTls>,
    /// Memory budgets.
    pub budgets: RateBudgets,
}
