//! The config of a daemon before rules between its parts are checked: every value is well formed
//! and has its place.

use super::{Cluster, DaemonConfig, DiskConfig, GroupConfig, Placed};

/// Config from the command line and the config file.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// Disks, in the order of the file.
    pub disks: Vec<Placed<DiskConfig>>,
    /// Groups, in the order of the file.
    pub groups: Vec<Placed<GroupConfig>>,
    /// Settings of the process. Command-line options have replaced keys of the file.
    pub service: Placed<DaemonConfig>,
    /// Cluster; `None` without one.
    pub cluster: Option<Placed<Cluster>>,
}
