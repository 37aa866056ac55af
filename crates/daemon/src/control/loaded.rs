//! The config file as it was read last, and what it takes to read it again.
//!
//! Only data: who reads it again is `reload`.

use std::{path::PathBuf, rc::Rc};

use export::nbd;
use settings::{Plan, ServiceDraft};
use storage::rate::Budgets;

pub(crate) struct Loaded {
    /// As it was named: places in messages and relative paths begin with it.
    pub(crate) file: PathBuf,
    /// What the command line said, which wins over the file.
    pub(crate) said: ServiceDraft,
    /// How many sockets the service manager passed.
    pub(crate) inherited: usize,
    pub(crate) plan: Rc<Plan>,
    pub(crate) tls: Option<nbd::Tls>,
    pub(crate) budgets: Budgets,
}
