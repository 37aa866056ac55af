//! The config of a daemon before the rules between its parts are checked: every value is well
//! formed, and has its place.

use super::{Cluster, DaemonConfig, DiskConfig, GroupConfig, Placed};

/// The config of the command line and the config file together.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// Disks, in the order of the file.
    pub disks: Vec<Placed<DiskConfig>>,
    /// Groups, in the order of the file.
    pub groups: Vec<Placed<GroupConfig>>,
    /// The process. Options of the command line have replaced keys of the file.
    pub service: Placed<DaemonConfig>,
    /// The hosts that share limits; `None`: no cluster.
    pub cluster: Option<Placed<Cluster>>,
}
