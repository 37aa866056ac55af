//! Error policies of disks as arguments and results. Commands of QEMU have them with the prefix
//! `x-weir-`: QEMU sets them for the guest's device.

use block::disk::{ErrorPolicies, Failures, OnError};
use reactor::error::Error as DiskError;
use settings::error_keys;

use super::{arguments::QmpArguments, error::QmpError};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ErrorPolicyChanges {
    read: Option<OnError>,
    write: Option<OnError>,
}

impl ErrorPolicyChanges {
    pub(super) fn read(arguments: &mut QmpArguments, prefix: &str) -> Result<Self, QmpError> {
        let mut policy = |name: &str, all: &[OnError]| -> Result<_, QmpError> {
            let names: Vec<_> = all.iter().map(|policy| policy.name()).collect();
            Ok(arguments.choice(&format!("{prefix}{name}"), &names)?.map(|index| all[index]))
        };
        Ok(Self {
            read: policy(error_keys::READ, &OnError::READ_POLICIES)?,
            write: policy(error_keys::WRITE, &OnError::ALL)?,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn apply_to(&self, failures: &Failures) {
        let ErrorPolicies { read, write } = failures.policies();
        failures.set_policies(ErrorPolicies {
            read: self.read.unwrap_or(read),
            write: self.write.unwrap_or(write),
        });
    }
}

/// `BlockDeviceIoStatus`; as in QEMU, `None` if no error policy can change it.
pub(super) fn io_status(failures: &Failures) -> Option<&'static str> {
    match failures.stopped_by() {
        Some(DiskError::NO_SPACE) => Some("nospace"),
        Some(_) => Some("failed"),
        None => failures.policies().may_stop().then_some("ok"),
    }
}
