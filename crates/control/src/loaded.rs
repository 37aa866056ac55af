//! The config file as it was read last, and what it takes to read it again.
//!
//! Only data: who reads it again is `reload`.

use std::{path::PathBuf, rc::Rc};

use export::nbd;
use settings::{Plan, ServiceDraft};
use storage::rate::Budgets;

pub struct Loaded {
    /// As it was named: places in messages and relative paths begin with it.
    pub file: PathBuf,
    /// What the command line said, which wins over the file.
    pub said: ServiceDraft,
    /// How many sockets the service manager passed.
    pub inherited: usize,
    pub plan: Rc<Plan>,
    pub tls: Option<nbd::Tls>,
    pub budgets: Budgets,
}
