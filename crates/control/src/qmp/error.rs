//! Error of a QMP command: QMP's error class, and a description in QEMU's wording that names the
//! parameter and the rule that its value violates.

use std::fmt;

use serde_json::{Value, json};

use super::json::excerpt;
use crate::registry::RegistryError;

/// QMP's `QapiErrorClass`, as far as weir uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QmpErrorClass {
    Generic,
    /// No command has this name, or the session is not negotiated.
    CommandNotFound,
    /// No disk, group or object has this name.
    DeviceNotFound,
    /// The object exists, but its state does not permit the operation.
    DeviceNotActive,
}

impl QmpErrorClass {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Generic => "GenericError",
            Self::CommandNotFound => "CommandNotFound",
            Self::DeviceNotFound => "DeviceNotFound",
            Self::DeviceNotActive => "DeviceNotActive",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QmpError {
    class: QmpErrorClass,
    description: String,
}

impl QmpError {
    pub(crate) fn new(class: QmpErrorClass, description: impl Into<String>) -> Self {
        Self { class, description: description.into() }
    }

    pub(crate) fn generic(description: impl Into<String>) -> Self {
        Self::new(QmpErrorClass::Generic, description)
    }

    pub(crate) fn no_device(name: &str) -> Self {
        Self::new(QmpErrorClass::DeviceNotFound, format!("Device '{name}' not found"))
    }

    pub(crate) fn missing(key: &str) -> Self {
        Self::generic(format!("Parameter '{key}' is missing"))
    }

    /// `expected` is QMP's name of a type: `string`, `integer`, `boolean`, `array`, `object`.
    pub(crate) fn wrong_type(key: &str, expected: &str) -> Self {
        Self::generic(format!("Invalid parameter type for '{key}', expected: {expected}"))
    }

    pub(crate) fn not_accepted(key: &str, value: &str, accepted: &[&str]) -> Self {
        let list = accepted.join(", ");
        Self::generic(format!("Parameter '{key}' does not accept value '{value}' (accepted: {list})"))
    }

    /// `rule` completes the sentence that begins with the parameter: "must be a power of two".
    pub(crate) fn rule(key: &str, rule: impl fmt::Display) -> Self {
        Self::generic(format!("Parameter '{key}' {rule}"))
    }

    /// Converts an error of the daemon.
    pub(crate) fn from_daemon_error(error: anyhow::Error) -> Self {
        match error.downcast::<RegistryError>() {
            Ok(refused) => refused.into(),
            Err(error) => Self::generic(format!("{error:#}")),
        }
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({ "class": self.class.name(), "desc": self.description })
    }
}

/// Unknown disks and groups become `DeviceNotFound`, which clients rely on.
impl From<RegistryError> for QmpError {
    fn from(refused: RegistryError) -> Self {
        match refused {
            RegistryError::UnknownDisk(name) | RegistryError::UnknownGroup(name) => {
                Self::no_device(&excerpt(&name))
            }
            other => Self::generic(other.to_string()),
        }
    }
}

impl From<policy::throttle::ThrottleError> for QmpError {
    fn from(refused: policy::throttle::ThrottleError) -> Self {
        Self::generic(refused.to_string())
    }
}

impl fmt::Display for QmpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.description)
    }
}

impl std::error::Error for QmpError {}
