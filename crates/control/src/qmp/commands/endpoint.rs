//! Arguments of `block-export-add` for exports with endpoints of their own. Types of QEMU have
//! QEMU's arguments; weir's types begin with `x-` and use the keys of the config file.

use std::path::Path;

use serde_json::Value;
use settings::{
    AddressedConfig, ExportTarget, FuseConfig, NbdDeviceConfig, UblkConfig, VhostUserBlkConfig,
    VhostUserSocket,
    key::{KeyType, ValueError},
};

use crate::qmp::{arguments::QmpArguments, error::QmpError};

pub(super) const TYPES: [&str; 4] = ["vhost-user-blk", "fuse", "x-ublk", "x-nbd-device"];

/// Types whose clients can see whether there is a write cache, and flush only if there is one.
pub(super) const WITH_WRITE_CACHE: [&str; 2] = ["vhost-user-blk", "x-ublk"];

pub(super) fn read_endpoint(kind: &str, arguments: &mut QmpArguments) -> Result<ExportTarget, QmpError> {
    Ok(match kind {
        "vhost-user-blk" => ExportTarget::VhostUserBlk(read_vhost_user(arguments)?),
        "fuse" => {
            let file: String = arguments.required("mountpoint")?;
            if file.is_empty() {
                return Err(QmpError::rule("mountpoint", "is empty; write the path of a regular file"));
            }
            ExportTarget::Fuse(read_keys(arguments, FuseConfig::new(file.into()), &[])?)
        }
        "x-ublk" => {
            // Fits into u32 by the range.
            let number = arguments.number("number", 0..=(1 << 20) - 1)?.map(|number| number as u32);
            let write_cache = !is_writethrough(arguments)?;
            ExportTarget::Ublk(read_keys(
                arguments,
                UblkConfig { number, write_cache, ..UblkConfig::default() },
                &["write-cache"],
            )?)
        }
        _ => {
            let device: Option<String> = arguments.optional("device")?;
            let device = device.as_deref().unwrap_or("auto").parse();
            let device: NbdDeviceConfig = device.map_err(|rule: String| QmpError::rule("device", rule))?;
            ExportTarget::NbdDevice(read_keys(arguments, device, &[])?)
        }
    })
}

/// Reads the keys of an export, except `excluded`, which QEMU names differently, and `read-only`:
/// QMP has `writable` instead.
fn read_keys<K: AddressedConfig>(
    arguments: &mut QmpArguments,
    mut export: K,
    excluded: &[&str],
) -> Result<K, QmpError> {
    for key in K::options().filter(|key| key.name != "read-only" && !excluded.contains(&key.name)) {
        // Converted to text, so that the config file's parser applies with its ranges.
        let text = match key.value {
            KeyType::Flag => arguments.optional::<bool>(key.name)?.map(|on| on.to_string()),
            _ => match arguments.optional::<Value>(key.name)? {
                None => None,
                Some(Value::String(text)) => Some(text),
                Some(Value::Number(number)) => Some(number.to_string()),
                Some(_) => {
                    return Err(QmpError::wrong_type(&arguments.full_name(key.name), "string or integer"));
                }
            },
        };
        let Some(text) = text else { continue };
        key.read(&mut export, &text, Path::new("")).map_err(|unread| match unread {
            ValueError::Malformed(rule) | ValueError::OutOfRange(rule) => {
                QmpError::rule(&arguments.full_name(key.name), rule)
            }
        })?;
    }
    for (key, rule) in K::REMOVED {
        if arguments.optional::<Value>(key)?.is_some() {
            return Err(QmpError::rule(&arguments.full_name(key), rule));
        }
    }
    Ok(export)
}

/// QEMU's argument for a device without a write cache.
fn is_writethrough(arguments: &mut QmpArguments) -> Result<bool, QmpError> {
    Ok(arguments.optional("writethrough")?.unwrap_or(false))
}

/// Arguments of QEMU's `BlockExportOptionsVhostUserBlk`; the default is one queue.
fn read_vhost_user(arguments: &mut QmpArguments) -> Result<VhostUserBlkConfig, QmpError> {
    let mut address = arguments.object("addr")?.ok_or_else(|| QmpError::missing("addr"))?;
    let kind = address.choice("type", &["unix", "fd"])?;
    let kind = kind.ok_or_else(|| QmpError::missing(&address.full_name("type")))?;
    let (member, scheme, empty) = match kind {
        0 => ("path", "unix", "is empty; write the socket's path"),
        _ => ("str", "fd", "is empty; write the name of a socket that was passed"),
    };
    let path_or_name: String = address.required(member)?;
    if path_or_name.is_empty() {
        return Err(QmpError::rule(&address.full_name(member), empty));
    }
    let socket = format!("{scheme}:{path_or_name}").parse::<VhostUserSocket>();
    let socket = socket.map_err(|rule| QmpError::rule(&address.full_name(member), rule))?;
    address.finish()?;
    if arguments.optional::<Value>("queues")?.is_some() {
        return Err(QmpError::rule("queues", "is 'num-queues' here"));
    }
    if arguments.optional::<Value>("write-cache")?.is_some() {
        return Err(QmpError::rule(
            "write-cache",
            "is given by its inverse here, 'writethrough' (default false)",
        ));
    }
    let queues = arguments.number("num-queues", 1..=256)?.unwrap_or(1);
    let write_cache = !is_writethrough(arguments)?;
    // Fits into u16 by the range.
    let machine =
        VhostUserBlkConfig { queues: queues as u16, write_cache, ..VhostUserBlkConfig::new(socket) };
    let machine = read_keys(arguments, machine, &["queues", "write-cache"])?;
    machine.check().map_err(QmpError::generic)?;
    Ok(machine)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Endpoint in the syntax of the command line, or the error.
    fn endpoint_text(kind: &str, arguments: Value) -> Result<String, String> {
        QmpArguments::read_all(arguments, |arguments| read_endpoint(kind, arguments))
            .map(|endpoint| endpoint.to_string())
    }

    #[test]
    fn vhost_user_export_has_the_keys_of_the_config_file() {
        let addr = json!({ "type": "unix", "path": "/s" });
        let machine = json!({
            "addr": addr, "num-queues": 4, "queue-size": 64, "serial": "disk-1", "discard": false,
            "write-zeroes": false, "client": true, "writethrough": true, "logical-block-size": 4096,
        });
        let expect = "unix:/s,queues=4,queue-size=64,serial=disk-1,logical-block-size=4096,discard=off,write-zeroes=off,write-cache=off,client=on";
        assert_eq!(endpoint_text("vhost-user-blk", machine).unwrap(), expect);
        assert_eq!(endpoint_text("vhost-user-blk", json!({ "addr": addr })).unwrap(), "unix:/s,queues=1");
        for (wrong, expected) in [
            (json!({ "addr": addr, "queue-size": 100 }), "a power of two from 4 to 32768"),
            (json!({ "addr": addr, "serial": "x".repeat(21) }), "at most 20"),
            (json!({ "addr": addr, "logical-block-size": 8192 }), "logical-block-size"),
            (json!({ "addr": addr, "client": "yes" }), "client"),
            // Arguments with other names in QEMU.
            (json!({ "addr": addr, "queues": 4 }), "is 'num-queues' here"),
            (json!({ "addr": addr, "write-cache": false }), "'writethrough'"),
            (json!({ "addr": { "type": "fd", "str": "a" }, "client": true }), "needs unix:PATH"),
        ] {
            let error = endpoint_text("vhost-user-blk", wrong.clone()).unwrap_err();
            assert!(error.contains(expected), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_device_without_a_write_cache_is_writethrough() {
        assert_eq!(
            endpoint_text("x-ublk", json!({ "writethrough": true, "queues": 2 })).unwrap(),
            ",queues=2,write-cache=off"
        );
        assert_eq!(endpoint_text("x-ublk", json!({ "writethrough": false })).unwrap(), "");
    }
}
