//! The config of a daemon before rules between its parts are checked: every value is well formed
//! and has its origin.

use super::{ClusterConfig, ConfigWithOrigins, DaemonConfig, DiskConfig, GroupConfig};

/// Config from the command line and the config file.
#[derive(Clone, Debug, Default)]
pub struct ParsedConfig {
    /// Disks, in the order of the file.
    pub disks: Vec<ConfigWithOrigins<DiskConfig>>,
    /// Groups, in the order of the file.
    pub groups: Vec<ConfigWithOrigins<GroupConfig>>,
    /// Settings of the process. Command-line options have replaced keys of the file.
    pub daemon: ConfigWithOrigins<DaemonConfig>,
    /// Cluster; `None` without one.
    pub cluster: Option<ConfigWithOrigins<ClusterConfig>>,
}
